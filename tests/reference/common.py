"""What the reference exchanges share: error feedback, skips, drains, rounding, means.

Nothing here knows how an exchange chooses its coordinates. A worker's gradient, its x (gradient
plus residual) and what it sends are dicts of name -> float32 array; lists go over the workers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]

# (worker, name of a tensor, its x as (N,)) -> the flat indices which the worker selects, in ascending order.
Select = Callable[[int, str, np.ndarray], np.ndarray]
Turn = Callable[[int], float]

BLOCK = 1024  # coordinates; each tensor starts at a new block, and its last one may be short
TOO_LARGE = 2.0**100  # what is added to a residual has to be smaller: jaxcomm's choice, not a paper's

VALUE_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclass
class StepResult:
    """The result of one step of K workers.

    Attributes:
        mean: what every worker receives, by name of the tensor; the same on every worker.
        sent: per worker, how many coordinates of its compressed tensors it sent: all of them in a
            drain, none in a skipped step.
        overflow: per worker, how many selected coordinates found no slot in the payload.
        skipped: whether a non-finite number, in a worker's x or in the mean, or one which is too large for a
            residual, made all workers skip the step.
        near_ties: by name, how far a mean may be off where a number is so near the middle of two numbers of
            a narrower type that the last bit of a float32 division decides its rounding.
    """

    mean: Tensors
    sent: list[int]
    overflow: list[int]
    skipped: bool
    near_ties: Tensors = field(default_factory=dict)


def check_value_dtype(value_dtype: str) -> None:
    """Raises a ValueError for a type in which values cannot travel."""
    check_option("value_dtype", value_dtype, tuple(VALUE_DTYPES))


def check_option(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises a ValueError for an option which is none of the known ones."""
    if value not in known:
        raise ValueError(f"{name} must be one of {list(known)}, not {value}.")


def compressed_names(gradient: Tensors, dense_below: int) -> list[str]:
    """The tensors which are compressed; those with fewer than `dense_below` elements go dense."""
    return [name for name in gradient if np.asarray(gradient[name]).size >= dense_below]


def floor_of_dropped(n: int, sparsity: float) -> int:
    """floor(n * sparsity), with the sparsity as the decimal number in the source."""
    return math.floor(n * exactly(sparsity))


def exactly(decimal: float) -> Fraction:
    """The decimal number in the source, and not the float that is nearest to it."""
    return Fraction(repr(decimal))


def n_kept(n: int, sparsity: float) -> int:
    """The k of top-k and of random-k, for a tensor of n elements."""
    return max(1, n - floor_of_dropped(n, sparsity))


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """The indices, ascending, of the k largest |values|: of equal ones the first, never a zero."""
    descending = np.argsort(-np.abs(values), kind="stable")  # which keeps equal ones in the order of their index
    return np.sort([i for i in descending[:k] if values[i] != 0]).astype(np.int64)


def as_float32(gradients: list[Tensors]) -> list[Tensors]:
    """The workers' gradients, with every tensor in float32."""
    return [{name: np.asarray(g, np.float32) for name, g in gradient.items()} for gradient in gradients]


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


def can_be_added(added: list[Tensors], compressed: list[str]) -> bool:
    """Whether all workers can add their gradients, or momenta, to residuals: finite, and compressed ones not too large.

    Args:
        added: per worker, what is new in this step; its tensors that go dense need only be finite.
        compressed: the names of the compressed tensors.
    """
    small = all(np.all(np.abs(worker[name]) < TOO_LARGE) for worker in added for name in compressed)
    return small and all_finite(added)


def round_values(values: np.ndarray, value_dtype: str) -> np.ndarray:
    """The values as they arrive: rounded to the payload's type (to nearest even), in float32.

    A finite value stays finite: what rounding would make infinite is sent as the largest finite number of the type.
    """
    dtype = VALUE_DTYPES[value_dtype]
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    return np.clip(values, -largest, largest).astype(dtype).astype(np.float32)


def sum_over_workers(received: list[np.ndarray]) -> np.ndarray:
    """worker 0 + worker 1 + ..., in this order and in float32; infinite where the sum is."""
    total = np.zeros(np.shape(received[0]), np.float32)
    for array in received:
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for inf, nan
            total = np.asarray(total + array, np.float32)
    return total


def mean_over_workers(received: list[Tensors]) -> Tensors:
    """(worker 0 + worker 1 + ...) / K, in this order and in float32; infinite where the sum is."""
    return mean_of_sums(received, {})


def mean_of_sums(all_x: list[Tensors], sums: Tensors) -> Tensors:
    """sums / K for the tensors of which the sum over the workers is given; the mean of the x of all others."""
    mean = {}
    for name in all_x[0]:
        total = sums[name] if name in sums else sum_over_workers([x[name] for x in all_x])
        mean[name] = np.asarray(total / np.float32(len(all_x)), np.float32)
    return mean


def in_turn(coordinates: np.ndarray, capacity: int, turn: float) -> np.ndarray:
    """The coordinates that fit, ascending: all, or as many as there are slots, from a random one on, wrapping around.

    `coordinates` are M flat indices, ascending; the first taken is number floor(turn * M), 0 <= turn < 1.
    """
    M = len(coordinates)
    if capacity >= M:
        return coordinates
    first = min(int(np.float32(turn) * np.float32(M)), M - 1)
    return np.sort(np.roll(coordinates, -first)[:capacity])


def send_chosen(x: Tensors, chosen: dict[str, np.ndarray], value_dtype: str) -> tuple[Tensors, Tensors]:
    """One worker's (compressed gradient, new residual): x at the chosen coordinates, and what that leaves of x.

    `chosen` has flat indices for each compressed tensor; the others are sent whole, and have no residual.
    """
    sent, residual = dict(x), {}
    for name, indices in chosen.items():
        flat_sent = np.zeros(x[name].size, np.float32)  # (N,)
        flat_sent[indices] = round_values(x[name].reshape(-1)[indices], value_dtype)
        sent[name] = flat_sent.reshape(x[name].shape)
        residual[name] = np.asarray(x[name] - sent[name])
    return sent, residual


def sparse_step(
    all_x: list[Tensors],
    compressed: list[str],
    select: Select,
    capacity: Callable[[int], int],
    turn: float,
    value_dtype: str,
) -> tuple[list[Tensors], StepResult]:
    """Each worker sends x at those of its selected coordinates that fit; all receive the mean of what was sent.

    Args:
        all_x: each worker's x.
        compressed: the names of the compressed tensors.
        select: how a worker selects coordinates of a tensor.
        capacity: (elements of a tensor) -> the slots in a payload.
        turn: in [0, 1), which coordinates get them if there are too many, see `in_turn`.
        value_dtype: the type in which the values travel.

    Returns:
        (each worker's new residual, what the step gave). If the step is skipped, the first has no meaning.
    """
    K = len(all_x)
    all_sent, residuals = [], []
    sent_counts = [0] * K
    overflow_counts = [0] * K
    for w, x in enumerate(all_x):
        chosen = {}
        for name in compressed:
            selected = select(w, name, x[name].reshape(-1))
            chosen[name] = in_turn(selected, capacity(x[name].size), turn)
            sent_counts[w] += len(chosen[name])
            overflow_counts[w] += len(selected) - len(chosen[name])
        sent, residual = send_chosen(x, chosen, value_dtype)
        all_sent.append(sent)
        residuals.append(residual)

    mean = mean_over_workers(all_sent)
    if not all_finite([mean]):
        return residuals, skipped_step(all_x)
    return residuals, StepResult(mean=mean, sent=sent_counts, overflow=overflow_counts, skipped=False)


def skipped_step(gradients: list[Tensors]) -> StepResult:
    """A step in which nothing is exchanged: the mean is zero and nobody's state changes."""
    K = len(gradients)
    zeros = {name: np.zeros(np.shape(gradients[0][name]), np.float32) for name in gradients[0]}
    return StepResult(mean=zeros, sent=[0] * K, overflow=[0] * K, skipped=True)


def drained_step(all_x: list[Tensors], compressed: list[str]) -> StepResult:
    """A step in which every x goes dense, in float32 whatever the payload's type is."""
    return whole_step(mean_over_workers(all_x), all_x, compressed)


def whole_step(mean: Tensors, all_x: list[Tensors], compressed: list[str]) -> StepResult:
    """A step in which each worker sent all coordinates of its compressed tensors; skipped if the mean is not finite."""
    if not all_finite([mean]):
        return skipped_step(all_x)
    K = len(all_x)
    coordinates = sum(all_x[0][name].size for name in compressed)
    return StepResult(mean=mean, sent=[coordinates] * K, overflow=[0] * K, skipped=False)
