"""TernGrad in NumPy: the oracle of the tests.

Algorithm 1 of Wen, Xu, Yan, Wu, Wang, Chen and Li, "TernGrad: Ternary Gradients to Reduce Communication in Distributed
Deep Learning" (NeurIPS 2017), with its layer-wise ternarizing, scaler sharing and gradient clipping (section 3). The
paper's N workers are K here. For worker i and one tensor:

    1:  input the worker's part of the mini-batch
    2:  compute the gradient g_i
    3:  ternarize it:  t_i = s * sign(g_i) * b_i,  b_i = 1 with probability |g_i| / s, else 0, at each coordinate
    4:  push t_i to the server
    5:  pull the average t from the server
    6:  apply t, which is the mean here
    7:  on the server:  t = (t_1 + ... + t_K) / K

Before line 3 the gradient is clipped to +-c * sigma, sigma being the standard deviation of its elements (c = 2.5 in the
paper). s is the largest |g_i| of all workers (scaler sharing), so that line 7 adds up the codes sign(g_i) * b_i, which
are integers. Without clipping t is unbiased. There is no error feedback.

Where the paper is silent, or this differs:

- Every tensor has its own s and each worker its own sigma of it (the population's, about the mean). They are taken from
  the gradient after and before clipping. A sigma which float32 does not hold clips nothing.
- Line 3: b_i = 1 where u < |g_i| / s, with u uniform in [0, 1). If s is 0, the codes are 0.
- Line 7 is (sum of the codes) * (s * float32(1 / K)) in float32. The sum is exact in any order, so that every
  collective gives the same mean.
- A tensor with fewer than `dense_below` elements goes dense in float32.
- If any worker's gradient or the mean holds a non-finite number, all workers skip the step: the mean is zero. The steps
  are counted from 0, skipped ones too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .common import (
    StepResult,
    Tensors,
    all_finite,
    as_float32,
    compressed_names,
    mean_over_workers,
    skipped_step,
    whole_step,
)


@dataclass(kw_only=True, eq=False)
class TernGradReference:
    """K synchronous workers which exchange ternary gradients.

    Args:
        uniform: (step, worker) -> random numbers in [0, 1), float32, in the shapes of the gradient, by name.
        clip: the paper's c, or None not to clip.
        dense_below: tensors with fewer elements than this are sent dense.
        collective: how the codes are summed; any one gives the same result.
    """

    uniform: Callable[[int, int], Tensors]
    clip: float | None = 2.5
    dense_below: int = 512
    collective: str = "gather"
    k: int = field(default=0, init=False)

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker. `sent` counts all coordinates, `overflow` none."""
        K = len(gradients)
        compressed = compressed_names(gradients[0], self.dense_below)
        step = self.k
        self.k += 1

        # 1, 2: the gradients
        gradients = as_float32(gradients)
        if not all_finite(gradients):
            return skipped_step(gradients)

        all_u = [self.uniform(step, w) for w in range(K)]
        dense = [{name: g for name, g in worker.items() if name not in compressed} for worker in gradients]
        mean = mean_over_workers(dense)
        for name in compressed:
            # before 3: clip, and share the scaler
            clipped = [self._clip(worker[name]) for worker in gradients]
            s = np.float32(max(np.abs(g).max() for g in clipped))
            # 3 to 5: the codes, and their sum
            total = np.zeros(clipped[0].shape, np.int64)
            for w in range(K):
                total += ternary_codes(clipped[w], s, all_u[w][name])
            # 7: the average
            with np.errstate(over="ignore"):
                mean[name] = total.astype(np.float32) * (s * np.float32(1 / K))
        return whole_step({name: mean[name] for name in gradients[0]}, gradients, compressed)

    def _clip(self, g: np.ndarray) -> np.ndarray:
        """The gradient within +-c * sigma."""
        if self.clip is None:
            return g
        with np.errstate(over="ignore", invalid="ignore"):
            limit = np.float32(self.clip) * np.std(g, dtype=np.float32)
        return np.clip(g, -limit, limit) if np.isfinite(limit) else g


def ternary_codes(g: np.ndarray, s: np.float32, u: np.ndarray) -> np.ndarray:
    """Line 3, but for the scaler: -1, 0 or 1 for each element of a tensor."""
    if s == 0:
        return np.zeros(g.shape, np.int64)
    return np.sign(g).astype(np.int64) * (np.asarray(u, np.float32) < np.abs(g) / s)
