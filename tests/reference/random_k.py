"""Random-k with error feedback in NumPy: the oracle of the tests.

Algorithm 1, Mem-SGD, of Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018), with the compressor
rand_k of its definition 2.1, on K workers. The paper's memory m is `residual` here; its step size stays with the
optimizer, so that x below is the paper's m_t + eta_t * gradient, but for eta_t. For one worker and one tensor of N
elements:

    1:  residual = 0, before the first step
    2:  for each step
    3:      sample the data; compute the gradient
    4:      sent = rand_k(x), x = gradient + residual: x at k random coordinates, 0 elsewhere
    5:      apply what the K workers receive: the mean of what they sent
    6:      residual = x - sent
    7:  end for

Where the paper is silent:

- k = max(1, N - floor(N * sparsity)).
- Line 4: the coordinates are the same on all workers, and new ones in each step. They are stratified, and the strata
  rotated: the N coordinates, from a random one on, wrapping around, are cut into k strata of N // k or, the first N % k
  of them, N // k + 1 coordinates; one is taken from each, at floor(u * width) with u uniform in [0, 1). The paper draws
  k of N without strata, and proves its rate for a uniform choice. Here too each coordinate is taken with probability
  k / N: without rotation, coordinates of the wider strata would be taken less often.
- Line 5: since the coordinates are shared, the values are summed slot by slot, in one of the three ways of
  `shared_sum`; line 6 includes rounding errors of the sum. The tensors are in the payload in the sorted order of their
  names.
- A tensor with fewer than `dense_below` elements goes dense in float32 and has no residual.
- If any worker's gradient or x, or a sum over the workers, holds a non-finite number, or a gradient a number of 2^100
  or more in a compressed tensor, all workers skip the step: the mean is zero, residuals stay. The steps are counted
  from 0, skipped ones too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .common import (
    StepResult,
    Tensors,
    add_residuals,
    all_finite,
    can_be_added,
    compressed_names,
    mean_of_sums,
    n_kept,
    skipped_step,
    zero_residuals,
)
from .shared_sum import check_collective, exchange_slots


@dataclass(kw_only=True, eq=False)
class RandomKReference:
    """K synchronous workers which exchange their gradients by random-k; K is that of the first step.

    Args:
        sparsity: the fraction of the coordinates which is dropped.
        uniform: step -> the random numbers of the step, float32 in [0, 1), of shape (k,) by name of the tensor; the
            same on all workers.
        offsets: step -> at which coordinate the first stratum of the step begins, from 0 to N - 1, by name of the
            tensor; the same on all workers.
        dense_below: tensors with fewer elements than this are sent dense.
        value_dtype: the type in which the sent values travel, "float32" or "bfloat16".
        collective: how values are summed, "psum", "two_shot" or "ring".

    Attributes:
        residuals: per worker, what it has not sent, by name; compressed tensors only.
    """

    sparsity: float
    uniform: Callable[[int], Tensors]
    offsets: Callable[[int], dict[str, int]]
    dense_below: int = 512
    value_dtype: str = "float32"
    collective: str = "psum"
    k: int = field(default=0, init=False)
    residuals: list[Tensors] = field(default_factory=list, init=False)

    def __post_init__(self):
        check_collective(self.collective, self.value_dtype)

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker. `overflow` is always 0."""
        K = len(gradients)
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.residuals = zero_residuals(gradients, compressed)
        step = self.k
        self.k += 1

        # 3: error feedback
        all_x = add_residuals(gradients, self.residuals)
        if not can_be_added(gradients, compressed) or not all_finite(all_x):
            return skipped_step(gradients)

        # 4: one coordinate of each stratum
        u, offsets = self.uniform(step), self.offsets(step)
        chosen, slots = {}, {}
        for name in compressed:
            n = all_x[0][name].size
            slots[name] = n_kept(n, self.sparsity)
            chosen[name] = draw_stratified(n, slots[name], u[name], offsets[name])

        # 5, 6: sum; keep what was not sent
        sums, residuals = exchange_slots(all_x, chosen, slots, self.collective, self.value_dtype)
        mean = mean_of_sums(all_x, sums)
        if not all_finite([mean]):
            return skipped_step(gradients)
        self.residuals = residuals
        return StepResult(mean=mean, sent=[sum(slots.values())] * K, overflow=[0] * K, skipped=False)


def draw_stratified(n: int, k: int, u: np.ndarray, offset: int = 0) -> np.ndarray:
    """One of the n coordinates from each of k strata, in the order of the strata.

    Args:
        n: how many coordinates there are.
        k: how many are taken.
        u: a number in [0, 1) for each stratum, float32 of shape (k,).
        offset: the coordinate at which the first stratum begins; the last ones wrap around to before it.
    """
    coordinates = np.zeros(k, np.int64)
    for s in range(k):
        start = s * (n // k) + min(s, n % k)
        width = n // k + (1 if s < n % k else 0)
        coordinates[s] = start + min(int(np.floor(np.float32(u[s]) * np.float32(width))), width - 1)
    return (coordinates + offset) % n
