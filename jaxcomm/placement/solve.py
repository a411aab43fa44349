"""Assigns every block to a stage, and every tensor to an option for its exchange, so that a step is shortest.

For one placement of the blocks, the choice of the options is a mixed integer program. Its variables, for groups g of
n_g equal tensors, their stage s, and options o:

    w[g, o] in 0 ... n_g  the number of tensors that use the option; the sum over o is n_g
    y[o, s] in {0, 1}     whether the stage pays the start of the option: n_g y[o, s] >= w[g, o]
    E                     seconds of the exchange, at least those of every stage

It minimises E, within the memory of every stage and the error budget. A single program for all placements would need a
w for every stage, and solvers prove little about it: its relaxation assigns fractions of blocks, which balances all
stages. So placements are tried in the order of a lower bound (`bounds.py`), with a program for each. The search ends
when the next bound is not below the best step.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real

import numpy as np

from jaxcomm.checks import check_range
from jaxcomm.placement.bounds import Bounds, closest_fit, ranges, to_go
from jaxcomm.placement.problem import Option, Problem, StepParts, Tensor, step_parts

_KEPT = 20_000  # placements, those with the least bounds, that are kept in the search
_AT_ONCE = 512  # placements that get their better bound at once
_TOLERANCE = 1e-6  # the solver's, relative to a limit or a step
_SCALE = 1e3  # to which the limits of a program are scaled, so that the solver's tolerance is a billionth of them
_ROUNDING = 1e-9  # the share of a limit by which sums may exceed it


class NotInTimeError(ValueError):
    """No assignment was found in time; there may be one."""


@dataclass(frozen=True)
class Assignment:
    """A placement of the blocks and the options of their tensors.

    Attributes:
      stages: the stage of each block.
      options: the name of each tensor's option.
      parts: seconds of compute, boundaries and exchange.
      gap: a proof that no assignment takes less than (1 - gap) * seconds.
      optimal: whether `gap` is within the requested gap; False if the time was up before.
    """

    stages: tuple[int, ...]
    options: dict[str, str]
    parts: StepParts
    gap: float
    optimal: bool

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.parts.seconds

    @property
    def at_least(self) -> float:
        """Seconds that every assignment takes, by the proof of `gap`."""
        return (1 - self.gap) * self.seconds


def solve(problem: Problem, *, time_limit: float = 10.0, gap: float = 1e-4) -> Assignment:
    """Returns the assignment with the shortest step.

    Stages hold the blocks in order, at least one each. `step_parts` is the cost of a step. With one stage the problem
    is a knapsack: one option for every tensor. Limits hold to one part in a million, the solver's tolerance.

    Args:
      problem: blocks, devices, links and limits.
      time_limit: seconds to search for; then the best assignment so far is returned.
      gap: the relative amount by which the step may be longer than the shortest; 0 means the solver's tolerance.

    Raises:
      ValueError: if no assignment fits the memory of the devices or the budget of errors, or none was found in time.

    References:
      The pipeline's fill: Huang et al., "GPipe", NeurIPS 2019. The search: A. Land and A. Doig, "An Automatic Method of
      Solving Discrete Programming Problems", Econometrica, 1960.
    """
    holds = isinstance(time_limit, Real) and time_limit > 0
    check_range("time_limit", time_limit, "above 0 seconds", holds, "10 is enough for most models")
    holds = isinstance(gap, Real) and 0 <= gap < 1
    check_range("gap", gap, "at least 0 and below 1", holds, "1e-4 is a step within 0.01% of the shortest")
    deadline = time.monotonic() + time_limit
    excess = _excess(problem)
    _check_memory(problem, excess)
    _check_errors(problem)
    bounds = Bounds(problem, excess)
    placements, first, left_out = _placements(bounds, len(problem.devices), len(problem.blocks))
    # Entries (bound, start, is_one): the first bound of _AT_ONCE placements from `start` on, or one placement's better
    # bound. An entry of one placement is solved when it comes first.
    queue = [(first[start], start, False) for start in range(0, len(placements), _AT_ONCE)]
    heapq.heapify(queue)
    best: Assignment | None = None
    proved = left_out
    in_time = True
    while queue and (best is None or queue[0][0] < best.seconds * (1 - gap)):
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            in_time = False
            break
        bound, start, is_one = heapq.heappop(queue)
        if not is_one:
            for offset, better in enumerate(bounds.second(placements[start : start + _AT_ONCE])):
                heapq.heappush(queue, (better, start + offset, True))
            continue
        ends = placements[start]
        base = float(bounds.base(ends[None])[0])
        limits = (float(bound) - base, math.inf if best is None else best.seconds - base)
        stages_of = _stages(problem, excess, ends)
        if problem.error_budget is None or len(stages_of) == 1 or gap == 0:
            options, lower_bound, is_done = _choose(problem, stages_of, limits, gap, seconds_left)
        else:
            quick = partial(bounds.errors, ends)
            options, lower_bound, is_done = _bisect(problem, stages_of, limits, gap * float(bound), deadline, quick)
        proved, in_time = min(proved, base + lower_bound), in_time and is_done
        if options is None:
            continue
        stages = tuple(int(stage) for stage in np.searchsorted(ends, np.arange(len(problem.blocks)), side="right"))
        parts = step_parts(problem, stages, options)
        if best is None or parts.seconds < best.seconds:
            best = Assignment(stages, options, parts, gap=1.0, optimal=False)
    if best is None and in_time and left_out == math.inf:
        raise _no_room_for_errors(problem, excess, time_limit)
    if best is None:
        raise NotInTimeError(
            f"An assignment must be found within the time limit; got none in {time_limit} seconds. Give more time, or "
            "fewer tensors: merge those that are exchanged in the same way."
        )
    proved = min([proved, best.seconds, *[bound for bound, _, _ in queue[:1]]])
    relative_gap = 1 - proved / best.seconds if best.seconds else 0.0
    return Assignment(best.stages, best.options, best.parts, gap=relative_gap, optimal=relative_gap <= gap + _TOLERANCE)


def _placements(bounds: Bounds, S: int, B: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns stage ends (n, S) of placements, their bounds (n,) in ascending order, and the least bound left out."""
    ends, left_out = np.zeros((1, 0), int), math.inf
    first_bounds = np.zeros(1)
    for s in range(S):
        nexts = np.arange(s + 1, B - (S - 1 - s) + 1) if s < S - 1 else np.array([B])
        last = ends[:, -1] if s else np.zeros(1, int)
        rows, columns = np.nonzero(nexts > last[:, None])
        ends = np.concatenate([ends[rows], nexts[columns, None]], axis=1)
        first_bounds = bounds.first(ends)
        order = np.argsort(first_bounds, kind="stable")
        order = order[np.isfinite(first_bounds[order])]
        if len(order) > _KEPT:
            left_out = min(left_out, float(first_bounds[order[_KEPT]]))
        ends, first_bounds = ends[order[:_KEPT]], first_bounds[order[:_KEPT]]
    return ends, first_bounds, left_out


def _stages(problem: Problem, excess: np.ndarray, ends: Sequence[int] | np.ndarray) -> list[tuple[list[Tensor], float]]:
    """Returns the tensors of every stage, and its spare bytes: those that its device has beyond the least need."""
    parts = enumerate(itertools.pairwise([0, *(int(end) for end in ends)]))
    return [([t for b in problem.blocks[i:j] for t in b.tensors], -float(excess[s, i, j])) for s, (i, j) in parts]


def _choose(
    problem: Problem,
    stages: list[tuple[list[Tensor], float]],
    limits: tuple[float, float],
    gap: float,
    time_limit: float,
    *,
    of_errors: bool = False,
) -> tuple[dict[str, str] | None, float, bool]:
    """Solves the program of a placement.

    Args:
      problem: the problem, for its starts and its budget.
      stages: the tensors of every stage, and its spare bytes.
      limits: the lower and upper limit of the exchange's seconds.
      gap: the relative amount by which the exchange may be longer than the shortest.
      time_limit: in seconds.
      of_errors: minimise the sum of errors instead of the seconds, without a budget.

    Returns:
      The option of every tensor, or None if no choice fits; a lower bound of the best's seconds (or errors); whether
      the solver finished in time.
    """
    from scipy.optimize import milp
    from scipy.sparse import coo_array

    tensors = [tensor for stage_tensors, _ in stages for tensor in stage_tensors]
    if not tensors:
        return {}, 0.0, True
    has_budget = problem.error_budget is not None and not of_errors
    least_error = _least_error(tensors)
    spare_error = max(0.0, (problem.error_budget or 0.0) - least_error) if has_budget else math.inf
    groups: list[tuple[int, tuple[Option, ...], list[str]]] = []
    for s, (stage_tensors, spare) in enumerate(stages):
        by_options: dict[tuple[Option, ...], list[str]] = {}
        for tensor in stage_tensors:
            options = _useful(problem, tensor, spare_error, spare, has_errors=has_budget or of_errors)
            by_options.setdefault(options, []).append(tensor.name)
        groups += [(s, options, names) for options, names in by_options.items()]
    unit = _unit(problem, groups, len(stages))
    error_unit = (problem.error_budget or least_error or 1.0) / _SCALE
    rows: list[tuple[float, float, dict[int, float]]] = []

    def row(low: float, high: float, coefficients: dict[int, float]) -> dict[int, float]:
        """Adds a row with limits; returns its coefficients by column, to be filled."""
        rows.append((low, high, coefficients))
        return coefficients

    seconds = [row(-np.inf, 0.0, {0: -1.0}) for _ in stages]
    errors = row(-np.inf, _SCALE, {})
    memory = [row(-np.inf, _SCALE, {}) for _ in stages]
    upper, cost = [limits[1] / unit], [0.0 if of_errors else 1.0]
    starts: dict[tuple[int, str], int] = {}
    for s, options, _ in groups:
        for option in options:
            if problem.start(option.name) > 0 and (s, option.name) not in starts:
                starts[s, option.name] = len(upper)
                seconds[s][len(upper)] = problem.start(option.name) / unit
                upper.append(1.0)
                cost.append(0.0)
    columns = []
    for s, options, names in groups:
        n = len(names)
        one_each, spare = row(n, n, {}), stages[s][1]
        for option in options:
            w = len(upper)
            columns.append(w)
            upper.append(n)
            one_each[w] = 1.0
            seconds[s][w] = option.seconds / unit
            if has_budget and spare_error > 0:
                errors[w] = option.error / spare_error * _SCALE
            if 0 < spare < math.inf:
                memory[s][w] = option.memory / spare * _SCALE
            if (start := starts.get((s, option.name))) is not None:
                row(0.0, np.inf, {start: n, w: -1.0})
            cost.append(option.error / error_unit if of_errors else 0.0)
    cells = {(at, column): value for at, (*_, terms) in enumerate(rows) for column, value in terms.items()}
    coordinates = tuple(zip(*cells, strict=True))
    matrix = coo_array((list(cells.values()), coordinates), shape=(len(rows), len(upper))).tocsc()
    result = milp(
        np.array(cost),
        integrality=np.array([0, *[1] * (len(upper) - 1)]),
        bounds=(np.array([max(0.0, limits[0]) / unit, *[0.0] * (len(upper) - 1)]), np.array(upper)),
        constraints=(matrix, np.array([low for low, _, _ in rows]), np.array([high for _, high, _ in rows])),
        options={"time_limit": time_limit, "mip_rel_gap": gap},
    )
    scale = error_unit if of_errors else unit
    is_done = result.status != 1
    if result.x is None:
        return None, math.inf if is_done else 0.0, is_done
    counts, choice = iter(np.rint(result.x[columns]).astype(int)), {}
    for _, options, names in groups:
        option_names = [option.name for option in options for _ in range(next(counts))]
        choice |= zip(names, option_names, strict=True)
    return choice, max(0.0, result.mip_dual_bound * scale), is_done


def _bisect(
    problem: Problem,
    stages: list[tuple[list[Tensor], float]],
    limits: tuple[float, float],
    tolerance: float,
    deadline: float,
    least_errors: Callable[[float], np.ndarray],
) -> tuple[dict[str, str] | None, float, bool]:
    """Solves the program of a placement by programs of its stages.

    For a given E, the stages are coupled by the budget alone: it can be kept if the sum of the stages' least errors is
    within it. The shortest E is found by bisection.

    Args:
      problem: the problem, for its starts and its budget.
      stages: the tensors of every stage, and its spare bytes.
      limits: the lower and upper limit of the exchange's seconds.
      tolerance: seconds by which the exchange may be longer than the shortest.
      deadline: the end of the search, by `time.monotonic()`.
      least_errors: E -> lower bounds of the stages' errors, (S,).

    Returns:
      As `_choose`.
    """
    budget = (problem.error_budget or 0.0) * (1 + _ROUNDING)
    low, high = max(0.0, limits[0]), limits[1]
    best: dict[str, str] | None = None
    # Try the upper limit first: it rules out most placements. Without one, go up from the lower limit in growing steps.
    ceiling = _ceiling(problem, stages)
    tolerance = max(tolerance, _ROUNDING * ceiling)
    step = tolerance
    tried = high - tolerance / 2 if high < math.inf else low + step
    while True:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            return best, low, False
        errors = least_errors(tried)
        options: dict[str, str] | None = {}
        for s in np.argsort(-errors):
            if math.fsum(errors) > budget:
                options = None
                break
            choice, errors[s], is_done = _choose(problem, [stages[s]], (0.0, tried), 0.0, seconds_left, of_errors=True)
            if not is_done:
                return best, low, False
            if choice is None:
                options = None
                break
            options |= choice
        if options is not None and math.fsum(errors) <= budget:
            longest = max(_seconds(problem, stage_tensors, options) for stage_tensors, _ in stages)
            best, high = options, min(tried, longest)
        else:
            low = max(low, tried)
            if best is None and limits[1] < math.inf:
                return None, low, True
            if best is None and low > ceiling:
                return None, math.inf, True
        if high - low <= tolerance:
            return best, low, True
        step *= 4
        tried = min((low + high) / 2, low + step)


def _ceiling(problem: Problem, stages: list[tuple[list[Tensor], float]]) -> float:
    """Returns an upper bound of the seconds of any exchange."""
    tensors = (tensor for stage_tensors, _ in stages for tensor in stage_tensors)
    return math.fsum(max(o.seconds + problem.start(o.name) for o in t.options) for t in tensors)


def _seconds(problem: Problem, tensors: Sequence[Tensor], options: dict[str, str]) -> float:
    """Returns the seconds of a stage's exchange."""
    names = {options[tensor.name] for tensor in tensors}
    seconds = (o.seconds for t in tensors for o in t.options if o.name == options[t.name])
    return math.fsum(seconds) + sum(problem.start(name) for name in names)


def _useful(
    problem: Problem, tensor: Tensor, spare_error: float, spare_memory: float, *, has_errors: bool
) -> tuple[Option, ...]:
    """Returns the options that are within the limits and not dominated.

    An option is dominated if another is no worse, even if only the other pays its start. Memory, and errors under a
    budget, are given relative to the tensor's least, and as 0 without a limit, so that more tensors are equal. If
    errors are minimised (`spare_error` is infinite) they are not made relative.
    """
    lowest_error = min(option.error for option in tensor.options)
    lowest_memory = min(option.memory for option in tensor.options)
    taken_off = lowest_error if spare_error < math.inf else 0.0
    max_error = lowest_error + spare_error + _ROUNDING * (problem.error_budget or 0.0)
    options = [
        Option(
            o.name,
            o.seconds,
            max(0.0, o.error - taken_off) if has_errors else 0.0,
            o.memory - lowest_memory if spare_memory < math.inf else 0,
        )
        for o in tensor.options
        if o.error <= max_error and o.memory - lowest_memory <= spare_memory
    ]
    undominated: list[Option] = []
    for option in sorted(options, key=lambda o: o.seconds + problem.start(o.name)):
        if not any(
            rival.seconds + problem.start(rival.name) <= option.seconds
            and rival.error <= option.error
            and rival.memory <= option.memory
            for rival in undominated
        ):
            undominated.append(option)
    return tuple(undominated)


def _unit(problem: Problem, groups: list[tuple[int, tuple[Option, ...], list[str]]], stages: int) -> float:
    """Returns the unit of time of the program, a small part of an exchange, in seconds."""
    shortest, longest = [0.0] * stages, 0.0
    for s, options, names in groups:
        shortest[s] += len(names) * min((option.seconds for option in options), default=0.0)
        longest = max([longest, *(option.seconds + problem.start(option.name) for option in options)])
    return (max(shortest) or longest) / _SCALE or 1.0


def _least_error(tensors: Sequence[Tensor]) -> float:
    return math.fsum(min(option.error for option in tensor.options) for tensor in tensors)


def _excess(problem: Problem) -> np.ndarray:
    """Returns the least bytes by which each range of blocks exceeds each stage's device, (S, B + 1, B + 1)."""
    needs = [b.memory + sum(min(o.memory for o in t.options) for t in b.tensors) for b in problem.blocks]
    needs = ranges(np.array(needs, float))
    is_range = np.isfinite(needs)
    limits = [np.inf if device.memory is None else float(device.memory) for device in problem.devices]
    return np.stack([np.where(is_range, np.where(is_range, needs, 0) - at, np.inf) for at in limits])


def _check_memory(problem: Problem, excess: np.ndarray) -> None:
    ends = closest_fit(excess)
    excess_bytes = [float(excess[s, i, j]) for s, (i, j) in enumerate(itertools.pairwise((0, *ends)))]
    stage = int(np.argmax(excess_bytes))
    if excess_bytes[stage] > 0:
        limit = problem.devices[stage].memory or 0
        raise ValueError(
            f"Every stage must fit into the memory of its device; got {limit:,} bytes for stage {stage}, which needs "
            f"{limit + int(excess_bytes[stage]):,} in the assignment that comes closest. Give the devices at least "
            f"{int(excess_bytes[stage]):,} bytes more, or use more stages, or options that need less."
        )


def _check_errors(problem: Problem) -> None:
    smallest = _least_error([tensor for block in problem.blocks for tensor in block.tensors])
    if problem.error_budget is not None and smallest > problem.error_budget * (1 + _ROUNDING):
        raise ValueError(
            f"The errors must stay within the budget; got error_budget={problem.error_budget} where the smallest "
            f"reachable sum is {smallest}. Give at least that, or every tensor a dense option."
        )


def _no_room_for_errors(problem: Problem, excess: np.ndarray, time_limit: float) -> ValueError:
    """Returns the error for an error budget and a memory limit that can each be kept, but not both."""
    S, B = excess.shape[0], len(problem.blocks)
    errors, cache = np.full(excess.shape, np.inf), {}
    for s, i, j in np.argwhere(excess <= 0).tolist():
        spare = -float(excess[s, i, j])
        if (i, j, spare) not in cache:
            stage = [([tensor for block in problem.blocks[i:j] for tensor in block.tensors], spare)]
            cache[i, j, spare] = _choose(problem, stage, (0.0, math.inf), 0.0, time_limit / (S * B), of_errors=True)[1]
        errors[s, i, j] = cache[i, j, spare]
    return ValueError(
        f"The errors must stay within the budget; got error_budget={problem.error_budget} where the smallest sum that "
        f"the memory of the devices leaves is {to_go(errors, np.add)[0, 0]:.6g}. Give at least that, devices with more "
        "memory, or options that need less."
    )
