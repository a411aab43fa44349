"""How the numbers of a traced program scale with the rows of a batch: a mean, a sum, or a mean of other weights.

The mean over K workers of a mean over their rows is the mean over all rows; that of sums is a Kth of the sum. A loss is
only a Python function, but its program tells. It is traced for a worker's rows and for more of them, and both programs
are compared, equation by equation. A constant that grows is a number of rows.
"""

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.jaxpr import COLLECTIVES, inner_jaxpr, inner_jaxprs, scan_counts
from jaxcomm.collectives.axis import abstract_mesh
from jaxcomm.exchange import SCOPE


class Scaling(NamedTuple):
    """What becomes of a number if a worker has n times as many rows, each of its own n times.

    Attributes:
      power: it is n**power times as large: 1 for a sum over rows, 0 for a mean, -inf for 0; NaN if it is not known.
      is_own: whether it is computed from a worker's own rows.
      is_weighted: whether it was divided by a sum over own rows, such as a number of valid tokens.
      is_extreme: whether it is the largest or smallest of own rows.
      is_total: whether it is a sum over the workers.
      terms: how many numbers were added, along rows and other axes.
      rows: how many along rows alone.
      constant: its value, if it is a constant of the program.
    """

    power: float = 0
    is_own: bool = False
    is_weighted: bool = False
    is_extreme: bool = False
    is_total: bool = False
    terms: int = 1
    rows: int = 1
    constant: float | None = None

    @property
    def is_count(self) -> bool:
        """Whether it has a number of rows in it, and nothing else of a worker's own."""
        return not self.is_own and self.power not in (0, -math.inf)

    @property
    def reduction(self) -> str:
        """What it is of own rows, "sum" or "max", so that the mean over workers is wrong; else ""."""
        return "max" if self.is_extreme else "sum" if self.power == 1 else ""

    @property
    def is_quotient(self) -> bool:
        """Whether it is of one size for any number of rows, and was divided by a sum computed from rows."""
        return self.power == 0 and self.is_weighted

    def times(self, factor: float, workers: int) -> "Scaling":
        """Returns that of the product with a constant that is the same for all rows.

        If it is one by the number of terms or rows, a sum becomes a mean; so it does if it is the number of workers,
        since the mean over these is then the sum over all rows.
        """
        is_mean = any(math.isclose(factor * count, 1, rel_tol=1e-5) for count in (self.terms, self.rows))
        is_summed = self.power == 1 and (is_mean or factor == workers)
        is_mean_of_workers = self.is_total and math.isclose(factor * workers, 1, rel_tol=1e-5)
        power = self.power - is_summed + is_mean_of_workers
        terms, rows = (1, 1) if is_mean else (self.terms, self.rows)
        return self._replace(power=power, terms=terms, rows=rows, is_total=False, constant=None)


_ROWS = Scaling(is_own=True)
_UNKNOWN = Scaling(math.nan)
_NEW: dict[str, Any] = {"is_extreme": False, "is_total": False, "constant": None}  # of most results

# By `Scaling.reduction`: what is found, and what to do with a minimum.
KINDS = {"sum": "a sum", "max": "an extreme"}
NOTES = {"sum": "", "max": " (of a minimum: return its negative)"}

# Primitives by how they treat a common factor of their operands.
_KEEP = frozenset(
    (
        *("abs", "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg", "optimization_barrier"),
        *("pcast", "pvary", "real", "reduce_precision", "reshape", "rev", "slice", "squeeze", "stop_gradient"),
        "transpose",
    )
)
_JOIN = ["add", "add_any", "clamp", "concatenate", "max", "min", "pad", "sub"]
_SUMS = ("psum", "psum_invariant", "psum2", "reduce_scatter")
_PICK = {"gather": slice(1), "dynamic_slice": slice(1), "select_n": slice(1, None)}


def scalings(function: Callable[..., Any], rows: Sequence[Any], workers: int) -> Any:
    """Traces a function of a worker's rows for these and for twice as many.

    Args:
      function: of a list of arrays (rows, ...).
      rows: the arrays.
      workers: K.

    Returns:
      The function's output, with a `Scaling` for each number; None if it cannot be traced for other rows.
    """
    avals = [jax.typeof(x) for x in rows]
    doubled = [aval.update(shape=(2 * aval.shape[0], *aval.shape[1:])) for aval in avals]
    try:
        (one, out), two = jax.make_jaxpr(function, return_shape=True)(avals), jax.make_jaxpr(function)(doubled)
    except Exception:
        return None
    numbers = _compare(one, two, [_ROWS] * len(rows), _Walk(workers, 2))
    return None if numbers is None else jax.tree.unflatten(jax.tree.structure(out), numbers)


class StepScaling(NamedTuple):
    """The scalings in a step that a user wrote, with one worker that has all rows in place of one of K.

    Attributes:
      outputs: those of the outputs; none if they are not known.
      gradients: those of what enters an exchange and is computed from rows.
      workers: K.
    """

    outputs: list[Scaling]
    gradients: list[Scaling]
    workers: int

    @classmethod
    def of(
        cls, step: Callable[..., Any], program: Any, arrays: Any, specs: Any, has_rows: Sequence[bool], axes: Any
    ) -> "StepScaling":
        """Traces the step of one worker, if there are several.

        Args:
          step: what a worker does.
          program: the jaxpr of its `jax.shard_map` over the workers.
          arrays: a tree of its global arguments.
          specs: their PartitionSpecs, in a like tree.
          has_rows: for every argument, whether it has rows of a batch; others with a spec have one of each worker.
          axes: the axes of workers.
        """
        (eqn,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "shard_map"]
        workers = math.prod(eqn.params["mesh"].shape[axis] for axis in axes)

        def alone(leaf: Any, spec: P, is_batch: bool) -> jax.ShapeDtypeStruct:
            shape = list(jnp.shape(leaf))
            if spec != P() and not is_batch:
                shape[len(spec) - 1] //= workers
            return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))

        if workers == 1 or not any(has_rows):
            return cls([], [], workers)
        leaves, treedef = jax.tree.flatten(arrays)
        shapes = treedef.unflatten(map(alone, leaves, jax.tree.leaves(specs), has_rows))
        mesh = abstract_mesh(dict.fromkeys(axes, 1))
        try:
            # Only traced, and untracked as the step itself is.
            on_one = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            (other,) = jax.make_jaxpr(on_one)(*shapes).jaxpr.eqns
        except Exception:
            return cls([], [], workers)
        inputs = dict(zip(program.jaxpr.invars, (_ROWS if has else Scaling() for has in has_rows), strict=True))
        walk = _Walk(workers, workers, is_alone=True)
        bodies = eqn.params["jaxpr"], other.params["jaxpr"]
        numbers = _compare(*bodies, [inputs.get(var, Scaling()) for var in eqn.invars], walk)
        return cls(numbers or [], walk.gradients if numbers else [], workers)

    def check(self, averaged: Sequence[str]) -> None:
        """Refuses gradients, and outputs that are averaged, that are sums over a worker's rows; warns of quotients.

        Args:
          averaged: for every output its path, if it is averaged over the workers; else "".

        Raises:
          ValueError: naming the outputs.
        """
        if any(gradient.power == 1 for gradient in self.gradients):
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
        quotients = [("gradients", number) for number in self.gradients] + pairs
        if names := list(dict.fromkeys(name for name, number in quotients if number.is_quotient)):
            warn_of_weights(names)


def warn_of_weights(names: Sequence[str]) -> None:
    """Warns that some numbers are divided by what each worker has computed from its own rows."""
    warnings.warn(
        f"{', '.join(names)}: divided by a sum over a worker's own rows, such as a number of valid tokens. The mean "
        "over workers and micro-batches is not the quotient for all rows where these sums differ. Divide by their mean "
        "over the workers, jax.lax.pmean(count, axis); see 'Losses that are no mean over rows' in the guide.",
        stacklevel=3,
    )


def _compare(program: Any, other: Any, inputs: Sequence[Scaling], walk: "_Walk") -> list[Scaling] | None:
    """Returns the `Scaling` of each output of two traces of one function; None if their equations are not the same."""
    try:
        numbers = walk.outputs(program, other, inputs)
        if walk.carries_rows:
            warnings.warn(
                "A loop in a step carries arrays from one row of the batch to the next, as a recurrent network does "
                "where time comes first: each worker would get some of the times. If the rows are along another axis, "
                "pass batch_axis=1; see the guide.",
                stacklevel=3,
            )
        return numbers
    except (_DifferentError, KeyError, TypeError, ValueError):  # also for a primitive that is not as it was
        return None


class _DifferentError(Exception):
    """Two traces are not of the same equations."""


class _Walk:
    """The walk over two traces.

    Attributes:
      workers: K times the micro-batches.
      factor: n, how many times as many rows the second trace has.
      is_alone: whether the second trace is of an only worker, which has the rows of all.
      gradients: what enters an exchange and is computed from own rows, as far as the walk has come.
      carries_rows: whether a loop along rows carries arrays that are computed from own rows.
    """

    def __init__(self, workers: int, factor: int, is_alone: bool = False):
        self.workers, self.factor, self.is_alone = workers, factor, is_alone
        self.gradients: list[Scaling] = []
        self.carries_rows = False

    def outputs(self, program: Any, other: Any, inputs: Sequence[Scaling]) -> list[Scaling]:
        first, second = inner_jaxpr(program), inner_jaxpr(other)
        known: dict[Any, Scaling] = dict(zip(first.invars, inputs, strict=True))
        for var, *values in zip(first.constvars, *(getattr(p, "consts", ()) for p in (program, other)), strict=False):
            known[var] = self._of_constants(*values)

        def read(one: Any, two: Any) -> Scaling:
            if isinstance(one, Literal) and isinstance(two, Literal):
                return self._of_constants(one.val, two.val)
            return Scaling() if isinstance(one, Literal) else known.get(one, Scaling())

        counterparts = (eqn for eqn in second.eqns if not _is_exchange(eqn))  # which is another for other workers
        for one in first.eqns:
            if _is_exchange(one):
                is_float = [jnp.issubdtype(var.aval.dtype, jnp.floating) for var in one.invars]
                numbers = [read(var, var) for var, floating in zip(one.invars, is_float, strict=True) if floating]
                self.gradients += [number for number in numbers if number.is_own]
                continue
            two = next(counterparts, None)
            if two is None or one.primitive.name != two.primitive.name or len(one.invars) != len(two.invars):
                raise _DifferentError
            operands = [read(*pair) for pair in zip(one.invars, two.invars, strict=True)]
            known.update(zip(one.outvars, self._of_equation(one, two, operands), strict=True))
        if next(counterparts, None) is not None:
            raise _DifferentError
        return [read(*pair) for pair in zip(first.outvars, second.outvars, strict=True)]

    def _of_equation(self, one: Any, two: Any, operands: list[Scaling]) -> list[Scaling]:
        name, params = one.primitive.name, one.params
        if name == "scan":
            return self._of_scan(one, two, operands)
        if name == "cond":
            pairs = zip(params["branches"], two.params["branches"], strict=True)
            branches = [self.outputs(*pair, operands[1:]) for pair in pairs]
            return [_same(outs) for outs in zip(*branches, strict=True)]
        inner = [inner_jaxprs(eqn.params) for eqn in (one, two)]
        if name != "while" and len(inner[0]) == len(inner[1]) == 1 and len(inner[0][0].invars) == len(operands):
            return self.outputs(inner[0][0], inner[1][0], operands)
        if name in _KEEP:
            return operands[: len(one.outvars)]
        return [self._of_primitive(one, two, operands)] * len(one.outvars)

    def _of_primitive(self, one: Any, two: Any, operands: list[Scaling]) -> Scaling:
        name, marks = one.primitive.name, _marks(operands)
        powers = [operand.power for operand in operands]
        if name in _PICK:
            return _joined(operands[_PICK[name]])._replace(**marks)
        if any(map(math.isnan, powers)):
            return _UNKNOWN._replace(**marks)
        if name in _JOIN:
            return _joined(operands)
        if name in ("reduce_max", "reduce_min"):
            axes, *_ = _row_axes(one.invars[0], two.invars[0], one.params["axes"])
            return operands[0]._replace(is_extreme=operands[0].is_extreme or axes > 0)
        if name in ("mul", "div"):
            product = self._of_product(name, *operands)
            return product._replace(**_NEW | {"is_own": marks["is_own"], "is_extreme": _is_extreme(operands)})
        if name == "dot_general":
            (contracted, _), _ = one.params["dimension_numbers"]
            axes, items, rows = _row_axes(one.invars[0], two.invars[0], contracted)
            left, right = operands
            terms, rows = left.terms * right.terms * items, left.rows * right.rows * rows
            return Scaling(sum(powers) + axes, terms=terms, rows=rows, **marks)
        if name == "reduce_sum":
            axes, items, rows = _row_axes(one.invars[0], two.invars[0], one.params["axes"])
            counts = {"terms": operands[0].terms * items, "rows": operands[0].rows * rows}
            return operands[0]._replace(power=powers[0] + axes, **counts | _NEW)
        if name == "integer_pow":
            return Scaling(powers[0] * one.params["y"], **marks)
        if name in COLLECTIVES:
            return self._of_collective(name, operands)
        is_plain = all(power in (0, -math.inf) for power in powers)
        has_rows = [any(map(_differs, *pair)) for pair in ((one.invars, two.invars), (one.outvars, two.outvars))]
        return Scaling(**marks) if is_plain and (has_rows[1] or not has_rows[0]) else _UNKNOWN._replace(**marks)

    def _of_product(self, name: str, left: Scaling, right: Scaling) -> Scaling:
        is_quotient, is_weighted = name == "div", left.is_weighted or right.is_weighted
        if right.constant and right.power == 0:
            return left.times(1 / right.constant if is_quotient else right.constant, self.workers)
        if left.constant and left.power == 0 and not is_quotient:
            return right.times(left.constant, self.workers)
        if is_quotient:
            is_weighted |= right.power >= 1 and right.is_own
            return left._replace(power=left.power - right.power, terms=1, rows=1, is_weighted=is_weighted)
        terms, rows = left.terms * right.terms, left.rows * right.rows
        return Scaling(left.power + right.power, is_weighted=is_weighted, terms=terms, rows=rows)

    def _of_collective(self, name: str, operands: list[Scaling]) -> Scaling:
        """What all workers have is none's own. An only worker has as much as the sum of all."""
        power = max(operand.power for operand in operands)
        if self.is_alone:
            return Scaling(power - (name in _SUMS), is_total=name in _SUMS)
        return Scaling() if COLLECTIVES[name] == "all_reduce" and power == 0 and operands[0].is_own else _UNKNOWN

    def _of_constants(self, one: Any, two: Any) -> Scaling:
        """Returns the scaling of a constant: 1 if it has grown as the rows have, -1 if its inverse has."""
        if not all(map(_is_number, (one, two))):
            return Scaling()
        one, two = float(one), float(two)
        if one == two or math.isnan(one):
            return Scaling(-math.inf if one == 0 else 0, constant=one)
        power = math.log(two / one, self.factor) if math.isfinite(one * two) and one * two > 0 else 0.5
        return Scaling(round(power) if math.isclose(power, round(power), abs_tol=1e-6) else math.nan)

    def _of_scan(self, one: Any, two: Any, operands: list[Scaling]) -> list[Scaling]:
        bodies = one.params["jaxpr"], two.params["jaxpr"]
        consts, count = scan_counts(one)
        carry, outs = operands[consts : consts + count], list[Scaling]()
        for _ in range(3):
            outs = self.outputs(*bodies, [*operands[:consts], *carry, *operands[consts + count :]])
            pairs = list(zip(carry, outs, strict=False))
            if all(new[:3] == old[:3] for old, new in pairs):
                break
            carry = [new if old.power == -math.inf else _same([old, new]) for old, new in pairs]
        is_over_rows = one.params["length"] != two.params["length"]
        arrays = zip(one.outvars[:count], outs, strict=False)
        self.carries_rows |= is_over_rows and any(var.aval.ndim and number.is_own for var, number in arrays)
        totals = [_UNKNOWN._replace(**_marks([x])) if is_over_rows else x for x in outs[: len(carry)]]
        return totals + outs[len(carry) :]


def _marks(operands: Sequence[Scaling]) -> dict[str, bool]:
    return {name: any(getattr(x, name) for x in operands) for name in ("is_own", "is_weighted")}


def _is_extreme(operands: Sequence[Scaling]) -> bool:
    """Returns whether a sum or a product is of extremes, and of numbers that are not of own rows."""
    return any(x.is_extreme for x in operands) and all(x.is_extreme or not x.is_own for x in operands)


def _joined(operands: Sequence[Scaling]) -> Scaling:
    """Returns the scaling of a sum, or of one of several numbers: that of the largest power."""
    if any(math.isnan(x.power) for x in operands):
        return _UNKNOWN._replace(**_marks(operands))
    marks = _NEW | _marks(operands) | {"is_extreme": _is_extreme(operands)}
    return max(operands, key=lambda x: x.power)._replace(**marks)


def _same(operands: Sequence[Scaling]) -> Scaling:
    powers = {x.power for x in operands} - {-math.inf}
    return _joined(operands) if len(powers) <= 1 else _UNKNOWN._replace(**_marks(operands))


def _is_number(x: Any) -> bool:
    """Returns whether a constant is a real number that can be read."""
    is_real = any(jnp.issubdtype(jnp.result_type(x), kind) for kind in (jnp.integer, jnp.floating))
    return jnp.ndim(x) == 0 and is_real and not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _is_exchange(eqn: Any) -> bool:
    return SCOPE in str(eqn.source_info.name_stack)


def _differs(one: Any, two: Any) -> bool:
    return one.aval.shape != two.aval.shape


def _row_axes(one: Any, two: Any, axes: Sequence[int]) -> tuple[int, int, int]:
    """Returns how many of some axes of an array are of rows, and the number of items along all of them, and these."""
    sizes, second_sizes = ([v.aval.shape[axis] for axis in axes] for v in (one, two))
    of_rows = [size for size, second in zip(sizes, second_sizes, strict=True) if size != second]
    return len(of_rows), math.prod(sizes), math.prod(of_rows)
