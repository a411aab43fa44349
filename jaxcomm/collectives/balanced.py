"""The balanced sparse all-reduce: each worker owns a region, sums it, and keeps the sums that it does not send.

The bytes of gathered payloads grow with K. Here, a worker's coordinates go to the owners of their regions, and each
owner sends its largest sums, as many as fit, to all workers: about two payloads, whatever K is. The sums that an owner
does not send go into its own residual, and are sent when they are large enough.

Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk), PPoPP 2022.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import bits
from jaxcomm.codecs import IndexCodec, SlotCodec, choose_index_codec
from jaxcomm.collectives.axis import zeros_varying_as
from jaxcomm.collectives.gather import fuse, split_words
from jaxcomm.collectives.reduced import Sent, SparseReduced
from jaxcomm.collectives.status import read_status, write_status
from jaxcomm.collectives.two_shot import two_shot
from jaxcomm.layout import BLOCK, Layout
from jaxcomm.numerics import is_finite
from jaxcomm.scopes import DECODE, ENCODE
from jaxcomm.selectors import Selection, compact, compact_rows, select_topk
from jaxcomm.types import Payload
from jaxcomm.vectors import Stored

REGION_SLACK = Fraction(5, 4)  # capacity of a region divided by its share of the slots


@dataclass(frozen=True)
class Regions:
    """The flat vector in K regions of whole blocks, one per worker. Static.

    Attributes:
      layout: the flat vector.
      workers: K.
      values: the codec of values.
      index_codec: name of the codec of positions, or "auto".
      checksum: see `jaxcomm.collectives.checksum`.
    """

    layout: Layout
    workers: int
    values: SlotCodec
    index_codec: str
    checksum: bool = False

    @property
    def size(self) -> int:
        """Elements of a region; the last regions may end, or even start, beyond n."""
        return -(-self.layout.n // (self.workers * BLOCK)) * BLOCK

    @property
    def region(self) -> Layout:
        """The layout of one region, with R slots."""
        capacity = min(self.size, math.ceil(REGION_SLACK * self.layout.n_slots / self.workers))
        return Layout(((self.size,),), (jnp.dtype(jnp.float32),), (True,), (capacity,))

    @property
    def indices(self) -> IndexCodec:
        """The codec of positions in a region."""
        return choose_index_codec(self.region, self.index_codec)

    @property
    def received(self) -> int:
        """Bytes that each worker receives in both shots."""
        words = self.indices.n_words + self.values.n_words(self.region)
        return 4 * (self.workers - 1) * 2 * (words + 3 + self.checksum)

    def cut(self, vector: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cuts a vector (n,) and its mask (n/32,) into regions: (K, size) and (K, size/32), zeros beyond n."""
        k, beyond = self.workers, self.workers * self.size - self.layout.n
        rows = jnp.pad(vector, (0, beyond)).reshape(k, self.size)
        return rows, jnp.pad(mask, (0, beyond // bits.WORD)).reshape(k, -1)

    def place(self, position: jax.Array) -> jax.Array:
        """Turns slots' positions in their regions (K, R) into positions in the vector (K R,), all in range."""
        first = np.arange(self.workers, dtype=np.int32)[:, None] * self.size
        return jnp.minimum((position + first).reshape(-1), self.layout.n - 1)

    @jax.named_scope(ENCODE)
    def _encode(self, values: jax.Array, selection: Selection, header: list[jax.Array]) -> tuple[Payload, Selection]:
        """Writes the selected values of one region (size,) float32."""
        indices, selection = self.indices.encode(selection)
        sent = jnp.where(selection.slots.filled, values[selection.slots.position], 0.0)
        count = jnp.sum(selection.slots.filled, dtype=jnp.int32)
        header = [*header, count, selection.overflow]
        words = jnp.stack([number.astype(jnp.uint32) for number in header])
        written, _ = self.values.write(sent, selection.slots.filled, self.region)
        return {"header": words, "values": written, **indices}, selection

    @jax.named_scope(DECODE)
    def _decode(self, payload: Payload) -> tuple[jax.Array, jax.Array]:
        """Reads the positions in a region and the values."""
        return self.indices.decode(payload), self.values.read(payload["values"], self.region)

    def exchange(
        self, vector: jax.Array, mask: jax.Array, start: jax.Array, status: jax.Array, axis_name: str
    ) -> SparseReduced:
        """Sums the selected coordinates over the workers, and returns as many of the largest sums as there are slots.

        total + psum(residual) == psum(what was sent). Each worker receives 2 (K-1) payloads of a region.

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

        def encode_own(values: jax.Array, selection: Selection) -> tuple[Payload, bits.Slots]:
            payload, selection = self._encode(values, selection, [status])
            return payload, selection.slots

        payload, slots = jax.vmap(encode_own)(by_region, compact_rows(words, self.region, start))
        like = jax.tree.map(lambda rows: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype), payload)
        values = jax.vmap(lambda row: self.values.read(row, self.region))(payload["values"])  # (K, R)

        def at_owner(received: jax.Array) -> tuple[jax.Array, jax.Array]:
            payloads = jax.vmap(lambda row: split_words(row, like))(received)

            def add(total: jax.Array, one: Payload) -> tuple[jax.Array, None]:
                position, sent = self._decode(one)
                return total.at[position].add(sent, mode="promise_in_bounds"), None

            with jax.named_scope(DECODE):
                total, _ = lax.scan(add, zeros_varying_as((size,), jnp.float32, received), payloads)
            headers = payloads["header"]  # (K, 3): status, sent, overflow
            sound, overfull = read_status(headers[:, 0])
            largest = select_topk(Stored(total), self.region)
            counts = jnp.sum(headers[:, 1:], axis=0, dtype=jnp.uint32)
            result, selection = self._encode(total, compact(largest.words, self.region), [])
            kept = self.values.read(result["values"], self.region)
            dropped = total.at[selection.slots.position].add(-kept, mode="promise_in_bounds")
            # What this worker keeps of its own and of others' coordinates must be finite, or it could never be sent.
            own = by_region[me].at[slots.position[me]].add(-values[me], mode="promise_in_bounds")
            sound = sound & largest.ok & is_finite(own + dropped)
            result["header"] = jnp.stack([write_status(sound, overfull), counts[0], counts[1]])
            return fuse(result), dropped

        code, dropped, is_intact = two_shot(jax.vmap(fuse)(payload), at_owner, axis_name, self.checksum)
        results = jax.vmap(lambda row: split_words(row, like))(code)
        first = np.arange(k, dtype=np.int32)[:, None] * size
        with jax.named_scope(DECODE):
            position, sums = jax.vmap(self._decode)(results)  # (K, R) each
            total = jnp.zeros(k * size, jnp.float32)
            total = total.at[(position + first).reshape(-1)].add(sums.reshape(-1), mode="promise_in_bounds")
        headers = results["header"]
        finite, overfull = read_status(headers[:, 0])
        return SparseReduced(
            lambda ok: jnp.where(ok, total[:n], 0.0),
            lambda: self._in_place(dropped, me),
            finite & is_intact & jnp.isfinite(jnp.sum(jnp.abs(sums))),  # no number of the total is larger
            Sent(self.place(slots.position), slots.filled.reshape(-1), values.reshape(-1)),
            jnp.sum(headers[:, 1:].astype(jnp.float32), axis=0),
            overfull,
        )

    def _in_place(self, dropped: jax.Array, me: jax.Array) -> jax.Array:
        """Puts an owner's region (size,) at its place in a vector of zeros (n,)."""
        zeros = jnp.zeros(self.workers * self.size, jnp.float32)
        return lax.dynamic_update_slice(zeros, dropped, (me * self.size,))[: self.layout.n]
