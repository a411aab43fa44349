"""Top-k and DCT-DP by a balanced sparse all-reduce in NumPy: the oracles of the tests.

Algorithms 1 and 2 of Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022),
Ok-Topk, whose traffic is at most that of 6 * k values, whatever the number of workers. Their P workers are K here,
their epsilon is `residual`, and their step size stays with the optimizer. Algorithm 2, on worker i in each step:

    acc = gradient + residual, x here
    u, indexes = the sparse all-reduce of acc
    residual = acc, but 0 at `indexes`
    apply u / K, which is the mean here

and algorithm 1, the sparse all-reduce:

     1:  input: x, the step t, k, and how often the regions and the thresholds are renewed
     2:  if the thresholds are due then
     3:      local_th = the k-th largest |x|
     4:  end if
     5:  if the regions are due then
     6:      boundaries of the K regions, one for each worker, which balance what the workers select
     7:  end if
     8:  split and reduce: send x where |x| >= local_th, each region to its owner, who adds up what comes
     9:  if the thresholds are due then
    10:      gather the sums of all owners
    11:      global_th = the k-th largest |sum|
    12:  end if
    13:  balance and all-gather: u = the sums where |sum| >= global_th, to everybody
    14:  indexes = what this worker sent in line 8 that is part of u
    15:  return u, indexes

Where this differs, since a payload has a fixed capacity and a residual must lose nothing:

- Lines 2 to 4: what a worker selects is that of `topk` or of `dct_dp`, for each tensor by itself; the latter
  without its capacity per tensor.
- Lines 5 to 7: the regions are equal and fixed. All compressed tensors, in the sorted order of their names, each padded
  with zeros to whole blocks of 1024, are one vector of B blocks; a region has ceil(B / K) of them, the last ones
  shorter or empty.
- Line 8: a worker selects M coordinates of a region. It sends all of them if M <= R; otherwise R of them, from number
  floor(turn * M) on, wrapping around, with a random turn in [0, 1) for each step. The slots of the payload of the
  method without this (k, or the capacity, of every tensor; C in all) are spread evenly over the coordinates of their
  tensors; m is the largest sum over a region. R is ceil(max(region_slack * m, m + 5 sqrt(m))), at most C, and at most
  the ceil(B / K) * 1024 coordinates of a region. The rest, the overflow, stays in the residual. Values are rounded to
  the payload's type; the rounding error stays too. The owner sums in float32, in the order of the workers.
- Lines 9 to 13: an owner sends the R largest |sum| of its region, rounded to the payload's type; of equal ones those of
  the lowest index; never a zero.
- Line 14: what a worker sent but is not in u stays on the worker, as in the paper; so does what is 0 in u, unless the
  owner has a slot left. The owner adds the rounding errors of the other sums to its own residual.
- `sent` and `overflow` count line 8.
- Small tensors go dense, and a drain is one, as in `topk` and `dct_dp`. If any worker's gradient or x, a sum, or a new
  residual holds a non-finite number, or a gradient one of 2^100 or more, all workers skip the step, with the same
  conditions and consequences as there.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .common import (
    BLOCK,
    Select,
    StepResult,
    Tensors,
    Turn,
    all_finite,
    in_turn,
    largest,
    mean_of_sums,
    round_values,
    send_chosen,
    skipped_step,
    sum_over_workers,
)
from .dct_dp import DctDpReference
from .topk import TopKReference


class BalancedTopKReference(TopKReference):
    """K synchronous workers which exchange their gradients by top-k and the balanced all-reduce.

    Args:
        sparsity: the fraction of the coordinates which is dropped.
        region_slack: the slots of a region over its share of the slots.
        dense_below: tensors with fewer elements than this are sent dense.
        value_dtype: the type in which values travel, "float32" or "bfloat16".
        turn: a function of the step: a number in [0, 1), which coordinates of a region with too many are sent.

    Attributes:
        residuals: per worker, what was not applied and it has to send, by name; compressed tensors only.
    """

    def __init__(
        self,
        *,
        sparsity: float,
        turn: Turn,
        region_slack: float = 1.25,
        dense_below: int = 512,
        value_dtype: str = "float32",
    ):
        super().__init__(sparsity, dense_below, value_dtype)
        self.region_slack = region_slack
        self.turn = turn
        self.k = 0

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker. `overflow` is that of line 8."""
        result = super().step(gradients)
        self.k += 1
        return result

    def _send(self, all_x: list[Tensors], compressed: list[str], select: Select) -> tuple[list[Tensors], StepResult]:
        turn = self.turn(self.k)
        return balanced_step(all_x, compressed, select, self._capacity, self.region_slack, turn, self.value_dtype)


class BalancedDctDpReference(DctDpReference):
    """K synchronous workers which exchange their gradients by DCT-DP and the balanced all-reduce.

    Args:
        region_slack: the slots of a region over its share of the slots.
        options: those of `DctDpReference`; the turn decides which coordinates of a region with too many are sent.

    Attributes:
        residuals: per worker, what was not applied and it has to send, by name; compressed tensors only.
        thresholds: per worker, tau by name; compressed tensors only. 0 before the first refresh.
    """

    def __init__(self, *, region_slack: float = 1.25, **options: Any):
        super().__init__(**options)
        self.region_slack = region_slack

    def _send(self, all_x: list[Tensors], compressed: list[str], select: Select) -> tuple[list[Tensors], StepResult]:
        turn = self.turn(self.k - 1)
        return balanced_step(all_x, compressed, select, self._capacity, self.region_slack, turn, self.value_dtype)


class Regions:
    """Where the compressed tensors are in one vector of blocks, and which worker owns which part.

    Attributes:
        size: the coordinates of a region.
        offsets: by name, in the order of the vector, where a tensor starts.
    """

    def __init__(self, sizes: dict[str, int], K: int):
        self.offsets = {}
        blocks = 0
        for name in sorted(sizes):
            self.offsets[name] = blocks * BLOCK
            blocks += math.ceil(sizes[name] / BLOCK)
        self.size = math.ceil(blocks / K) * BLOCK

    def largest_share(self, sizes: dict[str, int], capacity: Callable[[int], int], K: int) -> float:
        """The slots of a region, if those of every tensor are spread evenly over it, in the region that has most."""
        shares = np.zeros(K)
        for name, n in sizes.items():
            shares += np.bincount(self.owners(name, np.arange(n)), minlength=K) * (capacity(n) / n)
        return max(shares)

    def owners(self, name: str, indices: np.ndarray) -> np.ndarray:
        """The workers which own coordinates of a tensor, given as flat indices."""
        return (self.offsets[name] + indices) // self.size


def balanced_step(
    all_x: list[Tensors],
    compressed: list[str],
    select: Select,
    capacity: Callable[[int], int],
    region_slack: float,
    turn: float,
    value_dtype: str,
) -> tuple[list[Tensors], StepResult]:
    """The sparse all-reduce of what the workers select.

    Args:
        all_x: each worker's x.
        compressed: the names of the compressed tensors.
        select: how a worker selects coordinates of a tensor.
        capacity: (elements of a tensor) -> the slots of the method without this.
        region_slack: the slots of a region over its share of these.
        turn: in [0, 1), which coordinates of a region with too many are sent, see `in_turn`.
        value_dtype: the type in which the values travel.

    Returns:
        (each worker's new residual, what the step gave). If the step is skipped, the first has no meaning.
    """
    K = len(all_x)
    sizes = {name: all_x[0][name].size for name in compressed}
    regions = Regions(sizes, K)
    total_slots = sum(capacity(n) for n in sizes.values())
    m = regions.largest_share(sizes, capacity, K)
    R = min(regions.size, total_slots, math.ceil(max(region_slack * m, m + 5 * math.sqrt(m))))

    # 8: each worker sends to the owners
    all_sent, sent_counts, overflow_counts = [], [], []
    for w, x in enumerate(all_x):
        selected = {name: select(w, name, x[name].reshape(-1)) for name in regions.offsets}
        chosen = in_turn_of_each_region(selected, regions, K, R, turn)
        sent, _ = send_chosen(x, chosen, value_dtype)
        all_sent.append(sent)
        sent_counts.append(sum(len(indices) for indices in chosen.values()))
        overflow_counts.append(sum(len(indices) for indices in selected.values()) - sent_counts[w])
    sums = {name: sum_over_workers([sent[name] for sent in all_sent]) for name in compressed}
    if not all_finite([sums]):
        return all_x, skipped_step(all_x)

    # 9 to 14: the owners send to everybody; workers keep what is not in it, and owners what they round off
    results = largest_of_each_region(sums, regions, K, R, value_dtype)
    nonzeros = np.zeros(K, int)
    for name in compressed:
        nonzeros += np.bincount(regions.owners(name, np.flatnonzero(sums[name])), minlength=K)
    has_room, residuals = nonzeros < R, []
    for j, (x, sent) in enumerate(zip(all_x, all_sent, strict=True)):
        residual = {}
        for name in compressed:
            owners = regions.owners(name, np.arange(sizes[name])).reshape(x[name].shape)
            is_in = (results[name] != 0) | has_room[owners]
            is_mine = is_in & (owners == j)
            with np.errstate(over="ignore"):  # looked for below
                left = x[name] - np.where(is_in, sent[name], np.float32(0))
                residual[name] = left + np.where(is_mine, sums[name] - results[name], np.float32(0))
        residuals.append(residual)

    mean = mean_of_sums(all_x, results)
    if not all_finite([mean]) or not all_finite(residuals):
        return residuals, skipped_step(all_x)
    return residuals, StepResult(mean=mean, sent=sent_counts, overflow=overflow_counts, skipped=False)


def in_turn_of_each_region(
    selected: dict[str, np.ndarray], regions: Regions, K: int, R: int, turn: float
) -> dict[str, np.ndarray]:
    """R of the selected coordinates of each region, from the start offset on in the order of the vector."""
    vector = np.sort(np.concatenate([offset + selected[name] for name, offset in regions.offsets.items()]))
    kept = np.concatenate([in_turn(vector[vector // regions.size == j], R, turn) for j in range(K)])
    chosen = {}
    for name, offset in regions.offsets.items():
        is_kept = np.isin(selected[name] + offset, kept)
        chosen[name] = selected[name][is_kept]
    return chosen


def largest_of_each_region(sums: Tensors, regions: Regions, K: int, R: int, value_dtype: str) -> Tensors:
    """What the owners send: the R largest sums of each region, rounded, and 0 elsewhere."""
    vector = np.zeros(K * regions.size, np.float32)
    for name, offset in regions.offsets.items():
        vector[offset : offset + sums[name].size] = sums[name].reshape(-1)
    results = np.zeros_like(vector)
    for j in range(K):
        mine = slice(j * regions.size, (j + 1) * regions.size)
        kept = largest(vector[mine], R)
        results[mine][kept] = round_values(vector[mine][kept], value_dtype)
    by_name = {}
    for name, offset in regions.offsets.items():
        by_name[name] = results[offset : offset + sums[name].size].reshape(sums[name].shape)
    return by_name
