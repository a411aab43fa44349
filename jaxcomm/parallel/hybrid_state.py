"""The state of a run whose parameters lie in slices on a mesh."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName
from jaxcomm.parallel.slices import SlicedExchange, SlicedState, plan_slices
from jaxcomm.parallel.state import TrainState, check_model_state, state_specs


class HybridState(NamedTuple):
    """The optimizer's state where parameters lie in slices.

    Attributes:
      exchange: of the exchange, and of what comes before it in the chain.
      rest: of what comes after it; what is like a parameter lies as the parameter does.
    """

    exchange: SlicedState
    rest: Any


def init_hybrid_state(
    params: Any,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    param_specs: Any,
    *,
    axis_name: AxisName = "data",
    model_state: Any = (),
) -> TrainState:
    """Makes the state of a run whose parameters lie in slices, placed where the steps for it want it.

    Momentum and the like (every array of the optimizer's state with the name and the shape of a parameter) lie as the
    parameter does. What differs between workers, such as a residual, has a row for each worker and slice.

    Args:
      params: the parameters, the same in every process. They are copied.
      tx: a chain with one exchange of gradients among its links.
      mesh: a mesh with the axis of workers.
      param_specs: the PartitionSpec of every parameter, in a tree like theirs or a prefix of it; see
        `make_hybrid_step`.
      axis_name: the axis of workers on the mesh, or the axes along which they lie, outermost first.
      model_state: as in `init_state`; a copy on every device.

    Raises:
      ValueError: if the chain has no exchange, several, or a local one, or its order is refused (see `check_chain`,
        whose warnings are emitted here); for specs that do not fit the parameters or the mesh.
    """
    exchange = plan_slices(tx, mesh, param_specs, params, axis_name)
    for message in exchange.chain.warnings:
        warnings.warn(message, stacklevel=2)
    check_model_state(model_state)
    specs = jax.tree.structure(params).unflatten(exchange.specs)
    params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)
    model_state = jax.device_put(jax.tree.map(jnp.asarray, model_state), NamedSharding(mesh, P()))

    return jax.jit(lambda given: _init(given[0], given[1], exchange))((params, model_state))  # which copies


def hybrid_state_shapes(
    params: Any,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    param_specs: Any,
    *,
    axis_name: AxisName = "data",
    model_state: Any = (),
) -> TrainState:
    """Returns what `init_hybrid_state` would make, as `jax.ShapeDtypeStruct`s that say where each array lies.

    A checkpoint is restored into it, and a step is compiled for it before any array exists.

    Args:
      params: the parameters, or their shapes.
      tx: as in `init_hybrid_state`.
      mesh: as in `init_hybrid_state`.
      param_specs: as in `init_hybrid_state`.
      axis_name: as in `init_hybrid_state`.
      model_state: as in `init_hybrid_state`, or its shapes.
    """
    exchange = plan_slices(tx, mesh, param_specs, params, axis_name)

    def shape(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(shape, params, jax.tree.structure(params).unflatten(exchange.specs))
    model_state = jax.tree.map(lambda leaf: shape(leaf, P()), model_state)
    state = jax.eval_shape(lambda given: _init(given[0], given[1], exchange), (params, model_state))
    shapes = jax.tree.map(lambda leaf: shape(leaf, P()), state)
    return shapes._replace(
        params=params,
        opt_state=HybridState(
            jax.tree.map(shape, state.opt_state.exchange, state_specs(state.opt_state.exchange)),
            jax.tree.map(shape, state.opt_state.rest, _specs(state.opt_state.rest, params, exchange)),
        ),
    )


def place(tree: Any, params: Any, exchange: SlicedExchange) -> Any:
    """Lays every array with the path (its end) and the shape of a parameter as that parameter, others as copies."""
    mesh = exchange.mesh
    is_explicit = all(kind == AxisType.Explicit for kind in mesh.axis_types)
    lay = jax.reshard if is_explicit else lax.with_sharding_constraint
    return jax.tree.map(lambda leaf, spec: lay(leaf, NamedSharding(mesh, spec)), tree, _specs(tree, params, exchange))


def _init(params: Any, model_state: Any, exchange: SlicedExchange) -> TrainState:
    others = (exchange.chain.after.init(params), jnp.zeros((), jnp.int32), model_state)
    rest, step, model_state = place(others, params, exchange)
    return TrainState(params, HybridState(exchange.init(params), rest), step, model_state)


def _specs(tree: Any, params: Any, exchange: SlicedExchange) -> Any:
    """Returns the PartitionSpecs of `place`."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    like = {path: (leaf.shape, spec) for (path, leaf), spec in zip(paths, exchange.specs, strict=True)}

    def spec(path: Any, leaf: Any) -> P:
        ends = (like.get(tuple(path[start:])) for start in range(len(path) + 1))
        shape, spec = next((found for found in ends if found is not None), ((), P()))
        return spec if leaf.shape == shape else P()

    return jax.tree_util.tree_map_with_path(spec, tree)
