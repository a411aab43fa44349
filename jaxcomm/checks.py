"""Checks of arguments, with one form of error: the rule, the value, the remedy.

A method's arguments are fields, and the rule of one is in its annotation: `p: Annotated[int, count(1, "...")] = 1`.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any


@dataclass(frozen=True)
class Rule:
    """What an argument must be.

    Attributes:
      text: what follows "must be".
      holds: whether a value keeps the rule.
      remedy: see `check_range`.
    """

    text: str
    holds: Callable[[Any], bool]
    remedy: str

    def __repr__(self) -> str:
        return self.text  # in signatures

    def check(self, name: str, value: object) -> None:
        """Raises a ValueError unless the value of an argument keeps the rule."""
        check_range(name, value, self.text, self.holds(value), self.remedy)


def number(text: str, holds: Callable[[Any], bool], remedy: str, *, or_none: bool = False) -> Rule:
    """Returns the rule of a real number, of Python or NumPy. NaN keeps no rule that compares."""

    def is_one(value: Any) -> bool:
        return (or_none and value is None) or (isinstance(value, Real) and holds(value))

    return Rule(f"{text}, or None" if or_none else text, is_one, remedy)


def positive(remedy: str, *, or_none: bool = False) -> Rule:
    """Returns the rule of a finite number above 0."""
    return number("a positive number", lambda value: 0 < value < math.inf, remedy, or_none=or_none)


def count(least: int, remedy: str, *, or_none: bool = False) -> Rule:
    """Returns the rule of an integer that has a least value."""

    def is_count(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least

    return number(f"an integer of at least {least}", is_count, remedy, or_none=or_none)


def one_of(values: Sequence[Any], remedy: str) -> Rule:
    """Returns the rule of one of a few values."""
    names = [repr(value) for value in values]
    return Rule(f"{', '.join(names[:-1])} or {names[-1]}", lambda value: value in values, remedy)


@functools.cache
def rules_of(kind: type) -> dict[str, Rule]:
    """Returns the rules in a class's annotations by field; where a subclass writes none, its base's rule holds."""
    rules: dict[str, Rule] = {}
    for base in reversed(kind.__mro__):
        for name, annotation in inspect.get_annotations(base).items():
            for item in getattr(annotation, "__metadata__", ()):
                if isinstance(item, Rule):
                    rules[name] = item
    return rules


def check_range(name: str, value: object, rule: str, holds: bool, remedy: str) -> None:
    """Raises a ValueError with the rule, the value and the remedy unless the rule holds.

    Args:
      name: of the argument.
      value: the argument.
      rule: what follows "must be".
      holds: whether the rule holds.
      remedy: a sentence of its own, as it is to be read: it begins with a capital letter, or with a value or the name
        of an argument as it is written in code, and has no full stop at the end.
    """
    if not holds:
        raise ValueError(f"{name} must be {rule}; got {value!r}. {remedy}.")


def check_transformation(name: str, tx: object) -> None:
    """Refuses what is no Optax transformation: an argument in its place, or a factory that was not called."""
    is_one = callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    kind = getattr(tx, "__name__", type(tx).__name__)
    remedy = (
        f"Call it: {kind}(...)" if callable(tx) else "Pass jaxcomm.chain(jaxcomm.topk(0.99), optax.adam(1e-3)), say"
    )
    if not is_one:
        raise ValueError(f"{name} must be a transformation, with init and update; got {kind}. {remedy}.")


SPARSITY = number(
    "at least 0 and below 1 (the fraction of coordinates that is not sent)",
    lambda value: 0 <= value < 1,
    "Use 0.99 to send 1%, or plump_dp to send everything",
)
Sparsity = Annotated[float, SPARSITY]
Seed = Annotated[
    int, Rule("an integer", lambda x: isinstance(x, Integral) and not isinstance(x, bool), "Any will do, such as 0")
]
DenseBelow = Annotated[int, count(0, "0 compresses every tensor")]  # elements


def check_count(name: str, value: int, minimum: int, remedy: str) -> None:
    """Checks an integer that has a least value; see `check_range` for the remedy."""
    count(minimum, remedy).check(name, value)
