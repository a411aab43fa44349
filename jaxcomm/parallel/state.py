"""The state of a training run, and where each part of it lives."""

import math
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName, axis_names, in_axes_of_workers
from jaxcomm.exchange import ExchangeState, communication_period, get_exchange, is_exchange_state
from jaxcomm.methods.local_sgd import LocalExchange
from jaxcomm.parallel.chain import check_chain
from jaxcomm.types import PerWorker, is_per_worker


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


def state_specs(state: Any) -> Any:
    """Returns the PartitionSpec of every leaf: rows of workers over their axes, the rest replicated.

    Args:
      state: an optimizer's state or a `TrainState`, of arrays or of `jax.ShapeDtypeStruct`s.

    Returns:
      A tree of the state's structure, for the `in_specs` and `out_specs` of `jax.shard_map`.
    """

    def spec(node: Any) -> Any:
        rows = P(node.axes[0] if len(node.axes) == 1 else node.axes) if is_per_worker(node) else P()
        return jax.tree.map(lambda _: rows, node)

    return jax.tree.map(spec, state, is_leaf=is_per_worker)


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Returns the NamedSharding of every leaf on a mesh; see `state_specs`."""
    specs = state_specs(state)
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
        whose warnings are emitted here), for a model state that cannot be averaged, or for a K below 1.
    """
    check_model_state(model_state)

    def worker_state(params: Any, model_state: Any) -> TrainState:
        return make_local(TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), model_state), axis_name)

    if isinstance(workers, Mesh):
        check_axis(workers, axis_name)
        sizes = tuple(workers.shape[name] for name in axis_names(axis_name))
    else:
        sizes = check_workers(workers, axis_name)
    shapes = jax.eval_shape(in_axes_of_workers(worker_state, sizes, axis_name), params, model_state)
    check_axes(get_exchange(shapes.opt_state), axis_name)
    for message in check_chain(tx, shapes.opt_state, params):
        warnings.warn(message, stacklevel=2)
    if isinstance(workers, Mesh):
        on_worker = jax.shard_map(worker_state, mesh=workers, in_specs=P(), out_specs=state_specs(shapes))
        given = jax.tree.map(jnp.asarray, (params, model_state))
        return jax.jit(on_worker)(*jax.device_put(given, NamedSharding(workers, P())))
    by_axis = dict(zip(axis_names(axis_name), sizes, strict=True))

    def rows(node: Any) -> Any:
        if not is_per_worker(node):
            return node
        count = math.prod(by_axis[name] for name in node.axes)
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


def check_axes(exchange: ExchangeState, axis_name: AxisName) -> None:
    """Refuses an exchange over other axes than those of the workers.

    Raises:
      ValueError: naming both.
    """
    wanted, got = set(axis_names(axis_name)), set(exchange.method.axes)
    if got != wanted:
        raise ValueError(
            f"{exchange.method.name} must average over all axes of workers, {axis_name!r}; got {exchange.method.axes}. "
            "Pass axis_name= to both."
        )


def make_local(state: TrainState, axis_name: AxisName) -> TrainState:
    """Gives a worker's parameters, and the state of its optimizer, a row of their own if `tx` is a local method."""
    if communication_period(state.opt_state) is None:
        return state
    axes = axis_names(axis_name)

    def row(node: Any) -> Any:
        return node if is_exchange_state(node) else PerWorker(node[None], axes, is_local=True)

    opt_state = jax.tree.map(row, state.opt_state, is_leaf=is_exchange_state)
    params = PerWorker(jax.tree.map(lambda leaf: leaf[None], state.params), axes, is_local=True)
    return state._replace(params=params, opt_state=opt_state)


def without_rows(state: TrainState) -> TrainState:
    """Returns the arrays that a worker of a local method works with; the inverse of `make_local`."""

    def own(node: Any) -> Any:
        is_row = is_per_worker(node) and node.is_local
        return jax.tree.map(lambda row: row[0], node.rows) if is_row else node

    return jax.tree.map(own, state, is_leaf=is_per_worker)


def global_params(state: TrainState) -> Any:
    """Returns the model to evaluate and to keep: one set of parameters.

    For a method that exchanges gradients these are the parameters themselves. The workers of a local method have their
    own, and the global model is put together from the method's state: under `jax.jit` where several processes share it.

    Raises:
      ValueError: if the parameters have rows and no exchange's state is there.
    """
    if not isinstance(state.params, PerWorker):
        return state.params
    like = jax.tree.map(lambda rows: rows[0], state.params.rows)
    exchange = get_exchange(state.opt_state)
    assert isinstance(exchange.method, LocalExchange), "only a local method has parameters per worker"
    return exchange.method.global_model(exchange, like)


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
