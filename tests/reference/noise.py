"""The documented random numbers of jaxcomm, in NumPy: a hash of a counter, and the keys of every draw.

No paper says how to draw. These sequences and keys are jaxcomm's own, written once more from its documentation, so that
an oracle makes the same draws without asking the library for them. That they are random enough is tested elsewhere.

    key of numbers a, b, ...:  x = 0x9E3779B9;  for each number:  x = mix(x ^ number) + 0x9E3779B9
    bits i of a key:           mix(mix(i ^ key) + key)
    uniform i:                 (bits i >> 8) * 2^-24
    integer i below a bound:   bits i % bound

All of it modulo 2^32. mix is lowbias32:

    x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
"""

from collections.abc import Sequence

import numpy as np

GOLDEN = 0x9E3779B9
OF_TURNS = 2**31 - 1
OF_PUBLISHERS = 2**31 - 2


def make_key(*numbers: int) -> int:
    """Folds integers into a key."""
    key = GOLDEN
    for number in numbers:
        key = (int(_mix(np.asarray([(key ^ number) % 2**32], np.uint32))[0]) + GOLDEN) % 2**32
    return key


def bits(key: int, n: int, start: int = 0) -> np.ndarray:
    """Numbers start .. start + n - 1 of a key's sequence, (n,) uint32."""
    counter = np.arange(start, start + n, dtype=np.uint32)
    return _mix(_mix(counter ^ np.uint32(key)) + np.uint32(key))


def uniform(key: int, n: int, start: int = 0) -> np.ndarray:
    """The same, in [0, 1): (n,) float32."""
    return (bits(key, n, start) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def integers(key: int, bounds: Sequence[int], start: int = 0) -> np.ndarray:
    """The same, each below its bound: (n,) int32."""
    return (bits(key, len(bounds), start) % np.asarray(bounds, np.uint32)).astype(np.int32)


def turn(seed: int, step: int) -> float:
    """The number in [0, 1) that decides which of too many coordinates are sent in a step."""
    return float(uniform(make_key(seed, step, OF_TURNS), 1)[0])


def publishers(seed: int, step: int, layers: int, K: int, r: int) -> list[list[int]]:
    """For each layer, the r of K workers with the largest numbers; of equal ones, the lower workers."""
    u = uniform(make_key(seed, step, OF_PUBLISHERS), layers * K).reshape(layers, K)
    return [np.argsort(-row, kind="stable")[:r].tolist() for row in u]


def rounding_key(seed: int, step: int, worker: int | None) -> int:
    """The key of a worker's quantization, or, if the worker is None, of that of the sums."""
    return make_key(seed, step, 1) if worker is None else make_key(seed, step, 0, worker)


def _mix(x: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))
