"""Collectives in a traced program: those that the program asks for, before XLA compiles it.

No devices are needed, so the collectives are known before anything runs.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxcomm.traffic import Program, Traffic, count_bytes

_ALL_REDUCE = ("psum", "psum_invariant", "psum2", "pmax", "pmin")
COLLECTIVES = {
    **dict.fromkeys(_ALL_REDUCE, "all_reduce"),
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
}
UNCOUNTED = ("ragged_all_to_all", "pbroadcast", "pgather", "psend", "precv")


def traced_program(function: Callable[..., Any], *args: Any) -> Program:
    """Returns the collectives that a function asks for, by tracing it; args may be `jax.ShapeDtypeStruct`s."""
    return jaxpr_program(jax.make_jaxpr(function)(*args))


def jaxpr_program(closed: ClosedJaxpr, outside: str | None = None) -> Program:
    """Returns the collectives of a traced program; with `outside`, those outside the `jax.named_scope` of that name.

    Raises:
      ValueError: for a collective that cannot be counted: of an unknown kind, or in a loop of unknown length.
    """
    return _read_jaxpr(closed.jaxpr, {}, outside)


def jaxpr_communicates(closed: ClosedJaxpr) -> bool:
    """Returns whether there is any collective in a traced program, in any loop or branch."""
    return has_primitive(closed, lambda name: name in (*COLLECTIVES, *UNCOUNTED))


def _read_jaxpr(jaxpr: Any, axis_sizes: dict[str, int], outside: str | None) -> Program:
    program = Program()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if outside is not None and outside in str(eqn.source_info.name_stack):
            continue
        if name in UNCOUNTED:
            raise ValueError(
                f"A collective must be one of {', '.join(sorted(COLLECTIVES))} for its bytes to be predicted; got "
                f"{name!r}."
            )
        if name in COLLECTIVES:
            program.always.append(_traffic(eqn, axis_sizes))
            continue
        sizes = {**axis_sizes, **eqn.params["mesh"].shape} if name == "shard_map" else axis_sizes
        programs = [_read_jaxpr(child, sizes, outside) for child in inner_jaxprs(eqn.params)]
        if name == "cond":
            program.add_conditional(programs)
            continue
        if name == "while" and any(inner.communicates for inner in programs):
            raise ValueError("A loop with collectives must have a static length; got a while loop. Use lax.scan.")
        for inner in programs:
            program.add(inner, eqn.params["length"] if name == "scan" else 1)
    return program


def _traffic(eqn: Any, axis_sizes: dict[str, int]) -> Traffic:
    # An axis of jax.vmap is an integer here: a dimension that is reduced before anything is sent.
    axis_labels = equation_axes(eqn)
    dims = {axis for axis in axis_labels if isinstance(axis, int)}
    axes = tuple(axis for axis in axis_labels if axis not in dims)
    groups = eqn.params.get("axis_index_groups")
    workers = len(groups[0]) if groups else math.prod(axis_sizes[axis] for axis in axes)
    operands = [(tuple(n for dim, n in enumerate(v.aval.shape) if dim not in dims), v.aval.dtype) for v in eqn.invars]
    size = sum(count_bytes(shape, dtype.itemsize) for shape, dtype in operands)
    pairs = tuple((int(a), int(b)) for a, b in eqn.params["perm"]) if eqn.primitive.name == "ppermute" else None
    op, (dtype, *more_dtypes) = COLLECTIVES[eqn.primitive.name], {v.aval.dtype for v in eqn.invars}
    is_narrow = op == "all_reduce" and not more_dtypes and dtype.itemsize != 4
    return Traffic(op, size, workers, axes=axes, pairs=pairs, dtype=dtype.name if is_narrow else "")


def equation_axes(eqn: Any) -> tuple[Any, ...]:
    """Returns the axes of a collective, or of an `axis_index`."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return axes if isinstance(axes, tuple) else (axes,)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns how many inputs of a `lax.scan` are constants, and how many are carried.

    By ranks: scanned arrays have one more dimension outside. (JAX releases differ in the names of the counts.)
    """
    body = inner_jaxpr(eqn.params["jaxpr"])
    whole, carried = (
        sum(out.aval.ndim == var.aval.ndim for out, var in zip(*pair, strict=True))
        for pair in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    )
    return whole - carried, carried


def inner_jaxpr(jaxpr: Any) -> Any:
    """Returns the program without the constants that it may be closed over."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    """Returns the programs inside an equation's parameters."""
    values = [v for value in params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [inner_jaxpr(v) for v in values if hasattr(v, "eqns")]


def has_primitive(jaxpr: Any, is_one: Callable[[str], bool]) -> bool:
    """Returns whether a program, or one inside it, has a primitive whose name is such a one."""
    return any(
        is_one(eqn.primitive.name) or any(has_primitive(child, is_one) for child in inner_jaxprs(eqn.params))
        for eqn in inner_jaxpr(jaxpr).eqns
    )
