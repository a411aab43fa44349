"""Numbers of rows in a step's own state: `seen + len(batch)` has those of one worker, where one device has all."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.jaxpr import inner_jaxprs
from jaxcomm.collectives.axis import abstract_mesh
from jaxcomm.exchange import SCOPE
from jaxcomm.steps.replication import Axes

COUNTED = "(counts rows)"  # what the walk notes of what follows from a number of rows
Literals = Mapping[int, Axes]  # by the id of a literal of a program


def multiples(jaxpr: Any, rows: set[int]) -> Literals:
    """Marks the literals of a program that may be numbers of rows: multiples of one of `rows`."""

    def may_be(value: np.ndarray) -> bool:
        is_number = value.ndim == 0 and value.dtype.kind in "iuf" and bool(np.isfinite(value))
        return is_number and value != 0 and any(value % count == 0 for count in rows)

    values = [(id(literal), np.asarray(literal.val)) for _, literal in _literals(jaxpr)]
    return {key: frozenset({COUNTED}) for key, value in values if may_be(value)}


def differences(jaxpr: Any, step: Callable[..., Any], shapes: Any, axes: tuple[str, ...]) -> Literals:
    """Marks the literals of a worker's program that are others where the only worker has all rows.

    Args:
      jaxpr: the program of one of several workers.
      step: what it is the program of.
      shapes: the arguments of the only worker.
      axes: the axes of workers.

    Returns:
      The literals; none if the programs have not the same form, as of a step that looks at the number of workers.
    """
    mesh = abstract_mesh(dict.fromkeys(axes, 1))
    try:
        alone = jax.make_jaxpr(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(*shapes)
        (eqn,) = [eqn for eqn in alone.jaxpr.eqns if eqn.primitive.name == "shard_map"]
        pairs = list(zip(_literals(jaxpr), _literals(eqn.params["jaxpr"]), strict=True))
    except Exception:
        return {}
    if any(name != other_name for (name, _), (other_name, _) in pairs):
        return {}
    return {
        id(literal): frozenset({COUNTED})
        for (_, literal), (_, other) in pairs
        if not np.array_equal(literal.val, other.val)
    }


def _literals(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Yields the literals of a program outside of its exchange, each with what takes it."""
    for eqn in jaxpr.eqns:
        if SCOPE in str(eqn.source_info.name_stack):
            continue
        yield from ((eqn.primitive.name, v) for v in eqn.invars if hasattr(v, "val"))
        for inner in inner_jaxprs(eqn.params):
            yield from _literals(inner)
    yield from (("", v) for v in jaxpr.outvars if hasattr(v, "val"))
