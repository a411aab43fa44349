"""Lower bounds of placements of blocks on stages: the least time of a step, before any option is chosen.

A range of blocks is from i up to, but not including, j. Values for ranges are arrays whose last two indices are [i, j],
infinite where there is no such range.
"""

import itertools
from collections.abc import Callable

import numpy as np

from jaxcomm.placement.problem import Problem, crossing_seconds, fill

_ROUNDING = 1e-9  # the share by which lower bounds are reduced
_PRICED_NAMES = 8  # names, those with the longest starts, of which all sets are enumerated
_PRICES = 64


def ranges(values: np.ndarray) -> np.ndarray:
    """Returns the sums (..., B + 1, B + 1) over all ranges of values (..., B)."""
    B = values.shape[-1]
    out = np.full((*values.shape[:-1], B + 1, B + 1), np.inf)
    for i in range(B):
        out[..., i, i + 1 :] = np.cumsum(values[..., i:], axis=-1)
    return out


def to_go(costs: np.ndarray, combine: Callable[..., np.ndarray]) -> np.ndarray:
    """Returns the least cost of stages s and later if they hold blocks i and later, (S + 1, B + 1).

    Args:
      costs: the cost of each range in each stage, (S, B + 1, B + 1).
      combine: `np.add` or `np.maximum`, to combine stages.
    """
    S, B = costs.shape[0], costs.shape[1] - 1
    costs_to_go = np.full((S + 1, B + 1), np.inf)
    costs_to_go[S, B] = 0 if combine is np.add else -np.inf
    for s in reversed(range(S)):
        costs_to_go[s] = combine(costs[s], costs_to_go[s + 1]).min(axis=1)
    return costs_to_go


def closest_fit(excess: np.ndarray) -> tuple[int, ...]:
    """Returns the stage ends of the placement whose worst `excess` (S, B + 1, B + 1) is least."""
    excess_to_go, ends = to_go(excess, np.maximum), [0]
    for s in range(excess.shape[0]):
        ends.append(int(np.argmin(np.maximum(excess[s, ends[-1]], excess_to_go[s + 1]))))
    return tuple(ends[1:])


class Bounds:
    """Lower bounds for all placements of a problem.

    If a stage's exchange takes at most E seconds, the errors of its tensors sum to at least L(p) - p E, for every price
    p of a second. L(p) is the least sum of errors plus p times the seconds, starts included. It depends on the range of
    blocks but not on the stage. The sum over stages must be within the budget, which bounds E from below. Memory is
    used only to rule out ranges that cannot fit.

    Attributes:
      compute: seconds of each range in each stage times the pipeline's fill, (S, B + 1, B + 1).
      crossing: a micro-batch's seconds on the link after each range in each stage, (S, B + 1, B + 1).
      following: seconds for which the other micro-batches follow at the pace of this link, (S, B + 1, B + 1).
      prices: p, (P,).
      priced: L, (P, B + 1, B + 1).
      shortest: the least seconds of the exchange of a range, (B + 1, B + 1).
      least_exchange: a lower bound of E over all placements.
    """

    def __init__(self, problem: Problem, excess: np.ndarray):
        """Makes the tables.

        Args:
          problem: the problem.
          excess: the least bytes by which each range exceeds each stage's device, (S, B + 1, B + 1).
        """
        self.budget = problem.error_budget
        B, S = len(problem.blocks), len(problem.devices)
        fits = excess <= 0
        seconds = ranges(np.array([block.seconds for block in problem.blocks], float))
        speeds = np.array([device.speed for device in problem.devices])
        self.compute = np.where(fits, fill(problem) * seconds / speeds[:, None, None], np.inf)
        crossing = np.zeros_like(excess, float)
        for s, j in itertools.product(range(S - 1), range(1, B)):
            crossing[s, :, j] = crossing_seconds(problem, s, j - 1)
        self.crossing = np.where(fits, crossing, np.inf)
        self.following = np.where(fits, (problem.micro_batches - 1) * crossing, np.inf)
        self._price(problem)
        self._compute_to_go = to_go(self.compute, np.maximum)
        self._crossing_to_go = to_go(self.crossing, np.add)
        self._following_to_go = to_go(self.following, np.maximum)
        self._fits = fits
        self._shortest_to_go = to_go(np.where(fits, self.shortest, np.inf), np.maximum)
        self.least_exchange = self._least_exchange()

    def _price(self, problem: Problem) -> None:
        tensors = [tensor for block in problem.blocks for tensor in block.tensors]
        owner = np.array([b for b, block in enumerate(problem.blocks) for _ in block.tensors], int)
        names = sorted({option.name for tensor in tensors for option in tensor.options}, key=problem.start)[::-1]
        seconds, errors = np.full((2, len(tensors), len(names)), np.inf)
        for t, tensor in enumerate(tensors):
            for option in tensor.options:
                seconds[t, names.index(option.name)] = option.seconds
                errors[t, names.index(option.name)] = option.error
        self.prices = _prices(seconds, errors) if self.budget is not None else np.zeros(0)
        # One row more than prices, for the seconds alone.
        error_weight = np.array([*np.ones_like(self.prices), 0.0])
        price = np.array([*self.prices, 1.0])
        is_finite = np.isfinite(seconds)
        seconds, errors = np.where(is_finite, seconds, 0), np.where(is_finite, errors, 0)
        costs = error_weight[:, None, None] * errors + price[:, None, None] * seconds
        costs = np.where(is_finite, costs, np.inf)  # (P + 1, tensors, names)
        priced = [name for name in names if problem.start(name) > 0][:_PRICED_NAMES]
        starts = np.array([problem.start(name) for name in priced])
        B = len(problem.blocks)
        lowest = np.full((len(price), B + 1, B + 1), np.inf)
        for open_flags in itertools.product((False, True), repeat=len(priced)):
            is_open = np.array([*open_flags, *[True] * (len(names) - len(priced))], bool)
            best = costs[:, :, is_open].min(axis=2, initial=np.inf)  # (P + 1, tensors)
            blocks = np.zeros((B, len(price)))
            np.add.at(blocks, owner, best.T)
            start_costs = price * starts[np.array(open_flags, bool)].sum()  # (P + 1,)
            lowest = np.minimum(lowest, ranges(blocks.T) + start_costs[:, None, None])
        self.priced, self.shortest = lowest[:-1], lowest[-1]

    def _least_exchange(self) -> float:
        low = float(self._shortest_to_go[0, 0])
        if self.budget is None:
            return low

        budget = self.budget * (1 + _ROUNDING)

        def holds(seconds: float) -> bool:
            errors = (self.priced - self.prices[:, None, None] * seconds).max(axis=0)
            return to_go(np.where(self._fits, errors, np.inf), np.add)[0, 0] <= budget

        high = max(low, 1e-12)
        while not holds(high):
            high *= 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return low

    def first(self, ends: np.ndarray) -> np.ndarray:
        """Returns quick lower bounds (n,), in seconds, of all placements that start with these stage ends (n, s)."""
        n, s = ends.shape
        starts = np.concatenate([np.zeros((n, 1), int), ends[:, :-1]], axis=1)
        last, stage = ends[:, -1], np.arange(s)
        compute = np.maximum(self.compute[stage, starts, ends].max(axis=1), self._compute_to_go[s, last])
        crossing = self.crossing[stage, starts, ends].sum(axis=1) + self._crossing_to_go[s, last]
        following = np.maximum(self.following[stage, starts, ends].max(axis=1), self._following_to_go[s, last])
        exchange = np.maximum(self.shortest[starts, ends].max(axis=1), self._shortest_to_go[s, last])
        return (compute + crossing + following + np.maximum(exchange, self.least_exchange)) * (1 - _ROUNDING)

    def base(self, ends: np.ndarray) -> np.ndarray:
        """Returns the seconds (n,) of complete placements (n, S) without the exchange."""
        starts, stage = np.concatenate([np.zeros((len(ends), 1), int), ends[:, :-1]], axis=1), np.arange(ends.shape[1])
        boundaries = self.crossing[stage, starts, ends].sum(axis=1) + self.following[stage, starts, ends].max(axis=1)
        return self.compute[stage, starts, ends].max(axis=1) + boundaries

    def errors(self, ends: np.ndarray, exchange: float) -> np.ndarray:
        """Returns lower bounds (S,) of the stages' errors in a placement (S,) whose exchange takes so many seconds."""
        starts = np.array([0, *ends[:-1]])
        return (self.priced[:, starts, ends] - self.prices[:, None] * exchange).max(axis=0)

    def second(self, ends: np.ndarray) -> np.ndarray:
        """Returns better lower bounds (n,), in seconds, of complete placements (n, S)."""
        starts = np.concatenate([np.zeros((len(ends), 1), int), ends[:, :-1]], axis=1)
        exchange = np.maximum(self.shortest[starts, ends].max(axis=1), self.least_exchange)
        if self.budget is not None:
            priced = self.priced[:, starts, ends]  # (P, n, S)
            for _ in range(12):  # Newton's method from below: the errors are a convex, decreasing function of E
                errors = priced - self.prices[:, None, None] * exchange[:, None]
                price_index = errors.argmax(axis=0)  # (n, S)
                least = np.take_along_axis(errors, price_index[None], axis=0)[0].sum(axis=1)
                excess = least - self.budget * (1 + _ROUNDING)
                slope = self.prices[price_index].sum(axis=1)
                if not np.any(moves := (excess > 0) & (slope > 0)):
                    break
                exchange = exchange + np.where(moves, excess, 0) / np.where(moves, slope, 1)
        return (self.base(ends) + exchange) * (1 - _ROUNDING)


def _prices(seconds: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Returns prices of a second: 0, and quantiles of the prices at which tensors change between two options."""
    with np.errstate(invalid="ignore", divide="ignore"):
        gains = errors[:, :, None] - errors[:, None, :]  # (tensors, names, names)
        extra = seconds[:, None, :] - seconds[:, :, None]
        ratios = (gains / extra)[(gains > 0) & (extra > 0)]
    ratios = ratios[np.isfinite(ratios)]
    return np.array([0.0, *np.unique(np.quantile(ratios, np.linspace(0, 1, _PRICES)))]) if len(ratios) else np.zeros(1)
