"""One run: its steps, evaluations and checkpoints."""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

import jaxcomm as jc
from configs.experiment import Experiment, check
from configs.methods import Method
from jaxcomm.steps.replicas import differing_replicas
from jaxcomm.types import is_per_worker
from train.checkpoints import Checkpoints, check_settings, earlier_settings
from train.data import eval_batches, open_text, train_batches
from train.folders import METRICS, SETTINGS, check_fresh
from train.goodput import Goodput
from train.job import Job, make_job
from train.methods import is_rare, run_name
from train.metrics import Evaluation, Log, Summary
from train.plans import Watch
from train.processes import Processes
from train.restarts import ENDING, handled
from train.schedules import make_schedule
from train.scores import bleu
from train.tables import display_name, write_whole

STATE_FORMAT = 5  # of a checkpoint's state; another number is refused


class Progress(Protocol):
    """Shows how far a run is."""

    def say(self, message: str) -> None:
        """Shows a line."""
        ...

    def update(self, step: int, loss: float, accuracy: float, bytes_per_step: float) -> None:
        """Shows the state after a step."""
        ...


@dataclass(frozen=True)
class Run:
    """How a run ended.

    Attributes:
      summary: the row of the table.
      evaluations: on the test split, in order.
      losses: of every step since the start or the resume.
      state: the train state.
      report: the bytes of a step.
      finished: False if it was stopped, by a signal or `stop_after`.
    """

    summary: Summary
    evaluations: list[Evaluation]
    losses: list[float]
    state: jc.state.TrainState
    report: jc.accounting.WireReport
    finished: bool


def train(
    experiment: Experiment,
    method: Method,
    processes: Processes,
    progress: Progress,
    job: Job | None = None,
    doing: Callable[..., None] = lambda *what: None,
    goodput: Goodput | None = None,
) -> Run:
    """Trains one model with one method, from the start or from the last checkpoint.

    Args:
      experiment: the fields; `experiment.method` is ignored.
      method: how gradients are exchanged.
      processes: this process among the others.
      progress: where to show progress.
      job: of the same method and of an experiment that differs only in its seed; made here if not given.
      doing: called with what this process is about to do, and between steps with the arguments of `Liveness.doing`.
      goodput: counts where the time goes.

    Raises:
      ValueError: for settings that contradict each other, before anything is written; for data that the model cannot
        take; after `experiment.max_skipped` skipped steps in a row; if replicated arrays differ between devices.
    """
    begin, goodput = time.perf_counter(), goodput or Goodput()
    check(experiment, processes.count)
    job = job or make_job(experiment, method)
    index, count = rows_of(processes, experiment.workers * experiment.fsdp)
    where = {
        "global_batch": experiment.global_batch,
        "process_index": index,
        "process_count": count,
        "data_dir": experiment.data_dir,
        "mean": experiment.mean,
    }
    batches = train_batches(experiment.dataset, seed=experiment.seed, augment=experiment.augment, **where)
    tests = eval_batches(experiment.dataset, **where)
    if job.translate is not None:
        open_text(experiment.dataset, "test", experiment.data_dir)  # or what is missing would show after the last step
    folder, about = _folder_of(experiment, method), describe(experiment, method) | {"format": STATE_FORMAT}
    name, checkpoints = folder.name, Checkpoints(folder / "checkpoints")
    label = display_name(name)
    if job.late is not None:  # depends on the number of workers, and the state's shapes on it: a run keeps its own
        about["late"] = [layer.path for layer in job.late.layers if layer.is_late]
        earlier = earlier_settings(checkpoints.folder).get("late", about["late"])
        if earlier != about["late"]:
            job, about["late"] = make_job(experiment, method, late=earlier), earlier
            progress.say(f"As when the run began: {job.late}")
    first_step, state = 0, job.start(experiment.seed)
    restored = checkpoints.newest(state, job.step.resize, about, lambda line: progress.say(f"{label}: {line}"))
    if restored is None:
        check_fresh(folder, experiment.checkpoint_every)
    else:
        first_step, state = restored.step, restored.state
        batches.restore(restored.data)
        progress.say(f"{label}: resumed after step {first_step}. {restored.message}".rstrip())
    rare = partial(is_rare, method)
    shows = processes.index == 0
    schedule, board = make_schedule(experiment), experiment.tensorboard
    log = Log(folder / METRICS, job.report, rare, after=first_step, writes=shows, tensorboard=board, schedule=schedule)
    if shows:
        sizes = {"parameters": job.report.parameters, "dense_bytes": job.dense}
        write_whole(folder / SETTINGS, json.dumps(about | sizes, indent=2) + "\n")
    goodput.take(name, first_step, log.dropped)
    if log.last:
        progress.update(first_step, log.last["loss"], log.last["accuracy"], job.report.received)
    if first_step >= experiment.steps:
        progress.say(f"{label}: nothing is left to do; --steps {2 * experiment.steps} goes on from here.")

    def evaluate(state: jc.state.TrainState, *, at_end: bool) -> dict[str, float]:
        jax.block_until_ready(state)
        with goodput.on("evaluation"):
            model, rows, translations = job.model(state), [], []
            for number, batch in enumerate(tests):
                doing(f"{name}: test batch {number} after step {step}")
                placed = to_mesh(batch, job)
                rows.append(job.evaluate(model, placed))
                if at_end and job.translate is not None:
                    translations.append(job.translate(model, placed["source"]))
            return test_scores(experiment, job, jax.device_get(rows), jax.device_get(translations))

    def save(state: jc.state.TrainState) -> None:
        if checkpoints.last() == step:
            return
        doing(f"{name}: checkpoint of step {step}")
        jax.block_until_ready(state)
        with goodput.on("checkpoints"):
            check_replicas(job, state, name, step, checkpoints.last())
            log.sync()
            checkpoints.save(step, state, batches.state(), about)
        goodput.saved(step)

    def record(step: int, metrics: dict[str, jax.Array], test: dict[str, float] | None) -> None:
        values = log.record(step, jax.device_get(metrics), test)
        progress.update(step, values["loss"], values["accuracy"], job.report.received)
        if log.streak >= experiment.max_skipped:
            message = _streak_message(experiment, log, name, checkpoints.last())
            for resource in (checkpoints, log, batches):
                resource.close()
            raise ValueError(message)

    last = experiment.steps if experiment.stop_after is None else min(experiment.stop_after, experiment.steps)
    step, pending, is_due, watch = first_step, None, False, Watch(method)
    with stopping(processes) as stop_event, checkpoints:
        while step < last:
            doing(f"{name}: reading rows of step {step + 1}", step + 1, None if pending is None else pending[1])
            batch = to_mesh(next(batches), job)
            doing(f"{name}: step {step + 1}")
            if step == first_step:
                progress.say(f"{label}: {job.verify(state, batch)}")
            (state, metrics), line = watch.run(partial(job.step, state, batch))
            if line is not None:
                progress.say(f"{label}: {line}")
            if step == first_step:
                jax.block_until_ready(metrics)
            step += 1
            goodput.step()
            at_end, test = step == experiment.steps, None
            if at_end or step % experiment.eval_every == 0:
                test = evaluate(state, at_end=at_end)
            if pending is not None:
                record(*pending)  # one step late, so that reading it does not hold the devices up
            pending = (step, metrics, test)
            is_due |= step % experiment.checkpoint_every == 0
            if is_due:
                record(*pending)  # no checkpoint is ahead of the metrics
                pending = None
            if is_due and not log.streak:  # or states that skip every step would displace the last good one
                save(state)
                is_due = False
            if stop_event.is_set() if processes.count == 1 else checkpoints.preempted(step):
                break
        if pending is not None:
            record(*pending)
        save(state)
        with goodput.on("checkpoints"):
            checkpoints.close()
    log.close()
    batches.close()

    evaluated = log.evaluations and log.evaluations[-1].step == step
    scores = log.evaluations[-1].scores if evaluated else evaluate(state, at_end=step == experiment.steps)
    per_step = log.bytes_received / max(step, 1)
    summary = Summary(
        method=name,
        workers=experiment.workers,
        seed=experiment.seed,
        scores=scores,
        steps=step,
        bytes_per_step=per_step,
        ratio_to_dense=job.dense / per_step if per_step else None,
        ratio_to_bfloat16=job.dense / 2 / per_step if per_step else None,
        overflow_per_step=log.overflow / max(step, 1),
        skipped=log.skipped,
        seconds_per_step=log.seconds_per_step,
        seconds=time.perf_counter() - begin,
    )
    goodput.write()
    return Run(summary, log.evaluations, log.losses, state, job.report, finished=step == experiment.steps)


def check_replicas(job: Job, state: jc.state.TrainState, name: str, step: int, last: int | None) -> None:
    """Checks that replicated arrays are equal on all devices; a worker with other numbers would train another model.

    Raises:
      ValueError: naming the arrays that differ, and their workers.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_per_worker)
    replicated = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in leaves
        if not is_per_worker(leaf) and leaf.size and leaf.sharding.is_fully_replicated
    }
    differing = differing_replicas(job.mesh, replicated)
    if not differing:
        return
    places = {place for places in differing.values() for place in places}
    axes = [job.axis] if isinstance(job.axis, str) else list(job.axis)
    workers = sorted({_worker(job.mesh, axes, place) for place in places})
    listed = ", ".join([*list(differing)[:3], *(["others"] if len(differing) > 3 else [])])
    raise ValueError(
        "Replicated arrays must be the same on all workers; got other numbers on worker "
        f"{', '.join(map(str, workers))} at {listed} after step {step} of {name}; {_note(last)}. Go on with --resume; "
        "if it happens again, leave that machine out."
    )


def _worker(mesh: Mesh, axes: Sequence[str], place: int) -> int:
    """Returns the number of the worker to which a device belongs, by its place in the mesh."""
    at = dict(zip(mesh.axis_names, np.unravel_index(place, mesh.devices.shape), strict=True))
    return int(np.ravel_multi_index([at[axis] for axis in axes], [mesh.shape[axis] for axis in axes]))


def _note(last: int | None) -> str:
    return "there is no checkpoint" if last is None else f"the checkpoint of step {last} is kept"


def _streak_message(experiment: Experiment, log: Log, name: str, last: int | None) -> str:
    first = log.last_step - log.streak + 1
    return (
        f"A run must have fewer skipped steps in a row than --max-skipped {experiment.max_skipped}; got steps {first} "
        f"to {log.last_step} of {name}, whose gradients were not finite (the last loss before them: "
        f"{log.last_loss:.4g}); {_note(last)}. Most often the model has diverged: lower --learning-rate (now "
        f"{experiment.learning_rate:g}), raise --warmup-steps or clip gradients. If the loss was falling, look at the "
        "data; --max-skipped allows more."
    )


def rows_of(processes: Processes, parts: int) -> tuple[int, int]:
    """Returns which part of a batch's rows this process reads, and the number of such parts.

    `parts` is the number of workers, times the devices of each that have rows of their own. With fewer processes, each
    reads several parts; with more, processes that share a part, such as those of stages, read the same rows.
    """
    if processes.count <= parts:
        return processes.index, processes.count
    return processes.index // (processes.count // parts), parts


def test_scores(
    experiment: Experiment, job: Job, rows: list[dict[str, np.ndarray]], translations: list[np.ndarray]
) -> dict[str, float]:
    """Returns the scores of the test split from the results of its batches; for translations, BLEU as well."""
    real = np.concatenate([part["mask"] for part in rows]) > 0
    split = {name: np.concatenate([part[name] for part in rows])[real] for name in rows[0] if name != "mask"}
    scores = job.task.scores(split)
    if translations:
        text = open_text(experiment.dataset, "test", experiment.data_dir)
        sentences = text.subwords.decode(np.concatenate(translations)[real])
        scores["bleu"] = bleu(sentences, text.references).score
        scores["bleu_lower"] = bleu(sentences, text.references, lowercase=True).score
    return scores


def _folder_of(experiment: Experiment, method: Method) -> Path:
    return experiment.out / run_name(method, experiment.boundary, experiment.dense_layers, experiment.embeddings)


def check_resumable(experiment: Experiment, method: Method) -> None:
    """Refuses a run whose checkpoints are of other settings, before one before it is trained; see `check_settings`."""
    folder = _folder_of(experiment, method) / "checkpoints"
    if earlier := earlier_settings(folder):
        own = {"late": earlier["late"]} if "late" in earlier else {}  # which a run keeps
        check_settings(folder, earlier, describe(experiment, method) | {"format": STATE_FORMAT, **own})


def describe(experiment: Experiment, method: Method) -> dict[str, Any]:
    """Returns what must stay the same when a run is resumed, as JSON; only workers may change, and steps grow.

    Records of runs hold it too, so the format of the checkpoints is not in it.
    """
    names = (
        "dataset",
        "steps",
        "global_batch",
        "learning_rate",
        "optimizer",
        "momentum",
        "schedule",
        "drop_at",
        "warmup_steps",
        "nesterov",
        "weight_decay",
        "decay",
        "label_smoothing",
        "augment",
        "mean",
        "dtype",
        "rows_per_group",
        "stages",
        "micro_batches",
        "dense_layers",
        "embeddings",
        "model_parallel",
        "compress",
        "seed",
        "workers",
    )
    fields = {name: getattr(experiment, name) for name in names}
    # The number of slices may change, too, but not the workers in each.
    fields["workers_per_slice"] = experiment.workers // experiment.slices if experiment.slices > 1 else None
    # Left out at their defaults: records that were made before these fields existed do not have them.
    for name, usual in (("delay", 0), ("fsdp", 1), ("pipeline_schedule", "gpipe")):
        if getattr(experiment, name) != usual:
            fields[name] = getattr(experiment, name)
    fields["architecture"] = f"{experiment.architecture.name} {dict(experiment.architecture.options)}"
    fields["cuts"] = experiment.cuts
    boundary = dataclasses.asdict(experiment.boundary)
    if not boundary["rank"]:  # as above
        del boundary["rank"]
    fields |= {f"boundary.{name}": value for name, value in boundary.items()}
    if str(experiment.boundary.value_dtype).startswith("int"):
        fields["boundary.format"] = 2  # runs of before 2026-11-26 had no zero points, and gradients in as few bits
    options = method.options()
    later = {"residual_dtype": "float32", "exchange": "topk", "early": True, "start": 0}
    if method.name == "plump_dp":
        later["collective"] = "two_shot"
    for name, usual in later.items():
        if options.get(name) == usual:
            del options[name]
    about = fields | {"method": method.name} | {f"method.{name}": value for name, value in options.items()}
    return json.loads(json.dumps(about))  # tuples are lists when they come back


def to_mesh(batch: dict[str, np.ndarray], job: Job) -> dict[str, jax.Array]:
    """Places this process's rows of a global batch on its devices."""
    return {name: jax.make_array_from_process_local_data(job.by_rows, rows) for name, rows in batch.items()}


@contextmanager
def stopping(processes: Processes, stop_event: threading.Event | None = None) -> Iterator[threading.Event]:
    """Turns SIGTERM, SIGHUP and the first Ctrl-C into an event, a new one if none is given, while the block runs.

    With several processes, they become SIGTERM, whose handler is JAX's: it has them agree on a step at which to stop.
    """
    stop_event = stop_event or threading.Event()

    def stop(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            os.write(sys.stderr.fileno(), b"train: saves after this step, and ends; another Ctrl-C ends at once\n")
            signal.signal(number, signal.default_int_handler)
        if processes.count > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        stop_event.set()

    numbers = [number for number in ENDING if processes.count == 1 or number != signal.SIGTERM]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    with handled(numbers, stop):
        yield stop_event
