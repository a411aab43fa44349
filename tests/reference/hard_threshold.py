"""Hard-threshold sparsification in NumPy: an oracle of the tests.

After Sahu et al. (NeurIPS 2021), for one worker and one tensor: x = gradient + residual; x is sent where |x| is at
least the threshold, or as many as there are slots, from a random one on, wrapping around; residual = x - sent.
"""

import numpy as np

from .common import (
    StepResult,
    Tensors,
    Turn,
    add_residuals,
    all_finite,
    can_be_added,
    compressed_names,
    n_kept,
    skipped_step,
    sparse_step,
    zero_residuals,
)


class HardThresholdReference:
    """K synchronous workers; the arguments are those of the method, and `turn` as in `pulse`."""

    def __init__(self, sparsity: float, threshold: float, turn: Turn, dense_below: int, value_dtype: str):
        self.sparsity, self.threshold, self.turn = sparsity, threshold, turn
        self.dense_below, self.value_dtype = dense_below, value_dtype
        self.k = 0
        self.residuals: list[Tensors] = []

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker."""
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.residuals = zero_residuals(gradients, compressed)
        turn = self.turn(self.k)
        self.k += 1
        all_x = add_residuals(gradients, self.residuals)
        if not can_be_added(gradients, compressed) or not all_finite(all_x):
            return skipped_step(gradients)

        def select(_w: int, _name: str, x: np.ndarray) -> np.ndarray:
            return np.flatnonzero(np.abs(x) >= np.float32(self.threshold))

        def slots(n: int) -> int:
            return n_kept(n, self.sparsity)

        residuals, result = sparse_step(all_x, compressed, select, slots, turn, self.value_dtype)
        if not result.skipped:
            self.residuals = residuals
        return result
