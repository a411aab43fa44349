"""Finds where one of two ways stops being the cheaper one: by bisection, and between measured points."""

import itertools
import math
from collections.abc import Callable, Sequence


def bisect(is_cheaper: Callable[[int], bool], step: int, start: float) -> tuple[int, int]:
    """Finds two neighbouring multiples of `step`: batches such that one way is cheaper only for the smaller one.

    Args:
      is_cheaper: batch -> bool; True for small batches, and False from some batch on.
      step: the number of workers.
      start: a first guess.

    Returns:
      The two batches; the first may be 0.
    """
    low, high = 0, max(round(start / step), 1)
    while is_cheaper(high * step):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_cheaper(middle * step) else (low, middle)
    return low * step, high * step


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """Returns the batch at which a quotient rises through 1; None if it does not.

    `points` are (batch, quotient), in order of the batch; in between, log(quotient) is taken as linear in log(batch).
    """
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y0 < 1 <= y1:
            share = -math.log(y0) / (math.log(y1) - math.log(y0))
            return math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0)))
    return None
