"""How the numbers of a traced program scale with the rows of a batch: a mean, a sum, or a mean of other weights.

The mean over K workers of a mean over their rows is the mean over all rows; that of sums is a Kth of the sum. A loss is
only a Python function, but its program tells. It is traced for a worker's rows and for more of them, and both programs
are compared, equation by equation. A constant that grows is a number of rows.
"""

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.jaxpr import (
    COLLECTIVES,
    equation_axes,
    inner_jaxpr,
    inner_jaxprs,
    jaxpr_communicates,
    scan_counts,
)
from jaxcomm.collectives.axis import abstract_mesh
from jaxcomm.exchange import ARGUMENTS, DELAYED, SCOPE
from jaxcomm.steps.places import INDEXED, READ, axes_of_rows, differs, is_at_place, is_part, with_places
from jaxcomm.steps.scaling import Integers, Scaling
from jaxcomm.types import PyTree

_ROWS = Scaling(is_own=True, stacks=1)
_UNKNOWN = Scaling(math.nan)
_NEITHER = _UNKNOWN._replace(is_own=True)

TINY = 1e-5  # a constant below is a guard against a division by 0

# By `Scaling.reduction`: what is found, and what to do with a minimum.
KINDS = {"sum": "a sum", "max": "an extreme"}
NOTES = {"sum": "", "max": " (of a minimum: return its negative)"}

# Primitives by how they treat a common factor of their operands.
_KEEP = frozenset(
    (
        *("abs", "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg", "optimization_barrier"),
        *("pcast", "pvary", "real", "imag", "reduce_precision", "reshape", "rev", "slice", "split", "squeeze"),
        *("conj", "fft", "stop_gradient", "transpose", "unstack"),
    )
)
_JOIN = (
    *("add", "add_any", "clamp", "complex", "concatenate", "dynamic_update_slice", "max", "min", "pad", "stack", "sub"),
)
_LINEAR = _KEEP - {"abs"} | {
    *("add", "add_any", "complex", "concatenate", "cumsum", "dynamic_update_slice", "pad", "reduce_sum", "sub"),
    *("dynamic_slice", "gather", "scatter", "scatter-add", "select_n", "stack", "tile", "while"),
}
_BY_ELEMENT = ("add", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "pow", "sub")
_SUMS = ("psum", "psum_invariant", "psum2", "reduce_scatter")
_PICK = ("gather", "dynamic_slice", "select_n", "select_and_scatter_add")
# Primitives for which the order of rows counts, and what names the axis of it.
_ORDERS = {"sort": "dimension", "top_k": "dimension", "cumprod": "axis", "cumlogsumexp": "axis"}
_KERNELS = ("custom_linear_solve", "ffi_call", "linear_solve", "pallas_call", "ragged_dot", "ragged_dot_general")
_ROOTS = {"sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3, "square": 2}
_EXTREMES = ("reduce_max", "reduce_min", "reduce_or", "reduce_and", "cummax", "cummin")
_EXTREMES += ("reduce_window_max", "reduce_window_min")
# What is known of a number, and then of all that is computed from it.
_MARKS = frozenset(Scaling._fields) - {"power", "is_extreme", "is_total", "places", "constant"}


def flaw_of_sum(number: Scaling) -> str:
    """Returns what is wrong with a number whose sum over workers and micro-batches is taken; "" if nothing is."""
    if number.is_total:
        return "a sum over the workers already, which would count once for each of them: leave out jax.lax.psum"
    if number.is_mixed:
        return "a sum with other terms, which would count once for each worker and micro-batch"
    return "no sum" if number.is_extreme or number.power not in (1, -math.inf) else ""


def flaw_of_extreme(number: Scaling) -> str:
    """Returns what is wrong with a number whose maximum over the workers is taken; "" if nothing is."""
    return "no extreme" if number.is_own and not (number.is_extreme or number.is_gathered) else ""


def check_named(number: Scaling, name: str, how: str, pattern: str | None) -> None:
    """Refuses what the pattern of sums or maxima finds and what is none, as far as it is known."""
    if number.is_unknown and not number.is_mixed:
        return
    if flaw := flaw_of_sum(number) if how == "sum" else flaw_of_extreme(number):
        raise ValueError(
            f"{how}= must name {KINDS[how]} over a worker's own rows, and nothing else; got {pattern!r}, which finds "
            f"{name!r}, {flaw}. Narrow the pattern, or return it without."
        )


def scalings(function: Callable[..., Any], rows: Sequence[Any], workers: int, axes: Sequence[str] = ()) -> Any:
    """Traces a function of a worker's rows for these, for twice as many, and for an only worker that has those of all.

    The function is of a list of arrays (rows, ...), `axes` are those of workers, as far as they are bound.

    Returns:
      The function's output, with a `Scaling` for each number, which is unknown if other rows cannot be traced; None if
      these cannot either.
    """
    typed = [jax.typeof(x) for x in rows]
    untracked = [ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in typed]
    has_one = any(aval.shape[0] == 1 for aval in typed)  # along one row a program may have other operations
    numbers, out, one, avals, factor = list[Scaling](), None, None, typed, 1
    for factor in (1, 2, 4)[has_one:]:  # a layer may choose its way by the number of rows
        for avals in (typed, untracked):  # a loop may start with zeros that no type calls different by worker
            try:
                one, out = jax.make_jaxpr(function, return_shape=True)(_times(avals, factor))
                break
            except Exception:
                one = None
        if one is None:
            return _of_one_row(function, typed, workers, axes) if has_one else None
        try:
            two = jax.make_jaxpr(function)(_times(avals, 2 * factor))
        except Exception:
            numbers = [_NEITHER] * len(inner_jaxpr(one).outvars)
            break
        numbers = _compare(one, two, [_ROWS] * len(rows), _Walk(workers, 2, axes, has_one=has_one))
        if numbers[:1] != [_NEITHER]:
            break
    is_compared = not any(number is _NEITHER for number in numbers)
    if axes and workers > 1 and is_compared:
        alone = None
        with contextlib.suppress(Exception):
            alone = jax.make_jaxpr(function, axis_env=[(axis, 1) for axis in axes])(_times(avals, factor * workers))
        if alone is not None:
            others = _compare(one, alone, [_ROWS] * len(rows), _Walk(workers, workers, axes, True, has_one))
            if others[:1] != [_NEITHER]:
                numbers = [number.beside(other) for number, other in zip(numbers, others, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(out), numbers)


def _of_one_row(function: Callable[..., Any], rows: Sequence[Any], workers: int, axes: Sequence[str]) -> Any:
    """Returns unknown scalings if more rows cannot be traced, but those of all workers, in another way; else None."""
    with contextlib.suppress(Exception):
        one = jax.make_jaxpr(function)(rows)
        how = {"axis_env": [(axis, 1) for axis in axes], "return_shape": True}
        alone, out = jax.make_jaxpr(function, **how)(_times(rows, workers))
        if _compare(one, alone, [_ROWS] * len(rows), _Walk(workers, workers, axes, is_alone=True))[:1] == [_NEITHER]:
            return jax.tree.map(lambda _: _NEITHER, out)
    return None


def _times(avals: Sequence[Any], factor: int) -> list[Any]:
    """Returns the types of arrays of so many times as many rows."""
    return [aval.update(shape=(factor * aval.shape[0], *aval.shape[1:])) for aval in avals]


class StepScaling(NamedTuple):
    """The scalings in a step that a user wrote, with one worker that has all rows in place of one of K.

    Attributes:
      outputs: those of the outputs; none if they are not known.
      gradients: those of what enters an exchange and is computed from rows.
      workers: K.
      rows: the axes of every output that are of rows; none if they are not known.
    """

    outputs: list[Scaling]
    gradients: list[Scaling]
    workers: int
    rows: Sequence[list[int]] = ()

    @classmethod
    def of(
        cls, step: Callable[..., Any], program: Any, arrays: PyTree, specs: PyTree, has_rows: Sequence[bool], axes: Any
    ) -> "StepScaling":
        """Traces the step of one worker, if there are several.

        `program` is the jaxpr of its `jax.shard_map` over the workers, `arrays` a tree of its global arguments, and
        `specs` a like tree of their PartitionSpecs. `has_rows` says of every argument whether it has rows of a batch;
        others with a spec have one of each worker.
        """
        sizes = _shard_map_in(program)[0].params["mesh"].shape
        workers = math.prod(sizes[axis] for axis in axes)
        if workers == 1 or not any(has_rows):
            return cls([], [], workers)
        leaves, treedef = jax.tree.flatten(arrays)
        arguments = list(zip(leaves, jax.tree.leaves(specs), has_rows, strict=True))

        def trace(factor: int, is_alone: bool) -> Any:
            """That for so many times as many rows, with an only worker or all; None if they cannot be traced."""

            def shape_of(leaf: PyTree, spec: P, is_batch: bool) -> jax.ShapeDtypeStruct:
                shape = list(jnp.shape(leaf))
                if is_batch:
                    shape[len(spec) - 1] *= factor
                elif spec != P() and is_alone:
                    shape[len(spec) - 1] //= workers
                return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf), weak_type=jax.typeof(leaf).weak_type)

            mesh = abstract_mesh({axis: 1 if is_alone else sizes[axis] for axis in axes})
            # Only traced, and untracked as the step itself is.
            how = {"mesh": mesh, "in_specs": P() if is_alone else specs, "out_specs": P(), "check_vma": False}
            with contextlib.suppress(Exception):
                return jax.make_jaxpr(jax.shard_map(step, **how))(*treedef.unflatten(shape_of(*x) for x in arguments))

        # Along one row it may have other operations.
        has_one = any(has and jnp.shape(leaf)[len(spec) - 1] == workers for leaf, spec, has in arguments)
        of_two = trace(2, is_alone=False) if has_one else None
        one = program if of_two is None else of_two
        two, is_alone = trace(1 if of_two is None else 2, is_alone=True), True
        if two is None:  # a number of workers or of rows is written in it
            if (has_one and of_two is None) or trace(1, is_alone=False) is None:
                return cls([], [], workers)
            two, is_alone = trace(4 if has_one else 2, is_alone=False), False
        (eqn, variables), factor = _shard_map_in(one), workers if is_alone else 2
        inputs = dict(zip(variables, (_ROWS if has else Scaling() for has in has_rows), strict=True))
        if two is None:
            return cls([_NEITHER] * len(eqn.outvars), [_NEITHER], workers)
        walk = _Walk(workers, factor, axes, is_alone, has_one)
        bodies = [_shard_map_in(x)[0].params["jaxpr"] for x in (one, two)]
        numbers = _compare(bodies[0], bodies[1], [inputs.get(var, Scaling()) for var in eqn.invars], walk)
        pairs = zip(*(inner_jaxpr(body).outvars for body in bodies), strict=True)
        rows = [axes_of_rows(*pair) for pair in pairs]
        if numbers[:1] == [_NEITHER]:
            return cls(numbers, [_NEITHER], workers, rows)
        if not is_alone:  # of what all workers have, no sum is told from a mean
            numbers, walk.gradients = (
                [_NEITHER if x.is_own and math.isfinite(x.power) and x.power != 0 else x for x in known]
                for known in (numbers, walk.gradients)
            )
        # An array, such as the variance that a normalisation tracks, is of each worker's rows by intention.
        numbers = [
            number._replace(
                is_curved=number.is_curved and not one.aval.ndim,
                is_normalised=number.is_normalised and not one.aval.ndim,
                is_of_parts=number.is_of_parts or (number.is_shared and number.power % 1 > 0),
                is_multiple=number.is_multiple or (number.is_shared and number.power == -1 and len(number.summed) > 0),
            )
            for number, one in zip(numbers, inner_jaxpr(bodies[0]).outvars, strict=True)
        ]
        gradients = [
            gradient._replace(is_multiple=gradient.is_multiple or (gradient.is_shared and gradient.power == -1))
            for gradient in walk.gradients
        ]
        return cls(numbers, gradients, workers, rows)

    def check_named(
        self, names: Sequence[str], hows: Sequence[str], go_on: Sequence[bool], patterns: Mapping[str, str | None]
    ) -> None:
        """Refuses outputs by `hows` "sum" and "max" that are none; a sum may go on from that of the step before."""
        for name, how, goes_on, number in zip(names, hows, go_on, self.outputs, strict=False):
            if how in ("sum", "max"):
                known = number._replace(is_mixed=number.is_mixed and not goes_on)
                check_named(known, name, how, patterns[how])

    def check(
        self,
        names: Sequence[str],
        averaged: Sequence[str],
        of_rows: Sequence[str] = (),
        tracked: Sequence[bool] = (),
        feeds_back: bool = False,
    ) -> None:
        """Refuses gradients, and outputs that are averaged, that are sums over a worker's rows; warns of others.

        Args:
          names: for every output its path.
          averaged: the same, if it is averaged over the workers; else "".
          of_rows: the same, if each row has its own.
          tracked: whether it is an array that goes on from the step before, is averaged, and has no rows.
          feeds_back: whether an exchange has error feedback, so that each worker's gradient is clipped before it.
        """
        if any(x.power == 1 and not (x.is_by_place or x.is_mixed) for x in self.gradients):
            raise ValueError(
                "A loss must be a mean over rows, since an exchange takes the mean over the workers; got the gradient "
                f"of a sum, which would be 1/{self.workers} of that on one device. Take the mean of the rows' losses; "
                "or sum over the workers as well: jax.lax.psum(losses.sum(), axis)."
            )
        pairs = [(name, number) for name, number in zip(averaged, self.outputs, strict=False) if name]
        for name, number in pairs:
            if how := number.reduction:
                pattern = f"^{re.escape(name)}$"
                raise ValueError(
                    f"An output that is averaged over the workers must be a mean over rows; got {KINDS[how]} at "
                    f"{name!r}. Pass {how}={pattern!r}{NOTES[how]}; for the mean of the workers' numbers take "
                    "jax.lax.pmean(x, axis) in the step."
                )
        warn("is_share", ((name, x) for name, x in zip(of_rows, self.outputs, strict=False) if name))
        gradients = [("gradients", number) for number in self.gradients]
        warn("is_alike", gradients + pairs)
        warn("is_multiple", [*gradients, *zip(names, self.outputs, strict=False)])
        # In the backward pass of a normalisation by own statistics there are such ratios as well.
        pairs = [("gradients", number._replace(is_ratio=False)) for number in self.gradients] + pairs
        warn("is_quotient", pairs)
        others = [(name, x) for name, x in zip(names, self.outputs, strict=False) if x.is_of_parts or x.is_sized]
        warn("is_unknown", [(name, x) for name, x in pairs + others if not x.is_multiple])
        # Where a normalisation tracks its statistics, rows are normalised by each worker's own by intention.
        if any(number.is_own and is_one for number, is_one in zip(self.outputs, tracked, strict=False)):
            pairs = [(name, x._replace(is_normalised=False)) for name, x in pairs if name != "gradients"]
        warn("is_of_mean", ((name, x) for name, x in pairs if not (name == "gradients" and x.is_curved and feeds_back)))


# By the attribute of a `Scaling` that tells: what a number is, and what to do.
WARNINGS = {
    "is_unknown": "cannot be told to be a mean over rows, since rows are combined in another way than by sums and "
    "means (a logsumexp, a norm, an order, a recurrence, weights by a row's place, a loop in Python, a backward pass "
    "that clips), or their number is written in the code, or is in it by more than a factor. The mean over workers and "
    "micro-batches is the number of one device only if it is a mean over rows. If it is, ignore this warning. Where "
    "time comes first, pass batch_axis=1; otherwise take it of all rows: jax.lax.all_gather(x, axis, tiled=True).",
    "is_multiple": "the sum over the workers of what is no sum over a worker's rows, such as a mean, or such a sum "
    "divided by the number of a worker's own rows: as many times the number of one device as there are workers. Take "
    "jax.lax.pmean.",
    "is_alike": "computed with random numbers of rows (a dropout, an augmentation) of which all workers draw the "
    "same, since their key is. On one device every row has its own. Pass rng=, for keys of each worker's own; or fold "
    "in the worker, jax.random.fold_in(key, jax.lax.axis_index(axis)).",
    "is_share": "divided by the number of a worker's own rows, as the gradient of a mean over them for what each row "
    "has of its own (a code, an input). It is as many times that of one device as there are workers. Divide it by "
    "jax.lax.axis_size(axis).",
    "is_quotient": "divided by a sum over a worker's own rows, such as a number of valid tokens. The mean over "
    "workers and micro-batches is not the quotient for all rows where these sums differ. Divide by their mean over "
    "the workers, jax.lax.pmean(count, axis); see 'Losses that are no mean over rows' in the guide.",
    "is_of_mean": "computed from a mean over a worker's own rows by a function that is not linear (a root, a power, "
    "the exponential of a perplexity, a normalisation of rows by their own statistics, a clip of the gradients). The "
    "mean over workers and micro-batches is not the function of the mean over all rows. Return the mean, and take the "
    "function of the result; or of the mean of all workers: jax.lax.pmean(x, axis).",
}


def warn(flaw: str, numbers: Iterable[tuple[str, Scaling]]) -> None:
    """Warns of the numbers, by name, that have a flaw of `WARNINGS`."""
    if names := dict.fromkeys(name for name, number in numbers if getattr(number, flaw)):
        others = " and others" if len(names) > 8 else ""
        warnings.warn(f"{', '.join(list(names)[:8])}{others}: {WARNINGS[flaw]}", stacklevel=3)


def _shard_map_in(program: Any) -> tuple[Any, list[Any]]:
    """Returns the one `jax.shard_map` of a program, an equation, and the program's arguments."""
    (eqn,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    return eqn, program.jaxpr.invars


class _DifferentError(Exception):
    """Two traces are not of the same equations."""


# What may end a comparison: also a primitive that is not as it was, since a check must not end a step that is right.
_TOLERATED: type[Exception] = Exception


def _compare(program: Any, other: Any, inputs: Sequence[Scaling], walk: "_Walk") -> list[Scaling]:
    """Returns the `Scaling` of each output of two traces of one function; `_NEITHER` if their equations differ."""
    try:
        return walk.outputs(program, other, inputs)
    except _TOLERATED:
        return [_NEITHER] * len(inner_jaxpr(program).outvars)


class _Walk:
    """The walk over two traces.

    Attributes:
      workers: K.
      factor: n, how many times as many rows the second trace has.
      axes: the axes of workers.
      is_alone: whether the second trace is of an only worker, which has the rows of all.
      has_one: whether a worker has one row, and the first trace two: the first of them is all of an only one.
      gradients: what enters an exchange and is computed from own rows, as far as the walk has come.
    """

    def __init__(self, workers: int, factor: int, axes: Sequence[str], is_alone: bool = False, has_one: bool = False):
        self.workers, self.factor, self.axes = workers, factor, frozenset(axes)
        self.is_alone, self.has_one = is_alone, has_one
        self.gradients: list[Scaling] = []
        self.is_backward = False  # whether the equation is one of a backward pass, or inside of one
        self.is_in_while = False  # whether it is inside of a loop of any number of turns, as those of a line search are

    def outputs(self, program: Any, other: Any, inputs: Sequence[Scaling]) -> list[Scaling]:
        first, second = inner_jaxpr(program), inner_jaxpr(other)
        known: dict[Any, Scaling] = dict(zip(first.invars, inputs, strict=True))
        for var, *values in zip(first.constvars, *(getattr(p, "consts", ()) for p in (program, other)), strict=False):
            known[var] = self._of_constants(*values)

        def read(one: PyTree, two: PyTree) -> Scaling:
            if isinstance(one, Literal) and isinstance(two, Literal):
                return self._of_constants(one.val, two.val)
            return Scaling() if isinstance(one, Literal) else known.get(one, Scaling())

        producers = {var: eqn for eqn in first.eqns for var in eqn.outvars}

        # Without the exchange, which is another for other workers.
        counterparts = (eqn for eqn in second.eqns if SCOPE not in str(eqn.source_info.name_stack))
        for one in first.eqns:
            stack = str(one.source_info.name_stack)
            if (SCOPE in stack or DELAYED in stack) and not (ARGUMENTS in stack and self.is_in_while):
                is_float = [jnp.issubdtype(var.aval.dtype, jnp.floating) for var in one.invars]
                numbers = [read(var, var) for var, floating in zip(one.invars, is_float, strict=True) if floating]
                self.gradients += [number for number in numbers if number.is_own]
            if SCOPE in stack:
                continue
            two = next(counterparts, None)
            if two is None or one.primitive.name != two.primitive.name or len(one.invars) != len(two.invars):
                raise _DifferentError
            if one.primitive.name in _BY_ELEMENT and _is_repeated(one, two):
                raise _DifferentError
            operands = [read(*pair) for pair in zip(one.invars, two.invars, strict=True)]
            outer = self.is_backward
            self.is_backward = "rematted_computation" not in stack and (outer or "transpose(" in stack)
            outs = self._of_equation(one, two, operands)
            self.is_backward = outer
            if one.outvars and not inner_jaxprs(one.params):
                outs = with_places(one, two, operands, outs, producers)
            if not _is_linear(one, operands):
                has_rows = any(map(differs, (*one.invars, *one.outvars), (*two.invars, *two.outvars)))
                has_mean = any(operand.has_mean for operand in operands)
                outs = [
                    out._replace(
                        is_curved=out.is_curved or not has_rows, is_normalised=out.is_normalised or has_mean, summed=()
                    )
                    for out in outs
                ]
            outs = [_with_size(out, var) for out, var in zip(outs, one.outvars, strict=True)]
            known.update(zip(one.outvars, outs, strict=True))
        if next(counterparts, None) is not None:
            raise _DifferentError
        return [read(*pair) for pair in zip(first.outvars, second.outvars, strict=True)]

    def _of_equation(self, one: PyTree, two: PyTree, operands: list[Scaling]) -> list[Scaling]:
        name, params = one.primitive.name, one.params
        if name == "scan":
            return self._of_scan(one, two, operands)
        if name == "cond":
            pairs = zip(params["branches"], two.params["branches"], strict=True)
            branches = [self.outputs(*pair, operands[1:]) for pair in pairs]
            is_agreed = any(map(jaxpr_communicates, inner_jaxprs(params)))  # then all workers take the same branch
            return [_picked([] if is_agreed else operands[:1], _same(outs)) for outs in zip(*branches, strict=True)]
        inner = [inner_jaxprs(eqn.params) for eqn in (one, two)]
        if name != "while" and len(inner[0]) == len(inner[1]) == 1 and len(inner[0][0].invars) == len(operands):
            programs = [
                next(x for x in eqn.params.values() if hasattr(x, "eqns")) for eqn in (one, two)
            ]  # and constants
            has_backward = name.startswith("custom_vjp_call")
            outs = self.outputs(programs[0], programs[1], operands)
            return [x._replace(has_backward=x.has_backward or has_backward) for x in outs]
        if self.has_one and _is_first(one, two):
            return operands[:1]
        if name in _KEEP and not _is_shifted(one, two):
            if is_part(one, two, operands[0].blocks) and operands[0].stacks <= 1:
                operands = [operands[0]._replace(is_by_place=True)]
            return operands * len(one.outvars) if len(operands) == 1 else operands
        if name in COLLECTIVES and len(operands) == len(one.outvars):
            variables = zip(one.invars, two.invars, operands, one.outvars, two.outvars, strict=True)
            return [
                self._of_collective(one, _reduced_by_position(one, var, second, operand), differs(*outs))
                for var, second, operand, *outs in variables
            ]
        if name != "while":
            return [self._of_primitive(one, two, operands)] * len(one.outvars)
        outer, self.is_in_while = self.is_in_while, True
        try:
            outputs = self._of_while(one, two, operands)
        except _DifferentError:
            outputs = [self._of_primitive(one, two, operands)] * len(one.outvars)
        self.is_in_while = outer
        carried = _NEITHER._replace(is_gathered=any(map(jaxpr_communicates, inner[0])))  # as a line search does
        pairs = zip(outputs, one.outvars, two.outvars, strict=True)
        return [out if differs(*pair) or not out.is_own else carried for out, *pair in pairs]

    def _of_primitive(self, one: PyTree, two: PyTree, operands: list[Scaling]) -> Scaling:
        name, marks = one.primitive.name, _marks(operands)
        powers = [operand.power for operand in operands]
        if name in INDEXED and _points_at_rows(one, two, operands[1]):
            return _UNKNOWN._replace(**marks)
        is_of_one = self.has_one and name in ("gather", "dynamic_slice") and not differs(one.outvars[0], two.outvars[0])
        if not is_of_one and is_at_place(one, two, operands):
            operands = [operands[0]._replace(is_by_place=True), *operands[1:]]
            marks = _marks(operands)
        if name in _PICK:
            places, numbers = (operands[:1], operands[1:]) if name == "select_n" else (operands[1:], operands[:1])
            if name in ("gather", "dynamic_slice") and _is_along_rows(one, two):  # each row from its own place
                places = [place._replace(is_by_place=operands[0].is_by_place) for place in places]
            numbers = [x for x in numbers if not _is_huge(x)] or numbers
            return _picked(places, _joined(numbers))._replace(is_own=marks["is_own"])
        if name == "iota":
            return Scaling(is_by_place=one.params["dimension"] in axes_of_rows(one.outvars[0], two.outvars[0]))
        if name == "axis_index":
            return Scaling(is_of_worker=True)
        if name.startswith(("random_", "rng_")):
            key, is_of_rows = operands[0], any(map(differs, one.outvars, two.outvars))
            has_rows = marks["is_by_place"] or is_of_rows
            # Noise of any row does; not that of a block of rows.
            is_of_block = name == "random_bits" and key.blocks > 0 and not key.is_own
            marks["is_by_place"] = is_of_block and not is_of_rows
            is_of_own = marks["is_own"] if name == "random_fold_in" else key.is_own
            marks["is_alike"] |= has_rows and not (is_of_own or marks["is_of_worker"])
        if name == "mul" and -math.inf in powers:
            return Scaling(-math.inf)
        if (
            name.endswith("_callback")
            and one.params.get("vmap_method") is None
            and any(map(differs, one.invars, two.invars))
        ):
            return _UNKNOWN._replace(**marks)
        if any(map(math.isnan, powers)):
            return _UNKNOWN._replace(**marks)
        if name == "add" and marks["is_of_worker"] and marks["is_by_place"] and not marks["is_own"]:
            return Scaling(is_of_worker=True)  # a row's place among those of all workers
        if name in _JOIN:
            terms = [x for x in operands if abs(x.constant or 1) > TINY] or operands
            finite = {x.power for x in terms} - {-math.inf}
            # The larger of a sum and 1 is a guard.
            is_sum = name in ("add", "add_any", "sub") or (
                name in ("clamp", "max", "min") and min(finite, default=0) < 0
            )
            is_mixed = is_sum and len(finite) > 1 and marks["is_own"]
            joined = _joined(terms)
            if (
                is_mixed
                and self.is_alone
                and self.is_backward
                and any(x.is_shared and x.power == min(finite) for x in terms)
            ):
                joined = joined._replace(is_multiple=True)
            return joined._replace(is_mixed=joined.is_mixed or is_mixed)
        if name in ("mul", "div"):
            return self._of_product(one, two, *operands)
        if name in ("scatter", "scatter-add"):
            start, _, updates = operands
            axes = _reduced(one.invars[2:], two.invars[2:], one, two)
            is_added = name == "scatter-add"
            if axes and marks["is_own"] and not is_added:
                return _UNKNOWN._replace(**marks)  # what any row has set
            number = _joined([start, _summed([updates], axes if is_added else 0)])._replace(is_own=marks["is_own"])
            is_number = jnp.issubdtype(one.outvars[0].aval.dtype, jnp.floating)  # and no place itself
            return number._replace(is_by_place=number.is_by_place and is_number)
        if (axes := _reduced_axes(one, two)) is not None:
            # Of pairs of rows, of which workers have some.
            if axes and len(axes_of_rows(one.invars[0], two.invars[0])) > 1:
                axes = _own_axes(one, two) if marks["is_gathered"] else axes
                if axes:
                    return _UNKNOWN._replace(**marks)
            if _mixes_rows(one, two, axes):
                return _UNKNOWN._replace(**marks)
            if name in _EXTREMES:
                return _extreme(operands[0]) if axes else operands[0]._replace(constant=None)
            number = _summed(operands, axes)
            if name != "reduce_sum":
                return number
            sizes, along = one.invars[0].aval.shape, set(one.params["axes"])
            row_axes = along.intersection(axes_of_rows(one.invars[0], two.invars[0]))
            rows, numbers, count = operands[0].summed or (1, 1, 1)
            rows, numbers = (
                start * math.prod(sizes[axis] for axis in axes) for start, axes in ((rows, row_axes), (numbers, along))
            )
            return number._replace(summed=(rows, numbers, count))
        if name == "integer_pow" or name in _ROOTS:
            power = powers[0] * _ROOTS.get(name, one.params.get("y"))
            return operands[0]._replace(power=power, constant=None)
        if name == "sign" and math.isfinite(powers[0]):
            return operands[0]._replace(power=0, constant=None)
        if name == "triangular_solve" and powers[0] == 0:
            return operands[1]._replace(constant=None, **marks)
        if name in ("eq", "ne", "lt", "le", "gt", "ge"):  # numbers of one scale are equal, or not, at any other
            scales = {x.power for x in operands if not _is_huge(x)} - {-math.inf}
            powers = powers if len(scales) > 1 else [0]
        is_plain = all(power in (0, -math.inf) for power in powers)
        is_ordered = name in _ORDERS and _rows_along(one, two, [one.params.get(_ORDERS[name], -1)])
        has_rows = [any(map(differs, *pair)) for pair in ((one.invars, two.invars), (one.outvars, two.outvars))]
        factors = set(powers) - {0, -math.inf}
        if name in _KERNELS and len(factors) == 1 and has_rows[1]:  # of a cotangent, taken to be linear
            return Scaling(factors.pop(), **marks)
        is_by_rows = is_plain and not is_ordered and not _is_shifted(one, two) and (has_rows[1] or not has_rows[0])
        return Scaling(is_extreme=_is_extreme(operands), **marks) if is_by_rows else _UNKNOWN._replace(**marks)

    def _of_product(self, one: PyTree, two: PyTree, left: Scaling, right: Scaling) -> Scaling:
        is_quotient, marks = one.primitive.name == "div", _marks([left, right])
        has_total = left.is_total != right.is_total if is_quotient else left.is_total or right.is_total
        is_total = has_total and not marks["is_own"]
        # Of one worker, a pmean is divided by 1.
        is_divided = any(x.is_count and (x.power < 0) == is_quotient for x in (left, right)) and self.is_alone
        marks["is_multiple"] &= not (is_divided or (is_quotient and right.is_total))
        is_total &= not is_divided
        marks["summed"] = self._divided(left, right, is_quotient)
        power = left.power - right.power if is_quotient else left.power + right.power
        for number, other in ((left, right), (right, left)):
            is_factored = number.is_total and not self.is_backward and (number is left or not is_quotient)
            if other.constant and other.power == 0 and is_factored:
                factor = 1 / other.constant if is_quotient else other.constant
                is_total = not math.isclose(factor * self.workers, 1, rel_tol=1e-5)
                marks["is_multiple"] &= is_total
                power += self.is_alone and not is_total  # of an only worker, the total was counted as that of one of K
        if is_total and power == 0 and not self.is_alone:
            marks["is_multiple"] |= self._is_by_own_count(marks["summed"])
        if is_quotient:
            is_times_workers = left.summed[2:] == (1 / self.workers,)
            if right.is_total and right.power >= 1 and left.is_own and not (self.is_alone or is_times_workers):
                return _NEITHER  # a Kth of a quotient
            is_reduced = not any(map(differs, one.invars, two.invars))
            marks["is_weighted"] |= right.power >= 1 and right.is_own
            marks["is_ratio"] |= is_reduced and left.is_own and right.is_own
            marks["is_mixed"] = left.is_mixed
        is_pair = power >= 2 and left.is_own and right.is_own
        number = Scaling(power, is_extreme=_is_extreme([left, right]), is_total=is_total, **marks)
        return _UNKNOWN._replace(**marks) if is_pair else number

    def _divided(self, left: Scaling, right: Scaling, is_quotient: bool) -> tuple[float, ...]:
        """Returns `Scaling.summed` of a product with a number of rows, or of workers."""
        for number, other in [(left, right), (right, left)][: 1 if is_quotient else 2]:
            if number.summed and other.constant and not other.is_own:
                count = other.constant if is_quotient else 1 / other.constant
                if other.is_count or any(math.isclose(x, self.workers) for x in (count, 1 / count)):
                    return (*number.summed[:2], number.summed[2] * count)
        return max(left.summed, right.summed)

    def _is_by_own_count(self, summed: tuple[float, ...]) -> bool:
        """Returns whether a sum was divided by the number of a worker's own rows, and not by that of all."""
        rows, numbers, count = summed or (1, 1, 1)
        if rows == 1:  # it was summed in another way
            return False
        each = count / rows
        is_part = math.isclose(each, round(each)) and round(each) % self.workers > 0
        return math.isclose(count, numbers) or is_part

    def _of_collective(self, eqn: Any, operand: Scaling, has_rows: bool) -> Scaling:
        """What all workers have is none's own. An only worker has as much as the sum of all."""
        name, axes = eqn.primitive.name, self.axes.intersection(equation_axes(eqn))
        unmarked = dict.fromkeys(("is_extreme", "has_extreme", "has_mean"), False)
        is_gathered = operand.is_gathered or COLLECTIVES[name] != "all_reduce"
        shared = operand._replace(is_shared=True, is_gathered=is_gathered, constant=None, **unmarked)
        if COLLECTIVES[name] == "all_gather":  # of the rows of all, of which there are as many as are summed
            shared = shared._replace(summed=(math.inf, math.inf, 1))
        if not axes:
            return operand
        is_multiple = name in _SUMS and operand.power == 0 and not operand.is_shared and self.workers > 1
        is_of_all = operand.summed[:1] > (1,) and not self._is_by_own_count(operand.summed)
        is_multiple &= not (has_rows or is_of_all)
        if name in _SUMS and not (has_rows or self.is_backward):
            is_flawed = operand.is_unknown or operand.is_of_mean or operand.is_extreme
            shared = shared._replace(is_of_parts=operand.is_of_parts or (is_flawed and not operand.is_gathered))
        if self.is_alone:
            is_total = name in _SUMS
            power, is_multiple = operand.power - is_total, is_multiple and operand.is_own
            return shared._replace(power=power, is_total=is_total, is_multiple=is_multiple, is_own=False)
        if name in _SUMS and self.is_backward:
            return shared._replace(is_spread=True)
        if not operand.is_own and operand.constant is not None and name in _SUMS:  # the number of workers
            return shared._replace(constant=self.workers * operand.constant)
        if not operand.is_own or COLLECTIVES[name] not in ("all_reduce", "all_gather"):
            is_moved = name in ("reduce_scatter", "all_to_all", "ppermute")  # rows again, each where a worker needs it
            is_own, is_of_worker = operand.is_own or is_moved, operand.is_of_worker or is_moved
            return shared._replace(is_own=is_own, is_of_worker=is_of_worker, is_total=operand.is_total and not is_own)
        if axes != self.axes:
            return _NEITHER
        is_known = name in _SUMS or operand.power == 0
        return shared._replace(
            power=operand.power if is_known else math.nan,
            is_own=False,
            is_total=name not in ("pmax", "pmin"),
            is_multiple=is_multiple,
        )

    def _of_constants(self, one: PyTree, two: PyTree) -> Scaling:
        """Returns the scaling of a constant: 1 if it has grown as the rows have, -1 if its inverse has."""
        is_read = not isinstance(one, Tracer) and (
            jnp.issubdtype(jnp.result_type(one), jnp.integer) or jnp.result_type(one) == jnp.bool_
        )
        places = Integers(np.asarray(one)) if is_read and jnp.size(one) < READ else None
        if all(map(_is_number, (one, two))):
            one, two = (float(np.asarray(x).flat[0]) for x in (one, two))
            if one == two or math.isnan(one):
                return Scaling(-math.inf if one == 0 else 0, constant=one, places=places)
            power = self._power_of(one, two)
            return Scaling(power, places=places, constant=one, is_sized=math.isnan(power))
        if jnp.shape(one) != jnp.shape(two):
            return Scaling(is_by_place=True, stacks=1, places=places)
        if not all(map(_is_read, (one, two))):
            return Scaling(places=places)
        if np.array_equal(one, two):
            return Scaling(places=places)
        pairs = zip(np.asarray(one).flat, np.asarray(two).flat, strict=True)
        powers = {self._power_of(float(x), float(y)) for x, y in pairs if x != 0 or y != 0}
        power = powers.pop() if len(powers) == 1 else math.nan
        return Scaling(power, places=places, is_sized=math.isnan(power))

    def _power_of(self, one: float, two: float) -> float:
        """Returns to which power of the rows a number has grown; NaN for none."""
        power = math.log(two / one, self.factor) if math.isfinite(one * two) and one * two > 0 else 0.5
        return round(power) if math.isclose(power, round(power), abs_tol=1e-6) else math.nan

    def _of_while(self, one: PyTree, two: PyTree, operands: list[Scaling]) -> list[Scaling]:
        """What a loop does once it may do any number of times; a loop of each row's own ends with its last row."""
        consts = one.params["cond_nconsts"], one.params["body_nconsts"]
        own, carry = operands[consts[0] : sum(consts)], operands[sum(consts) :]
        outs = [x._replace(places=None) for x in carry]
        for _ in range(2):
            outs = self.outputs(one.params["body_jaxpr"], two.params["body_jaxpr"], [*own, *outs])
            outs = [_joined([x, start])._replace(places=None) for x, start in zip(outs, carry, strict=True)]
        whole, condition = _joined(operands), inner_jaxpr(one.params["cond_jaxpr"])
        ends = self.outputs(condition, two.params["cond_jaxpr"], [*operands[: consts[0]], *outs])[0]
        # A loop of each row's own, by jax.vmap, asks for each row, or whether there is any.
        is_any = any(eqn.primitive.name == "reduce_or" and eqn.outvars == condition.outvars for eqn in condition.eqns)
        is_any |= condition.outvars[0].aval.ndim > 0
        is_whole = ends.is_own and not ends.is_gathered and not is_any
        return [
            x._replace(is_own=whole.is_own, is_by_place=is_whole or x.is_by_place or x.has_mean or x.has_extreme)
            for x in outs
        ]

    def _of_scan(self, one: PyTree, two: PyTree, operands: list[Scaling]) -> list[Scaling]:
        bodies = one.params["jaxpr"], two.params["jaxpr"]
        consts, count = scan_counts(one)
        is_longer, body = one.params["length"] != two.params["length"], inner_jaxpr(bodies[0])
        operands = [x if place < consts else x._replace(places=None) for place, x in enumerate(operands)]
        carry, outs = operands[consts : consts + count], list[Scaling]()
        if is_longer:  # what changes from row to row, as a counter, tells of a row's place
            changes = [
                var is not out for var, out in zip(body.invars[consts : consts + count], body.outvars, strict=False)
            ]
            carry = [
                start._replace(is_by_place=start.is_by_place or (change and not start.is_own))
                for start, change in zip(carry, changes, strict=True)
            ]
        length, given = one.params["length"], operands[consts + count :]
        is_of_blocks = any(x.blocks == length for x in given)
        given = [x._replace(blocks=0) if x.blocks == length else x for x in given]  # one block at a time
        if is_of_blocks:
            keys = [jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key) for var in body.invars[consts + count :]]
            given = [
                x._replace(blocks=length) if is_key and not x.is_own else x
                for x, is_key in zip(given, keys, strict=True)
            ]
        for _ in range(3):
            outs = self.outputs(*bodies, [*operands[:consts], *carry, *given])
            pairs = list(zip(carry, outs, strict=False))
            if all(new[:3] == old[:3] for old, new in pairs):
                break
            carry = [new if old.power == -math.inf else _same([old, new]) for old, new in pairs]
        if not is_longer and not is_of_blocks:
            return outs
        ways = [_accumulation(body, consts + place, place) for place in range(count)]
        if not is_longer:  # a loop over blocks of rows, of which each worker has its own
            own = zip(body.invars[consts + count :], given, strict=True)
            is_recurrent = any(not way and out.is_own for way, out in zip(ways, outs, strict=False))
            is_recurrent |= not self.is_backward and any(
                jnp.issubdtype(var.aval.dtype, jnp.floating) and not x.is_own for var, x in own
            )
            stacked = [
                place >= count and differs(*pair)
                for place, pair in enumerate(zip(one.outvars, two.outvars, strict=True))
            ]
            return [
                out._replace(is_by_place=out.is_by_place or is_recurrent, blocks=length if is_stacked else out.blocks)
                for out, is_stacked in zip(outs, stacked, strict=True)
            ]
        zeros = [Scaling(-math.inf) if way == "sum" else start for way, start in zip(ways, carry, strict=True)]
        terms = self.outputs(*bodies, [*operands[:consts], *zeros, *given])
        is_recurrent = False
        for place, (way, start, term) in enumerate(zip(ways, operands[consts:], terms, strict=False)):
            is_recurrent |= not way and outs[place].is_own
            of_way = {"sum": _joined([start, _summed([term], 1)]), "max": term._replace(is_extreme=True)}
            outs[place] = of_way.get(way, _UNKNOWN._replace(**_marks([outs[place]])))
        return [_UNKNOWN._replace(**_marks([x])) if is_recurrent else x for x in outs]


def _accumulation(body: Any, place: int, out: int) -> str:
    """Returns what a loop makes of an output that it carries: "sum", "max" (or minimum), "" for anything else."""
    carry, producers = body.invars[place], {var: eqn for eqn in body.eqns for var in eqn.outvars}
    uses = [var for eqn in (*body.eqns, body) for var in (eqn.outvars if eqn is body else eqn.invars) if var is carry]
    var, ways = body.outvars[out], set[str]()
    while len(uses) == 1 and var is not carry and var in producers:
        eqn = producers[var]
        name, inner = eqn.primitive.name, inner_jaxprs(eqn.params)
        if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars) and carry in eqn.invars:
            return "" if ways else _accumulation(inner[0], eqn.invars.index(carry), eqn.outvars.index(var))
        if name not in ("add", "add_any", "max", "min", "convert_element_type", "copy"):
            return ""
        ways |= {name[:3]} & {"add", "max", "min"}
        var = next((operand for operand in eqn.invars if _leads(operand, carry, producers)), None)
    is_one = var is carry and len(ways) == 1
    return "" if not is_one else "sum" if "add" in ways else "max"


def _leads(var: Any, carry: PyTree, producers: dict[Any, Any]) -> bool:
    """Returns whether a variable is computed from the carried one."""
    if isinstance(var, Literal):
        return False
    return var is carry or (var in producers and any(_leads(x, carry, producers) for x in producers[var].invars))


def _marks(operands: Sequence[Scaling]) -> dict[str, Any]:
    return {name: max((getattr(x, name) for x in operands), default=getattr(Scaling(), name)) for name in _MARKS}


def _is_linear(eqn: Any, operands: Sequence[Scaling]) -> bool:
    """Returns whether an equation is linear in a worker's own numbers."""
    name, marks = eqn.primitive.name, [operand.is_own and operand.power != -math.inf for operand in operands]
    if name in _LINEAR or name in COLLECTIVES or inner_jaxprs(eqn.params) or _is_guard(eqn):
        return True
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return not all(marks)
    if name == "triangular_solve":
        return not marks[0]
    return not marks[1] if name == "div" else not any(marks)


def _is_guard(eqn: Any) -> bool:
    """Returns whether an equation tells numbers from NaN and infinity, or joins such answers."""
    name, operands = eqn.primitive.name, eqn.invars
    is_of_itself = name == "ne" and operands[0] is operands[1]
    return is_of_itself or name in ("is_finite", "and", "or", "not", "reduce_and", "reduce_or")


def _is_extreme(operands: Sequence[Scaling]) -> bool:
    """Returns whether a number is of extremes, and of numbers that are not of own rows."""
    return any(x.is_extreme for x in operands) and all(x.is_extreme or not x.is_own for x in operands)


def _extreme(operand: Scaling) -> Scaling:
    """Returns the scaling of the largest or smallest number along axes of rows."""
    is_extreme = operand.is_extreme or operand.is_own
    return operand._replace(is_extreme=is_extreme, has_extreme=operand.has_extreme or is_extreme, constant=None)


def _joined(operands: Sequence[Scaling]) -> Scaling:
    """Returns the scaling of a sum, or of one of several numbers: that of the largest power."""
    marks = _marks(operands)
    if any(math.isnan(x.power) for x in operands):
        return _UNKNOWN._replace(**marks)
    largest = max(operands, key=lambda x: x.power)
    is_total = largest.is_total and not marks["is_own"]
    return Scaling(largest.power, is_extreme=_is_extreme(operands), is_total=is_total, **marks)


def _same(operands: Sequence[Scaling]) -> Scaling:
    powers = {x.power for x in operands} - {-math.inf}
    return _joined(operands) if len(powers) <= 1 else _UNKNOWN._replace(**_marks(operands))


def _picked(places: Sequence[Scaling], number: Scaling) -> Scaling:
    """Returns the scaling of what is picked from numbers by others: not known for an order of rows, or its like."""
    marks = _marks([*places, number])
    is_order = any(place.is_own and (math.isnan(place.power) or place.is_extreme) for place in places)
    if is_order or any(place.is_sized and math.isnan(place.power) for place in places):
        return _UNKNOWN._replace(**marks)
    # A place among the rows of all is one on one device, too.
    by_place = any(x.is_by_place and not (x.is_of_worker and number.is_gathered) for x in places)
    names = ("is_curved", "is_normalised", "is_alike")
    return number._replace(is_by_place=by_place or number.is_by_place, **{name: marks[name] for name in names})


def _with_size(number: Scaling, var: Any) -> Scaling:
    """Returns a number, marked if it comes of a number of rows in another way than by products; not so a place."""
    is_of_rows = number.is_own or number.is_shared or number.is_by_place or number.is_of_worker
    is_new = math.isnan(number.power) and not is_of_rows and not var.aval.shape
    return number._replace(is_sized=(number.is_sized or is_new) and not number.is_by_place)


def _is_repeated(one: PyTree, two: PyTree) -> bool:
    """Returns whether an equation by element repeats an only row beside an array that has no rows."""
    row_axes = axes_of_rows(one.outvars[0], two.outvars[0])
    return any(not set(axes_of_rows(*pair)) <= set(row_axes) for pair in zip(one.invars, two.invars, strict=True))


def _is_huge(number: Scaling) -> bool:
    """Returns whether it is a constant that stands for infinity, as in masks and guards."""
    return abs(number.constant or 0) > 1e30


def _is_number(x: Any) -> bool:
    """Returns whether a constant is a real number that can be read, or an array of equal ones."""
    return _is_read(x) and (jnp.ndim(x) == 0 or bool((np.asarray(x) == np.asarray(x).flat[0]).all()))


def _is_read(x: Any) -> bool:
    """Returns whether a constant, of real numbers, can be read."""
    is_real = any(jnp.issubdtype(jnp.result_type(x), kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))
    if not is_real or isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return False
    return 0 < jnp.size(x) < READ


def _is_first(one: PyTree, two: PyTree) -> bool:
    """Returns whether the first of all rows is taken."""
    if one.primitive.name != "slice" or not (row_axes := axes_of_rows(one.invars[0], two.invars[0])):
        return False
    return all(one.params["start_indices"][axis] == 0 and one.params["limit_indices"][axis] == 1 for axis in row_axes)


def _is_shifted(one: PyTree, two: PyTree) -> bool:
    """Returns whether rows are reversed, or a slice takes some that are not a part: the first, or all but the last."""
    if one.primitive.name == "fft":
        axes = range(one.invars[0].aval.ndim - len(one.params["fft_lengths"]), one.invars[0].aval.ndim)
        return _rows_along(one, two, axes) > 0
    if one.primitive.name == "rev":
        return _rows_along(one, two, one.params["dimensions"]) > 0
    if one.primitive.name != "slice":
        return False
    variables = (*one.invars, *one.outvars, *two.invars, *two.outvars)
    sizes = zip(*(var.aval.shape for var in variables), strict=True)
    return any(size != second and out * second != second_out * size for size, out, second, second_out in sizes)


def _rows_along(one: PyTree, two: PyTree, axes: Sequence[int]) -> int:
    """Returns how many of some axes of the first operand are of rows."""
    var, second = one.invars[0], two.invars[0]
    return len({axis % var.aval.ndim for axis in axes}.intersection(axes_of_rows(var, second)))


def _reduced_axes(one: PyTree, two: PyTree) -> int | None:
    """Returns along how many axes of rows a primitive reduces; None if it does not."""
    name, params = one.primitive.name, one.params
    if name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and"):
        return _rows_along(one, two, params["axes"])
    if name in ("cumsum", "cummax", "cummin"):
        return _rows_along(one, two, [params["axis"]])
    if name == "dot_general":
        return _rows_along(one, two, params["dimension_numbers"][0][0])
    if name in ("reduce_window_sum", "reduce_window_max", "reduce_window_min"):
        windows = (eqn.params["window_dimensions"] for eqn in (one, two))
        return sum(size != second for size, second in zip(*windows, strict=True))
    if name == "conv_general_dilated":  # over the rows of both, where the result has none
        return _reduced(one.invars, two.invars, one, two) // 2
    return None


def _is_along_rows(one: PyTree, two: PyTree) -> bool:
    """Returns whether some of the axes along which numbers are picked are of rows."""
    if one.primitive.name == "dynamic_slice":
        return differs(one.invars[0], two.invars[0])
    return _rows_along(one, two, one.params["dimension_numbers"].start_index_map) > 0


def _points_at_rows(one: PyTree, two: PyTree, places: Scaling) -> bool:
    """Returns whether indices are of rows, and come from the batch: a worker reads them as places among its own."""
    indexed = getattr(one.params["dimension_numbers"], INDEXED[one.primitive.name])
    return places.is_own and not places.is_by_place and _rows_along(one, two, indexed) > 0


def _reduced_by_position(eqn: Any, var: Any, second: Any, operand: Scaling) -> Scaling:
    """Returns the scaling of what a collective inside `jax.vmap` is of: it reduces axes of the array as well."""
    axes = len(set(axes_of_rows(var, second)).intersection(eqn.params.get("axes", ())))  # others are names
    if not axes:
        return operand
    return _summed([operand], axes) if eqn.primitive.name in _SUMS else _extreme(operand)


def _mixes_rows(one: PyTree, two: PyTree, axes: int) -> bool:
    """Returns whether a convolution that reduces so many axes of rows, or a window, slides along rows."""
    if one.primitive.name == "conv_general_dilated":
        return not axes and _rows_along(one, two, one.params["dimension_numbers"].lhs_spec[2:]) > 0
    windows = [eqn.params.get("window_dimensions", ()) for eqn in (one, two)]
    sliding = [axis for axis, sizes in enumerate(zip(*windows, strict=True)) if sizes[0] == sizes[1] > 1]
    return _rows_along(one, two, sliding) > 0


def _own_axes(one: PyTree, two: PyTree) -> int:
    """Returns along how many axes of own rows a primitive reduces; the rows of all workers are more."""
    shape, row_axes = one.invars[0].aval.shape, axes_of_rows(one.invars[0], two.invars[0])
    fewest = min(shape[axis] for axis in row_axes)
    reduced = one.params.get("axes", row_axes)
    return sum(axis in reduced and shape[axis] == fewest for axis in row_axes)


def _reduced(invars: Sequence[Any], second_invars: Sequence[Any], one: PyTree, two: PyTree) -> int:
    """Returns how many more axes of rows some operands have than the result."""
    pairs = (invars, second_invars), (one.outvars, two.outvars)
    own, results = (sum(map(len, map(axes_of_rows, *pair))) for pair in pairs)
    return max(own - results, 0)


def _summed(operands: Sequence[Scaling], axes: int) -> Scaling:
    """Returns the scaling of a sum of products, along some axes of rows."""
    marks, is_total = _marks(operands), any(x.is_total for x in operands)
    marks["is_curved"] &= not axes
    marks["has_mean"] |= axes > 0 and marks["is_own"]
    power, is_extreme = sum(x.power for x in operands) + axes, _is_extreme(operands) and not axes
    return Scaling(power, is_extreme=is_extreme, is_total=is_total and not marks["is_own"], **marks)
