"""The train step as an object, and its parts: where its state is, and what it does with gradients."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.report import PipelineReport, WireReport, step_report
from jaxcomm.collectives.axis import AxisName, axis_names, on_step_mesh
from jaxcomm.state import TrainState, check_rows, global_params, mean_model_state, resize_workers, state_specs, trained
from jaxcomm.steps.batch import Batch, check_global, row_axes
from jaxcomm.steps.mesh import shapes_on
from jaxcomm.steps.settings import StepSettings
from jaxcomm.traffic import Program, Traffic
from jaxcomm.types import Params, PerWorker, PyTree, is_per_worker, nodes_of

Report = WireReport | PipelineReport


class Placement(ABC):
    """Where the state of a step is: how it starts, what it looks like, and which model it is.

    Attributes:
      tx: the chain.
      mesh: the mesh; None on one device.
      axis_name: the axis of workers, or the axes, outermost first.
      sizes: the number of workers along each axis.
      takes_scalars: whether a batch may have scalars.
    """

    mesh: Any
    takes_scalars = True

    def __init__(
        self, tx: optax.GradientTransformation, mesh: Mesh | None, axis_name: AxisName, sizes: tuple[int, ...]
    ):
        self.tx, self.mesh, self.axis_name, self.sizes = tx, mesh, axis_name, sizes

    @property
    def row_sizes(self) -> Mapping[str, int]:
        """The sizes of the axes along which a state has rows first."""
        names = axis_names(self.axis_name)
        return dict(zip(names, self.sizes, strict=True)) if self.mesh is None else self.mesh.shape

    @abstractmethod
    def init(self, params: Params, model_state: PyTree) -> TrainState:
        """Makes the first state."""

    def shapes(self, params: Params, model_state: PyTree) -> TrainState:
        """Returns the shapes of what `init` makes."""
        shapes = jax.eval_shape(self.init, params, model_state)
        return shapes if self.mesh is None else shapes_on(self.mesh, shapes, self.specs_of(shapes))

    def specs_of(self, state: TrainState) -> TrainState:
        """Returns the PartitionSpec of every leaf of a state."""
        return state_specs(state)

    def params(self, state: TrainState) -> Params:
        """Returns the model; see `TrainStep.params`."""
        return global_params(state)

    def own_params(self, state: TrainState) -> Params:
        """Returns the shapes of one worker's parameters: those of a stage, in a pipeline."""
        return params_like(state)

    def model_state(self, state: TrainState) -> PyTree:
        """Returns the model's state; see `TrainStep.model_state`."""
        return mean_model_state(state.model_state)

    def resize(self, state: TrainState, workers: int) -> TrainState:
        """Converts a state to another number of workers; see `TrainStep.resize`."""
        return resize_workers(state, workers)

    def see(self, state: PyTree) -> None:
        """Notes what only arrays on devices tell; called before a state is traced."""
        del state

    def accepted(self, batch: PyTree) -> Any:
        """Returns a batch where the compiled step can take it."""
        return batch


class Update(ABC):
    """What a step does with gradients, and where it gets them.

    Attributes:
      overlap: a `HostOverlap`, another way to take the step; None without.
    """

    overlap: Any = None

    @abstractmethod
    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Returns the new state and the metrics."""

    @abstractmethod
    def verify(
        self, step: "TrainStep", state: PyTree, batch: PyTree, other_bytes: int, beside: Sequence[Traffic]
    ) -> Report:
        """Proves what the step sends; see `TrainStep.verify`."""

    def loss_program(self, state: PyTree, batch: Batch) -> Program:
        """Returns the collectives of the loss and of its gradient, unless `verify` counts them by itself."""
        del state, batch
        return Program()


class TrainStep:
    """A compiled train step that knows its chain, its mesh and its workers.

        state = step.init(params)
        state, metrics = step(state, batch)

    Attributes:
      tx: the chain, with one exchange of this library.
      axis_name: the axis of workers, or the axes, outermost first.
      sizes: the number of workers along each axis.
      mesh: the mesh; None for a simulated step.
    """

    def __init__(self, placement: Placement, update: Update, settings: StepSettings):
        """Compiles nothing yet; see `make_train_step` and `simulate`."""
        self.tx, self.mesh = placement.tx, placement.mesh
        self.axis_name, self.sizes = placement.axis_name, placement.sizes
        self._placement, self._update, self._settings = placement, update, settings
        self._jitted = settings.jit(self._step, donate_argnums=0 if settings.donate else ())
        self._of_own = jax.jit(partial(settings.kinds.of_own, workers=self.workers))
        self._executable: Any = None
        self._is_checked = self._is_traced = False

    @property
    def workers(self) -> int:
        """K, the number of workers."""
        return math.prod(self.sizes)

    @on_step_mesh
    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes a step; returns the new state and the metrics. The first call checks the state's rows."""
        self._placement.see(state)
        if isinstance(state, TrainState) and _is_deleted(state.step):  # JAX would end in a RuntimeError, or crash
            _check_kept(state)
        if not self._is_checked:
            check_state(state, {})
            check_rows(state, self.workers)
            self._is_checked = True
        check_global(batch, self._settings.batch_axis)
        try:
            state, metrics = self._run(state, batch)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
            state, metrics = self._run(*self._placed(state, batch))  # from one device, or from a mesh of another order
        row_metrics = {name: _process_rows(node.rows) for name, node in metrics.items() if is_per_worker(node)}
        return state, metrics | self._of_own(row_metrics) if row_metrics else metrics

    def _run(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Any]:
        batch, overlap = self._placement.accepted(batch), self._update.overlap
        if overlap is not None and overlap.serves(state):
            if not self._is_traced:
                jax.eval_shape(self._step, state, batch)  # for its checks
                self._is_traced = True
            return overlap(state, batch)
        if self._executable is not None:
            try:
                return self._executable(state, batch)
            except (TypeError, ValueError):  # compiled for other arguments
                self._executable = None
        return self._jitted(state, batch)

    @on_step_mesh
    def trace(self, state: PyTree, batch: PyTree) -> Any:
        """Traces the step for arrays or shapes, as `jax.jit(...).trace` does."""
        self._placement.see(state)
        return self._jitted.trace(state, batch)

    @on_step_mesh
    def lower(self, state: PyTree, batch: PyTree) -> Any:
        """Lowers the step for arrays or shapes, as `jax.jit(...).lower` does."""
        return self.trace(state, batch).lower()

    def compile(self, state: PyTree, batch: PyTree) -> Any:
        """Compiles the step for arrays or shapes; later calls use the program while their arguments match it."""
        self._executable = self.lower(state, batch).compile()
        return self._executable

    def init(self, params: Params, model_state: PyTree = ()) -> TrainState:
        """Makes the first state of a run, placed for the step.

        Args:
          params: the parameters, equal in every process; for a `Pipeline` those of every stage. They are copied: a step
            that donates its state does not delete the caller's arrays.
          model_state: the model's state besides its parameters (running statistics), floats, equal in every process;
            copied as well. For a step with `has_state`, or a `Pipeline` with one: that of every stage.

        Returns:
          The state. Of a `Pipeline`, the first dimension of its leaves, except `step`, is the stages, and in
          `PerWorker` leaves the second is the workers.

        Raises:
          ValueError: if the chain has no exchange, if the order of its links is refused (see the guide; warnings are
            emitted here), for a model state that cannot be averaged, or for shapes that are not the pipeline's.
        """
        trained(params)  # refuses what is no array
        return self._placement.init(params, model_state)

    def shapes(self, params: Params, model_state: PyTree = ()) -> TrainState:
        """Returns the state that `init` would make, as `jax.ShapeDtypeStruct`s with shardings.

        Use it to restore a checkpoint into, or to compile a step before any array exists.
        """
        trained(params)
        return self._placement.shapes(params, model_state)

    @on_step_mesh
    def params(self, state: TrainState) -> Params:
        """Returns the model to evaluate and to save: one set of parameters; with a local method, the global model.

        Of a `Pipeline` it is a list, the parameters of every stage. It shares the memory of the state, which the next
        step donates. To keep it longer, copy it: `jax.tree.map(jnp.copy, step.params(state))`.
        """
        return self._placement.params(state)

    def model_state(self, state: TrainState) -> PyTree:
        """Returns the model's state besides its parameters; with a local method, the mean over the workers."""
        return self._placement.model_state(state)

    def resize(self, state: TrainState, workers: int) -> TrainState:
        """Converts a state to another number of workers; see `resize_workers`. Returns NumPy rows, on one host.

        Replicated arrays stay where they are. Place the whole state for the step of the new mesh, see its `shapes`.
        """
        return self._placement.resize(state, workers)

    def report(self, state: PyTree, batch: PyTree) -> WireReport:
        """Predicts the bytes of a whole step, losses and metrics included, by tracing it. Shapes are enough.

        Raises:
          ValueError: for simulated workers.
        """
        self._check_mesh("reported", "jaxcomm.wire_report")
        return step_report(self, state, batch, params=self._placement.own_params(state), workers=self.workers)

    @on_step_mesh
    def verify(self, state: PyTree, batch: PyTree, *, other_bytes: int = 256, beside: Sequence[Traffic] = ()) -> Report:
        """Proves from the compiled text that the step sends what its exchange claims, no more and no less.

        With sharded parameters, collectives over other axes than the workers' do not count, and what the loss sends
        between workers (`split_dense`) is traced.

        Args:
          state: the state, or its shapes.
          batch: the batch, or its shapes.
          other_bytes: bytes that the step may receive in addition to the exchange (losses and metrics). The bytes of
            the model's state, and of the loss's own collectives, are added.
          beside: collectives of gradients in addition to the exchange: `plan.traffic` of `plan_late_multiply`.

        Returns:
          The report of the compiled step; for a pipeline, the report of its boundaries and its exchange.

        Raises:
          ValueError: see `jaxcomm.verify`; for simulated workers; and for `beside` with a pipeline.
        """
        self._check_mesh("verified", "make_train_step")
        return self._update.verify(self, state, batch, other_bytes, beside)

    def loss_program(self, state: PyTree, batch: PyTree) -> Program:
        """Returns the collectives of the loss and of its gradient, unless `verify` counts them by itself."""
        return self._update.loss_program(state, jax.eval_shape(self._batch, state.step, batch))

    def _check_mesh(self, verb: str, remedy: str) -> None:
        if self.mesh is None:  # nothing crosses a wire
            raise ValueError(f"A step must run on a mesh to be {verb}; got simulated workers. Use {remedy}.")

    def _batch(self, step: jax.Array, batch: PyTree) -> Batch:
        return self._settings.batch(step, batch, self.workers, takes_scalars=self._placement.takes_scalars)

    @on_step_mesh
    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        """The function that is compiled."""
        check_state(state, self._placement.row_sizes)
        return self._update(state, self._batch(state.step, batch))

    def _placed(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Any]:
        """Places a state and a batch from other devices on the mesh; without one, a batch where the state is."""
        if self.mesh is None:
            return state, jax.device_put(batch, next(iter(state.step.devices())))
        leaves, treedef = jax.tree.flatten(batch)
        axes, on_mesh = row_axes(batch, self._settings.batch_axis), partial(NamedSharding, self.mesh)
        rows = [P() if axis is None else P(*[None] * axis, self.axis_name) for axis in axes]
        specs = jax.tree.leaves(self._placement.specs_of(state))
        shardings = jax.tree.unflatten(jax.tree.structure(state), map(on_mesh, specs))
        return jax.device_put(state, shardings), treedef.unflatten(jax.device_put(leaves, list(map(on_mesh, rows))))


def params_like(state: PyTree) -> Any:
    """Returns the shapes of one worker's parameters."""
    check_state(state, {})
    if not is_per_worker(state.params):
        return state.params
    return jax.eval_shape(lambda rows: jax.tree.map(lambda x: x[0], rows), state.params.rows)


def check_state(state: PyTree, sizes: Mapping[str, int]) -> None:
    """Refuses anything but a `TrainState`, and a state of another number of workers."""
    if not isinstance(state, TrainState):
        raise ValueError(
            f"The state must be a jaxcomm.state.TrainState; got {type(state).__name__}. Make it by step.init(params), "
            "and restore a checkpoint into step.shapes(params); a TrainState of another library goes with "
            "jaxcomm.data_parallel."
        )
    for node in nodes_of(state, PerWorker):
        if not set(node.axes) <= sizes.keys():
            continue
        count = math.prod(sizes[name] for name in node.axes)
        if row_counts := {len(rows) for rows in jax.tree.leaves(node)} - {count}:
            raise ValueError(
                f"A state must have a row for each worker; got {row_counts.pop()} rows for {count}. Make it by "
                "step.init(params); jaxcomm.resize_workers carries one over to another number of workers."
            )


def _process_rows(rows: jax.Array) -> jax.Array:
    """Returns the rows (K,) of scalars, or those on this process's devices if others hold some: (n,), on one device."""
    if isinstance(rows, Tracer) or rows.is_fully_addressable:
        return rows
    shards = {shard.index[0].start: shard.data for shard in rows.addressable_shards}
    return jnp.concatenate(jax.device_put(list(shards.values()), next(iter(shards.values())).device))


def _check_kept(state: PyTree) -> None:
    """Refuses a state whose memory was donated."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if _is_deleted(leaf):
            raise ValueError(
                "A state must be one that no step has taken yet, since a step donates its memory; got one that was "
                f"passed to a step before, deleted at {jax.tree_util.keystr(path)!r}. Pass the state that the step "
                "returned, copy what you keep (jax.tree.map(jnp.copy, step.params(state))), or make the step with "
                "donate=False."
            )


def _is_deleted(leaf: PyTree) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
