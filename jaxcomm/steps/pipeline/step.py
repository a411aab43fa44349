"""The train step of a pipeline: stages along one axis of a mesh, data-parallel workers along another."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.report import PipelineReport
from jaxcomm.collectives.axis import AxisName, axis_names, in_axes_of_workers, on_step_mesh
from jaxcomm.exchange import get_exchange
from jaxcomm.kernels.numerics import is_finite_tree
from jaxcomm.order import check_chain, check_descent
from jaxcomm.state import (
    TrainState,
    check_aliases,
    check_axes,
    check_model_state,
    global_params,
    make_local,
    mean_model_state,
    resize_workers,
    state_specs,
)
from jaxcomm.steps.batch import check_batch
from jaxcomm.steps.engine import worker_step
from jaxcomm.steps.mesh import place, shapes_on
from jaxcomm.steps.pipeline.one_forward_one_backward import OneForwardOneBackward
from jaxcomm.steps.pipeline.pipeline import STAGE_AXIS, Pipeline, Schedule
from jaxcomm.steps.pipeline.verify import verify_pipeline
from jaxcomm.steps.replication import over_workers
from jaxcomm.steps.workers import StepSettings, TrainStep
from jaxcomm.traffic import Traffic
from jaxcomm.types import is_per_worker


class PipelineStep(TrainStep):
    """Workers whose devices each hold one stage of the model; see `make_train_step`.

    The first dimension of a state's leaves, except `step`, is the stages. In `PerWorker` leaves the second is the
    workers.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        axis_name: AxisName,
        settings: StepSettings,
    ):
        """See `make_train_step`."""
        _check_mesh(pipeline, mesh, axis_name)
        super().__init__(tx, axis_name, tuple(mesh.shape[name] for name in axis_names(axis_name)), settings)
        self.mesh = mesh
        loss_fn, kinds = pipeline.loss_fn, settings.kinds._replace(micro_batches=pipeline.micro_batches)

        def loss(x: Any, batch: Any) -> Any:
            value, scalars = loss_fn(x, batch)
            return value, kinds.checked(scalars, axis_name)

        self.pipeline = replace(pipeline, loss_fn=loss)

    @on_step_mesh
    def init(self, params: Sequence[Any], model_state: Sequence[Any] | None = None) -> TrainState:
        """Makes the first state of a run, each stage's part on that stage's devices.

        Args:
          params: the parameters of every stage, equal in every process.
          model_state: the model state of every stage, if the pipeline has one.

        Raises:
          ValueError: as `TrainStep.init`; for shapes that are not the pipeline's; for an exchange with `where`.
        """
        pipeline = self.pipeline
        if (model_state is None) != (pipeline.model_state is None):
            raise ValueError(
                "model_state must be given to both the Pipeline and its init, or to neither; got "
                f"{'none' if model_state is None else 'one'} for a pipeline "
                f"{'without' if pipeline.model_state is None else 'with one'}. Pass model_state= to both."
            )
        _check_shapes("params", params, pipeline.params)
        check_aliases(params)
        states = [()] * pipeline.size if model_state is None else model_state
        if pipeline.model_state is not None:
            _check_shapes("model_state", states, pipeline.model_state)
            check_model_state(states)

        def device_state(params: list[jax.Array], states: list[jax.Array]) -> TrainState:
            stage_slots = [slot[0] for slot in params]
            stages = {"stages": [slot[0] for slot in states]}
            with self.pipeline.exchanging():
                state = TrainState(stage_slots, self.tx.init(stage_slots), jnp.zeros((), jnp.int32), stages)
            return _of_mesh(make_local(state, self.axis_name))

        stacked = (pipeline.param_slots.stack(params), pipeline.state_slots.stack(states))
        one_stage = jax.eval_shape(lambda: jax.tree.map(lambda slot: slot[:1], stacked))
        shapes = jax.eval_shape(in_axes_of_workers(device_state, self.sizes, self.axis_name), *one_stage)
        exchange = get_exchange(shapes.opt_state)
        if exchange.method.where is not None:
            raise ValueError(
                "A pipeline must exchange all gradients of a stage, whose stacked parameters have no paths of their "
                "own and whose layers cannot gather over the workers; got an exchange with where=. Leave it out."
            )
        check_axes(exchange, self.axis_name)
        if not hasattr(self.tx, "links"):  # a jaxcomm.chain has checked itself
            stage_like = jax.eval_shape(lambda: [slot[0] for slot in stacked[0]])
            for message in check_chain(self.tx, shapes.opt_state, stage_like):
                warnings.warn(message, stacklevel=2)
        specs = _staged_specs(shapes)
        on_devices = jax.shard_map(device_state, mesh=self.mesh, in_specs=P(STAGE_AXIS), out_specs=specs)
        return jax.jit(on_devices)(*place(stacked, NamedSharding(self.mesh, P(STAGE_AXIS))))

    @on_step_mesh
    def shapes(self, params: Sequence[Any], model_state: Sequence[Any] | None = None) -> TrainState:
        """Returns the shapes of what `init` makes; see `TrainStep.shapes`."""
        shapes = jax.eval_shape(self.init, params, model_state)
        return shapes_on(self.mesh, shapes, _staged_specs(shapes))

    @on_step_mesh
    def params(self, state: TrainState) -> list[Any]:
        """Returns the parameters of every stage; with a local method, those of the global model."""
        slots = self.pipeline.param_slots
        if not is_per_worker(state.params):
            return slots.unstack(state.params)
        of_stages = []
        for stage in range(self.pipeline.size):
            stage_state = jax.tree.map(lambda leaf, at=stage: leaf[at], (state.params, state.opt_state))
            model = global_params(state._replace(params=stage_state[0], opt_state=stage_state[1]))
            of_stages.append(slots.of_stage(stage, model))
        return of_stages

    def model_state(self, state: TrainState) -> list[Any]:
        """Returns the model state of every stage; with a local method, the mean over the workers."""
        return self.pipeline.state_slots.unstack(mean_model_state(state.model_state["stages"], axis=1))

    def resize(self, state: TrainState, workers: int) -> TrainState:
        """Converts every stage's rows to another number of workers; see `TrainStep.resize`."""
        of_stages = [
            resize_workers(_of_stage(state, lambda leaf, at=stage: np.asarray(leaf[at])), workers)
            for stage in range(self.pipeline.size)
        ]
        return jax.tree.map(lambda *rows: np.stack(rows), *of_stages)._replace(step=state.step)

    @on_step_mesh
    def verify(
        self, state: Any, batch: Any, *, other_bytes: int = 256, beside: Sequence[Traffic] = ()
    ) -> PipelineReport:
        """Proves from the compiled text that the step sends what its pipeline and its exchange claim.

        Raises:
          ValueError: as `verify_pipeline`, and for `beside`.
        """
        if beside:
            raise ValueError(f"beside must be empty for a pipeline, whose layers cannot gather; got {beside}.")
        return verify_pipeline(
            self,
            state,
            batch,
            pipeline=self.pipeline,
            tx=self.tx,
            mesh=self.mesh,
            other_bytes=other_bytes,
            axis_name=self.axis_name,
            text=self.compile(state, batch).as_text(),
        )

    @on_step_mesh
    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        check_batch(batch, self.workers, self.pipeline.micro_batches, takes_scalars=False)
        check_descent(self.tx, state.opt_state, state.params)
        specs = self._specs(state)
        in_specs, out_specs = (specs, P(self.axis_name)), (specs, (self._of_scalars(state), P()))
        step = over_workers(self._device_step, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        state, (scalars, exchanged) = step(state, batch)
        return state, {**scalars, **exchanged}

    def _specs(self, state: TrainState) -> TrainState:
        return _staged_specs(state)

    def _device_step(self, state: TrainState, batch: Any) -> tuple[TrainState, tuple[dict[str, Any], dict[str, Any]]]:
        gradients = partial(_gradients, self.pipeline, self.axis_name, state.step)

        # Only the last stage has the loss, so a chain that takes it (reduce_on_plateau, a line search) must fail.
        def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
            with self.pipeline.exchanging(on_stages=True):
                return self.tx.update(updates, state, params)

        tx = optax.GradientTransformation(self.tx.init, cast(Any, update))
        new, metrics = worker_step(gradients, tx, self.axis_name, _of_device(state), batch)
        return _of_mesh(new), _over_stages(metrics)


def _staged_specs(state: TrainState) -> TrainState:
    """Returns the PartitionSpec of every leaf of a pipeline's state; see `state_specs`."""
    staged = jax.tree.map(lambda spec: P(STAGE_AXIS, *spec), state_specs(state), is_leaf=lambda n: isinstance(n, P))
    return staged._replace(step=P())


def _gradients(
    pipeline: Pipeline,
    axis_name: AxisName,
    step: jax.Array,
    params: list[jax.Array],
    model_state: dict[str, Any],
    batch: Any,
) -> Any:
    """Runs the micro-batches forward and backward.

    Returns:
      ((loss, (scalars, new model state)), gradients) for this device's stage.
    """
    run = Schedule if pipeline.schedule == "gpipe" else OneForwardOneBackward
    schedule = run(pipeline, axis_name, batch, seed=step)
    totals, gradients = schedule.gradients(params, model_state["stages"])
    gradients = _broken_together(gradients)
    return (totals.loss, (totals.scalars, {"stages": totals.model_state})), gradients


def _of_stage(state: TrainState, function: Callable[[Any], Any]) -> TrainState:
    """Applies a function to every leaf but `step`, to remove or add the dimension of stages."""
    params, opt_state, model_state = jax.tree.map(function, (state.params, state.opt_state, state.model_state))
    return TrainState(params, opt_state, state.step, model_state)


def _of_device(state: TrainState) -> TrainState:
    """Removes the dimension of stages, which is 1 on a device."""
    return _of_stage(state, lambda leaf: leaf[0])


def _of_mesh(state: TrainState) -> TrainState:
    """Adds the dimension of stages; the inverse of `_of_device`."""
    return _of_stage(state, lambda leaf: leaf[None])


def _broken_together(gradients: Any) -> Any:
    """Makes all gradients of a worker NaN if those of one stage are not finite, so that all stages skip."""
    broken = lax.psum((~is_finite_tree(gradients)).astype(jnp.int32), STAGE_AXIS) > 0
    return jax.tree.map(lambda leaf: jnp.where(broken, jnp.full_like(leaf, jnp.nan), leaf), gradients)


def _over_stages(metrics: Any) -> Any:
    """Combines the scalars, and the exchange's metrics, of all stages: sums; 1 if a stage has skipped, or drained."""

    def total(tree: Any) -> Any:
        vector, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))
        return unravel(lax.psum(vector, STAGE_AXIS))

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
