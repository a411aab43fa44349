"""What the reference exchanges share: error feedback, the skip, the drain, the rounding, the mean.

Nothing here knows how an exchange chooses its coordinates. A worker's gradient, its x (gradient
plus residual) and what it sends are dicts of name -> float32 array; lists go over the workers.
"""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]

VALUE_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass
class StepResult:
    """What one step of K workers gave.

    Attributes:
        mean: what every worker receives, by name of the tensor; the same on every worker.
        sent: per worker, how many coordinates of its compressed tensors it sent: all of them in a
            drain, none in a skipped step.
        overflow: per worker, how many selected coordinates found no slot in the payload.
        skipped: whether a non-finite number, in a worker's x or in the mean, made all workers skip the step.
    """

    mean: Tensors
    sent: list[int]
    overflow: list[int]
    skipped: bool


def compressed_names(gradient: Tensors, dense_below: int) -> list[str]:
    """The tensors which are compressed; those with fewer than `dense_below` elements go dense."""
    return [name for name in gradient if np.asarray(gradient[name]).size >= dense_below]


def floor_of_dropped(n: int, sparsity: float) -> int:
    """floor(n * sparsity), of a product which rounding may have left just below an integer."""
    return math.floor(n * sparsity + 1e-9)


def zero_residuals(gradients: list[Tensors], compressed: list[str]) -> list[Tensors]:
    """Each worker's residual before its first step."""
    return [{name: np.zeros(np.shape(gradient[name]), np.float32) for name in compressed} for gradient in gradients]


def add_residuals(gradients: list[Tensors], residuals: list[Tensors]) -> list[Tensors]:
    """Each worker's x: gradient + residual in float32; the gradient where there is no residual."""
    if len(gradients) != len(residuals):
        raise ValueError(
            f"The number of workers must not change: {len(gradients)} gradients came, "
            f"{len(residuals)} residuals are held. Make a new reference for another K."
        )
    all_x = []
    for gradient, residual in zip(gradients, residuals, strict=True):
        x = {}
        for name in gradient:
            x[name] = np.asarray(gradient[name], np.float32)
            if name in residual:
                with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for inf, nan
                    x[name] = np.asarray(x[name] + residual[name], np.float32)
        all_x.append(x)
    return all_x


def all_finite(tensors: list[Tensors]) -> bool:
    """Whether every number of every tensor of every worker is finite."""
    return all(np.all(np.isfinite(array)) for worker in tensors for array in worker.values())


def round_values(values: np.ndarray, value_dtype: str) -> np.ndarray:
    """The values as they arrive: rounded to the payload's type (to nearest even), in float32.

    A finite value stays finite: what rounding would make infinite is sent as the largest finite number of the type.
    """
    dtype = VALUE_DTYPES[value_dtype]
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    return np.clip(values, -largest, largest).astype(dtype).astype(np.float32)


def mean_over_workers(received: list[Tensors]) -> Tensors:
    """(worker 0 + worker 1 + ...) / K, in this order and in float32; infinite where the sum is."""
    K = len(received)
    mean = {}
    for name in received[0]:
        total = np.zeros(received[0][name].shape, np.float32)
        for w in range(K):
            with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for inf, nan
                total = total + received[w][name]
        mean[name] = np.asarray(total / np.float32(K), np.float32)
    return mean


def sums_may_overflow(all_sent: list[Tensors], compressed: list[str]) -> bool:
    """Whether the workers' largest compressed numbers add up to more than float32 holds.

    Only then can the sum over the workers be infinite somewhere; it need not be, if they lie in different places.
    """
    total = np.float32(0)
    for sent in all_sent:
        with np.errstate(over="ignore"):
            total = total + np.float32(max((np.abs(sent[name]).max() for name in compressed), default=0))
    return not np.isfinite(total)


def skipped_step(gradients: list[Tensors]) -> StepResult:
    """A step in which nothing is exchanged: the mean is zero and nobody's state changes."""
    K = len(gradients)
    zeros = {name: np.zeros(np.shape(gradients[0][name]), np.float32) for name in gradients[0]}
    return StepResult(mean=zeros, sent=[0] * K, overflow=[0] * K, skipped=True)


def drained_step(all_x: list[Tensors], compressed: list[str]) -> StepResult:
    """A step in which every x goes dense, in float32 whatever the payload's type is."""
    K = len(all_x)
    coordinates = sum(all_x[0][name].size for name in compressed)
    mean = mean_over_workers(all_x)
    if not all_finite([mean]):
        return skipped_step(all_x)
    return StepResult(mean=mean, sent=[coordinates] * K, overflow=[0] * K, skipped=False)
