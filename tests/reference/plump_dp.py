"""The dense exchange in NumPy: all K workers receive the mean of their K gradients.

If a gradient or the mean holds a non-finite number, the step is skipped: the mean is zero.
"""

import numpy as np

from .common import VALUE_DTYPES, StepResult, Tensors, all_finite, mean_over_workers, skipped_step


class PlumpDpReference:
    """K synchronous workers which exchange their gradients densely.

    Args:
        value_dtype: the type in which values are sent. In bfloat16 each worker rounds its own, the owner of a
            coordinate sums them in float32 in the order of the workers, and rounds the sum; of two workers, each sums
            them, and does not round the sum. In float16 each worker divides its own by K and rounds it, and the network
            sums them: here every partial sum is rounded, in the order of the workers.
    """

    def __init__(self, value_dtype: str = "float32") -> None:
        self.dtype = VALUE_DTYPES[value_dtype]

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker. `sent` counts compressed tensors: none."""
        K = len(gradients)
        gradients = [{name: np.asarray(g, np.float32) for name, g in worker.items()} for worker in gradients]
        if self.dtype == np.float32:
            mean = mean_over_workers(gradients)
        elif self.dtype == np.float16:
            mean = {name: self._half_mean([worker[name] for worker in gradients]) for name in gradients[0]}
        else:
            mean = {name: self._narrow_mean([worker[name] for worker in gradients]) for name in gradients[0]}
        if not all_finite([mean]):
            return skipped_step(gradients)
        result = StepResult(mean=mean, sent=[0] * K, overflow=[0] * K, skipped=False)
        if self.dtype == np.float16:
            result.near_ties = {
                name: self._near_ties([worker[name] for worker in gradients], mean[name]) for name in mean
            }
        return result

    def _half_mean(self, rows: list[np.ndarray]) -> np.ndarray:
        total = np.zeros(rows[0].shape, self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for row in rows:
                total = total + (row / np.float32(len(rows))).astype(self.dtype)
        return total.astype(np.float32)

    def _near_ties(self, rows: list[np.ndarray], mean: np.ndarray) -> np.ndarray:
        apart = np.zeros(mean.shape, np.float32)
        for row in rows:
            part = row / np.float32(len(rows))
            below, above = (np.nextafter(part, np.float32(end)).astype(self.dtype) for end in (-np.inf, np.inf))
            apart = apart + (above.astype(np.float32) - below.astype(np.float32))
        # A partial sum that is off may also be rounded the other way.
        return np.where(apart > 0, apart + np.spacing(np.abs(mean).astype(self.dtype)).astype(np.float32), 0)

    def _narrow_mean(self, rows: list[np.ndarray]) -> np.ndarray:
        total = np.zeros(rows[0].shape, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for inf, nan
            for row in rows:
                total = total + row.astype(self.dtype).astype(np.float32)
            if len(rows) != 2:
                total = total.astype(self.dtype).astype(np.float32)
            return total / np.float32(len(rows))
