"""Activations in tiles of a few bits and their gradients, in NumPy and float64: the oracle of `codecs.tiles`.

`published` is the quantizer of He et al., "TAH-QUANT" (arXiv 2506.01352), as its published code does it, for tokens
that all have b bits, with its float16 zero points and steps:

1. Cut the numbers into tiles of 64.
2. If the largest |x| of a tile is at least twice the second: swap that number with the tile's first one, and rotate:
   y = H x, with H[i, j] = (-1)^(bits that i and j have in common) / 8. Other tiles: y = x.
3. z = min y; s = (max y - z) / (2^b - 1); the code of each number: (y - z) / s, rounded to nearest.
4. The receiver computes code * s + z, and undoes the rotation and the swap.

`arrive` is the same, with what jaxcomm's words hold, L = 2^b - 1:

1. The last tile is filled with zeros.
3. s = max((max y - min y) / L, |min y| / 4095), rounded up to the next bfloat16; the offset
   k = floor(8 min y / s + 1/2), the code q = floor(y / s - k / 8 + 1/2), at least 0 and at most L.
4. The receiver computes (q + k / 8) s, and undoes rotation and swap, without the filled-in zeros.

`returned` is a gradient: buckets of 32, the last one filled with zeros, with the largest |g| of a bucket as its scale,
and floor(|g| / scale * L + u) as level, L = 2^(b-1) - 1, u random in [0, 1).
"""

import numpy as np

from tests.reference.noise import uniform

H = np.array([[(-1.0) ** (i & j).bit_count() / 8 for j in range(64)] for i in range(64)])


def rounded_up(scale: np.ndarray) -> np.ndarray:
    """The smallest bfloat16 that is at least a scale: 8 bits of significand."""
    fraction, exponent = np.frexp(scale)
    return np.ldexp(np.ceil(fraction * 256) / 256, exponent)


def turned(tiles: np.ndarray) -> tuple[np.ndarray, list[int | None]]:
    """Step 2: the tiles, and for each that was rotated the place of its largest number, else None."""
    turned, pivots = tiles.copy(), []
    for row in turned:
        second, first = np.sort(np.abs(row))[-2:]
        pivot = int(np.argmax(np.abs(row))) if first >= 2 * second else None
        if pivot is not None:
            row[[0, pivot]] = row[[pivot, 0]]
            row[:] = H @ row
        pivots.append(pivot)
    return turned, pivots


def turned_back(tiles: np.ndarray, pivots: list[int | None]) -> np.ndarray:
    """The inverse of `turned`."""
    tiles = tiles.copy()
    for row, pivot in zip(tiles, pivots, strict=True):
        if pivot is not None:
            row[:] = H @ row
            row[[0, pivot]] = row[[pivot, 0]]
    return tiles


def published(x: np.ndarray, bits: int) -> np.ndarray:
    """Tiles (tiles, 64) as they arrive with the published code."""
    y, pivots = turned(np.asarray(x, np.float64))
    zero, levels = y.min(1, keepdims=True), 2**bits - 1
    step = np.maximum((y.max(1, keepdims=True) - zero) / levels, 1e-30)
    code = np.clip(np.rint((y - zero) / step), 0, levels)
    arrived = code * step.astype(np.float16).astype(np.float64) + zero.astype(np.float16).astype(np.float64)
    return turned_back(arrived, pivots)


def arrive(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers as they arrive, in the shape of x, and whether a code of their tile was a close call."""
    y, pivots = turned(np.pad(np.ravel(x).astype(np.float64), (0, -np.size(x) % 64)).reshape(-1, 64))
    low, levels = y.min(1, keepdims=True), 2**bits - 1
    exact = np.maximum((y.max(1, keepdims=True) - low) / levels, np.abs(low) / 4095)
    step = rounded_up(exact)
    divisor = np.where(step > 0, step, 1)
    offset = np.floor(8 * low / divisor + 0.5)
    shifted = y / divisor - offset / 8 + 0.5
    close = (np.abs(shifted - np.round(shifted)) < 1e-3).any(1)
    close |= (np.abs(8 * low / divisor - offset) > 0.499)[:, 0] | (exact > step * (1 - 1e-5))[:, 0]
    decoded = turned_back((np.clip(np.floor(shifted), 0, levels) + offset / 8) * step, pivots)
    shape = np.shape(x)
    return decoded.reshape(-1)[: np.size(x)].reshape(shape), np.repeat(close, 64)[: np.size(x)].reshape(shape)


def returned(x: np.ndarray, bits: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """A gradient as it arrives, in the shape of x, and whether a level of its bucket was a close call."""
    flat = np.pad(np.ravel(x).astype(np.float64), (0, -np.size(x) % 32)).reshape(-1, 32)
    levels, scale = 2 ** (bits - 1) - 1, np.abs(flat).max(1, keepdims=True)
    steps = np.divide(np.abs(flat) * levels, scale, out=np.zeros_like(flat), where=scale > 0)
    shifted = steps + uniform(key, flat.size).reshape(flat.shape)
    close = (np.abs(shifted - np.round(shifted)) < 1e-4).any(1)
    decoded = np.sign(flat) * np.minimum(np.floor(shifted), levels) * scale / levels
    shape = np.shape(x)
    return decoded.reshape(-1)[: np.size(x)].reshape(shape), np.repeat(close, 32)[: np.size(x)].reshape(shape)
