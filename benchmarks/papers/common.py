"""What the modules of papers share: their options, records that are kept, and trained seeds.

A module has a `Config` and `TABLES`, the functions of its tables and figures by name, and ends in `run`. What takes
long is asked for by a key, and made where --json does not have it. `timing` has exchanges and steps that are timed,
`report` claims and figures.
"""

import contextlib
import dataclasses
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import tyro

from configs import CONFIGS
from configs.experiment import Experiment
from configs.methods import Method
from train.tables import check_file, plain

Record = dict[str, Any]
SMOKE_STEPS = 4  # of training, with --smoke
EVALUATIONS = 40  # in a run

_FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@dataclass(frozen=True)
class Config:
    """Options that every paper has."""

    table: str = "all"
    """A table or a figure of the paper; or all."""
    seeds: int = 3
    """Runs of each setting, with the seeds 0, 1, ..."""
    steps: int | None = None
    """Training steps; as many as suit the table if not given."""
    json: Path | None = None
    """File for the records; what it has of the same settings is not measured again."""
    figures: Path | None = None
    """Folder of the figures; docs/figures if not given, and with --smoke one that is removed again."""
    data_dir: Path | None = None
    """Folder of prepared datasets."""
    smoke: bool = False
    """Run the smallest size, in under a minute: to see that everything works. Its figures mean nothing."""

    def smallest(self) -> Self:
        """Returns the options of --smoke."""
        return dataclasses.replace(self, seeds=1, steps=SMOKE_STEPS)

    def experiment(self, name: str, **changes: Any) -> Experiment:
        """Returns an experiment of `configs/` with other fields; --steps comes before those given here."""
        changes |= {"data_dir": self.data_dir, **({"steps": self.steps} if self.steps else {})}
        experiment = dataclasses.replace(CONFIGS[name], **changes)
        steps = experiment.steps
        return dataclasses.replace(
            experiment,
            warmup_steps=min(experiment.warmup_steps, steps // 4),
            eval_every=max(1, steps // EVALUATIONS),
            checkpoint_every=steps,
            max_skipped=steps + 1,  # a method that diverges is a result
        )


class Records:
    """Results by what they are results of; each is written as soon as it is there, one a line."""

    def __init__(self, path: Path | None):
        """Reads what an earlier run has left.

        Args:
          path: the file; None keeps nothing.

        Raises:
          ValueError: for a folder.
        """
        check_file("--json", path)
        self._path = path
        self._records: list[Record] = json.loads(path.read_text()) if path is not None and path.exists() else []

    def find(self, key: Mapping[str, Any]) -> Record | None:
        """Returns the record whose fields are those of the key, and others; None if there is none."""
        wanted = json.loads(json.dumps(key))  # tuples are lists when they come back
        return next((record for record in self._records if wanted.items() <= record.items()), None)

    def get(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> Record:
        """Returns the record of a key: the one that is there, or what `make` returns, which is written."""
        return self.find(key) or self.add({**key, **make()})

    def add(self, record: Mapping[str, Any]) -> Record:
        """Writes a record, and returns it as it will be read."""
        self._records.append(json.loads(json.dumps(plain(record))))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_suffix(".draft")
            draft.write_text("[\n" + ",\n".join(json.dumps(record) for record in self._records) + "\n]\n")
            draft.replace(self._path)
        return self._records[-1]


C = TypeVar("C", bound=Config)
Table = Callable[[C, Records], None]


def run(config_type: type[C], tables: Mapping[str, Table[C]], description: str | None, devices: int) -> None:
    """Reads the command line of a paper's module, and makes the tables that it asks for.

    Args:
      config_type: the module's options.
      tables: by name; those that are one function are made once.
      description: of the module.
      devices: simulated devices, the most that a table has workers.
    """
    config = tyro.cli(config_type, description=description)
    if config.table not in (*tables, "all"):
        raise SystemExit(f"--table is one of {', '.join(tables)}, or all, got {config.table!r}.")
    if config.seeds < 1 or (config.steps is not None and config.steps < 2):
        raise SystemExit(f"--seeds is at least 1 and --steps at least 2, got {config.seeds} and {config.steps}.")
    import jax

    from train.processes import prepare_jax

    prepare_jax(devices)
    if config.smoke:  # programs compile faster, here and in the processes of benchmarks
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_disable_most_optimizations", True)
    chosen = dict.fromkeys(tables.values() if config.table == "all" else [tables[config.table]])
    with contextlib.ExitStack() as stack:
        if config.smoke:
            config = config.smallest()
        if config.figures is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory()) if config.smoke else _FIGURES
            config = dataclasses.replace(config, figures=Path(folder))
        try:
            records = Records(config.json)
            for table in chosen:
                table(config, records)
        except ValueError as error:
            raise SystemExit(str(error)) from None


def train_seeds(records: Records, experiment: Experiment, method: Method, seeds: int) -> list[Record]:
    """Trains one setting with the seeds 0, 1, ...; they share one program.

    Returns:
      A record for each: "steps", those of the evaluations, and of the same length "accuracies" (%) and "losses" on the
      test split, "train_losses" and "sent" (coordinates of a worker, dense tensors not counted), means a step since the
      evaluation before, and "received", bytes of a worker until then; None where a loss is not finite. Of the whole run
      "scores" on the test split at its end, "parameters", "bytes_per_step" that a worker receives, "dense_bytes" that
      it would, "overflow_per_step" of all workers, and "skipped" steps.
    """
    from train.job import make_job
    from train.loop import describe

    job, found = None, []
    for seed in range(seeds):
        seeded = dataclasses.replace(experiment, seed=seed)
        about = describe(seeded, method) | {"eval_every": experiment.eval_every}
        key = {"of": "run", "experiment": experiment.name, "about": about}
        record = records.find(key)
        if record is None:
            job = job or make_job(experiment, method)
            record = records.add(key | _train(seeded, method, job))
        print(
            f"{experiment.name} {label(method)}, K={experiment.workers}, seed {seed}: "
            f"{record['accuracies'][-1]:.2f}%, {record['bytes_per_step']:,.0f} bytes a step",
            flush=True,
        )
        found.append(record)
    return found


def _train(experiment: Experiment, method: Method, job: Any) -> Record:
    import jax

    from train.compare import Stopwatch
    from train.loop import train
    from train.processes import Processes

    with tempfile.TemporaryDirectory() as scratch:
        ended = train(dataclasses.replace(experiment, out=Path(scratch)), method, Processes(), Stopwatch(), job)
        (path,) = Path(scratch).glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not ended.finished:
        raise SystemExit("Stopped by SIGTERM; --json has what was done.")
    marks = [each.step for each in ended.evaluations]
    between = list(zip([0, *marks[:-1]], marks, strict=True))
    sent = [line["sent"] / experiment.workers for line in lines]
    return {
        "scores": {name: _finite(score) for name, score in ended.summary.scores.items()},
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(job.model(ended.state)[0])),
        "steps": marks,
        "accuracies": [round(100 * each.accuracy, 4) for each in ended.evaluations],
        "losses": [_finite(each.scores["loss"]) for each in ended.evaluations],
        "train_losses": [_finite(statistics.fmean(ended.losses[since:until])) for since, until in between],
        "sent": [round(statistics.fmean(sent[since:until]), 2) for since, until in between],
        "received": [each.bytes_received for each in ended.evaluations],
        "bytes_per_step": ended.summary.bytes_per_step,
        "dense_bytes": job.dense,
        "overflow_per_step": ended.summary.overflow_per_step,
        "skipped": ended.summary.skipped,
    }


def _finite(number: float) -> float | None:
    return round(number, 6) if math.isfinite(number) else None


def label(method: Method) -> str:
    """Returns a method's name, and those of its options that are not its defaults."""
    default = type(method)().options()
    changed = {name: value for name, value in method.options().items() if value != default[name]}
    return method.name + (f"({', '.join(f'{name}={value}' for name, value in changed.items())})" if changed else "")


def last_accuracies(runs: Sequence[Record]) -> list[float]:
    """Returns the accuracy in % that each run ends with."""
    return [run["accuracies"][-1] for run in runs]


def first_reaching(record: Mapping[str, Any], target: float) -> int | None:
    """Returns the step of a run's first evaluation with at least this accuracy; None if there is none."""
    curve = zip(record["steps"], record["accuracies"], strict=True)
    return next((step for step, accuracy in curve if accuracy >= target), None)
