"""Which outputs of a traced program differ between workers, where JAX does not track it.

With `check_vma=False`, which foreign code needs, JAX trusts `out_specs`. This walk over the traced program finds, for
every output, the mesh axes along which it may differ. It is conservative: an output that it calls replicated is
replicated.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxcomm.accounting.jaxpr import COLLECTIVES, UNCOUNTED, equation_axes, inner_jaxpr, inner_jaxprs, scan_counts
from jaxcomm.collectives.messages import SAME
from jaxcomm.steps.shard_map import shard_map
from jaxcomm.steps.sharding import spec_axes
from jaxcomm.types import PyTree

Axes = frozenset[str]
See = Callable[[Any, list[Axes], list[Axes]], list[Axes]]

# Collectives whose result is replicated; the results of the others differ.
_REPLICATING = frozenset(name for name, op in COLLECTIVES.items() if op in ("all_reduce", "all_gather"))


# Messages of JAX where its tracking ends: loops and branches; a collective over workers and an axis of `jax.vmap`.
_NOT_TRACKED = "manual ax(is|es)|can only accept axis_name which corresponds to one of"


def over_workers(function: Callable[..., Any], mesh: Mesh, in_specs: PyTree, out_specs: PyTree, **options: Any) -> Any:
    """Returns `jax.shard_map` of a function that has a user's loss or optimizer in it.

    JAX tracks what differs between workers, and so refuses a loop that begins with a constant, or a branch that returns
    one, in code that was written for one device; and a mean over rows and workers at once, as of Equinox's batch
    normalisation. Such a function is traced again without tracking. The walk of this module then proves what JAX would
    have proven. No gradient in the function may be taken with respect to anything replicated.

    Raises:
      ValueError: if an output that `out_specs` calls replicated may differ between workers.
    """

    def call(*args: Any) -> Any:
        try:
            with naming_axes(mesh):
                return shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)(*args)
        except (TypeError, ValueError) as error:
            if not re.search(_NOT_TRACKED, str(error)):
                raise
        jitted = jax.jit(function)  # traced once, for the proof and for the program
        untracked = jax.shard_map(jitted, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False, **options)
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
        return shard_map(jitted, mesh, in_specs, out_specs, check_vma=False, **options)(*args)

    return call


@contextmanager
def naming_axes(mesh: Mesh) -> Iterator[None]:
    """Adds a note with the axes of the mesh to what JAX raises for a collective over an axis that is not there."""
    try:
        yield
    except (AssertionError, NameError) as error:
        error.add_note(
            f"If this is from a collective such as jax.lax.pmean, its axis must be one of the mesh, {mesh.axis_names}. "
            "The exchange averages gradients, and the step the loss: leave out a collective that does no more."
        )
        raise


# What the walk notes beside axes. LINEAR: a function of the marked inputs that adds up: their multiples by replicated
# numbers, plus what is not marked. OTHER: any other function of them.
LINEAR, OTHER = "(linear)", "(other)"


def varying_axes(jaxpr: Any, inputs: Sequence[Axes], see: See | None = None) -> list[Axes]:
    """Returns the axes along which each output of a traced program may differ.

    A mutable reference differs from its first write of a value that differs on. References of one type may be the same.
    LINEAR among the axes of an input is followed as well. `see` is given every equation, the axes of its inputs and
    those of its outputs, and returns the latter.
    """
    walk = _Walk(see)
    while True:  # a reference may be read before the turn of a loop that writes to it
        before = dict(walk.memory)
        out_axes = walk.axes_of(jaxpr, inputs)
        if walk.memory == before:
            return out_axes


class _Walk:
    """The walk of `varying_axes`: what is known of references, and along which axes the present branch differs."""

    def __init__(self, see: See | None = None):
        self.memory: dict[str, Axes] = {}
        self.branch = frozenset[str]()
        self.see = see

    def axes_of(self, jaxpr: Any, inputs: Sequence[Axes]) -> list[Axes]:
        axes_of_var: dict[Any, Axes] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(variables: Sequence[Any]) -> list[Axes]:
            return [frozenset() if hasattr(v, "val") else axes_of_var.get(v, frozenset()) for v in variables]

        for eqn in jaxpr.eqns:
            ins = read(eqn.invars)
            out = self._written(eqn, ins, self._outputs(eqn, ins))
            axes_of_var |= zip(eqn.outvars, out if self.see is None else self.see(eqn, ins, out), strict=True)
        return read(jaxpr.outvars)

    def _written(self, eqn: Any, ins: list[Axes], out: list[Axes]) -> list[Axes]:
        """Notes what an equation writes to references, and adds what it may read from them."""
        kinds = {kind for v in (*eqn.invars, *eqn.outvars) if (kind := _reference(v))}
        if not kinds or _bodies(eqn):
            return out
        anywhere = self.branch.union(*ins)
        for kind in kinds:
            if eqn.primitive.name not in ("get", "freeze"):
                self.memory[kind] = self.memory.get(kind, frozenset()) | anywhere
            anywhere |= self.memory.get(kind, frozenset())
        return [out_axes | anywhere for out_axes in out]

    def _inside(self, differs: Axes, jaxpr: Any, inputs: Sequence[Axes]) -> list[Axes]:
        """Walks over a branch that is taken along different axes."""
        before, self.branch = self.branch, self.branch | differs
        out_axes = self.axes_of(jaxpr, inputs)
        self.branch = before
        return out_axes

    def _outputs(self, eqn: Any, ins: list[Axes]) -> list[Axes]:
        name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
        anywhere = frozenset[str]().union(*ins)
        if name in (*COLLECTIVES, *UNCOUNTED, "axis_index"):
            axes = frozenset(equation_axes(eqn))
            is_whole = name in _REPLICATING and params.get("axis_index_groups") is None
            item = ins if len(ins) == count else [anywhere]
            item = item if is_whole and name.startswith("psum") else [_nonlinear(axes) for axes in item]
            return [one - axes if is_whole else one | axes for one in item]
        if name == SAME:
            return [ins[1]]
        if name == "cond":
            index, operands = ins[0], ins[1:]
            branches = [self._inside(index, inner_jaxpr(branch), operands) for branch in params["branches"]]
            return [_branch_axes(index, *item) for item in zip(*branches, strict=True)]
        if name == "scan":
            body, (consts, carry) = inner_jaxpr(params["jaxpr"]), scan_counts(eqn)
            start, xs = ins[consts : consts + carry], ins[consts + carry :]
            start = _fixpoint(lambda state: self.axes_of(body, [*ins[:consts], *state, *xs])[:carry], start)
            return self.axes_of(body, [*ins[:consts], *start, *xs])
        if name == "while":
            first = params["cond_nconsts"]
            second = first + params["body_nconsts"]
            test, body = inner_jaxpr(params["cond_jaxpr"]), inner_jaxpr(params["body_jaxpr"])

            def turn(state: list[Axes]) -> list[Axes]:
                (goes_on,) = self.axes_of(test, [*ins[:first], *state])  # workers may leave the loop at different times
                item = self._inside(goes_on, body, [*ins[first:second], *state])
                return [_branch_axes(goes_on, one) for one in item]

            return _fixpoint(turn, ins[second:])
        if len(inner := _bodies(eqn)) == 1:
            return self.axes_of(inner[0], ins)
        for item in inner_jaxprs(params):  # unknown: every input may reach every output; its references are its own
            anywhere = anywhere.union(*_Walk().axes_of(item, [anywhere] * len(item.invars)))
        return [anywhere if _adds_up(eqn, ins) else _nonlinear(anywhere)] * count


def _bodies(eqn: Any) -> list[Any]:
    """Returns the programs in an equation to which its inputs are passed as they are: loops, branches, jit, remat."""
    inner = inner_jaxprs(eqn.params)
    if eqn.primitive.name in ("cond", "scan", "while"):
        return inner
    is_call = len(inner) == 1 and len(inner[0].invars) == len(eqn.invars) and len(inner[0].outvars) == len(eqn.outvars)
    return inner if is_call else []


def _reference(variable: Any) -> str:
    """Returns the type of a mutable reference, "" for a value."""
    inner = getattr(variable.aval, "inner_aval", None)
    return "" if inner is None else inner.str_short()


def _nonlinear(axes: Axes) -> Axes:
    return axes - {LINEAR} | {OTHER} if LINEAR in axes else axes


def _branch_axes(index_axes: Axes, *branch_axes: Axes) -> Axes:
    """Returns the axes of what is chosen by a condition."""
    union = index_axes.union(*branch_axes)
    return _nonlinear(union) if index_axes else union


# Primitives whose outputs are linear in each of their inputs, and those that only their first input may be linear in.
_LINEAR = {"add", "add_any", "sub", "neg", "reshape", "transpose", "broadcast_in_dim", "slice", "squeeze"}
_LINEAR |= {"expand_dims", "reduce_sum", "concatenate", "pad", "copy", "copy_p", "rev", "convert_element_type"}
_LINEAR_IN_FIRST = {"div", "dynamic_slice", "gather"}


def _adds_up(eqn: Any, ins: list[Axes]) -> bool:
    """Returns whether an equation makes LINEAR outputs of LINEAR inputs."""
    name, is_marked = eqn.primitive.name, [LINEAR in axes or OTHER in axes for axes in ins]
    if OTHER in frozenset[str]().union(*ins):
        return False
    if name in _LINEAR:
        kinds = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in (*eqn.invars, *eqn.outvars)]
        return name != "convert_element_type" or kinds[0] <= kinds[1]  # rounding to integers is not linear
    if name in ("mul", "dot_general"):
        return sum(is_marked) <= 1 and not any(axes for axes, one in zip(ins, is_marked, strict=True) if not one)
    if name in _LINEAR_IN_FIRST:
        is_integer = name == "div" and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
        return not is_integer and not any(ins[1:])
    if name == "scatter-add":  # wherever a worker adds to it
        return not any(is_marked[1:])
    return name == "select_n" and not ins[0]


def _fixpoint(turn: Any, axes: list[Axes]) -> list[Axes]:
    """Repeats a loop's body until no output differs along more axes than its input."""
    while True:
        after = [a | b for a, b in zip(axes, turn(axes), strict=True)]
        if after == axes:
            return axes
        axes = after


def by_scope(jaxpr: Any, scope: str, axes: Axes) -> tuple[list[Any], list[Any]]:
    """Returns the collectives over any of the axes outside a `jax.named_scope`, and the equations of the scope.

    Loops and branches are looked into, those of the scope are not. `scope` may be a part of its name.
    """
    outside, inside = [], []
    for eqn in jaxpr.eqns:
        if scope in str(eqn.source_info.name_stack):
            inside.append(eqn)
            continue
        if eqn.primitive.name in (*COLLECTIVES, *UNCOUNTED) and axes & set(equation_axes(eqn)):
            outside.append(eqn)
        for inner in inner_jaxprs(eqn.params):
            parts = by_scope(inner, scope, axes)
            outside += parts[0]
            inside += parts[1]
    return outside, inside
