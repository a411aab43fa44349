"""Workers that each hold the whole model: on a mesh, or simulated on one device."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.chain import warn
from jaxcomm.collectives.axis import (
    ALL_EXCHANGED,
    AxisName,
    axis_names,
    check_workers,
    in_axes_of_workers,
    on_step_mesh,
)
from jaxcomm.exchange import get_exchange
from jaxcomm.order import check_chain
from jaxcomm.state import (
    TrainState,
    bypassing,
    check_aliases,
    check_axes,
    check_model_state,
    communication_period,
    is_averaged,
    make_local,
    state_specs,
    trained,
    works_alone,
)
from jaxcomm.steps.agreement import trace_on
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.mesh import check_axis, place
from jaxcomm.steps.replication import over_workers
from jaxcomm.steps.shard_map import shard_map
from jaxcomm.steps.step import Placement
from jaxcomm.types import Params, PerWorker, PyTree, is_per_worker, map_rows

Worker = Callable[[TrainState, Batch], tuple[TrainState, Any]]


class WorkerPlacement(Placement):
    """The state of workers that each take a whole step by themselves, `worker_step`."""

    @property
    def worker_tx(self) -> optax.GradientTransformation:
        """The chain, as a worker runs it."""
        return self.tx

    @abstractmethod
    def run(self, worker: Worker, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """Runs a worker's function on all workers."""

    def worker_state(self, params: Params, model_state: PyTree) -> TrainState:
        """Returns a worker's first state."""
        state = TrainState(params, self.worker_tx.init(trained(params)), jnp.zeros((), jnp.int32), model_state)
        return make_local(state, self.axis_name)

    def checked_shapes(
        self, params: Params, model_state: PyTree, shapes_of: Callable[..., TrainState] | None = None
    ) -> TrainState:
        """Returns the shapes of a first state; refuses a state or chain that cannot be trained, and warns.

        It is a worker's, unless `shapes_of` returns those of another.
        """
        check_aliases(params)
        shapes_of = shapes_of or partial(
            jax.eval_shape, in_axes_of_workers(self.worker_state, self.sizes, self.axis_name)
        )
        shapes = shapes_of(params, model_state)
        check_model_state(model_state, takes_counts=communication_period(shapes.opt_state) is None)
        check_axes(get_exchange(shapes.opt_state), self.axis_name)
        if not hasattr(self.tx, "links"):  # a jaxcomm.chain has checked itself
            for message in check_chain(self.tx, shapes.opt_state, trained(params)):
                warn(message)
        return shapes


class Replicated(WorkerPlacement):
    """Workers on a mesh that each hold the whole model."""

    def __init__(self, tx: optax.GradientTransformation, mesh: Mesh, axis_name: AxisName):
        check_axis(mesh, axis_name)
        super().__init__(tx, mesh, axis_name, tuple(mesh.shape[name] for name in axis_names(axis_name)))

    @on_step_mesh
    def init(self, params: Params, model_state: PyTree) -> TrainState:
        """Makes the state on the mesh; see `TrainStep.init`."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
                raise ValueError(
                    "Every worker must hold all parameters, or shards of them on devices of its own; got one that is "
                    f"sharded over the workers, {sharding.spec} at {jax.tree_util.keystr(path)!r}. Shard it over an "
                    'axis of its own, make_mesh(data=2, fsdp=4) and P("fsdp"); or copy it to all devices.'
                )
        init, on_mesh = partial(_first_state, self), cache(partial(NamedSharding, self.mesh))
        placed = place(jax.tree.map(jnp.asarray, (params, model_state)), on_mesh(P()))
        # Of the function and the types of the call below, so that JAX traces them once.
        shapes = self.checked_shapes(params, model_state, lambda *_: jax.eval_shape(init, *placed))
        # A program returns empty arrays as replicated, so they begin so.
        shardings = jax.tree.map(lambda leaf, spec: on_mesh(spec if leaf.size else P()), shapes, state_specs(shapes))
        # Not in a jax.shard_map, which takes XLA four times as long to compile where there are many tensors.
        return jax.jit(init, out_shardings=shardings)(*placed)

    def run(self, worker: Worker, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """Runs a worker's function on every device."""
        specs, rows = state_specs(state), batch.like(P(self.axis_name), P())
        if AxisType.Explicit in self.mesh.axis_types:  # the batch's types may have other shardings
            batch = jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(self.mesh, spec)), batch, rows)
        on_workers = shard_map if bypassing(state.opt_state, trained(state.params)) else over_workers
        out_specs = (specs, (scalar_spec(state, self.axis_name), P()))
        return on_workers(worker, mesh=self.mesh, in_specs=(specs, rows), out_specs=out_specs)(state, batch)


class Simulated(WorkerPlacement):
    """Workers simulated on one device, under `jax.vmap`."""

    def __init__(self, tx: optax.GradientTransformation, workers: int | tuple[int, ...], axis_name: AxisName):
        super().__init__(tx, None, axis_name, check_workers(workers, axis_name))

    @on_step_mesh
    def init(self, params: Params, model_state: PyTree) -> TrainState:
        """Makes the state, on one device; see `TrainStep.init`."""
        params, model_state = self.accepted((params, model_state))
        self.checked_shapes(params, model_state)
        return jax.jit(partial(_first_state, self))(params, model_state)

    def accepted(self, batch: PyTree) -> Any:
        """Moves arrays whose types have a mesh of Explicit axes to the host: such types do not fit a `jax.vmap`."""

        def to_host(leaf: PyTree) -> Any:
            mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
            if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
                return leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(to_host(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
            return jax.device_get(leaf)  # on another device it would keep its type

        return jax.tree.map(to_host, batch)

    def run(self, worker: Worker, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """Runs a worker's function under a `jax.vmap` for each axis."""
        # JAX tracks nothing under vmap: trace on an abstract mesh to find what differs between workers.
        has_bypass = bool(bypassing(state.opt_state, trained(state.params)))
        if has_bypass or not all(map(is_averaged, jax.tree.leaves(state.model_state))):  # counters must be replicated
            out_specs = (state_specs(state), (scalar_spec(state, self.axis_name), P()))
            how = jax.shard_map if has_bypass else over_workers
            trace_on(worker, self.row_sizes, self.axis_name, state, batch, out_specs=out_specs, how=how)
        function: Any = worker if has_bypass else in_axes_of_workers(worker, (1,), ALL_EXCHANGED)
        count = math.prod(self.sizes)
        parts = [rows.reshape(*self.sizes, len(rows) // count, *rows.shape[1:]) for rows in batch.rows]
        parts = replace(batch, rows=parts)
        rows = batch.like(0, None)
        state = map_rows(self._split_rows, state)
        of_scalars = 0 if works_alone(state.opt_state, state.model_state) else None
        for name in reversed(axis_names(self.axis_name)):
            state_axes = _axes_of(state, name)
            out_axes = (state_axes, (of_scalars, None))
            function = jax.vmap(function, in_axes=(state_axes, rows), out_axes=out_axes, axis_name=name)
        return map_rows(_rows_together, function(state, parts))

    def _split_rows(self, node: PerWorker) -> Any:
        """Reshapes rows (K, ...) to (*sizes, 1, ...): each worker sees its row as (1, ...), as on a mesh."""
        along = [size for name, size in self.row_sizes.items() if name in node.axes]
        return jax.tree.map(lambda rows: rows.reshape(*along, 1, *rows.shape[1:]), node)


def _first_state(placement: WorkerPlacement, params: Params, model_state: PyTree) -> TrainState:
    """Returns the state of all workers before the first step, with the same row for each."""

    def rows(node: PerWorker) -> Any:
        count = math.prod(placement.row_sizes[name] for name in node.axes)
        return jax.tree.map(lambda row: jnp.broadcast_to(row, (count, *row.shape[1:])), node)

    worker_state = in_axes_of_workers(placement.worker_state, placement.sizes, placement.axis_name)
    return map_rows(rows, worker_state(params, model_state))


def scalar_spec(state: TrainState, axis_name: AxisName) -> P:
    """Returns the PartitionSpec of the scalars of `worker_step`."""
    return P(axis_name) if works_alone(state.opt_state, state.model_state) else P()


def _rows_together(node: PerWorker) -> Any:
    """Inverts `_split_rows`."""
    depth = len(node.axes) + 1
    return jax.tree.map(lambda rows: rows.reshape(math.prod(rows.shape[:depth]), *rows.shape[depth:]), node)


def _axes_of(state: PyTree, name: str) -> Any:
    """Returns the `in_axes` of a `jax.vmap` over one axis of workers."""

    def axis(node: PyTree) -> int | None:
        return 0 if is_per_worker(node) and name in node.axes else None

    return jax.tree.map(axis, state, is_leaf=is_per_worker)
