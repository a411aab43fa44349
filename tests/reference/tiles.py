"""Activations in rotated tiles of a few bits, in NumPy and float64: the oracle of `jaxcomm.codecs.tiles`.

1. Cut the n numbers into tiles of 64, the last one filled with zeros.
2. Rotate: y = H x, with H[i, j] = (-1)^(bits that i and j have in common) / 8.
3. The scale s of a tile: the largest |y|, rounded up to the next bfloat16.
4. The level of each number, of L = 2^(b-1) - 1 on each side of zero: floor(y L / s + u), at most L and at least -L,
   with u = 1/2, or u in [0, 1) at random.
5. The receiver computes H (level s / L), without the filled-in zeros.
"""

import numpy as np

from tests.reference.noise import uniform

H = np.array([[(-1.0) ** (i & j).bit_count() / 8 for j in range(64)] for i in range(64)])


def rounded_up(scale: np.ndarray) -> np.ndarray:
    """The smallest bfloat16 that is at least a scale: 8 bits of significand."""
    fraction, exponent = np.frexp(scale)
    return np.ldexp(np.ceil(fraction * 256) / 256, exponent)


def arrive(x: np.ndarray, bits: int, key: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The numbers as they arrive, in the shape of x, and whether a level of their tile was a close call."""
    flat = np.pad(np.ravel(x).astype(np.float64), (0, -np.size(x) % 64)).reshape(-1, 64)
    rotated, levels = flat @ H, 2 ** (bits - 1) - 1
    scale = rounded_up(np.abs(rotated).max(1).astype(np.float32).astype(np.float64))[:, None]
    steps = np.divide(rotated * levels, scale, out=np.zeros_like(rotated), where=scale > 0)
    shifted = steps + (0.5 if key is None else uniform(key, steps.size).reshape(steps.shape))
    close = (np.abs(shifted - np.round(shifted)) < 1e-4).any(1) | (np.abs(rotated).max(1) > scale[:, 0] * (1 - 1e-6))
    decoded = np.clip(np.floor(shifted), -levels, levels) * scale / levels @ H
    shape = np.shape(x)
    return decoded.reshape(-1)[: np.size(x)].reshape(shape), np.repeat(close, 64)[: np.size(x)].reshape(shape)
