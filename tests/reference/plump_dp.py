"""The dense exchange in NumPy: all K workers receive the mean of their K gradients.

If a gradient or the mean holds a non-finite number, the step is skipped: the mean is zero.
"""

import numpy as np

from .common import StepResult, Tensors, all_finite, mean_over_workers, skipped_step


class PlumpDpReference:
    """K synchronous workers which exchange their gradients densely."""

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker. `sent` counts compressed tensors: none."""
        K = len(gradients)
        gradients = [{name: np.asarray(g, np.float32) for name, g in worker.items()} for worker in gradients]
        mean = mean_over_workers(gradients)
        if not all_finite([mean]):
            return skipped_step(gradients)
        return StepResult(mean=mean, sent=[0] * K, overflow=[0] * K, skipped=False)
