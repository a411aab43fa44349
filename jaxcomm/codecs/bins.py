"""A sign and a magnitude bin per value, and the bins' means per segment: 2 or 4 bits a value."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.codecs.values import ValueCodec
from jaxcomm.kernels import bits
from jaxcomm.layout import Layout

_LARGEST = ValueCodec(jnp.dtype("bfloat16"))
_STEPS = 255  # levels of the other means, as fractions of the largest


@dataclass(frozen=True)
class BinCodec:
    """Writes the values of each segment as signs and bins of magnitude, with a table of the bins' means.

    The magnitudes of a segment are split at their mean, each part at its own mean, and so on. A value is read as its
    bin's mean with its sign. A segment's largest mean takes 16 bits, and each other mean 8, as a fraction of it. If a
    segment has empty slots, only they are in its lowest bin, whose mean is then 0.

    Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, quantizes to a table of bin
    means; its bins are of equal width, and have no signs of their own.

    Attributes:
      bits: bits a value, 2 or 4.
    """

    bits: int

    @property
    def bins(self) -> int:
        """Bins of magnitude in a segment."""
        return 2 ** (self.bits - 1)

    def _parts(self, layout: Layout) -> tuple[int, int, int]:
        """Returns the words of the largest means, of the others, and of the codes."""
        segments = len(layout.capacities)
        table_words = bits.packed_words(segments * (self.bins - 1), 8)
        return -(-segments // 2), table_words, bits.packed_words(layout.n_slots, self.bits)

    def n_words(self, layout: Layout) -> int:
        """Returns the words of the values of all slots."""
        return sum(self._parts(layout))

    def write(self, values: jax.Array, filled: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
        """Writes the values of slots.

        Args:
          values: (C,) float32, 0 in empty slots.
          filled: (C,) bool.
          layout: the segments and their slots.

        Returns:
          The words, (n_words,) uint32, and the values that are read from them, (C,) float32.
        """
        segment = layout.segment_of_slot()
        magnitude = jnp.minimum(jnp.abs(values), np.float32(jnp.finfo(jnp.bfloat16).max))
        group = segment
        for _ in range(self.bits - 1):
            means = self._means(magnitude, filled, group, layout)
            # Rounding may put a mean of equal numbers above all of them, which would leave the upper part empty.
            largest_of_group = jax.ops.segment_max(jnp.where(filled, magnitude, 0.0), group, means.size)
            group = 2 * group + (magnitude >= jnp.minimum(means, largest_of_group)[group])
        empty = jax.ops.segment_sum((~filled).astype(jnp.int32), segment, len(layout.capacities))
        first_bin = jnp.where(empty[segment] > 0, 1, 0)
        bin_of = jnp.where(filled, jnp.maximum(group % self.bins, first_bin), 0)
        means = self._means(magnitude, filled, segment * self.bins + bin_of, layout).reshape(-1, self.bins)
        largest = _LARGEST.rounded(means[:, -1])
        parts = means[:, :-1] / jnp.where(largest > 0, largest, 1.0)[:, None]
        steps = jnp.clip(jnp.round(_STEPS * parts), 0, _STEPS).astype(jnp.int32)
        code = jnp.where(values < 0, self.bins, 0) + bin_of
        words = [_LARGEST.encode(largest), bits.pack_numbers(steps.reshape(-1), 8), bits.pack_numbers(code, self.bits)]
        return jnp.concatenate(words), self._read(largest, steps, code, segment)

    def read(self, words: jax.Array, layout: Layout) -> jax.Array:
        """Reads the values of all slots: (C,) float32, 0 in empty ones."""
        n_largest, n_others, _ = self._parts(layout)
        segments = len(layout.capacities)
        largest = _LARGEST.decode(words[:n_largest], segments)
        steps = bits.unpack_numbers(words[n_largest : n_largest + n_others], segments * (self.bins - 1), 8)
        code = bits.unpack_numbers(words[n_largest + n_others :], layout.n_slots, self.bits)
        return self._read(largest, steps.reshape(segments, -1), code, layout.segment_of_slot())

    def _means(self, magnitude: jax.Array, filled: jax.Array, group: jax.Array, layout: Layout) -> jax.Array:
        """Returns the mean magnitude of the filled slots of every group, at the group's index."""
        count = jax.ops.segment_sum(filled.astype(jnp.float32), group, len(layout.capacities) * self.bins)
        shares = jnp.where(filled, magnitude / jnp.maximum(count, 1.0)[group], 0.0)
        return jax.ops.segment_sum(shares, group, count.size)

    def _read(self, largest: jax.Array, steps: jax.Array, code: jax.Array, segment: jax.Array) -> jax.Array:
        """Reads values from the table, (S,) and (S, bins - 1), and the codes and segments of their slots."""
        parts = steps.astype(jnp.float32) * np.float32(1 / _STEPS)
        means = jnp.concatenate([largest[:, None] * parts, largest[:, None]], axis=1).reshape(-1)
        magnitude = means[segment * self.bins + code % self.bins]
        return jnp.where(code >= self.bins, -magnitude, magnitude)
