"""DCT-DP, data-parallel dynamic communication thresholding, in NumPy: the oracle of the tests.

Algorithm 1 of Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model
and Data Parallelism" (KDD 2021), section 2.1. For one worker and one tensor of N elements, at
iteration k, with sparsity eta and threshold life-span L (the paper's W_grad, after line 2, is x
here; E_grad is `residual`):

     1:  Input: eta, L, k, the gradient, the residual, and tau of iteration k - 1
     2:  x = gradient + residual
     3:  if L divides k then
     4:      [w_1, ..., w_N] = Sort(|x|), ascending
     5:      tau = w_m, m = floor(N * eta)
     6:  else
     7:      keep tau of iteration k - 1
     8:  end if
     9:  mask = |x| >= tau
    10:  sent = x * mask
    11:  residual = x - sent
    12:  send `sent`; here all K workers receive the mean of what the K workers sent

Where the paper is silent:

- k counts the calls of `step`, from 0. In line 5, tau = 0 if m = 0.
- Line 9 never selects a zero.
- Line 10: the paper sends whatever is selected. Right after a refresh that is N - m + 1 coordinates,
  since the m-th smallest itself reaches tau (more if others equal it; N if m = 0). Here a payload has a
  fixed capacity: ceil(slack * (N - m + 1)), at most N. If more coordinates are selected, M of them, as
  many as fit are sent: in C order, from number floor(turn * M) on, wrapping around, with a
  random turn in [0, 1) for each step. The rest, the overflow, stay in the residual.
- Line 3, jaxcomm's additions, unless `early` is False: tau is renewed in more steps than the paper's.
  While k < L, where gradients change fastest, also at the powers of two, 1, 2, 4, ...; and at the step
  after one which was overfull, that is one with an old tau in which some worker selected in some tensor
  more than twice as many coordinates as the capacity. All workers and tensors are renewed at once.
- Line 10: the values are rounded to the payload's type before line 11, so that the residual holds
  the rounding error too. A finite value stays finite: what rounding would make infinite is sent as
  the largest finite number of the type.
- A tensor with fewer than `dense_below` elements goes dense in float32 and has no residual.
- If any worker's gradient or x, or the mean of line 12, holds a non-finite number, or a gradient one of
  2^100 or more in a compressed tensor, all workers skip the step: the mean is zero, residuals and
  thresholds stay. A refresh (lines 4 and 5) which was due is then due at the next step which is not
  skipped; the others stay where they are.
- In a drain every x goes dense in float32 and every residual becomes zero, so that a gradient of 2^100 is
  no reason to skip. A due refresh happens; nothing is overfull.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from .common import (
    Select,
    StepResult,
    Tensors,
    Turn,
    add_residuals,
    all_finite,
    can_be_added,
    check_value_dtype,
    compressed_names,
    drained_step,
    exactly,
    floor_of_dropped,
    skipped_step,
    sparse_step,
    zero_residuals,
)

POWERS_OF_TWO = [2**i for i in range(31)]


def algorithm_1(gradients: np.ndarray, eta: float, L: int) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 as printed, for one tensor of N elements, without what is written above about its silence.

    Args:
        gradients: (steps, K, N).
        eta: the sparsity.
        L: the threshold life-span.

    Returns:
        What the K workers receive in each step, (steps, N), and their residuals at the end, (K, N).
    """
    steps, K, N = gradients.shape
    residual, tau, received = np.zeros((K, N)), np.zeros(K), np.zeros((steps, N))
    for k in range(steps):
        for w in range(K):
            x = gradients[k, w] + residual[w]  # 2
            if k % L == 0:  # 3
                tau[w] = np.sort(np.abs(x))[int(N * eta) - 1]  # 4, 5
            mask = np.abs(x) >= tau[w]  # 9
            sent = x * mask  # 10
            residual[w] = x - sent  # 11
            received[k] += sent / K  # 12
    return received, residual


@dataclass(kw_only=True, eq=False)
class DctDpReference:
    """K synchronous workers which exchange their gradients by DCT-DP; K is that of the first step.

    Args:
        sparsity: the paper's eta, the fraction of the coordinates which is dropped.
        life_span: the paper's L, in steps.
        early: whether tau is also renewed in jaxcomm's additional steps.
        slack: the capacity over the N - floor(N * eta) + 1 coordinates which a new tau selects.
        dense_below: tensors with fewer elements than this are sent dense.
        value_dtype: the type in which the sent values travel, "float32" or "bfloat16".
        turn: a function of the step: a number in [0, 1), which coordinates are sent where too many are selected.

    Attributes:
        residuals: per worker, what it has not sent, by name; compressed tensors only.
        thresholds: per worker, tau by name; compressed tensors only. 0 before the first refresh.
    """

    sparsity: float
    turn: Turn
    life_span: int = 1000
    early: bool = True
    slack: float = 1.05
    dense_below: int = 512
    value_dtype: str = "float32"
    k: int = field(default=0, init=False)
    refresh_due: bool = field(default=False, init=False)
    residuals: list[Tensors] = field(default_factory=list, init=False)
    thresholds: list[dict[str, float]] = field(default_factory=list, init=False)

    def __post_init__(self):
        check_value_dtype(self.value_dtype)

    def step(self, gradients: list[Tensors], drain: bool = False) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker."""
        K = len(gradients)
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.residuals = zero_residuals(gradients, compressed)
            self.thresholds = [dict.fromkeys(compressed, 0.0) for _ in range(K)]

        # 2: error feedback
        all_x = add_residuals(gradients, self.residuals)

        # 3: does L divide k, is it a power of two below L, or is a refresh still owed?
        is_early = self.early and self.k < self.life_span and self.k in POWERS_OF_TWO
        if self.k % self.life_span == 0 or is_early:
            self.refresh_due = True
        self.k += 1

        if not (drain or can_be_added(gradients, compressed)) or not all_finite(all_x):
            return skipped_step(gradients)

        # 4 to 8: a new tau for each worker and tensor, or the old one
        thresholds = self.thresholds
        if self.refresh_due:
            thresholds = [{name: self._threshold(x[name]) for name in compressed} for x in all_x]

        def select(w: int, name: str, flat: np.ndarray) -> np.ndarray:  # 9: mask, as flat indices in ascending order
            tau = np.float32(thresholds[w][name])
            return np.flatnonzero((np.abs(flat) >= tau) & (flat != 0))

        # 10 to 12, or a drain
        overfull = False
        if drain:
            residuals, result = zero_residuals(gradients, compressed), drained_step(all_x, compressed)
        else:
            residuals, result = self._send(all_x, compressed, select)
            for w, x in enumerate(all_x):
                for name in compressed:
                    selected = select(w, name, x[name].reshape(-1))
                    overfull = overfull or len(selected) > 2 * self._capacity(x[name].size)
        if not result.skipped:
            self.residuals, self.thresholds = residuals, thresholds
            self.refresh_due = overfull and not self.refresh_due and self.early
        return result

    def _send(self, all_x: list[Tensors], compressed: list[str], select: Select) -> tuple[list[Tensors], StepResult]:
        """Lines 10 to 12, given line 9: (each worker's new residual, what the step gave)."""
        return sparse_step(all_x, compressed, select, self._capacity, self.turn(self.k - 1), self.value_dtype)

    def _threshold(self, x: np.ndarray) -> float:
        """Lines 4 and 5: the m-th smallest |x|, counted from 1."""
        m = floor_of_dropped(x.size, self.sparsity)
        if m == 0:
            return 0.0
        ascending = np.sort(np.abs(x.reshape(-1)))  # (N,)
        return float(ascending[m - 1])

    def _capacity(self, n: int) -> int:
        """The slots in a payload, for a tensor of n elements: what a new tau selects, and the slack."""
        selected = n - floor_of_dropped(n, self.sparsity) + 1
        return min(n, math.ceil(exactly(self.slack) * selected))
