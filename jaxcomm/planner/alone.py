"""The computing of one of K workers: a program whose collectives are replaced by local copies.

With it the time of selecting, coding and decoding can be measured on one device for any K, without the wire.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxcomm.accounting.jaxpr import COLLECTIVES, has_primitive, inner_jaxprs
from jaxcomm.collectives.axis import AxisName, axis_names, check_workers
from jaxcomm.kernels.platforms import in_memory
from jaxcomm.types import PyTree

_ON_THE_SPOT = (*COLLECTIVES, "axis_index", "pvary", "pcast")


def without_wire(function: Callable[..., Any], workers: int | tuple[int, ...], axis_name: AxisName = "data") -> Any:
    """Makes a program for one device from a function that runs inside the axes of workers.

    All shapes are those of K workers: a gather returns K copies of the worker's operand, a sum over the workers returns
    the operand itself, and the worker's index is 0. The results are those of K workers with equal gradients, except
    that sums are not multiplied by K.

    Args:
      function: a worker's function of arrays and trees of arrays, such as `tx.update`.
      workers: K, or the number along each axis.
      axis_name: the axis of workers, or the axes, outermost first.
    """
    sizes = list(zip(axis_names(axis_name), check_workers(workers, axis_name), strict=True))

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, axis_env=sizes, return_shape=True)(*args)
        leaves = _evaluate(closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return run


def _evaluate(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Runs a closed program equation by equation."""
    jaxpr, values = closed.jaxpr, {}

    def read(var: Any) -> Any:
        return var.val if hasattr(var, "val") else values[var]

    values.update(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        out = _run(eqn, [read(var) for var in eqn.invars])
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _run(eqn: Any, args: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "axis_index":
        return [lax.optimization_barrier(jnp.zeros((), jnp.int32))]  # XLA must not know it
    if name in _ON_THE_SPOT:
        return [_copied(x, var.aval) for x, var in zip(args, eqn.outvars, strict=True)]
    if any(has_primitive(child, _ON_THE_SPOT.__contains__) for child in inner_jaxprs(eqn.params)):
        if name == "cond":
            index, *operands = args
            branches = [functools.partial(_evaluate, branch) for branch in params["branches"]]
            return lax.switch(index, branches, *operands)
        if name not in ("scan", "while"):  # a call: run the called program here
            (inner,) = [value for value in params.values() if hasattr(value, "jaxpr") or hasattr(value, "eqns")]
            return _evaluate(inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ()), *args)
        params |= {key: _rebuilt(value) for key, value in params.items() if hasattr(value, "jaxpr")}
    bound = eqn.primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # JAX releases differ
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _rebuilt(closed: ClosedJaxpr) -> Any:
    return jax.make_jaxpr(functools.partial(_evaluate, closed))(*closed.in_avals)


def _copied(x: Any, like: PyTree) -> jax.Array:
    """Returns a collective's result, made from the worker's own operand. XLA cannot optimise it away."""
    out = jnp.reshape(x, -1)
    if like.size > out.size:
        out = jnp.tile(out, like.size // out.size)
    out = out[: like.size].astype(like.dtype)
    if out.size:
        out = lax.optimization_barrier(in_memory(out))
    return jnp.reshape(out, like.shape)
