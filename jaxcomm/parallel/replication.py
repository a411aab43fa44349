"""Which outputs of a traced program differ between workers, where JAX does not track it.

With `check_vma=False`, which foreign code needs, JAX trusts `out_specs`. This walk over the traced program finds, for
every output, the mesh axes along which it may differ. It is conservative: an output that it calls replicated is
replicated.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxcomm.accounting.jaxpr import COLLECTIVES, UNCOUNTED, equation_axes, inner_jaxpr, inner_jaxprs
from jaxcomm.collectives.messages import SAME
from jaxcomm.parallel.sharding import spec_axes

Axes = frozenset[str]

# Collectives whose result is replicated; the results of the others differ.
_REPLICATING = frozenset(name for name, op in COLLECTIVES.items() if op in ("all_reduce", "all_gather"))


def over_workers(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, **more: Any) -> Any:
    """Returns `jax.shard_map` of a function that has a user's loss or optimizer in it.

    JAX tracks what differs between workers, and so refuses a loop that begins with a constant, or a branch that returns
    one, in code that was written for one device. Such a function is traced again without tracking. The walk of this
    module then proves what JAX would have proven.

    Args:
      function: a worker's function. No gradient in it may be taken with respect to anything replicated.
      mesh: the devices.
      in_specs: as for `jax.shard_map`.
      out_specs: as for `jax.shard_map`.
      **more: other arguments of `jax.shard_map`.

    Raises:
      ValueError: if an output that `out_specs` calls replicated may differ between workers.
    """

    def call(*args: Any) -> Any:
        try:
            return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **more)(*args)
        except (TypeError, ValueError) as error:
            if not re.search("manual ax(is|es)", str(error)):
                raise
        once = jax.jit(function)  # traced once, for the proof and for the program
        untracked = jax.shard_map(once, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False, **more)
        traced, out = jax.make_jaxpr(untracked, return_shape=True)(*args)
        (eqn,) = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "shard_map"]
        inputs, claimed = (
            [frozenset(spec_axes(spec)) for spec in eqn.params[name]] for name in ("in_specs", "out_specs")
        )
        varying = varying_axes(eqn.params["jaxpr"], inputs)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(out)]
        wrong = [path for path, axes, spec in zip(paths, varying, claimed, strict=True) if axes - spec]
        if wrong:
            raise ValueError(
                "Replicated outputs must be the same on all workers; got others at "
                f"{', '.join(wrong[:8])}, computed from a worker's own rows or its place. Average them over the "
                "workers, or leave them out."
            )
        return untracked(*args)

    return call


def varying_axes(jaxpr: Any, inputs: Sequence[Axes]) -> list[Axes]:
    """Returns the axes along which each output of a traced program may differ.

    Args:
      jaxpr: the program that a worker runs.
      inputs: the axes along which each input differs.
    """
    known: dict[Any, Axes] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variables: Sequence[Any]) -> list[Axes]:
        return [known.get(v, frozenset()) if not hasattr(v, "val") else frozenset() for v in variables]

    for eqn in jaxpr.eqns:
        known |= zip(eqn.outvars, _outputs(eqn, of(eqn.invars)), strict=True)
    return of(jaxpr.outvars)


def _outputs(eqn: Any, given: list[Axes]) -> list[Axes]:
    name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
    anywhere = frozenset[str]().union(*given)
    if name in (*COLLECTIVES, *UNCOUNTED, "axis_index"):
        axes = frozenset(equation_axes(eqn))
        is_whole = name in _REPLICATING and params.get("axis_index_groups") is None
        return [each - axes if is_whole else each | axes for each in (given if len(given) == count else [anywhere])]
    if name == SAME:
        return [given[1]]
    if name == "cond":
        index, operands = given[0], given[1:]
        branches = [varying_axes(inner_jaxpr(branch), operands) for branch in params["branches"]]
        return [index.union(*each) for each in zip(*branches, strict=True)]
    if name == "scan":
        # By ranks: scanned arrays have one more dimension outside (JAX releases differ in the names of the counts).
        body = inner_jaxpr(params["jaxpr"])
        carry = sum(out.aval.ndim == own.aval.ndim for out, own in zip(eqn.outvars, body.outvars, strict=True))
        consts = sum(out.aval.ndim == own.aval.ndim for out, own in zip(eqn.invars, body.invars, strict=True)) - carry
        start, xs = given[consts : consts + carry], given[consts + carry :]
        start = _fixpoint(lambda now: varying_axes(body, [*given[:consts], *now, *xs])[:carry], start)
        return varying_axes(body, [*given[:consts], *start, *xs])
    if name == "while":
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        test, body = inner_jaxpr(params["cond_jaxpr"]), inner_jaxpr(params["body_jaxpr"])

        def turn(now: list[Axes]) -> list[Axes]:
            (goes_on,) = varying_axes(test, [*given[:first], *now])  # workers may leave the loop at different times
            return [each | goes_on for each in varying_axes(body, [*given[first:second], *now])]

        return _fixpoint(turn, given[second:])
    inner = inner_jaxprs(params)
    if len(inner) == 1 and len(inner[0].invars) == len(given) and len(inner[0].outvars) == count:  # jit, remat, ...
        return varying_axes(inner[0], given)
    for each in inner:  # unknown: every input may reach every output
        anywhere = anywhere.union(*varying_axes(each, [anywhere] * len(each.invars)))
    return [anywhere] * count


def _fixpoint(turn: Any, now: list[Axes]) -> list[Axes]:
    """Repeats a loop's body until no output differs along more axes than its input."""
    while True:
        after = [a | b for a, b in zip(now, turn(now), strict=True)]
        if after == now:
            return now
        now = after


def collectives_outside(jaxpr: Any, scope: str, axes: Axes) -> list[Any]:
    """Returns the collectives over any of the axes that are outside a `jax.named_scope`, in any loop or branch.

    Args:
      jaxpr: the program that a worker runs.
      scope: the name of the scope, or a part of it.
      axes: the axes.
    """
    found = []
    for eqn in jaxpr.eqns:
        if scope in str(eqn.source_info.name_stack):
            continue
        if eqn.primitive.name in (*COLLECTIVES, *UNCOUNTED) and axes & set(equation_axes(eqn)):
            found.append(eqn)
        for each in inner_jaxprs(eqn.params):
            found += collectives_outside(each, scope, axes)
    return found
