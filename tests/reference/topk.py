"""Top-k with error feedback in NumPy: what DCT-DP approximates, and an oracle of the tests.

The sparsification of Stich et al., "Sparsified SGD with Memory" (NeurIPS 2018), for each tensor by
itself, in the form to which Gupta et al. (KDD 2021) compare DCT-DP. For one worker and one tensor
of N elements:

    1:  x = gradient + residual
    2:  chosen = the k = max(1, N - floor(N * sparsity)) coordinates of largest |x|; of equal ones
        those of the lowest flat index (C order); never a zero, so that fewer than k may be chosen
    3:  sent = x on the chosen coordinates, rounded to the payload's type; 0 elsewhere
    4:  residual = x - sent
    5:  send `sent`; all K workers receive the mean of what the K workers sent

Small tensors, numbers of 2^100 or more, and non-finite ones are treated as in `dct_dp`.
"""

from dataclasses import dataclass, field

import numpy as np

from .common import (
    Select,
    StepResult,
    Tensors,
    add_residuals,
    all_finite,
    can_be_added,
    check_value_dtype,
    compressed_names,
    largest,
    n_kept,
    skipped_step,
    sparse_step,
    zero_residuals,
)


@dataclass(eq=False)
class TopKReference:
    """K synchronous workers which exchange their gradients by top-k; K is that of the first step.

    Args:
        sparsity: the fraction of the coordinates which is dropped.
        dense_below: tensors with fewer elements than this are sent dense.
        value_dtype: the type in which the sent values travel, "float32" or "bfloat16".

    Attributes:
        residuals: per worker, what it has not sent, by name; compressed tensors only.
    """

    sparsity: float
    dense_below: int = 512
    value_dtype: str = "float32"
    residuals: list[Tensors] = field(default_factory=list, init=False)

    def __post_init__(self):
        check_value_dtype(self.value_dtype)

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker. `overflow` is always 0."""
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.residuals = zero_residuals(gradients, compressed)

        # 1: error feedback
        all_x = add_residuals(gradients, self.residuals)

        if not can_be_added(gradients, compressed) or not all_finite(all_x):
            return skipped_step(gradients)

        # 2 to 5
        residuals, result = self._send(all_x, compressed, self._select)
        if not result.skipped:
            self.residuals = residuals
        return result

    def _select(self, _w: int, _name: str, flat: np.ndarray) -> np.ndarray:
        """Line 2: the coordinates of one tensor, as flat indices in ascending order."""
        return largest(flat, self._capacity(flat.size))

    def _send(self, all_x: list[Tensors], compressed: list[str], select: Select) -> tuple[list[Tensors], StepResult]:
        """Lines 3 to 5, given line 2: (each worker's new residual, what the step gave)."""
        return sparse_step(all_x, compressed, select, self._capacity, 0.0, self.value_dtype)

    def _capacity(self, n: int) -> int:
        """The slots in a payload, for a tensor of n elements: its k, so that what is chosen fits."""
        return n_kept(n, self.sparsity)
