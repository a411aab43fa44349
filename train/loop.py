"""One run: a model, a method, and the steps between two checkpoints."""

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from configs.experiment import Experiment, Method, check
from models.cnn import Cnn
from train.checkpoints import Checkpoints
from train.data import dataset_info, eval_batches, train_batches
from train.methods import make_exchange, method_name
from train.metrics import Evaluation, Log, Summary
from train.processes import Processes


class Progress(Protocol):
    """Where a run shows how far it is."""

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
      losses: of every step of this process's part of the run.
      state: the train state.
      finished: False if it was stopped, by SIGTERM or `stop_after`.
    """

    summary: Summary
    evaluations: list[Evaluation]
    losses: list[float]
    state: jc.TrainState
    finished: bool


@dataclass(frozen=True)
class Job:
    """The compiled functions of a run, and the state that it starts with.

    Attributes:
      step: (state, batch) -> (state, metrics).
      evaluate: (params, batch with a mask) -> sums of losses and of right answers over the real rows.
      state: fresh, on the mesh.
      report: bytes of a step, losses and metrics included.
    """

    step: Callable[[jc.TrainState, Any], tuple[jc.TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Any], tuple[jax.Array, jax.Array]]
    state: jc.TrainState
    report: jc.WireReport


def make_job(experiment: Experiment, method: Method, mesh: Mesh) -> Job:
    """Makes the model, the optimizer and the functions of a run."""
    info = dataset_info(experiment.dataset)
    model = Cnn(info.image_shape, info.num_classes, rngs=nnx.Rngs(experiment.seed))
    graph, variables = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(variables)

    def predict(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, params, copy=True)(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])  # (B,)
        return losses, jnp.argmax(logits, axis=-1) == batch["label"]  # (B,), (B,)

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses, right = predict(params, batch)
        return losses.mean(), {"accuracy": right.mean()}

    @jax.jit
    def evaluate(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        losses, right = predict(params, batch)
        return jnp.sum(losses * batch["mask"]), jnp.sum(right * batch["mask"])

    tx = optax.chain(make_exchange(method), *_optimizer(experiment))
    step = jc.make_train_step(loss_fn, tx, mesh, has_aux=True)
    state = jc.init_state(params, tx, mesh)
    rows, sharding = experiment.global_batch, NamedSharding(mesh, P("data"))
    batch = {
        "image": jax.ShapeDtypeStruct((rows, *info.image_shape), jnp.float32, sharding=sharding),
        "label": jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=sharding),
    }
    return Job(step, evaluate, state, jc.step_report(step, state, batch, params=params, workers=experiment.workers))


def train(experiment: Experiment, method: Method, processes: Processes, progress: Progress) -> Run:
    """Trains one model with one method, from the start or from the last checkpoint.

    Args:
      experiment: the fields; `experiment.method` is not looked at.
      method: how gradients are exchanged.
      processes: this process among the others.
      progress: where to show it.

    Raises:
      ValueError: for settings that contradict each other, before anything is written.
    """
    begin = time.perf_counter()
    check(experiment, processes.count)
    mesh = jc.make_mesh(data=experiment.workers)
    job = make_job(experiment, method, mesh)
    where = {
        "global_batch": experiment.global_batch,
        "process_index": processes.index,
        "process_count": processes.count,
        "data_dir": experiment.data_dir,
    }
    batches = train_batches(experiment.dataset, seed=experiment.seed, **where)
    tests = eval_batches(experiment.dataset, **where)
    about = describe(experiment, method)

    folder = experiment.out / method_name(method)
    checkpoints = Checkpoints(folder / "checkpoints")
    done, state = checkpoints.last() or 0, job.state
    if done:
        restored = checkpoints.restore(done, state, mesh, about)
        state = restored.state
        batches.restore(restored.data)
        progress.say(f"{method_name(method)}: resumed after step {done}. {restored.message}".rstrip())
    log = Log(folder / "metrics.jsonl", job.report, after=done, writes=processes.index == 0)

    def evaluate(state: jc.TrainState) -> tuple[float, float]:
        totals = [job.evaluate(state.params, _to_mesh(batch, mesh)) for batch in tests]
        loss, right = np.sum(jax.device_get(totals), axis=0)
        return float(loss) / tests.num_examples, float(right) / tests.num_examples

    def record(step: int, metrics: dict[str, jax.Array], test: tuple[float, float] | None) -> None:
        values = log.record(step, jax.device_get(metrics), test)
        progress.update(step, values["loss"], values["accuracy"], job.report.received)

    last = experiment.steps if experiment.stop_after is None else min(experiment.stop_after, experiment.steps)
    step, pending = done, None
    with _sigterm(processes) as stopping:
        while step < last:
            state, metrics = job.step(state, _to_mesh(next(batches), mesh))
            step += 1
            test = evaluate(state) if step % experiment.eval_every == 0 or step == experiment.steps else None
            if pending is not None:
                record(*pending)  # one step late, so that reading it does not hold the devices up
            pending = (step, metrics, test)
            if step % experiment.checkpoint_every == 0:
                record(*pending)  # no checkpoint is ahead of the metrics
                pending = None
                checkpoints.save(step, state, batches.state(), about)
            if stopping.is_set() if processes.count == 1 else checkpoints.preempted(step):
                break
        if pending is not None:
            record(*pending)
        checkpoints.save(step, state, batches.state(), about)
        checkpoints.close()
    log.close()
    batches.close()

    evaluated = log.evaluations and log.evaluations[-1].step == step
    summary = Summary(
        method=method_name(method),
        workers=experiment.workers,
        seed=experiment.seed,
        accuracy=log.evaluations[-1].accuracy if evaluated else evaluate(state)[1],
        steps=step,
        bytes_per_step=job.report.received,
        ratio_to_dense=job.report.ratio_to_dense if job.report.received else None,
        ratio_to_bfloat16=job.report.ratio_to_dense_bfloat16 if job.report.received else None,
        overflow_per_step=log.overflow / max(step, 1),
        skipped=log.skipped,
        seconds=time.perf_counter() - begin,
    )
    return Run(summary, log.evaluations, log.losses, state, finished=step == experiment.steps)


def describe(experiment: Experiment, method: Method) -> dict[str, Any]:
    """Returns what must stay the same when a run goes on, as JSON; the number of workers may change."""
    names = (
        "dataset",
        "steps",
        "global_batch",
        "learning_rate",
        "momentum",
        "warmup_steps",
        "weight_decay",
        "seed",
        "workers",
    )
    fields = {name: getattr(experiment, name) for name in names}
    return fields | {"method": method_name(method), **dataclasses.asdict(method)}


def _optimizer(experiment: Experiment) -> list[optax.GradientTransformation]:
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if experiment.warmup_steps else experiment.learning_rate,
        peak_value=experiment.learning_rate,
        warmup_steps=experiment.warmup_steps,
        decay_steps=experiment.steps,
    )
    return [
        optax.trace(decay=experiment.momentum, nesterov=True),
        optax.add_decayed_weights(experiment.weight_decay),
        optax.scale_by_learning_rate(schedule),
    ]


def _to_mesh(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Places this process's rows of a global batch on its devices."""
    sharding = NamedSharding(mesh, P("data"))
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}


@contextmanager
def _sigterm(processes: Processes) -> Iterator[threading.Event]:
    """Turns SIGTERM into an event, while the block runs.

    Among several processes JAX's own handler stays, by which they agree on a step to stop at.
    """
    asked = threading.Event()
    if processes.count > 1 or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
