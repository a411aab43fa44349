"""The train step of a pipeline: stages along one axis of a mesh, data-parallel workers along another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.chain import warn
from jaxcomm.collectives.axis import AxisName, axis_names, on_step_mesh
from jaxcomm.collectives.messages import sum_of_few
from jaxcomm.exchange import get_exchange
from jaxcomm.order import check_slots, check_stages
from jaxcomm.state import (
    TrainState,
    check_aliases,
    check_model_state,
    global_params,
    mean_model_state,
    resize_workers,
    state_specs,
)
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.engine import WorkerUpdate
from jaxcomm.steps.loss import GradientsFn
from jaxcomm.steps.mesh import place
from jaxcomm.steps.pipeline.one_forward_one_backward import OneForwardOneBackward
from jaxcomm.steps.pipeline.pipeline import STAGE_AXIS, Pipeline, Schedule
from jaxcomm.steps.pipeline.verify import verify_pipeline
from jaxcomm.steps.replication import over_workers
from jaxcomm.steps.settings import StepSettings
from jaxcomm.steps.step import Report, TrainStep, params_like
from jaxcomm.steps.workers import Worker, WorkerPlacement, scalar_spec
from jaxcomm.traffic import Traffic
from jaxcomm.types import Params, PyTree, is_per_worker


def pipeline_step(
    pipeline: Pipeline, tx: optax.GradientTransformation, mesh: Mesh, settings: StepSettings
) -> TrainStep:
    """Makes the step of workers whose devices each hold one stage of the model; see `make_train_step`."""
    settings, loss_fn = replace(settings, accumulate=pipeline.micro_batches), pipeline.loss_fn

    def loss(x: Any, batch: PyTree) -> Any:
        value, scalars = loss_fn(x, batch)
        return settings.kinds.checked(value, scalars, settings.axis_name)

    placement = Staged(replace(pipeline, loss_fn=loss), tx, mesh, settings.axis_name)
    gradients_fn = _gradients_of(placement.pipeline, settings.axis_name)

    def gradients(params: list[jax.Array], model_state: dict[str, Any], batch: Batch) -> PyTree:
        leaves, treedef = jax.tree.flatten(batch.tree())
        ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), pipeline.params)

        def whole_model(rows: list[jax.Array], params: list[PyTree]) -> Any:
            return _whole_model(pipeline, params, treedef.unflatten(rows))

        settings.kinds.check_scaling(whole_model, leaves, ones, settings.axis_name)
        return gradients_fn(params, model_state, batch)

    return TrainStep(placement, StagedUpdate(placement, gradients), settings)


def _whole_model(
    pipeline: Pipeline, params: list[PyTree], batch: PyTree
) -> tuple[jax.Array, dict[str, jax.Array], list[Any]]:
    """Returns the loss, its scalars and the new model states of all stages, with ones in place of model states."""
    states = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), pipeline.model_state or [()] * pipeline.size)
    x, new_states = None, []
    for stage in range(pipeline.size):
        x, new = pipeline.run_stage(stage, params[stage], states[stage], x, batch)
        new_states.append(new)
    return (*pipeline.loss_fn(x, batch), new_states)


class Staged(WorkerPlacement):
    """Workers whose devices each hold one stage of the model.

    The first dimension of a state's leaves, except `step`, is the stages. In `PerWorker` leaves the second is the
    workers.
    """

    takes_scalars = False

    def __init__(self, pipeline: Pipeline, tx: optax.GradientTransformation, mesh: Mesh, axis_name: AxisName):
        _check_mesh(pipeline, mesh, axis_name)
        super().__init__(tx, mesh, axis_name, tuple(mesh.shape[name] for name in axis_names(axis_name)))
        self.pipeline = pipeline

    @property
    def row_sizes(self) -> Mapping[str, int]:
        """None: stages are first."""
        return {}

    @property
    def worker_tx(self) -> optax.GradientTransformation:
        """The chain, which counts each stage's own elements."""

        def init(params: Params) -> PyTree:
            with self.pipeline.exchanging():
                return self.tx.init(params)

        # Only the last stage has the loss, so a chain that takes it (reduce_on_plateau, a line search) must fail.
        def update(updates: PyTree, state: PyTree, params: Params) -> tuple[Any, Any]:
            return self.tx.update(updates, state, params)

        return optax.GradientTransformation(init, cast(Any, update))

    @on_step_mesh
    def init(self, params: Sequence[Any], model_state: Sequence[Any] | None) -> TrainState:
        """Makes the first state of a run, each stage's part on that stage's devices; see `TrainStep.init`."""
        pipeline, has_state = self.pipeline, bool(model_state)
        if has_state != (pipeline.model_state is not None):
            raise ValueError(
                "model_state must be given to both the Pipeline and its init, or to neither; got "
                f"{'one' if has_state else 'none'} for a pipeline {'without' if has_state else 'with one'}. Pass "
                "model_state= to both."
            )
        _check_shapes("params", params, pipeline.params)
        check_aliases(params)
        states = model_state or [()] * pipeline.size
        if has_state:
            _check_shapes("model_state", states, pipeline.model_state)
            check_model_state(states)

        def device_state(params: list[jax.Array], states: list[jax.Array]) -> TrainState:
            return _of_mesh(self.worker_state([slot[0] for slot in params], {"stages": [slot[0] for slot in states]}))

        stacked = (pipeline.param_slots.stack(params), pipeline.state_slots.stack(states))
        stage = jax.eval_shape(lambda: jax.tree.map(lambda slot: slot[0], stacked))
        shapes = self.checked_shapes(stage[0], {"stages": stage[1]})
        exchange = get_exchange(shapes.opt_state)
        if exchange.method.where is not None:
            raise ValueError(
                "A pipeline must exchange all gradients of a stage, whose stacked parameters have no paths of their "
                "own and whose layers cannot gather over the workers; got an exchange with where=. Leave it out."
            )
        slots = pipeline.param_slots
        paths = [jax.tree.map("[{}]".format, numbers) for numbers in slots.stages]
        check_slots(self.tx, stage[0], list(zip(pipeline.params, paths, strict=True)))
        for message in check_stages(self.tx, exchange, stage[0]) if pipeline.size > 1 else ():
            warn(message)
        specs = self.specs_of(shapes)
        on_devices = jax.shard_map(device_state, mesh=self.mesh, in_specs=P(STAGE_AXIS), out_specs=specs)
        return jax.jit(on_devices)(*place(stacked, NamedSharding(self.mesh, P(STAGE_AXIS))))

    def specs_of(self, state: TrainState) -> TrainState:
        """Returns the PartitionSpec of every leaf; see `state_specs`."""
        staged = jax.tree.map(lambda spec: P(STAGE_AXIS, *spec), state_specs(state))
        return staged._replace(step=P())

    def params(self, state: TrainState) -> list[Any]:
        """Returns the parameters of every stage; with a local method, those of the global model."""
        slots = self.pipeline.param_slots
        if not is_per_worker(state.params):
            return slots.unstack(state.params)
        models = (global_params(_at_stage(state, stage)) for stage in range(self.pipeline.size))
        return [slots.of_stage(stage, model) for stage, model in enumerate(models)]

    def own_params(self, state: TrainState) -> Params:
        """Returns the shapes of a stage's slots."""
        return params_like(jax.eval_shape(partial(_at_stage, stage=0), state))

    def model_state(self, state: TrainState) -> list[Any]:
        """Returns the model state of every stage; with a local method, the mean over the workers."""
        return self.pipeline.state_slots.unstack(mean_model_state(state.model_state["stages"], axis=1))

    def resize(self, state: TrainState, workers: int) -> TrainState:
        """Converts every stage's rows to another number of workers; see `TrainStep.resize`."""
        state = _of_stage(state, np.asarray)
        stages = [resize_workers(_at_stage(state, stage), workers) for stage in range(self.pipeline.size)]
        return jax.tree.map(lambda *rows: np.stack(rows), *stages)._replace(step=state.step)

    def run(self, worker: Worker, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """Runs a worker's function on the device of every stage."""

        def device_step(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
            seeded = replace(batch, key=state.step)  # of random boundaries
            with self.pipeline.exchanging(on_stages=True):
                new, metrics = worker(_at_stage(state, 0), seeded)
            return _of_mesh(new), _over_stages(metrics)

        specs = self.specs_of(state)
        in_specs = (specs, batch.like(P(self.axis_name), P()))
        out_specs = (specs, (scalar_spec(state, self.axis_name), P()))
        return over_workers(device_step, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)(state, batch)


@dataclass(frozen=True)
class StagedUpdate(WorkerUpdate):
    """A `WorkerUpdate` whose stages send to each other."""

    placement: Staged

    def verify(self, step: Any, state: PyTree, batch: PyTree, other_bytes: int, beside: Sequence[Traffic]) -> Report:
        """Proves what the step sends; see `verify_pipeline`."""
        if beside:
            raise ValueError(f"beside must be empty for a pipeline, whose layers cannot gather; got {beside}.")
        return verify_pipeline(
            step,
            state,
            batch,
            pipeline=self.placement.pipeline,
            tx=self.placement.tx,
            mesh=self.placement.mesh,
            other_bytes=other_bytes,
            axis_name=self.placement.axis_name,
            text=step.compile(state, batch).as_text(),
        )


def _gradients_of(pipeline: Pipeline, axis_name: AxisName) -> GradientsFn:
    """Returns (params, model_state, batch) -> ((loss, (scalars, new model_state)), gradients) for a device's stage."""
    run = Schedule if pipeline.schedule == "gpipe" else OneForwardOneBackward

    def gradients(params: list[jax.Array], model_state: dict[str, Any], batch: Batch) -> PyTree:
        schedule = run(pipeline, axis_name, batch.tree(), seed=batch.key)
        totals, gradients = schedule.gradients(params, model_state["stages"])
        return (totals.loss, (totals.scalars, {"stages": totals.model_state})), gradients

    return gradients


def _of_stage(state: TrainState, function: Callable[[Any], Any]) -> TrainState:
    """Applies a function to every leaf but `step`, to remove or add the dimension of stages."""
    params, opt_state, model_state = jax.tree.map(function, (state.params, state.opt_state, state.model_state))
    return TrainState(params, opt_state, state.step, model_state)


def _at_stage(state: TrainState, stage: int) -> TrainState:
    """Returns one stage's state, without the dimension of stages, which is 1 on a device."""
    return _of_stage(state, lambda leaf: leaf[stage])


def _of_mesh(state: TrainState) -> TrainState:
    """Adds the dimension of stages; the inverse of `_at_stage`."""
    return _of_stage(state, lambda leaf: leaf[None])


def _over_stages(metrics: Any) -> Any:
    """Combines the scalars, and the exchange's metrics, of all stages: sums; 1 if a stage has skipped, or drained."""

    def total(tree: PyTree) -> Any:
        vector, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))
        return unravel(sum_of_few(vector, STAGE_AXIS))

    is_local = any(map(is_per_worker, metrics[0].values()))  # then the scalars differ between workers
    scalars, exchanged = map(total, metrics) if is_local else total(metrics)
    for name in ("skipped", "drained"):
        exchanged[name] = (exchanged[name] > 0).astype(jnp.int32)
    return scalars, exchanged


def _check_shapes(name: str, trees: Sequence[Any], planned: Sequence[Any] | None) -> None:
    actual = [jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree) for tree in trees]
    expected = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in planned or ()]
    if jax.tree.structure(actual) != jax.tree.structure(expected) or actual != expected:
        raise ValueError(
            f"The {name} must have the shapes that the Pipeline was made with; got {actual} for {expected}. Make the "
            "Pipeline with the same trees."
        )


def _check_mesh(pipeline: Pipeline, mesh: Mesh, axis_name: AxisName) -> None:
    sizes, axes = dict(mesh.shape), (*axis_names(axis_name), STAGE_AXIS)
    extra_axes = {name: size for name, size in sizes.items() if name not in axes and size > 1}
    if extra_axes or any(name not in sizes for name in axes):
        raise ValueError(
            f"The mesh of a pipeline must have the axes {axes}, and no others; got {sizes}. Make it with "
            f"make_mesh({', '.join(f'{name}=...' for name in axes)}), 1 for an axis that is not used."
        )
    if sizes[STAGE_AXIS] != pipeline.size:
        raise ValueError(
            f"The axis of stages must have a place for each stage; got {sizes[STAGE_AXIS]} for {pipeline.size} stages. "
            f"Make the mesh with {STAGE_AXIS}={pipeline.size}, or cut the model into {sizes[STAGE_AXIS]}."
        )
