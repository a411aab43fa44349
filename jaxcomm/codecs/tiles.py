"""Activations in a few bits: tiles of numbers, rotated, with a scale each.

After He et al., "TAH-QUANT: Effective Activation Quantization in Pipeline Parallelism over Slow Network", arXiv
2506.01352, 2025, from its abstract: tiles, a Hadamard transform, 3 to 4 bits, no state. Its choice of bits by a tile's
entropy and its pivot swap are not implemented; the tile size, the scale and the rounding of gradients are our own.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import bits, noise
from jaxcomm.codecs.values import ValueCodec
from jaxcomm.numerics import divide, magnitude_bits
from jaxcomm.vectors import computed_end_to_end

TILE = 64
_SCALES = ValueCodec(jnp.dtype("bfloat16"))
_LARGEST = np.uint32(0x7FFF)  # the upper half of a NaN


@dataclass(frozen=True)
class Tiles:
    """Writes values as integers of b bits: in tiles of 64, rotated by a Walsh-Hadamard matrix, with a scale per tile.

    The scale is the largest magnitude of the rotated tile, rounded up to bfloat16. Each number takes the nearest of
    2^b - 1 levels or, with a key, one of its two neighbours at random, unbiased. A tile's squared error is that of the
    rotated numbers, each off by at most half a step, or one step with a key. A tile with a number that is not finite
    arrives as NaN, as may a tile with numbers above 2^120. A tile of zeros arrives as zeros.

    All values form one row, and the last tile is padded with zeros. If the size of a sample is not a multiple of 64, a
    tile may have numbers of two samples.

    Attributes:
      width: b, bits a value, in addition to 16 bits a tile.
    """

    width: int

    @property
    def levels(self) -> int:
        """Levels above zero."""
        return 2 ** (self.width - 1) - 1

    def n_words(self, n: int) -> int:
        """Returns the words of n values: the scales, two a word, and b planes of bits."""
        tiles = -(-n // TILE)
        return -(-tiles // 2) + bits.packed_words(tiles * TILE, self.width)

    def encode(self, values: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Writes values (n,) as (n_words(n),) uint32.

        Args:
          values: of any floating type.
          key: () uint32, of random rounding; None rounds to nearest.
        """
        rotated = self._rotate(jnp.pad(values.astype(jnp.float32), (0, -values.size % TILE)))  # (tiles, 64)
        # A maximum of the bits as integers, of which NaN is the largest: a maximum of floats may lose it.
        largest = jnp.max(magnitude_bits(rotated), axis=1)  # (tiles,)
        upper = jnp.minimum((largest >> 16) + (largest & np.uint32(0xFFFF) != 0), _LARGEST)
        scale = lax.bitcast_convert_type(upper << 16, jnp.float32)
        steps = divide(rotated, scale[:, None]) * np.float32(self.levels)
        steps = jnp.where(scale[:, None] > 0, steps, 0.0)
        shift = 0.5 if key is None else noise.uniform(key, steps.size).reshape(steps.shape)
        code = jnp.clip(jnp.floor(steps + shift), -self.levels, self.levels).astype(jnp.int32) + self.levels
        return computed_end_to_end([_SCALES.encode(scale), bits.pack_numbers(code.reshape(-1), self.width)])

    def decode(self, words: jax.Array, n: int) -> jax.Array:
        """Reads n values: (n,) float32."""
        tiles = -(-n // TILE)
        middle = -(-tiles // 2)
        step = _SCALES.decode(words[:middle], tiles) * np.float32(1 / self.levels)
        code = bits.unpack_numbers(words[middle:], tiles * TILE, self.width) - self.levels
        return self._rotate(code.astype(jnp.float32).reshape(-1, TILE) * step[:, None]).reshape(-1)[:n]

    def _rotate(self, values: jax.Array) -> jax.Array:
        """Rotates every tile, (tiles, 64); its own inverse."""
        return jnp.matmul(values.reshape(-1, TILE), self._hadamard, precision=lax.Precision.HIGHEST)

    @cached_property
    def _hadamard(self) -> np.ndarray:
        """Returns the symmetric orthogonal matrix (64, 64) of -1/8 and 1/8."""
        matrix: Any = np.ones((1, 1), np.float32)
        while len(matrix) < TILE:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        return matrix / np.float32(TILE**0.5)
