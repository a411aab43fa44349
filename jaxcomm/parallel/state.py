"""The state of a training run, and where each part of it lives."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.parallel.chain import check_chain
from jaxcomm.types import (
    ExchangeMetrics,
    InnerRows,
    LocalRows,
    PerWorker,
    SliceRows,
    already_mean_paths,
    communication_period,
    exchange_metrics,
)


class TrainState(NamedTuple):
    """What a train step takes and returns.

    Attributes:
      params: the parameters, the same on every worker; with a local method rows of them, see `global_params`.
      opt_state: the optimizer's state. Its `PerWorker` leaves have a row per worker, the rest is the same on every one.
      step: () int32, steps so far, skipped ones included.
      model_state: what the model keeps beside its parameters and changes without a gradient, such as the running
        statistics of batch normalisation: floats, the same on every worker. Empty for most models.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    model_state: Any = ()


def is_per_worker(node: Any) -> bool:
    """Returns whether a node of a state is a `PerWorker`; the `is_leaf` of every map over states."""
    return isinstance(node, PerWorker)


def state_specs(state: Any, axis_name: AxisName = "data") -> Any:
    """Returns the PartitionSpec of every leaf: rows of workers over the axis, the rest replicated.

    Args:
      state: an optimizer's state or a `TrainState`, of arrays or of `jax.ShapeDtypeStruct`s.
      axis_name: the axis of workers, or the axes along which they lie, outermost first.

    Returns:
      A tree of the state's structure, for the `in_specs` and `out_specs` of `jax.shard_map`.
    """

    def spec(node: Any) -> Any:
        if is_per_worker(node):
            rows = P(node.axis) if isinstance(node, InnerRows) else P(axis_name)
            rows = P(node.axes) if isinstance(node, SliceRows) else rows
            return jax.tree.map(lambda _: rows, node)
        return P()

    return jax.tree.map(spec, state, is_leaf=is_per_worker)


def state_shardings(state: Any, mesh: Mesh, axis_name: AxisName = "data") -> Any:
    """Returns the NamedSharding of every leaf on a mesh; see `state_specs`."""
    specs = state_specs(state, axis_name)
    return jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=lambda x: isinstance(x, P))


def init_state(
    params: Any,
    tx: optax.GradientTransformation,
    workers: Mesh | int | tuple[int, ...],
    *,
    axis_name: AxisName = "data",
    model_state: Any = (),
) -> TrainState:
    """Makes the state of a run from its parameters, placed where `make_train_step` or `simulate` wants it.

    Args:
      params: the parameters, the same in every process. They are copied: a train step that donates its state does not
        take the caller's arrays away.
      tx: a chain with one exchange of this library in it.
      workers: a mesh (for `make_train_step`), or the number of workers K (for `simulate`), one for each axis.
      axis_name: the axis of workers on the mesh, or the axes along which they lie, outermost first.
      model_state: running statistics and their like, of floats, the same in every process; copied as well. For a step
        with `has_state`.

    Raises:
      ValueError: if no transformation of the chain exchanges gradients, if their order is refused (see `check_chain`,
        whose warnings are emitted here), for a model state that cannot be averaged, for `already_mean` in a local
        method, or for a K below 1.
    """
    for message in check_chain(tx):
        warnings.warn(message, stacklevel=2)
    check_model_state(model_state)

    def worker_state(params: Any, model_state: Any) -> TrainState:
        return make_local(TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), model_state))

    if isinstance(workers, Mesh):
        check_axis(workers, axis_name)
        sizes = tuple(workers.shape[name] for name in axis_names(axis_name))
    else:
        sizes = check_workers(workers, axis_name)
    shapes = jax.eval_shape(in_axes_of_workers(worker_state, sizes, axis_name), params, model_state)
    if exchange_metrics(shapes.opt_state) is None:
        raise ValueError(
            "A data-parallel step needs one transformation that averages over the workers, got a chain without: put "
            "jaxcomm.plump_dp() (dense) or a compressor such as jaxcomm.dct_dp(0.99) first in optax.chain(...)."
        )
    passed = already_mean_paths(shapes.opt_state)
    if passed and communication_period(shapes.opt_state) is not None:
        raise ValueError(
            "Workers of a local method have parameters of their own, whose gradients have no mean in common, got a "
            f"local method with already_mean for {', '.join(sorted(passed))}: give the local method the exchange "
            "itself, and the layers mode='reduce'."
        )
    if isinstance(workers, Mesh):
        on_worker = jax.shard_map(worker_state, mesh=workers, in_specs=P(), out_specs=state_specs(shapes, axis_name))
        given = jax.tree.map(jnp.asarray, (params, model_state))
        return jax.jit(on_worker)(*jax.device_put(given, NamedSharding(workers, P())))
    by_axis = dict(zip(axis_names(axis_name), sizes, strict=True))

    def rows(node: Any) -> Any:
        if not is_per_worker(node):
            return node
        count = by_axis[node.axis] if isinstance(node, InnerRows) else math.prod(sizes)
        return jax.tree.map(lambda row: jnp.repeat(row, count, axis=0), node)

    one = jax.jit(in_axes_of_workers(worker_state, sizes, axis_name))(params, model_state)
    return jax.tree.map(rows, one, is_leaf=is_per_worker)


def check_model_state(model_state: Any) -> None:
    """Refuses a model's state that has no mean over the workers.

    Raises:
      ValueError: for a leaf that is not of a real floating type.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                "A model's state is averaged over the workers, so its leaves are of a real floating type, got "
                f"{jnp.result_type(leaf)} at {jax.tree_util.keystr(path)!r}: keep counters and random keys out of it "
                "(nnx.state(model, nnx.BatchStat) has running statistics alone), or make the leaf a float."
            )


def check_workers(workers: int | tuple[int, ...], axis_name: AxisName) -> tuple[int, ...]:
    """Returns the number of simulated workers along each axis.

    Raises:
      ValueError: for fewer than one, or another number of axes.
    """
    sizes = workers if isinstance(workers, tuple) else (workers,)
    if min(sizes) < 1:
        raise ValueError(f"A run has at least one worker, got {workers}: pass a mesh or a positive integer.")
    if len(sizes) != len(axis_names(axis_name)):
        raise ValueError(
            f"Each axis of workers has a number of them, got {workers} for axis_name={axis_name!r}: pass one for each."
        )
    return sizes


def in_axes_of_workers(function: Callable[..., Any], sizes: tuple[int, ...], axis_name: AxisName) -> Callable[..., Any]:
    """Gives a function that is the same for all workers their axes to ask about; it runs once."""
    for name, size in reversed(list(zip(axis_names(axis_name), sizes, strict=True))):
        function = jax.vmap(function, in_axes=None, out_axes=None, axis_name=name, axis_size=size)
    return function


def is_exchange_state(node: Any) -> bool:
    """Returns whether a node is the state of one transformation of this library: it holds its metrics itself."""
    if not isinstance(node, tuple):
        return False
    return any(isinstance(child, ExchangeMetrics) or type(child) is PerWorker for child in node)


def make_local(state: TrainState) -> TrainState:
    """Gives a worker's parameters, and the state of its optimizer, a row of their own if `tx` is a local method."""
    if communication_period(state.opt_state) is None:
        return state

    def row(node: Any) -> Any:
        return node if is_exchange_state(node) else LocalRows(node[None])

    opt_state = jax.tree.map(row, state.opt_state, is_leaf=is_exchange_state)
    return state._replace(params=LocalRows(jax.tree.map(lambda leaf: leaf[None], state.params)), opt_state=opt_state)


def without_rows(node: Any) -> Any:
    """Returns a tree whose `LocalRows` of one worker are the arrays that it works with; the inverse of `make_local`."""

    def own(node: Any) -> Any:
        return jax.tree.map(lambda row: row[0], node.rows) if isinstance(node, LocalRows) else node

    return jax.tree.map(own, node, is_leaf=is_per_worker)


def global_params(state: TrainState) -> Any:
    """Returns the model to evaluate and to keep: one set of parameters.

    For a method that exchanges gradients these are the parameters themselves. The workers of a local method have their
    own, and the global model is put together from the method's state: under `jax.jit` where several processes share it.

    Raises:
      ValueError: if the parameters have rows and no state of a local method is there.
    """
    if not isinstance(state.params, PerWorker):
        return state.params
    like = jax.tree.map(lambda rows: rows[0], state.params.rows)
    found = [node for node in jax.tree.leaves(state.opt_state, is_leaf=_has_model) if _has_model(node)]
    if not found:
        raise ValueError("Parameters per worker need the state of a local method, got none: pass the whole TrainState.")
    return found[0].global_model(like)


def _has_model(node: Any) -> bool:
    return hasattr(node, "global_model")


def check_axis(mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses a mesh on which the data-parallel step cannot run.

    Raises:
      ValueError: if the axis is not on the mesh, or another axis has more than one device.
    """
    sizes = dict(mesh.shape)
    names = axis_names(axis_name)
    for name in names:
        if name not in sizes:
            raise ValueError(
                f"The axis of workers is an axis of the mesh, got {name!r} and a mesh with {tuple(sizes)}: make it "
                f"with make_mesh({name}=...), or pass axis_name=."
            )
    others = {name: size for name, size in sizes.items() if name not in names and size > 1}
    if others:
        raise ValueError(
            f"The data-parallel step keeps a whole copy of the parameters on every device, got a mesh with {others} "
            f"beside {axis_name!r}: make the mesh with {names[0]}= alone, or call the transformation inside your own "
            "jax.shard_map that is manual over all axes."
        )
