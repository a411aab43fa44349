"""One worker of a run whose workers are separate programs, and whose rounds are a log in an object store."""

import hashlib
import json
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

import jaxcomm as jc
from configs.experiment import Experiment, check
from configs.methods import PlumpDp
from jaxcomm.rounds.worker import Worker
from train.data import eval_batches, train_batches
from train.folders import METRICS
from train.job import Job, make_job
from train.loop import Progress, describe, stopping, test_scores, to_mesh
from train.processes import Processes
from train.tables import display_name, plain, write_records

OWN = ("seed", "fsdp")  # what each worker may choose: only the first one's parameters count
SHORT_WAIT = 5.0  # seconds to wait for a round after a signal


class InnerStep:
    """The local step: the trainer's step of one worker, whose learning rate follows the run's rounds.

    Attributes:
      worker: the worker that calls it; set once it is made.
    """

    def __init__(self, job: Job, steps: int):
        """Takes the job of one worker, and the local steps of a round."""
        self.worker: Worker | None = None
        self._job, self._steps, self._round = job, steps, 0

    def __call__(self, params: Any, state: jc.state.TrainState, batch: Any) -> tuple[Any, jc.state.TrainState, Any]:
        """Takes a step; a worker that joins late, or is slow, has the learning rate of the others."""
        number = 0 if self.worker is None else self.worker.round
        if number != self._round:
            self._round = number
            taken = 0 if self.worker is None else self.worker.taken  # while the round before was under way
            state = state._replace(opt_state=_at_step(state.opt_state, number * self._steps + taken))
        state, metrics = self._job.step(state._replace(params=params), batch)
        return state.params, state, metrics


def _at_step(opt_state: Any, step: int) -> Any:
    """Returns an optimizer's state whose schedule has come to a step; Adam's own count stays."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def moved(node: Any) -> Any:
        if not is_schedule(node):
            return node
        return node._replace(count=jax.device_put(np.int32(step), node.count.sharding))

    return jax.tree.map(moved, opt_state, is_leaf=is_schedule)


def train(experiment: Experiment, processes: Processes, progress: Progress) -> str:
    """Trains until all rounds of the run are over, or a signal ends this worker.

    Args:
      experiment: the fields; `experiment.rounds` is the store, and `experiment.out` this worker's own folder.
      processes: this process, which is alone.
      progress: where to show progress.

    Returns:
      What to print at the end.

    Raises:
      ValueError: see `jaxcomm.rounds`; after `experiment.max_skipped` skipped steps in a row.
    """
    check(experiment, processes.count)
    method = experiment.method.transform().method
    assert isinstance(method, jc.methods.LocalSgd), "checked"
    alone = replace(experiment, workers=1, global_batch=experiment.global_batch // experiment.workers)
    job = make_job(alone, PlumpDp())
    state, step = job.start(experiment.seed), InnerStep(job, method.steps)
    event = threading.Event()
    worker = step.worker = jc.rounds(
        experiment.rounds,
        step,
        state.params,
        local=state,
        exchange=method.exchange,
        outer=method.outer,
        steps=method.steps,
        overlap=method.overlap,
        quorum=experiment.quorum,
        worker=experiment.worker,
        total=experiment.steps // method.steps,
        settings=_settings(experiment),
        timeout=experiment.step_timeout,
        stop=event.is_set,
    )
    seed = int.from_bytes(hashlib.sha256(f"{experiment.seed} {worker.name}".encode()).digest()[:4], "little")
    data = {"global_batch": alone.global_batch, "data_dir": experiment.data_dir, "mean": experiment.mean}
    batches = train_batches(experiment.dataset, seed=seed, augment=experiment.augment, **data)
    name, begun, joined = experiment.method.name, time.perf_counter(), worker.round
    batches.restore(batches.state() | {"step": joined * method.steps})  # where it was, if it trained in those rounds
    progress.say(f"{display_name(name)}: worker {worker.name} joins in round {joined}")
    folder = experiment.out / name
    folder.mkdir(parents=True, exist_ok=True)
    records, steps, streak, pending = (folder / METRICS).open("w"), 0, 0, None

    def record(number: int, metrics: dict[str, Any]) -> None:
        nonlocal streak
        values = {key: np.asarray(value).item() for key, value in metrics.items()}
        received = float(worker.traffic["received"])
        line = {"step": number, **values, "bytes_received": received, "seconds": time.perf_counter() - begun}
        records.write(json.dumps(plain(line)) + "\n")
        records.flush()
        progress.update(values["round"] * method.steps, values["loss"], values["accuracy"], received / number)
        streak = streak + 1 if values["skipped"] else 0
        if streak >= experiment.max_skipped:
            raise ValueError(
                f"A worker must have fewer skipped steps in a row than --max-skipped {experiment.max_skipped}; got "
                f"steps {number - streak + 1} to {number}, whose gradients were not finite. Lower --learning-rate, or "
                "look at the data; --max-skipped allows more."
            )

    with stopping(processes, event), records:
        while not worker.done and steps != experiment.stop_after:
            metrics = worker(to_mesh(next(batches), job))
            if worker.stopped:
                break
            steps += 1
            if pending is not None:
                record(*pending)  # one step late, so that reading it does not hold the device up
            pending = steps, metrics
        if pending is not None:
            record(*pending)
        worker.leave(SHORT_WAIT if event.is_set() else 60.0, keep=not worker.done)
    batches.close()
    has_statistics = bool(jax.tree.leaves(worker.local.model_state))
    scores = {} if has_statistics and not steps else _scores(alone, job, worker)
    row = {"worker": worker.name, "scores": scores, "rounds": worker.round, "steps": steps}
    row |= {"counted": worker.counted, "late": worker.late, **worker.traffic, "digest": worker.digest()}
    write_records(experiment.json, [row | scores])
    begun_in = f"in round {joined}" if joined else "at the start"
    ends = "all rounds are over" if worker.done else f"left in round {worker.round}; go on with --worker {worker.name}"
    quality = "not known, as its running statistics are of a worker's own steps"
    if scores:
        quality = f"{100 * scores['accuracy']:.2f}%, loss {scores['loss']:.4f}"
        quality += f" (with the running statistics of these {steps} steps)" if has_statistics else ""
    return (
        f"{worker.name} began {begun_in}, took {steps} local steps, and {worker.counted} of its payloads counted "
        f"({worker.late} were late); {ends}. Accuracy of the global model: {quality}, digest {worker.digest()}. "
        f"{worker.traffic['sent']:,} bytes sent, {worker.traffic['received']:,} received. Metrics are in {folder}"
    )


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Returns what all workers of a run have in common, beside what `rounds` compares of the method."""
    about = describe(experiment, experiment.method)
    return {name: value for name, value in about.items() if name not in OWN and not name.startswith("method")}


def _scores(experiment: Experiment, job: Job, worker: Worker) -> dict[str, float]:
    """Returns the test scores of the global model, with this worker's running statistics."""
    data = {"global_batch": experiment.global_batch, "data_dir": experiment.data_dir, "mean": experiment.mean}
    state = worker.local._replace(params=worker.params)
    model, evaluate = job.model(state), partial(job.evaluate)
    rows = [evaluate(model, to_mesh(batch, job)) for batch in eval_batches(experiment.dataset, **data)]
    return test_scores(experiment, job, jax.device_get(rows), [])
