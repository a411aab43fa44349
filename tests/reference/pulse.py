"""PULSELoCo's exchange in NumPy: an oracle of the tests.

After the abstract of "PULSE" (arXiv 2602.03839, 2026), for one worker and one tensor w of N elements:

    1:  x = gradient + residual
    2:  visible = the coordinates i where bfloat16(w_i - learning_rate * x_i) != bfloat16(w_i)
    3:  chosen = the visible ones, or as many as there are slots, max(1, N - floor(N * sparsity)), from a random one
        on, wrapping around
    4:  sent = x on the chosen coordinates, rounded to the payload's type; 0 elsewhere
    5:  residual = x - sent
    6:  send `sent`; all K workers receive the mean of what the K workers sent

The slots are jaxcomm's; so are small tensors, numbers of 2^100 or more, and non-finite ones, as in `dct_dp`.
"""

from dataclasses import dataclass, field

import ml_dtypes
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


@dataclass(eq=False)
class PulseReference:
    """K synchronous workers which exchange their gradients by line 1 to 6; K is that of the first step.

    Args:
        sparsity: the fraction of the coordinates for which there is no slot.
        turn: a function of the step: a number in [0, 1), which coordinates are sent where too many are visible.
        learning_rate: of the step that follows.
        dense_below: tensors with fewer elements than this are sent dense.
        value_dtype: the type in which the sent values travel, "float32" or "bfloat16".

    Attributes:
        residuals: per worker, what it has not sent, by name; compressed tensors only.
    """

    sparsity: float
    turn: Turn
    learning_rate: float = 1.0
    dense_below: int = 512
    value_dtype: str = "float32"
    k: int = field(default=0, init=False)
    residuals: list[Tensors] = field(default_factory=list, init=False)

    def step(self, gradients: list[Tensors], params: Tensors) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker; the parameters are everyone's."""
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.residuals = zero_residuals(gradients, compressed)
        turn = self.turn(self.k)
        self.k += 1
        all_x = add_residuals(gradients, self.residuals)
        if not can_be_added(gradients, compressed) or not all_finite(all_x):
            return skipped_step(gradients)

        def select(_w: int, name: str, x: np.ndarray) -> np.ndarray:
            w = np.asarray(params[name], np.float32).reshape(-1)
            with np.errstate(over="ignore"):
                moved = w - np.float32(self.learning_rate) * x
                return np.flatnonzero(moved.astype(ml_dtypes.bfloat16) != w.astype(ml_dtypes.bfloat16))

        residuals, result = sparse_step(
            all_x, compressed, select, lambda n: n_kept(n, self.sparsity), turn, self.value_dtype
        )
        if not result.skipped:
            self.residuals = residuals
        return result
