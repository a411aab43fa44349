"""The sum over the workers of payloads whose coordinates are the same on every worker.

A worker's payload is a list of C slots; slot c holds the same coordinate everywhere, so that the
payloads are summed slot by slot and no index travels. There are three ways to sum, for worker w's
values v_w and the payload's type; "round" is `common.round_values`:

"psum": the values travel in float32.

    1:  total = v_0 + v_1 + ... + v_(K-1)

"two_shot": a reduce-scatter in one shot, by all-to-all, and an all-gather. The slots are cut into K
parts; worker j owns part j.

    1:  worker w sends round(v_w); its error is v_w - round(v_w)
    2:  the owner of a part sums it over the workers:  s = round(v_0) + ... + round(v_(K-1))
    3:  and sends total = round(s) to all; s - round(s) is added to its own error of line 1

With two workers, each sends all of line 1 to the other, and both add up: total = round(v_0) + round(v_1).

"ring": a reduce-scatter along the ring 0 -> 1 -> ... -> K-1 -> 0 (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009), and an all-gather. Part j starts
at the worker after j and ends at worker j, after K - 1 hops.

    1:  the first worker sends round(v_w); its error is v_w - round(v_w)
    2:  the next one adds its own values to what came:  s = came + v_w
    3:  and sends round(s); its error is s - round(s); again from line 2, until worker j is reached
    4:  total = what worker j sent

So the sum of the workers' values is the total plus all errors, up to float32's rounding.

Decisions made here:

- A part has 32 * ceil(C / (32 * K)) slots; the last ones are shorter, or empty.
- Sums are float32, in the order above. Where one is infinite, so is the total, though rounding would
  make it finite: the caller has to skip the step.
"""

import math

import numpy as np

from .common import Tensors, check_option, check_value_dtype, round_values, sum_over_workers

COLLECTIVES = ("psum", "two_shot", "ring")
PART_MULTIPLE = 32


def check_collective(collective: str, value_dtype: str) -> None:
    """Raises a ValueError for an unknown way to sum, or a type of values that it does not have."""
    check_option("collective", collective, COLLECTIVES)
    check_value_dtype(value_dtype)
    if collective == "psum" and value_dtype != "float32":
        raise ValueError(f'value_dtype must be float32 for the collective "psum", not {value_dtype}.')


def sum_slots(values: list[np.ndarray], collective: str, value_dtype: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Sum the workers' payloads.

    Args:
        values: per worker, what its slots hold, of shape (C,), finite; an unfilled slot holds 0.
        collective: "psum", "two_shot" or "ring".
        value_dtype: the type in which the values travel, "float32" or "bfloat16".

    Returns:
        (what every worker receives, of shape (C,); per worker, what was lost to rounding and goes into
        its residual at the slots, of shape (C,)). If the first is not finite, the second has no meaning.
    """
    check_collective(collective, value_dtype)
    if collective == "two_shot":
        return _two_shot(values, value_dtype)
    if collective == "ring":
        return _ring(values, value_dtype)
    return sum_over_workers(values), [np.zeros(len(own), np.float32) for own in values]


def exchange_slots(
    all_x: list[Tensors],
    coordinates: dict[str, np.ndarray],
    capacities: dict[str, int],
    collective: str,
    value_dtype: str,
) -> tuple[Tensors, list[Tensors]]:
    """Exchange the workers' values at coordinates which are the same on every worker.

    Args:
        all_x: per worker, the tensors of which values are sent (others may be there too).
        coordinates: by name of the tensor, the flat indices which are sent, one for each filled slot.
        capacities: by name, the slots in the payload; those behind the filled ones hold zeros.
        collective: "psum", "two_shot" or "ring".
        value_dtype: the type in which the values travel.

    Returns:
        (sum of the workers' values by name, 0 where nothing is sent; per worker and name, x without what
        was sent and with what was lost to rounding). The tensors lie one after another in the payload, in
        the sorted order of their names. If the first is not finite, the second has no meaning.
    """
    names = sorted(coordinates)
    payloads = []
    for x in all_x:
        payload = []
        for name in names:
            slots = np.zeros(capacities[name], np.float32)
            slots[: len(coordinates[name])] = x[name].reshape(-1)[coordinates[name]]
            payload.append(slots)
        payloads.append(np.concatenate([np.zeros(0, np.float32), *payload]))

    total, errors = sum_slots(payloads, collective, value_dtype)

    totals: Tensors = {}
    residuals: list[Tensors] = [{} for _ in all_x]
    start = 0
    for name in names:
        filled = slice(start, start + len(coordinates[name]))
        shape = all_x[0][name].shape
        flat_total = np.zeros(all_x[0][name].size, np.float32)  # (N,)
        flat_total[coordinates[name]] = total[filled]
        totals[name] = flat_total.reshape(shape)
        for w, x in enumerate(all_x):
            flat_residual = np.array(x[name], np.float32).reshape(-1)  # (N,)
            flat_residual[coordinates[name]] = errors[w][filled]
            residuals[w][name] = flat_residual.reshape(shape)
        start += capacities[name]
    return totals, residuals


def _two_shot(values: list[np.ndarray], value_dtype: str) -> tuple[np.ndarray, list[np.ndarray]]:
    # 1: each worker rounds its own
    rounded = [round_values(own, value_dtype) for own in values]
    errors = [np.asarray(own - sent, np.float32) for own, sent in zip(values, rounded, strict=True)]

    if len(values) == 2:
        return sum_over_workers(rounded), errors

    # 2, 3: each owner rounds the sum of its part
    total = np.zeros(len(values[0]), np.float32)
    for j, part in enumerate(_parts(len(total), len(values))):
        total[part], error = _round_sum(sum_over_workers([sent[part] for sent in rounded]), value_dtype)
        errors[j][part] += error
    return total, errors


def _ring(values: list[np.ndarray], value_dtype: str) -> tuple[np.ndarray, list[np.ndarray]]:
    K = len(values)
    total = np.zeros(len(values[0]), np.float32)
    errors = [np.zeros(len(own), np.float32) for own in values]
    for j, part in enumerate(_parts(len(total), K)):
        # 1: the worker after j starts
        first = (j + 1) % K
        came, errors[first][part] = _round_sum(values[first][part], value_dtype)
        # 2, 3: the others add their own, worker j at last
        for hop in range(1, K):
            w = (first + hop) % K
            came, errors[w][part] = _round_sum(sum_over_workers([came, values[w][part]]), value_dtype)
        # 4: the sum
        total[part] = came
    return total, errors


def _parts(n_slots: int, K: int) -> list[slice]:
    """The slots of each worker's part."""
    size = PART_MULTIPLE * math.ceil(n_slots / (PART_MULTIPLE * K))
    return [slice(min(j * size, n_slots), min((j + 1) * size, n_slots)) for j in range(K)]


def _round_sum(s: np.ndarray, value_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(the sum as it travels, what it lost): an infinite number stays infinite."""
    finite = np.isfinite(s)
    rounded = np.where(finite, round_values(s, value_dtype), s)
    return rounded, np.where(finite, s - np.where(finite, rounded, 0), 0).astype(np.float32)
