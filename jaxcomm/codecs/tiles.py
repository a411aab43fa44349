"""Activations in a few bits, in tiles with a zero point each; and their gradients, in buckets of levels.

After He et al., "TAH-QUANT: Effective Activation Quantization in Pipeline Parallelism over Slow Network", arXiv
2506.01352, 2025, and its published code (heguangxin/TAH-Quant): tiles of 64, of which those with an outlier are
rotated, a zero point, 3 or 4 bits, no state; gradients in 6 bits, in buckets of 32. Its choice between 3 and 4 bits by
a token's entropy is not implemented. Its zero points and steps are float16; the form of the words here is our own.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.codecs.quantize import Buckets, encode
from jaxcomm.kernels import bits
from jaxcomm.kernels.numerics import divide, magnitude_bits
from jaxcomm.kernels.platforms import in_memory
from jaxcomm.kernels.vectors import computed_end_to_end

TILE = 64
_PIVOT_BITS = 6
_FINENESS = 8  # offsets per step
_MOST_STEPS = 4095  # from zero to the smallest number of a tile: what 16 bits of offset hold
_PLACE = np.arange(TILE, dtype=np.int32)
_INFINITY = np.uint32(0x7F800000)


@dataclass(frozen=True)
class Tiles:
    """Writes values as integers of b bits: tiles of 64 with a step and a zero point each, rotated if one number is big.

    A tile whose largest magnitude is at least twice the second has it swapped to the front, and is rotated by a
    Walsh-Hadamard matrix: the zero point then holds most of it. Each number takes the nearest of 2^b levels from the
    tile's smallest number to its largest, and is off by at most half a step: the span over 2^b - 1, rounded up to
    bfloat16. The zero point is a multiple of an eighth of a step, 0 where the smallest number is 0, and at most 4,095
    steps from 0: a tile that varies less than that has a step of 1/4095 of its smallest number. Zeros arrive as zeros
    if the tile has no negative numbers and is not rotated. A tile with a number that is not finite arrives as NaN, as
    may a tile with numbers above 2^120.

    All values form one row, and the last tile is padded with zeros. If the size of a sample is not a multiple of 64, a
    tile may have numbers of two samples.

    Attributes:
      width: b, bits a value, in addition to 38 bits a tile.
    """

    width: int

    @property
    def levels(self) -> int:
        """Levels above the lowest."""
        return 2**self.width - 1

    def n_words(self, n: int) -> int:
        """Returns the words of n values: one a tile, 6 planes of the places of the largest, and b planes of bits."""
        tiles = -(-n // TILE)
        return tiles + bits.packed_words(tiles, _PIVOT_BITS) + bits.packed_words(tiles * TILE, self.width)

    def encode(self, values: jax.Array) -> jax.Array:
        """Writes values (n,), of any floating type, as (n_words(n),) uint32."""
        plain = jnp.pad(values.astype(jnp.float32), (0, -values.size % TILE)).reshape(-1, TILE)  # (tiles, 64)
        magnitude = magnitude_bits(plain)  # as integers, of which NaN is the largest: a maximum of floats may lose it
        largest = jnp.max(magnitude, axis=1)  # (tiles,)
        pivot = jnp.min(jnp.where(magnitude == largest[:, None], _PLACE, TILE), axis=1)  # the first of equals
        second = jnp.max(jnp.where(pivot[:, None] == _PLACE, np.uint32(0), magnitude), axis=1)
        is_rotated = lax.bitcast_convert_type(largest, jnp.float32) >= 2 * lax.bitcast_convert_type(second, jnp.float32)
        tiles = jnp.where(is_rotated[:, None], self._rotate(_swap(plain, pivot)), plain)
        tiles = in_memory(tiles.reshape(-1)).reshape(-1, TILE)  # read three times
        low = jnp.min(tiles, axis=1)
        # Each of the two is divided on its own: the difference of the largest numbers would not be finite.
        span = jnp.max(tiles, axis=1) / np.float32(self.levels) - low / np.float32(self.levels)
        step = jnp.maximum(span, jnp.abs(low) / np.float32(_MOST_STEPS))
        step_bits = magnitude_bits(jnp.where(largest >= _INFINITY, jnp.nan, step))
        upper = (step_bits >> 16) + (step_bits & np.uint32(0xFFFF) != 0)
        step = lax.bitcast_convert_type(upper << 16, jnp.float32)
        offset = jnp.floor(_in_steps(low, step) * _FINENESS + 0.5).astype(jnp.int32)  # (tiles,)
        level = _in_steps(tiles, step[:, None]) - offset.astype(jnp.float32)[:, None] / _FINENESS
        code = in_memory(jnp.clip(jnp.floor(level + 0.5), 0, self.levels).astype(jnp.int32).reshape(-1))
        heads = is_rotated.astype(jnp.uint32) << 31 | upper << 16 | offset.astype(jnp.uint32) & np.uint32(0xFFFF)
        parts = [heads, bits.pack_numbers(pivot, _PIVOT_BITS), bits.pack_numbers(code, self.width)]
        return computed_end_to_end(parts)

    def decode(self, words: jax.Array, n: int) -> jax.Array:
        """Reads n values: (n,) float32."""
        count = -(-n // TILE)
        start = count + bits.packed_words(count, _PIVOT_BITS)
        heads = words[:count]
        step = lax.bitcast_convert_type((heads >> 16 & np.uint32(0x7FFF)) << 16, jnp.float32)
        offset = lax.shift_right_arithmetic(lax.bitcast_convert_type(heads << 16, jnp.int32), 16)
        pivot = bits.unpack_numbers(words[count:start], count, _PIVOT_BITS)
        code = bits.unpack_numbers(words[start:], count * TILE, self.width).reshape(-1, TILE)
        level = code.astype(jnp.float32) + offset.astype(jnp.float32)[:, None] / _FINENESS
        tiles = level * step[:, None]  # (tiles, 64)
        is_rotated = (heads >> 31 != 0)[:, None]
        return jnp.where(is_rotated, _swap(self._rotate(tiles), pivot), tiles).reshape(-1)[:n]

    def _rotate(self, tiles: jax.Array) -> jax.Array:
        """Rotates every tile, (tiles, 64); its own inverse."""
        return jnp.matmul(tiles, self._hadamard, precision=lax.Precision.HIGHEST)

    @cached_property
    def _hadamard(self) -> np.ndarray:
        """Returns the symmetric orthogonal matrix (64, 64) of -1/8 and 1/8."""
        matrix: Any = np.ones((1, 1), np.float32)
        while len(matrix) < TILE:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        return matrix / np.float32(TILE**0.5)


@dataclass(frozen=True)
class GradientLevels:
    """Writes the gradient of what `Tiles` wrote: buckets of 32, rounded stochastically, unbiased; see `Buckets`.

    Attributes:
      width: bits a value, in addition to 32 bits a bucket.
      key: () uint32, of the random rounding.
    """

    width: int
    key: Any

    @property
    def _buckets(self) -> Buckets:
        return Buckets(self.width, bits.WORD, "max", self.key)

    def encode(self, values: jax.Array) -> jax.Array:
        """Writes values (n,), of any floating type, as (1 + width) ceil(n / 32) words: uint32."""
        return encode(self._buckets, jnp.pad(values.astype(jnp.float32), (0, -values.size % bits.WORD)), 0)

    def decode(self, words: jax.Array, n: int) -> jax.Array:
        """Reads n values: (n,) float32."""
        return self._buckets.decode(words, n + -n % bits.WORD, 0)[:n]


def _in_steps(values: jax.Array, step: jax.Array) -> jax.Array:
    """Returns values / step, or 0 for a step of 0."""
    return jnp.where(step == 0, 0.0, divide(values, step))


def _swap(tiles: jax.Array, pivot: jax.Array) -> jax.Array:
    """Swaps the first number of every tile (tiles, 64) with the one at its pivot (tiles,); its own inverse."""
    is_pivot = pivot[:, None] == _PLACE
    at_pivot = jnp.sum(jnp.where(is_pivot, tiles, 0.0), axis=1, keepdims=True)
    return jnp.where(_PLACE == 0, at_pivot, jnp.where(is_pivot, tiles[:, :1], tiles))
