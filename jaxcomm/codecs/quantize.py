"""A few bits a value: buckets of levels (QSGD), ternary numbers, the small integers of their sums, and signs.

A codec writes a part of the flat vector as words, and reads it again; `start` is the position of the part's first
element in the vector, and a part is of whole blocks. The number of words depends only on the number of values, m.

`codes` returns arrays with equally many numbers for every block, in the order of the blocks; and whether no value is
broken, and what will be read is finite, () bool. `Ternary` and `Integers` do not look.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.kernels import bits, noise
from jaxcomm.kernels.numerics import divide, magnitude_bits, shrinkage
from jaxcomm.kernels.platforms import by_platform, in_memory
from jaxcomm.kernels.vectors import Stored, Vector, computed_end_to_end, largest_of_each
from jaxcomm.layout import BLOCK, Layout, in_blocks


@dataclass(frozen=True)
class Buckets:
    """Random rounding to 2^(b-1) - 1 levels of a bucket's scale, and a sign: b bits a value, 32 a bucket; unbiased.

    Attributes:
      width: b, bits a value.
      bucket: consecutive values that share a scale.
      norm: the scale, "max" (largest magnitude) or "l2".
      key: () uint32, of the random rounding.
    """

    width: int
    bucket: int
    norm: str
    key: Any

    @property
    def levels(self) -> int:
        """Levels above zero."""
        return 2 ** (self.width - 1) - 1

    def n_words(self, m: int) -> int:
        """Returns the words of m values: the scales, and b planes of bits."""
        return m // self.bucket + bits.packed_words(m, self.width)

    def codes(self, vector: Vector, start: jax.Array | int) -> tuple[list[jax.Array], jax.Array]:
        """Rounds values, m a multiple of the bucket: the scales, (m / bucket,) float32, and (m,) of 8 or 16 bits."""
        values = vector.sum()
        scale, ok = self.scale(values)
        code = self.draw(values, scale, self.levels, start) + self.levels
        return [scale, in_memory(code.astype(jnp.uint16 if self.width > 8 else jnp.uint8))], ok

    def words(self, codes: Sequence[jax.Array]) -> jax.Array:
        """Writes the scales and then the numbers."""
        scales = lax.bitcast_convert_type(codes[0], jnp.uint32)
        return computed_end_to_end([scales, bits.pack_numbers(codes[1], self.width)])

    def scale(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the scale of every bucket, (m / bucket,), and whether all values and scales are finite: () bool."""
        # A maximum of the bits as integers, of which NaN is the largest: a maximum of floats may lose it.
        scale = lax.bitcast_convert_type(largest_of_each(magnitude_bits(values), self.bucket), jnp.float32)
        if self.norm == "l2":  # of values relative to the largest, whose squares are not too small for float32
            unit = jnp.where((scale > 0) & (scale < 1), scale, 1.0)
            scale = unit * jnp.sqrt(jnp.sum(jnp.square(divide(values.reshape(-1, self.bucket), unit[:, None])), axis=1))
        largest = self.levels * (scale * np.float32(1 / self.levels))  # as it is read
        return scale, jnp.isfinite(largest).all()  # only finite scales are read as finite

    def _in_buckets(self, values: jax.Array) -> jax.Array:
        """Cuts values (m,) into buckets (m / bucket, rows, columns), with a TPU's columns if they divide a bucket."""
        columns = bits.LANES if self.bucket % bits.LANES == 0 else self.bucket
        return values.reshape(-1, self.bucket // columns, columns)

    def draw(self, values: jax.Array, scale: jax.Array, levels: int, start: jax.Array | int) -> jax.Array:
        """Rounds values to integers from -levels to levels, in float32: (m,). A scale bounds its values' magnitudes."""
        buckets = self._in_buckets(values)
        shrink = shrinkage(scale)
        inverse = np.float32(levels) / (scale * shrink)
        inverse = jnp.where(jnp.isfinite(inverse), inverse, 0.0)  # a scale of zero, or almost zero
        uniform = self._in_buckets(self.uniform(values.size, start))
        steps = (jnp.abs(buckets) * shrink[:, None, None]) * inverse[:, None, None]
        level = jnp.minimum(jnp.floor(steps + uniform), levels)
        return jnp.where(buckets < 0, -level, level).reshape(-1)

    def uniform(self, m: int, start: jax.Array | int) -> jax.Array:
        """Returns the numbers in [0, 1) that decide the rounding of m values."""
        return noise.uniform(self.key, m, start)

    def decode(self, words: jax.Array, m: int, start: jax.Array | int) -> jax.Array:
        """Reads values."""
        del start
        n_scales = m // self.bucket
        step = lax.bitcast_convert_type(words[:n_scales], jnp.float32) * np.float32(1 / self.levels)
        code = bits.unpack_numbers(words[n_scales:], m, self.width) - self.levels
        return (self._in_buckets(code.astype(jnp.float32)) * step[:, None, None]).reshape(-1)


class Nearest(Buckets):
    """`Buckets` that round to the nearest level, halves away from zero; without a key, and biased."""

    def uniform(self, m: int, start: jax.Array | int) -> jax.Array:
        """Returns halves."""
        del start
        return jnp.full(m, 0.5, jnp.float32)


@dataclass(frozen=True)
class Integers:
    """Integers from -limit to limit, exactly: ceil(log2(2 limit + 1)) bits a value.

    Attributes:
      limit: the largest integer.
    """

    limit: int

    @property
    def width(self) -> int:
        """Bits a value."""
        return (2 * self.limit).bit_length()

    def n_words(self, m: int) -> int:
        """Returns the words of m values."""
        return bits.packed_words(m, self.width)

    def codes(self, vector: Vector, start: jax.Array | int) -> tuple[list[jax.Array], jax.Array]:
        """Returns the integers from 0 to twice the limit: (m,) int32."""
        del start
        return [vector.sum().astype(jnp.int32) + self.limit], jnp.asarray(True)

    def words(self, codes: Sequence[jax.Array]) -> jax.Array:
        """Writes the codes."""
        return bits.pack_numbers(codes[0], self.width)

    def decode(self, words: jax.Array, m: int, start: jax.Array | int) -> jax.Array:
        """Reads values."""
        del start
        return (bits.unpack_numbers(words, m, self.width) - self.limit).astype(jnp.float32)


@dataclass(frozen=True)
class Ternary(Integers):
    """Random rounding of numbers in [-1, 1] to -1, 0 or 1: 2 bits a value; unbiased.

    Attributes:
      key: () uint32, of the random rounding.
    """

    limit: int = field(default=1, init=False)
    key: Any

    def codes(self, vector: Vector, start: jax.Array | int) -> tuple[list[jax.Array], jax.Array]:
        """Rounds values: (m,) uint8."""
        values = vector.sum()
        is_one = noise.uniform(self.key, values.size, start) < jnp.abs(values)
        code = jnp.where(is_one, jnp.where(values < 0, 0, 2), 1)
        return [in_memory(code.astype(jnp.uint8))], jnp.asarray(True)


@dataclass(frozen=True)
class BlockSigns:
    """The sign of every value, and the mean magnitude of every block: 1 bit a value, 32 a block of 1024.

    Attributes:
      layout: the flat vector; padding is read as zeros.
    """

    layout: Layout

    def n_words(self, m: int) -> int:
        """Returns the words of m values."""
        return m // BLOCK + m // bits.WORD

    def _used(self, m: int, start: jax.Array | int) -> jax.Array:
        """Returns how many elements of every block of a part are not padding: (m / BLOCK,) int32."""
        counts = jnp.pad(jnp.asarray(self.layout.used(self.layout.elements())), (0, m // BLOCK))
        return lax.dynamic_slice(counts, (jnp.asarray(start) // BLOCK,), (m // BLOCK,))

    def codes(self, vector: Vector, start: jax.Array | int) -> tuple[list[jax.Array], jax.Array]:
        """Rounds values: the scales, (m / BLOCK,) float32, and the mask of the negative values, (m/32,) uint32."""
        x = vector.sum()
        total, negative, broken = by_platform(
            x, x < 0, vector.broken(), cpu=_magnitudes_in_one_pass, default=_magnitudes_and_masks
        )
        scale = total / jnp.maximum(self._used(x.size, start).astype(jnp.float32), 1.0)
        return [scale, negative], ~jnp.any(broken != 0) & jnp.isfinite(scale).all()

    def words(self, codes: Sequence[jax.Array]) -> jax.Array:
        """Writes the scales and then the signs; zeros as positive."""
        return computed_end_to_end([lax.bitcast_convert_type(codes[0], jnp.uint32), codes[1]])

    def decode(self, words: jax.Array, m: int, start: jax.Array | int) -> jax.Array:
        """Reads values."""
        n_blocks = m // BLOCK
        scale = lax.bitcast_convert_type(words[:n_blocks], jnp.float32)[:, None, None]
        negative = in_blocks(bits.unpack(words[n_blocks:]))
        is_used = in_blocks(jnp.arange(BLOCK, dtype=jnp.int32)) < self._used(m, start)[:, None, None]
        return jnp.where(is_used, jnp.where(negative, -scale, scale), 0.0).reshape(-1)


PartCodec = Buckets | Integers | BlockSigns


def encode(codec: PartCodec, values: jax.Array, start: jax.Array | int) -> jax.Array:
    """Writes values (m,) float32 as (n_words(m),) uint32."""
    return codec.words(codec.codes(Stored(values), start)[0])


def _magnitudes_and_masks(values: jax.Array, *masks: jax.Array) -> tuple[jax.Array, ...]:
    """Sums the magnitudes of every block of values (m,), and packs masks: (m / BLOCK,) float32, (m/32,) uint32 each."""
    return jnp.sum(jnp.abs(values).reshape(-1, BLOCK), axis=1), *bits.pack_each(*masks)


def _magnitudes_in_one_pass(values: jax.Array, *masks: jax.Array) -> tuple[jax.Array, ...]:
    """Does `_magnitudes_and_masks` in one pass over what its arguments are computed from."""
    place = np.arange(bits.WORD, dtype=np.uint32)
    rows = [mask.reshape(-1, bits.WORD).astype(jnp.uint32) << place for mask in masks]
    zeros = [np.uint32(0)] * len(masks)

    def add(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> list[jax.Array]:
        return [xs[0] + ys[0], *(x | y for x, y in zip(xs[1:], ys[1:], strict=True))]

    magnitudes = jnp.abs(values).reshape(-1, bits.WORD)
    total, *words = lax.reduce([magnitudes, *rows], [np.float32(0), *zeros], add, [1])
    return jnp.sum(total.reshape(-1, BLOCK // bits.WORD), axis=1), *words
