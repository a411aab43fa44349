"""DGC, Deep Gradient Compression, in NumPy: an oracle of the tests.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training" (ICLR 2018), the algorithm of its Appendix D with the momentum of its Equation 7. A step of
one worker, with momentum m, and with a sparsity for each tensor of N elements by itself; v is
`residual` in the other exchanges:

    1:  g = the gradient, clipped locally
    2:  u = m * u + g
    3:  v = v + u
    4:  chosen = the largest |v|, a fraction 1 - sparsity of the N coordinates
    5:  sent = v on the chosen coordinates; 0 elsewhere
    6:  v = v - sent
    7:  u = 0 on the chosen coordinates
    8:  send `sent`; here all K workers receive the mean of what the K workers sent

Lines 1, 2, 3 and 7, the tensors that go dense and the warm-up are described in `momentum`.

Where the paper is silent:

- Line 4 chooses as top-k does: the k = max(1, N - floor(N * sparsity)) coordinates of largest |v|,
  exactly; of equal ones those of the lowest flat index (C order); never a zero.
- Line 5: the values are rounded to the payload's type before line 6, so that v keeps the rounding
  error. Line 7 makes u zero there nevertheless. It is left out if there is no factor masking.
- A step of the warm-up sends k = floor(f * N) coordinates, f its kept fraction, though no fewer than
  a later step, and in float32 whatever the payload's type is.
- If any worker's gradient or v, or what they would receive, holds a non-finite number, or a new u one
  of 2^100 or more in a compressed tensor, all workers skip the step: the mean is zero, u and v stay.
"""

from dataclasses import dataclass, field

import numpy as np

from .common import (
    StepResult,
    Tensors,
    all_finite,
    can_be_added,
    check_value_dtype,
    compressed_names,
    largest,
    mean_over_workers,
    n_kept,
    send_chosen,
    skipped_step,
    zero_residuals,
)
from .momentum import add_dense_momentum, clip_locally, correct_momentum, kept_fraction, mask_factors, warmup_slots


@dataclass(kw_only=True, eq=False)
class DgcReference:
    """K synchronous workers which exchange their gradients by DGC; K is that of the first step.

    Args:
        sparsity: the fraction of the coordinates which is dropped.
        momentum: the paper's m.
        factor_masking: whether u becomes zero where v was sent.
        clip: the norm at which gradients are clipped, before the factor K^(-1/2); None for never.
        warmup_steps: the number of steps which send more.
        dense_below: tensors with fewer elements than this are sent dense.
        value_dtype: the type in which the sent values travel, "float32" or "bfloat16".

    Attributes:
        velocities: per worker, u by name; compressed tensors only.
        residuals: per worker, v by name: what it has not sent; compressed tensors only.
        momentum_dense: u by name of the tensors which go dense, the same on every worker.
        k: the number of steps so far, skipped ones included.
    """

    sparsity: float
    momentum: float = 0.9
    factor_masking: bool = True
    clip: float | None = None
    warmup_steps: int = 0
    dense_below: int = 512
    value_dtype: str = "float32"
    k: int = field(default=0, init=False)
    velocities: list[Tensors] = field(default_factory=list, init=False)
    residuals: list[Tensors] = field(default_factory=list, init=False)
    momentum_dense: Tensors = field(default_factory=dict, init=False)

    def __post_init__(self):
        check_value_dtype(self.value_dtype)

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker. `overflow` is always 0."""
        K = len(gradients)
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.velocities = zero_residuals(gradients, compressed)
            self.residuals = zero_residuals(gradients, compressed)
            dense = [name for name in gradients[0] if name not in compressed]
            self.momentum_dense = zero_residuals(gradients[:1], dense)[0]
        k = self.k
        self.k += 1
        if not all_finite(gradients):
            return skipped_step(gradients)

        # 1 to 3: clipping, momentum correction, accumulation
        clipped = clip_locally(gradients, self.clip)
        velocities, all_v = correct_momentum(clipped, self.velocities, self.residuals, self.momentum)
        if not can_be_added(velocities, compressed) or not all_finite(all_v):
            return skipped_step(gradients)

        warm_up = k < self.warmup_steps
        all_sent, residuals, all_chosen = [], [], []
        for v in all_v:
            # 4: the largest
            chosen = {name: self._choose(name, v[name], k) for name in compressed}
            # 5, 6: the compressed accumulation, and the rest
            sent, residual = send_chosen(v, chosen, "float32" if warm_up else self.value_dtype)
            all_sent.append(sent)
            residuals.append(residual)
            all_chosen.append(chosen)

        # 7: factor masking
        if self.factor_masking:
            velocities = mask_factors(velocities, all_chosen)

        # 8: send
        mean = mean_over_workers(all_sent)
        momentum_dense = add_dense_momentum(mean, self.momentum_dense, self.momentum)
        received = {**mean, **momentum_dense}
        if not all_finite([received]):
            return skipped_step(gradients)
        self.velocities, self.residuals, self.momentum_dense = velocities, residuals, momentum_dense
        sent_counts = [sum(len(indices) for indices in chosen.values()) for chosen in all_chosen]
        return StepResult(mean=received, sent=sent_counts, overflow=[0] * K, skipped=False)

    def _choose(self, _name: str, v: np.ndarray, k: int) -> np.ndarray:
        """Line 4: the coordinates of one tensor, as flat indices in ascending order."""
        return largest(v.reshape(-1), self._slots(v.size, k))

    def _slots(self, n: int, k: int) -> int:
        """How many of n coordinates step k sends."""
        final = n_kept(n, self.sparsity)
        if k >= self.warmup_steps:
            return final
        return warmup_slots(kept_fraction(1 - self.sparsity, k, self.warmup_steps), n, final)
