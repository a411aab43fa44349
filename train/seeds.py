"""One setting trained with several seeds, which share one program; each seed has a record."""

import dataclasses
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from configs.experiment import Experiment
from configs.methods import Method
from train.records import Record, Records


def train_seeds(
    records: Records, experiment: Experiment, method: Method, seeds: int, *, prints: bool = True
) -> list[Record]:
    """Trains one setting with the seeds 0, 1, ..., except those that are already recorded.

    Args:
      records: where each run is written at its end.
      experiment: what is trained; its seed is ignored.
      method: how gradients are exchanged.
      seeds: how many.
      prints: whether to print a line for each.

    Returns:
      A record for each seed. It has an entry per evaluation in "steps"; in "accuracies" (%) and "losses" on the test
      split; in "train_losses" and "sent" (coordinates of a worker, dense tensors not counted), means over the steps
      since the evaluation before; and in "received", bytes of a worker until then. A loss that is not finite is None.
      Of the whole run it has "scores" on the test split at its end, "parameters", "bytes_per_step" that a worker
      receives, "dense_bytes" that it would receive uncompressed, "overflow_per_step" of all workers, "skipped" steps,
      and "seconds_per_step", the median on this machine, whose workers are simulated; and in "rows" what distinguishes
      the rows that it was trained on.

    Raises:
      ValueError: before a run is trained, if a recorded run of the dataset had other rows, as of another version.
      SystemExit: if a signal stops a run; the runs that were done are recorded.
    """
    from train.job import make_job

    rows, job, seed_records = None, None, []
    for seed in range(seeds):
        seeded = dataclasses.replace(experiment, seed=seed)
        key = {"of": "run", "experiment": experiment.name, "about": settings_of(seeded, method)}
        record = records.find(key)
        if record is None:
            rows = rows or _same_rows(records, experiment)
            job = job or make_job(experiment, method)
            record = records.add(key | _train(seeded, method, job) | {"rows": rows})
        if prints:
            print(
                f"{experiment.name} {label(method)}, K={experiment.workers}, seed {seed}: "
                f"{record['accuracies'][-1]:.2f}%, {record['bytes_per_step']:,.0f} bytes a step",
                flush=True,
            )
        seed_records.append(record)
    return seed_records


def settings_of(experiment: Experiment, method: Method) -> Record:
    """Returns what a run's results depend on."""
    from train.loop import describe

    return describe(experiment, method) | {"eval_every": experiment.eval_every}


def _same_rows(records: Records, experiment: Experiment) -> Record:
    """Returns what distinguishes the rows to train on; refuses records of runs that had others."""
    from train.data.datasets import open_split

    split = open_split(experiment.dataset, "train", experiment.data_dir)
    rows = {"examples": len(split), **split.identity}

    def rows_of(record: Record) -> Record:
        if record.get("about", {}).get("dataset") != experiment.dataset:
            return {"rows": rows}
        return {"rows": record.get("rows", rows)}  # records of before 2026-11-26 do not say

    records.check_same({"rows": rows}, rows_of)
    return rows


def _train(experiment: Experiment, method: Method, job: Any) -> Record:
    import jax

    from train.folders import read_lines
    from train.loop import train
    from train.processes import Processes

    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as scratch:
        outcome = train(dataclasses.replace(experiment, out=Path(scratch)), method, Processes(), stopwatch, job)
        (path,) = Path(scratch).glob("*/metrics.jsonl")
        lines = read_lines(path)
    if not outcome.finished:
        raise SystemExit("Stopped; --json has the runs that were done.")
    marks = [evaluation.step for evaluation in outcome.evaluations]
    intervals = list(zip([0, *marks[:-1]], marks, strict=True))
    n_sent = [line["sent"] / experiment.workers for line in lines]
    return {
        "scores": {name: score if math.isfinite(score) else None for name, score in outcome.summary.scores.items()},
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(job.model(outcome.state)[0])),
        "steps": marks,
        "accuracies": [round(100 * evaluation.accuracy, 4) for evaluation in outcome.evaluations],
        "losses": [_finite(evaluation.scores["loss"]) for evaluation in outcome.evaluations],
        "train_losses": [_finite(statistics.fmean(outcome.losses[start:stop])) for start, stop in intervals],
        "sent": [round(statistics.fmean(n_sent[start:stop]), 2) for start, stop in intervals],
        "received": [evaluation.bytes_received for evaluation in outcome.evaluations],
        "bytes_per_step": outcome.summary.bytes_per_step,
        "dense_bytes": job.dense,
        "overflow_per_step": outcome.summary.overflow_per_step,
        "skipped": outcome.summary.skipped,
        "seconds_per_step": stopwatch.seconds_per_step,
    }


def _finite(number: float) -> float | None:
    return round(number, 6) if math.isfinite(number) else None


def label(method: Method) -> str:
    """Returns a method's name, with its options that are not at their defaults."""
    default = type(method)().options()
    options = {name: value for name, value in method.options().items() if value != default[name]}
    return method.name + (f"({', '.join(f'{name}={value}' for name, value in options.items())})" if options else "")


class Stopwatch:
    """A `Progress` that shows nothing, and takes the time of steps."""

    def __init__(self):
        """Starts without a step; the time until the end of the first is not counted."""
        self._last: float | None = None
        self._seconds: list[float] = []

    @property
    def seconds_per_step(self) -> float:
        """Median over the steps; 0 if there was none."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def say(self, message: str) -> None:
        """Shows nothing."""

    def update(self, step: int, loss: float, accuracy: float, bytes_per_step: float) -> None:
        """Notes the time since the previous step."""
        clock = time.perf_counter()
        if self._last is not None:
            self._seconds.append(clock - self._last)
        self._last = clock
