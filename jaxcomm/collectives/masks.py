"""The union of the masks of a few workers, the same on every worker.

The publishers of a tensor's mask are drawn anew in every step, so the compiled program cannot know them: the other
workers take part with zeros.
"""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.codecs.indices import EliasFano, Plain
from jaxcomm.collectives.axis import axis_size, zeros_varying_as
from jaxcomm.collectives.checksum import gather_checked, two_shot
from jaxcomm.collectives.messages import fuse, split_words
from jaxcomm.kernels import bits
from jaxcomm.kernels.scopes import DECODE, ENCODE, EXCHANGE
from jaxcomm.layout import BLOCK_WORDS, Layout, segment_sum
from jaxcomm.selectors import compact

MASK_CODECS = ("bitmap", "coded")


@dataclass(frozen=True)
class MaskUnion:
    """How masks are published. Static.

    Attributes:
      layout: the flat vector; its capacities bound what a coded mask can hold.
      codec: "bitmap" (n bits, combined by the owners of its parts), "coded" (positions, one row per publisher), or
        "auto" for the one that receives fewer bytes.
      publishers: r, publishers of every segment.
      axis_name: the axis of workers.
      checksum: see `jaxcomm.collectives.checksum`. Positions are then gathered from all workers, since no worker could
        check what is summed on its way.
    """

    layout: Layout
    codec: str
    publishers: int
    axis_name: str
    checksum: bool = False

    @cached_property
    def indices(self) -> Plain | EliasFano:
        """The codec of a coded mask's positions: one whose words can be added if workers wrote different slots."""
        return min(Plain(self.layout), EliasFano(self.layout), key=lambda codec: codec.n_words)

    def is_coded(self) -> bool:
        """Chooses between positions and bits, for this K, r, n and capacity."""
        if self.codec != "auto":
            return self.codec == "coded"
        k = axis_size(self.axis_name)
        row = self.indices.n_words + len(self.layout.sizes) + 1 + self.checksum
        coded = row * (k if self._gathers() else 2 * self.publishers)
        return coded < 2 * (self._part_words(k) + self.checksum) * k

    def _gathers(self) -> bool:
        return self.checksum or 2 * self.publishers > axis_size(self.axis_name)

    def _part_words(self, k: int) -> int:
        return -(-self.layout.n_words // k)

    def __call__(self, mask: jax.Array, row: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Combines the publishers' masks.

        Each worker receives 2 (K-1)/K * n/8 bytes for a bitmap, or 2 (K-1)/K * r payloads of coded positions (K-1 of
        them if that is less).

        Args:
          mask: (n/32,) uint32, this worker's own.
          row: (S,) int32, for every segment, the worker's index among its publishers; -1 if it is not one of them.
          start: the start offset in a mask with more coordinates than fit, see `compact`.

        Returns:
          The union (n/32,) uint32, and how many coordinates publishers had no room for, () float32, both the same on
          every worker; and whether this worker received everything as it was sent, () bool.
        """
        published = jnp.where(self.layout.per_block(row >= 0)[:, None], mask.reshape(-1, BLOCK_WORDS), 0).reshape(-1)
        if self.is_coded():
            return self._coded(published, row, start)
        union, is_intact = self._bitmap(published)
        return union, jnp.zeros((), jnp.float32), is_intact

    def _bitmap(self, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, n_words = axis_size(self.axis_name), self.layout.n_words
        width = self._part_words(k)
        rows = jnp.pad(mask, (0, k * width - n_words)).reshape(k, width)

        @jax.named_scope(DECODE)
        def unite(masks: jax.Array) -> tuple[jax.Array, None]:
            return lax.reduce(masks, np.uint32(0), lax.bitwise_or, (0,)), None

        parts, _, is_intact = two_shot(rows, unite, self.axis_name, self.checksum)
        return parts.reshape(-1)[:n_words], is_intact

    def _coded(self, mask: jax.Array, row: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        selection = compact(mask, self.layout, start)
        segments, capacities = len(self.layout.sizes), self.layout.capacities
        segment = np.repeat(np.arange(segments), capacities)
        # Slots fill from the front of their segment, so that a count says which are in use.
        filled_counts = segment_sum(selection.slots.filled.astype(jnp.uint32), segment, segments)
        counts = jnp.append(filled_counts, selection.overflow.astype(jnp.uint32))
        with jax.named_scope(ENCODE):
            payload = {"counts": counts, **self.indices.encode(selection)}

        @jax.named_scope(ENCODE)
        def as_publisher(number: jax.Array) -> jax.Array:
            """Writes the slots of the segments for which this worker has that index among the publishers."""
            is_publisher = row == number  # (S,)
            counted = jnp.where(jnp.append(is_publisher, number == 0), counts, 0)
            return fuse({"counts": counted, **self.indices.encode(selection, is_publisher[segment])})

        is_intact = jnp.asarray(True)
        if self._gathers():
            rows, is_intact = gather_checked(fuse(payload), self.axis_name, self.checksum)  # (K, m)
        else:
            rows = jax.vmap(as_publisher)(jnp.arange(self.publishers))
            with jax.named_scope(EXCHANGE):
                rows = lax.psum(rows, self.axis_name)  # (r, m)
        slot = np.arange(self.layout.n_slots) - np.repeat(np.cumsum(capacities) - capacities, capacities)

        @jax.named_scope(DECODE)
        def add(union: jax.Array, words: jax.Array) -> tuple[jax.Array, jax.Array]:
            message = split_words(words, payload)
            position = self.indices.decode(message)
            filled = slot < message["counts"][:-1][segment].astype(jnp.int32)
            bit = jnp.where(filled, np.uint32(1) << (position % bits.WORD).astype(jnp.uint32), np.uint32(0))
            mask_words = jnp.zeros(self.layout.n_words, jnp.uint32).at[position // bits.WORD].add(bit)
            return union | mask_words, message["counts"][-1]

        union, overflow = lax.scan(add, zeros_varying_as((self.layout.n_words,), jnp.uint32, rows), rows)
        return union, jnp.sum(overflow.astype(jnp.float32)), is_intact
