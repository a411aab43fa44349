"""The train step as an object: on a mesh of workers, or with simulated workers on one device."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.jaxpr import traced_program
from jaxcomm.accounting.report import PipelineReport, WireReport, step_report, verify
from jaxcomm.checks import check_count, check_range
from jaxcomm.collectives.axis import (
    ALL_EXCHANGED,
    AxisName,
    axis_names,
    check_workers,
    in_axes_of_workers,
    on_step_mesh,
    to_varying,
)
from jaxcomm.exchange import get_exchange
from jaxcomm.order import check_chain, check_descent
from jaxcomm.state import (
    TrainState,
    bypassing,
    check_aliases,
    check_axes,
    check_model_state,
    check_rows,
    communication_period,
    global_params,
    is_averaged,
    make_local,
    mean_model_state,
    resize_workers,
    state_specs,
    trained,
    vary_exchanged,
    without_rows,
    works_alone,
)
from jaxcomm.steps.agreement import check_agreement, trace_on
from jaxcomm.steps.batch import Batch, check_batch, check_global, row_axes
from jaxcomm.steps.engine import worker_step
from jaxcomm.steps.loss import GradientsFn, LossFn, Scalars, gradients_of, in_turns
from jaxcomm.steps.mesh import check_axis, place, shapes_on
from jaxcomm.steps.overlap import HostOverlap, needs_host_overlap
from jaxcomm.steps.replication import over_workers
from jaxcomm.steps.shard_map import shard_map
from jaxcomm.traffic import Program, Traffic
from jaxcomm.types import is_per_worker


@dataclass(frozen=True)
class StepSettings:
    """Settings of a step of any kind; see `make_train_step`."""

    donate: bool = True
    accumulate: int = 1
    rng: jax.Array | None = None
    compiler_options: dict[str, Any] | None = None
    batch_axis: Any = 0
    kinds: Scalars = field(default_factory=Scalars)

    @property
    def jit(self) -> Callable[..., Any]:
        """`jax.jit` with the compiler options."""
        return partial(jax.jit, compiler_options=self.compiler_options)


class TrainStep(ABC):
    """A compiled train step that knows its chain, its mesh and its workers.

        state = step.init(params)
        state, metrics = step(state, batch)

    Attributes:
      tx: the chain, with one exchange of this library.
      axis_name: the axis of workers, or the axes, outermost first.
      sizes: the number of workers along each axis.
      mesh: the mesh; None for a simulated step.
    """

    mesh: Any = None

    def __init__(
        self,
        tx: optax.GradientTransformation,
        axis_name: AxisName,
        sizes: tuple[int, ...],
        settings: StepSettings,
    ):
        """Compiles nothing yet; see `make_train_step` and `simulate`."""
        check_count("accumulate", settings.accumulate, 1, "1 takes all rows of a worker at once")
        self.tx, self.axis_name, self.sizes, self._settings = tx, axis_name, sizes, settings
        rng = settings.rng
        check_range(
            "rng",
            rng,
            "a random key, or None",
            rng is None or isinstance(rng, jax.Array),
            "Make one of a seed: jax.random.key(5)",
        )
        if rng is not None and not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
            rng = jax.random.wrap_key_data(rng)
        self._rng = rng
        self._jitted = settings.jit(self._step, donate_argnums=0 if settings.donate else ())
        self._of_own = jax.jit(partial(settings.kinds.of_own, workers=self.workers))
        self._executable: Any = None
        self._is_checked = False

    @property
    def workers(self) -> int:
        """K, the number of workers."""
        return math.prod(self.sizes)

    @on_step_mesh
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes a step; returns the new state and the metrics. The first call checks the state's rows."""
        if isinstance(state, TrainState) and _is_deleted(state.step):  # JAX would end in a RuntimeError, or crash
            _check_kept(state)
        if not self._is_checked:
            _check_state(state, {})
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

    def _run(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        if self._executable is not None:
            try:
                return self._executable(state, batch)
            except (TypeError, ValueError):  # compiled for other arguments
                self._executable = None
        return self._jitted(state, batch)

    @on_step_mesh
    def trace(self, state: Any, batch: Any) -> Any:
        """Traces the step for arrays or shapes, as `jax.jit(...).trace` does."""
        return self._jitted.trace(state, batch)

    @on_step_mesh
    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers the step for arrays or shapes, as `jax.jit(...).lower` does."""
        return self._jitted.lower(state, batch)

    def compile(self, state: Any, batch: Any) -> Any:
        """Compiles the step for arrays or shapes; later calls use the program while their arguments match it."""
        self._executable = self.lower(state, batch).compile()
        return self._executable

    @abstractmethod
    def init(self, params: Any, model_state: Any = ()) -> TrainState:
        """Makes the first state of a run, placed for the step.

        Args:
          params: the parameters, equal in every process. They are copied: a step that donates its state does not
            delete the caller's arrays.
          model_state: the model's state besides its parameters (running statistics), floats, equal in every process;
            copied as well. For a step with `has_state`.

        Raises:
          ValueError: if the chain has no exchange, if the order of its links is refused (see the guide; warnings are
            emitted here), or for a model state that cannot be averaged.
        """

    def shapes(self, params: Any, model_state: Any = ()) -> TrainState:
        """Returns the state that `init` would make, as `jax.ShapeDtypeStruct`s with shardings.

        Use it to restore a checkpoint into, or to compile a step before any array exists.
        """
        return jax.eval_shape(self.init, params, model_state)

    def params(self, state: TrainState) -> Any:
        """Returns the model to evaluate and to save: one set of parameters; with a local method, the global model.

        It shares the memory of the state, which the next step donates. To keep it longer, copy it: `jax.tree.map(
        jnp.copy, step.params(state))`.
        """
        return global_params(state)

    def model_state(self, state: TrainState) -> Any:
        """Returns the model's state besides its parameters; with a local method, the mean over the workers."""
        return mean_model_state(state.model_state)

    def resize(self, state: TrainState, workers: int) -> TrainState:
        """Converts a state to another number of workers; see `resize_workers`. Returns NumPy rows, on one host.

        Replicated arrays stay where they are. Place the whole state for the step of the new mesh, see its `shapes`.
        """
        return resize_workers(state, workers)

    def report(self, state: Any, batch: Any) -> WireReport:
        """Predicts the bytes of a whole step, losses and metrics included, by tracing it. Shapes are enough."""
        return step_report(self, state, batch, params=self._like(state), workers=self.workers)

    @on_step_mesh
    def verify(
        self, state: Any, batch: Any, *, other_bytes: int = 256, beside: Sequence[Traffic] = ()
    ) -> WireReport | PipelineReport:
        """Proves from the compiled text that the step sends what its exchange claims, no more and no less.

        Args:
          state: the state, or its shapes.
          batch: the batch, or its shapes.
          other_bytes: bytes that the step may receive in addition to the exchange (losses and metrics). The bytes of
            the model's state, and of the loss's own collectives, are added.
          beside: collectives of gradients in addition to the exchange: `plan.traffic` of `plan_late_multiply`.

        Returns:
          The report of the compiled step; for a pipeline, the report of its boundaries and its exchange.

        Raises:
          ValueError: see `jaxcomm.verify`.
        """
        return verify(
            self,
            state,
            batch,
            tx=self.tx,
            params=self._like(state),
            workers=self.sizes,
            other_bytes=other_bytes,
            beside=beside,
            axis_name=self.axis_name,
            text=self.compile(state, batch).as_text(),
        )

    def _placed(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Places a state and a batch from other devices on the mesh."""
        leaves, treedef = jax.tree.flatten(batch)
        axes, on_mesh = row_axes(batch, self._settings.batch_axis), partial(NamedSharding, self.mesh)
        rows = [P() if axis is None else P(*[None] * axis, self.axis_name) for axis in axes]
        specs = jax.tree.leaves(self._specs(state), is_leaf=lambda x: isinstance(x, P))
        shardings = jax.tree.unflatten(jax.tree.structure(state), map(on_mesh, specs))
        return jax.device_put(state, shardings), treedef.unflatten(jax.device_put(leaves, list(map(on_mesh, rows))))

    def _specs(self, state: TrainState) -> TrainState:
        """Returns the PartitionSpec of every leaf of a state."""
        return state_specs(state)

    def _of_scalars(self, state: TrainState) -> P:
        """Returns the PartitionSpec of the scalars of `worker_step`."""
        return P(self.axis_name) if works_alone(state.opt_state, state.model_state) else P()

    def loss_program(self, state: Any, batch: Any) -> Program:
        """Returns the collectives of the loss and of its gradient, unless `verify` counts them by itself."""
        del state, batch
        return Program()

    @abstractmethod
    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """The function that is compiled."""

    def _keyed(self, step: jax.Array, batch: Any) -> Batch:
        """Checks that a batch divides, and takes it apart; adds the key of the step, if there is one."""
        axes = self._settings.batch_axis
        check_batch(batch, self.workers, self._settings.accumulate, axes)
        return Batch.of(batch, axes, None if self._rng is None else jax.random.fold_in(self._rng, step))

    def _like(self, state: Any) -> Any:
        """Returns the shapes of one worker's parameters."""
        _check_state(state, {})
        params = state.params
        return (
            jax.eval_shape(lambda rows: jax.tree.map(lambda x: x[0], rows), params.rows)
            if is_per_worker(params)
            else params
        )

    def _worker_state(self, params: Any, model_state: Any) -> TrainState:
        state = TrainState(params, self.tx.init(trained(params)), jnp.zeros((), jnp.int32), model_state)
        return make_local(state, self.axis_name)

    def _first_state(self, params: Any, model_state: Any) -> TrainState:
        """Returns the state of all workers before the first step, with the same row for each."""
        by_name = dict(zip(axis_names(self.axis_name), self.sizes, strict=True))

        def rows(node: Any) -> Any:
            if not is_per_worker(node):
                return node
            count = math.prod(by_name[name] for name in node.axes)
            return jax.tree.map(lambda row: jnp.broadcast_to(row, (count, *row.shape[1:])), node)

        state = in_axes_of_workers(self._worker_state, self.sizes, self.axis_name)(params, model_state)
        return jax.tree.map(rows, state, is_leaf=is_per_worker)

    def _checked_shapes(self, params: Any, model_state: Any) -> TrainState:
        """Returns the shapes of one worker's state; refuses a state or chain that cannot be trained, and warns."""
        check_aliases(params)
        init = in_axes_of_workers(self._worker_state, self.sizes, self.axis_name)
        shapes = jax.eval_shape(init, params, model_state)
        check_model_state(model_state, takes_counts=communication_period(shapes.opt_state) is None)
        check_axes(get_exchange(shapes.opt_state), self.axis_name)
        if not hasattr(self.tx, "links"):  # a jaxcomm.chain has checked itself
            for message in check_chain(self.tx, shapes.opt_state, trained(params)):
                warnings.warn(message, stacklevel=3)
        return shapes


class WorkersStep(TrainStep):
    """Workers on a mesh that each hold the whole model."""

    def __init__(
        self,
        loss: LossFn,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        axis_name: AxisName,
        settings: StepSettings,
    ):
        """See `make_train_step`; the loss is from `loss_of`."""
        check_axis(mesh, axis_name)
        super().__init__(tx, axis_name, tuple(mesh.shape[name] for name in axis_names(axis_name)), settings)
        self.mesh, self._loss = mesh, loss
        self._host_overlap: HostOverlap | None = None

    @on_step_mesh
    def init(self, params: Any, model_state: Any = ()) -> TrainState:
        """Makes the state on the mesh; see `TrainStep.init`."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
                raise ValueError(
                    "Every worker must hold all parameters, or shards of them on devices of its own; got one that is "
                    f"sharded over the workers, {sharding.spec} at {jax.tree_util.keystr(path)!r}. Shard it over an "
                    'axis of its own, make_mesh(data=2, fsdp=4) and P("fsdp"); or copy it to all devices.'
                )
        shapes, on_mesh = self._checked_shapes(params, model_state), partial(NamedSharding, self.mesh)
        # A program returns empty arrays as replicated, so they begin so.
        shardings = jax.tree.map(lambda leaf, spec: on_mesh(spec if leaf.size else P()), shapes, state_specs(shapes))
        arrays = jax.tree.map(jnp.asarray, (params, model_state))
        # Not in a jax.shard_map, which takes XLA four times as long to compile where there are many tensors.
        return jax.jit(self._first_state, out_shardings=shardings)(*place(arrays, on_mesh(P())))

    def shapes(self, params: Any, model_state: Any = ()) -> TrainState:
        """Returns the shapes of what `init` makes; see `TrainStep.shapes`."""
        shapes = jax.eval_shape(self.init, params, model_state)
        return shapes_on(self.mesh, shapes, state_specs(shapes))

    def _run(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        if not needs_host_overlap(state, self.mesh):
            return super()._run(state, batch)
        if self._host_overlap is None:
            jax.eval_shape(self._step, state, batch)  # for its checks
            program_args = (self._gradients_fn(), self.tx, self.mesh, self.axis_name)
            self._host_overlap = HostOverlap(*program_args, self._keyed, self._settings)
        return self._host_overlap(state, batch)

    @on_step_mesh
    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_state(state, self.mesh.shape)
        check_axes(get_exchange(state.opt_state), self.axis_name)
        check_descent(self.tx, state.opt_state, trained(state.params))
        batch = self._keyed(state.step, batch)
        check_agreement(self._loss, state, batch, dict(self.mesh.shape), self.axis_name)
        specs, rows = state_specs(state), batch.like(P(self.axis_name), P())
        if AxisType.Explicit in self.mesh.axis_types:  # the batch's types may have other shardings
            batch = jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(self.mesh, spec)), batch, rows)
        own_step = partial(worker_step, self._gradients_fn(), self.tx, self.axis_name, kinds=self._settings.kinds)
        on_workers = shard_map if bypassing(state.opt_state, trained(state.params)) else over_workers
        out_specs = (specs, (self._of_scalars(state), P()))
        state, (scalars, exchanged) = on_workers(own_step, mesh=self.mesh, in_specs=(specs, rows), out_specs=out_specs)(
            state, batch
        )
        return state, {**scalars, **exchanged}

    def loss_program(self, state: Any, batch: Any) -> Program:
        """Returns the collectives of the loss; see `TrainStep`."""
        if bypassing(state.opt_state, trained(self._like(state))):
            return Program()  # `beside` has them

        def gradients(state: TrainState, batch: Batch) -> Any:
            old = without_rows(state)
            params = vary_exchanged(old.params, old.opt_state, self.axis_name)
            local_gradients = self._gradients_fn()(params, old.model_state, batch)
            return jax.tree.map(lambda x: x[None], to_varying(local_gradients, self.axis_name))

        keyed = jax.eval_shape(self._keyed, state.step, batch)
        specs = state_specs(state), keyed.like(P(self.axis_name), P())
        return traced_program(over_workers(gradients, self.mesh, specs, P(self.axis_name)), state, keyed)

    def _gradients_fn(self) -> GradientsFn:
        return in_turns(gradients_of(self._loss, self.axis_name), self._settings.kinds, self.axis_name)


class SimulatedStep(TrainStep):
    """Workers simulated on one device, under `jax.vmap`."""

    def __init__(
        self,
        loss: LossFn,
        tx: optax.GradientTransformation,
        workers: int | tuple[int, ...],
        axis_name: AxisName,
        settings: StepSettings,
    ):
        """See `simulate`; the loss is from `loss_of`."""
        super().__init__(tx, axis_name, check_workers(workers, axis_name), settings)
        self._loss = loss
        self._by_name = dict(zip(axis_names(axis_name), self.sizes, strict=True))

    @on_step_mesh
    def init(self, params: Any, model_state: Any = ()) -> TrainState:
        """Makes the state, on one device; see `TrainStep.init`."""
        params, model_state = _without_mesh((params, model_state))
        self._checked_shapes(params, model_state)
        return jax.jit(self._first_state)(params, model_state)

    def _run(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        return super()._run(state, _without_mesh(batch))

    def verify(self, state: Any, batch: Any, *, other_bytes: int = 256, beside: Sequence[Traffic] = ()) -> WireReport:
        """Refuses: nothing crosses a wire where workers are simulated."""
        raise ValueError("A step must run on a mesh to be verified; got simulated workers. Use make_train_step.")

    def report(self, state: Any, batch: Any) -> WireReport:
        """Refuses: nothing crosses a wire where workers are simulated."""
        raise ValueError("A step must run on a mesh to be reported; got simulated workers. Use jaxcomm.wire_report.")

    def _placed(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Places a batch where the state is."""
        return state, jax.device_put(batch, next(iter(state.step.devices())))

    @on_step_mesh
    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_state(state, self._by_name)
        check_axes(get_exchange(state.opt_state), self.axis_name)
        check_descent(self.tx, state.opt_state, trained(state.params))
        batch = self._keyed(state.step, batch)
        gradients = in_turns(gradients_of(self._loss, self.axis_name), self._settings.kinds, self.axis_name)
        own_step = partial(worker_step, gradients, self.tx, self.axis_name, kinds=self._settings.kinds)
        if bypassing(state.opt_state, trained(state.params)):
            # JAX tracks nothing under vmap: trace on an abstract mesh to find what differs between workers.
            check_agreement(self._loss, state, batch, self._by_name, self.axis_name)
            out_specs = (state_specs(state), (self._of_scalars(state), P()))
            trace_on(own_step, self._by_name, self.axis_name, state, batch, out_specs=out_specs)
            function = own_step
        else:
            if not all(
                map(is_averaged, jax.tree.leaves(state.model_state))
            ):  # counters must be the same on all workers
                out_specs = (state_specs(state), (self._of_scalars(state), P()))
                trace_on(own_step, self._by_name, self.axis_name, state, batch, out_specs=out_specs, how=over_workers)
            function = in_axes_of_workers(own_step, (1,), ALL_EXCHANGED)
        parts = replace(batch, rows=[rows.reshape(*self.sizes, -1, *rows.shape[1:]) for rows in batch.rows])
        rows = batch.like(0, None)
        state = jax.tree.map(self._split_rows, state, is_leaf=is_per_worker)
        of_scalars = 0 if works_alone(state.opt_state, state.model_state) else None
        for name in reversed(self._by_name):
            state_axes = _axes_of(state, name)
            out_axes = (state_axes, (of_scalars, None))
            function = jax.vmap(function, in_axes=(state_axes, rows), out_axes=out_axes, axis_name=name)
        state, (scalars, exchanged) = jax.tree.map(_rows_together, function(state, parts), is_leaf=is_per_worker)
        return state, {**scalars, **exchanged}

    def _split_rows(self, node: Any) -> Any:
        """Reshapes rows (K, ...) to (*sizes, 1, ...): each worker sees its row as (1, ...), as on a mesh."""
        if not is_per_worker(node):
            return node
        along = [size for name, size in self._by_name.items() if name in node.axes]
        return jax.tree.map(lambda rows: rows.reshape(*along, 1, *rows.shape[1:]), node)


def _check_state(state: Any, sizes: Mapping[str, int]) -> None:
    """Refuses anything but a `TrainState`, and a state of another number of workers.

    Raises:
      ValueError: naming what was given.
    """
    if not isinstance(state, TrainState):
        raise ValueError(
            f"The state must be a jaxcomm.state.TrainState; got {type(state).__name__}. Make it by step.init(params), "
            "and restore a checkpoint into step.shapes(params); a TrainState of another library goes with "
            "jaxcomm.data_parallel."
        )
    for node in jax.tree.leaves(state, is_leaf=is_per_worker):
        if not is_per_worker(node) or not set(node.axes) <= sizes.keys():
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


def _without_mesh(tree: Any) -> Any:
    """Moves arrays whose types have a mesh of Explicit axes to one device, where such types do not fit a `jax.vmap`."""

    def to_host(leaf: Any) -> Any:
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
            return leaf
        return jax.device_put(leaf, mesh.devices.flat[0])

    return jax.tree.map(to_host, tree)


def _check_kept(state: Any) -> None:
    """Refuses a state whose memory was donated.

    Raises:
      ValueError: naming the first array.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if _is_deleted(leaf):
            raise ValueError(
                "A state must be one that no step has taken yet, since a step donates its memory; got one that was "
                f"passed to a step before, deleted at {jax.tree_util.keystr(path)!r}. Pass the state that the step "
                "returned, copy what you keep (jax.tree.map(jnp.copy, step.params(state))), or make the step with "
                "donate=False."
            )


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def _rows_together(node: Any) -> Any:
    """Inverts `_split_rows`."""
    if not is_per_worker(node):
        return node
    depth = len(node.axes) + 1
    return jax.tree.map(lambda rows: rows.reshape(math.prod(rows.shape[:depth]), *rows.shape[depth:]), node)


def _axes_of(state: Any, name: str) -> Any:
    """Returns the `in_axes` of a `jax.vmap` over one axis of workers."""

    def axis(node: Any) -> int | None:
        return 0 if is_per_worker(node) and name in node.axes else None

    return jax.tree.map(axis, state, is_leaf=is_per_worker)
