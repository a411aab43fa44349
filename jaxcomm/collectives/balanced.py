"""The balanced sparse all-reduce: each worker owns a region, sums it, and sends its largest sums to all.

The bytes of gathered payloads grow with K. Here, a worker's coordinates go to the owners of their regions, and each
owner sends its largest sums, as many as fit, to all workers: about two payloads, whatever K is. A coordinate whose sum
has no slot stays in the residual of every worker that sent it. (If the owner kept the sums instead, the largest numbers
of its residual would all be in its own region, which would overflow for good.)

Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk), PPoPP 2022.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.codecs import IndexCodec, SlotCodec, choose_index_codec
from jaxcomm.collectives.axis import zeros_varying_as
from jaxcomm.collectives.checksum import two_shot
from jaxcomm.collectives.messages import fuse, split_words
from jaxcomm.collectives.reduced import Sent, SparseReduced, read_status, write_status
from jaxcomm.kernels import bits
from jaxcomm.kernels.numerics import is_finite
from jaxcomm.kernels.scopes import DECODE, ENCODE
from jaxcomm.kernels.vectors import Stored, add_at
from jaxcomm.layout import BLOCK, Layout
from jaxcomm.selectors import Selection, compact, compact_rows, select_topk
from jaxcomm.types import Payload

REGION_SLACK = 5 / 4  # capacity of a region divided by its share of the slots
_HAS_ROOM = 31  # the bit of an owner's overflow that says that it had a slot for every sum
_DEVIATIONS = 5  # standard deviations of a random selection that a region has room for, if that is more


@dataclass(frozen=True)
class Regions:
    """The flat vector in K regions of whole blocks, one per worker. Static.

    Attributes:
      layout: the flat vector.
      workers: K.
      values: the codec of values.
      checksum: see `jaxcomm.collectives.checksum`.
    """

    layout: Layout
    workers: int
    values: SlotCodec
    checksum: bool = False

    @property
    def size(self) -> int:
        """Elements of a region; the last regions may end, or even start, beyond n."""
        return -(-self.layout.n // (self.workers * BLOCK)) * BLOCK

    @cached_property
    def region(self) -> Layout:
        """The layout of one region, with R slots: the share of the fullest region, and room to spare."""
        share = self._largest_share()
        room = math.ceil(round(max(REGION_SLACK * share, share + _DEVIATIONS * math.sqrt(share)), 6))
        capacity = min(self.size, self.layout.n_slots, room)
        return Layout(((self.size,),), (jnp.dtype(jnp.float32),), (True,), (capacity,))

    def _largest_share(self) -> float:
        """Returns how many of a payload's slots a region takes if segments are selected evenly, the most of any."""
        layout, shares = self.layout, []
        for sizes, slots in layout.of_stages():
            by_block = layout.used(sizes) * (slots / np.maximum(sizes, 1))[layout.segment_of_block()]
            shares.append(np.add.reduceat(by_block, np.arange(0, len(by_block), self.size // BLOCK)).max())
        return max(shares)

    @property
    def indices(self) -> IndexCodec:
        """The codec of positions in a region."""
        return choose_index_codec(self.region)

    @property
    def received(self) -> int:
        """Bytes that each worker receives in both shots."""
        words = self.indices.n_words + self.values.n_words(self.region)
        return 4 * (self.workers - 1) * 2 * (words + 3 + self.checksum)

    def cut(self, vector: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cuts a vector (n,) and its mask (n/32,) into regions: (K, size) and (K, size/32), zeros beyond n."""
        k, padding = self.workers, self.workers * self.size - self.layout.n
        rows = jnp.pad(vector, (0, padding)).reshape(k, self.size)
        return rows, jnp.pad(mask, (0, padding // bits.WORD)).reshape(k, -1)

    def place(self, position: jax.Array) -> jax.Array:
        """Turns slots' positions in their regions (K, R) into positions in the vector (K R,), all in range."""
        first = np.arange(self.workers, dtype=np.int32)[:, None] * self.size
        return jnp.minimum((position + first).reshape(-1), self.layout.n - 1)

    @jax.named_scope(ENCODE)
    def _encode(self, values: jax.Array, selection: Selection, header: list[jax.Array]) -> Payload:
        """Writes the selected values of one region (size,) float32."""
        filled_values = jnp.where(selection.slots.filled, values[selection.slots.position], 0.0)
        count = jnp.sum(selection.slots.filled, dtype=jnp.int32)
        header = [*header, count, selection.overflow]
        words = jnp.stack([number.astype(jnp.uint32) for number in header])
        value_words, _ = self.values.write(filled_values, selection.slots.filled, self.region)
        return {"header": words, "values": value_words, **self.indices.encode(selection)}

    @jax.named_scope(DECODE)
    def _decode(self, payload: Payload) -> tuple[jax.Array, jax.Array]:
        """Reads the positions in a region and the values."""
        return self.indices.decode(payload), self.values.read(payload["values"], self.region)

    def exchange(
        self, vector: jax.Array, mask: jax.Array, start: jax.Array, status: jax.Array, axis_name: str
    ) -> SparseReduced:
        """Sums the selected coordinates over the workers, and returns as many of the largest sums as there are slots.

        total + psum(errors) == psum(sent), where `sent` has only the coordinates of these sums; the others stay with
        their workers. Each worker receives 2 (K-1) payloads of a region.

        Args:
          vector: (n,) float32.
          mask: (n/32,) uint32, the selected coordinates. Those that have no slot in their region are not sent and count
            as overflow.
          start: the start offset in regions with too many coordinates, see `compact`.
          status: () uint32, this worker's status, from `write_status`.
          axis_name: the axis of workers.
        """
        n, k, size = self.layout.n, self.workers, self.size
        by_region, words = self.cut(vector, mask)
        me = lax.axis_index(axis_name)

        selections = compact_rows(words, self.region, start)
        payload = jax.vmap(lambda values, selection: self._encode(values, selection, [status]))(by_region, selections)
        slots = selections.slots
        like = jax.tree.map(lambda rows: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype), payload)
        values = jax.vmap(lambda row: self.values.read(row, self.region))(payload["values"])  # (K, R)

        def at_owner(messages: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            payloads = jax.vmap(lambda row: split_words(row, like))(messages)

            def add(total: jax.Array, one: Payload) -> tuple[jax.Array, None]:
                position, summands = self._decode(one)
                return add_at(total, position, summands), None

            with jax.named_scope(DECODE):
                total, _ = lax.scan(add, zeros_varying_as((size,), jnp.float32, messages), payloads)
            headers = payloads["header"]  # (K, 3): status, sent, overflow
            sound, overfull = read_status(headers[:, 0])
            largest = select_topk(Stored(total), self.region)
            counts = jnp.sum(headers[:, 1:], axis=0, dtype=jnp.uint32)
            selection = compact(largest.words, self.region)
            result = self._encode(total, selection, [])
            (position, filled), has_room = selection.slots, ~jnp.all(selection.slots.filled)
            rounded = self.values.read(result["values"], self.region)
            error = jnp.where(filled & (has_room | (rounded != 0)), total[position] - rounded, 0.0)  # (R,)
            # What this worker keeps of its own and of the sums' rounding must be finite, or it could never be sent.
            remainder = add_at(by_region[me], slots.position[me], -values[me])
            sound = sound & largest.ok & is_finite(remainder[position] + error)
            overflow = counts[1] | (has_room.astype(jnp.uint32) << _HAS_ROOM)
            result["header"] = jnp.stack([write_status(sound, overfull), counts[0], overflow])
            return fuse(result), (position, error)

        code, (own_position, error), is_intact = two_shot(jax.vmap(fuse)(payload), at_owner, axis_name, self.checksum)
        results = jax.vmap(lambda row: split_words(row, like))(code)
        first = np.arange(k, dtype=np.int32)[:, None] * size
        with jax.named_scope(DECODE):
            position, sums = jax.vmap(self._decode)(results)  # (K, R) each
            total = jnp.zeros(k * size, jnp.float32)
            total = add_at(total, (position + first).reshape(-1), sums.reshape(-1))
        headers = results["header"]  # (K, 3)
        finite, overfull = read_status(headers[:, 0])
        has_room, counts = headers[:, 2:] >> _HAS_ROOM != 0, headers[:, 1:] & ((1 << _HAS_ROOM) - 1)
        is_taken = slots.filled & (has_room | (total[slots.position + first] != 0))  # (K, R); sums may cancel to 0
        return SparseReduced(
            lambda ok: jnp.where(ok, total[:n], 0.0),
            (jnp.minimum(own_position + me * size, n - 1), error),
            finite & is_intact & jnp.isfinite(jnp.sum(jnp.abs(sums))),  # no number of the total is larger
            Sent(self.place(slots.position), is_taken.reshape(-1), jnp.where(is_taken, values, 0.0).reshape(-1)),
            jnp.sum(counts.astype(jnp.float32), axis=0),
            overfull,
        )
