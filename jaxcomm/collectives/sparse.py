"""The sum of sparse vectors: every worker's coordinates as one payload, gathered or summed by owners of regions."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.codecs import IndexCodec, SlotCodec, choose_index_codec
from jaxcomm.collectives.axis import axis_size
from jaxcomm.collectives.balanced import Regions
from jaxcomm.collectives.checksum import agreed, gather_checked
from jaxcomm.collectives.messages import fuse, split_words
from jaxcomm.collectives.reduced import Sent, SparseReduced, read_status, write_status
from jaxcomm.kernels.numerics import is_accumulable, not_accumulable
from jaxcomm.kernels.platforms import by_platform
from jaxcomm.kernels.scopes import DECODE, ENCODE
from jaxcomm.kernels.vectors import add_at, computed_once
from jaxcomm.layout import Layout
from jaxcomm.selectors import compact
from jaxcomm.selectors.selection import count_in_segment
from jaxcomm.types import Payload

HEADER = 3  # words of a payload: status, sent, overflow
COLLECTIVES = ("gather", "balanced")


class Accumulated(NamedTuple):
    """One worker's gradient + residual, added wherever it is read: storing the sum would cost a pass and n floats.

    Attributes:
      gradient: (n,) float32.
      residual: (1, n) float32, the worker's row. It keeps this shape until it is the new row, or XLA would copy it.
    """

    gradient: jax.Array
    residual: jax.Array

    def sum(self) -> jax.Array:
        """Returns gradient + residual, (n,) float32."""
        return self.gradient + self.residual[0]

    def at(self, position: jax.Array) -> jax.Array:
        """Returns gradient + residual at some positions."""
        return self.gradient[position] + self.residual[0, position]

    def is_ok(self) -> jax.Array:
        """Returns whether gradient + residual is finite, and every gradient below 2^100 in magnitude: () bool."""
        return is_accumulable(self.sum(), self.gradient)

    def broken(self) -> jax.Array:
        """Marks what is not so: (n,) bool."""
        return not_accumulable(self.sum(), self.gradient)


@dataclass(frozen=True)
class SparseSum:
    """One payload per worker and step. Static.

    Attributes:
      layout: the flat vector's segments and their capacities.
      values: the codec of values.
      collective: "gather", "balanced", or "auto" for gather if it receives at most a quarter of the dense bytes, else
        for whichever of the two receives fewer.
      always_fits: whether a segment never has more selected coordinates than slots (a region may).
      axis_name: the axis of workers.
      checksum: see `jaxcomm.collectives.checksum`.
    """

    layout: Layout
    values: SlotCodec
    collective: str
    always_fits: bool
    axis_name: str
    checksum: bool = False

    @cached_property
    def indices(self) -> IndexCodec:
        """The codec of positions for gathered payloads."""
        return choose_index_codec(self.layout)

    def regions(self) -> Regions:
        """Returns the regions of the balanced collective."""
        return Regions(self.layout, axis_size(self.axis_name), self.values, self.checksum)

    def is_gathered(self) -> bool:
        """Chooses between gather and balanced, for this K, n, capacity and codec."""
        if self.collective != "auto":
            return self.collective == "gather"
        k, n = axis_size(self.axis_name), self.layout.n
        words = HEADER + self.indices.n_words + self.values.n_words(self.layout) + self.checksum
        gathered, dense = 4 * (k - 1) * words, 8 * (k - 1) * n / k
        return gathered <= dense / 4 or gathered <= self.regions().received

    def __call__(self, vector: Accumulated, mask: jax.Array, ok: jax.Array, start: jax.Array) -> SparseReduced:
        """Sums the selected coordinates of each worker's vector over the workers.

        With gather, each worker receives (K-1) payloads; for balanced, see `Regions`.

        Args:
          vector: gradient + residual.
          mask: (n/32,) uint32, the selected coordinates.
          ok: () bool, whether this worker's vector is ok.
          start: the start offset of those that get slots if there are too few; see `compact`.
        """
        reduced = (self._gather if self.is_gathered() else self._by_regions)(vector, mask, ok, start)
        return agreed(reduced, self.axis_name, self.checksum)

    def status(self, ok: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns this worker's status: () uint32, from `write_status`."""
        if self.always_fits:
            return write_status(ok)
        selected = count_in_segment(mask, self.layout).astype(jnp.uint32)  # (S,)
        overfull = jnp.any(selected > 2 * self.layout.rooms().astype(np.uint32))
        return write_status(ok, overfull)

    @jax.named_scope(ENCODE)
    def encode(self, vector: Accumulated, mask: jax.Array, ok: jax.Array, start: jax.Array) -> tuple[Payload, Sent]:
        """Writes the selected coordinates as a payload of uint32 arrays; also returns what the receivers will read."""
        selection = compact(mask, self.layout, None if self.always_fits else start)
        position, filled = selection.slots
        values = computed_once(jnp.where(filled, vector.at(position), 0.0))  # (C,)
        packed, values = self.values.write(values, filled, self.layout)
        numbers = self.status(ok, mask), jnp.sum(filled), selection.overflow
        header = jnp.stack([number.astype(jnp.uint32) for number in numbers])
        payload = {"header": header, "values": packed, **self.indices.encode(selection)}
        return payload, Sent(position, filled, values)

    @jax.named_scope(DECODE)
    def decode(self, payload: Payload) -> tuple[jax.Array, jax.Array]:
        """Reads the positions and values of a payload, (C,) each; the value of an empty slot is 0."""
        values = self.values.read(payload["values"], self.layout)
        return self.indices.decode(payload), values

    def pack(self, vector: Accumulated, mask: jax.Array, ok: jax.Array, start: jax.Array) -> tuple[jax.Array, Sent]:
        """Does `encode`, and puts the payload's arrays end to end: (m,) uint32."""
        payload, sent = self.encode(vector, mask, ok, start)
        return fuse(payload), sent

    def unpack(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Does `decode` for what `pack` wrote."""
        n = self.layout.n

        def zeros() -> Payload:
            vector, mask = Accumulated(jnp.zeros(n), jnp.zeros((1, n))), jnp.zeros(self.layout.n_words, jnp.uint32)
            return self.encode(vector, mask, jnp.asarray(True), jnp.float32(0))[0]

        return self.decode(split_words(words, jax.eval_shape(zeros)))

    def _gather(self, vector: Accumulated, mask: jax.Array, ok: jax.Array, start: jax.Array) -> SparseReduced:
        payload, contribution = self.encode(vector, mask, ok, start)
        gathered, is_intact = gather_checked(fuse(payload), self.axis_name, self.checksum)  # (K, m)
        gathered = jax.vmap(lambda words: split_words(words, payload))(gathered)
        ok, overfull = read_status(gathered["header"][:, 0])
        counts = gathered["header"][:, 1:].astype(jnp.float32)  # (K, 2), sent and overflow
        # If the sum of all magnitudes is finite, so is every number of the mean, wherever the values are added.
        with jax.named_scope(DECODE):
            read = jax.vmap(lambda words: self.values.read(words, self.layout))
            values = read(gathered["values"])  # (K, C)
            magnitude = jnp.sum(jnp.abs(values))

        @jax.named_scope(DECODE)
        def total(ok: jax.Array) -> jax.Array:
            def add(total: jax.Array, slots: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                position, summands = slots
                return add_at(total, position, jnp.where(ok, summands, 0.0)), None

            def one_by_one(zeros: jax.Array) -> jax.Array:
                return lax.scan(lambda total, payload: add(total, self.decode(payload)), zeros, gathered)[0]

            def decoded_at_once(zeros: jax.Array) -> jax.Array:  # in as few kernels of a GPU as one payload takes
                return lax.scan(add, zeros, (jax.vmap(self.indices.decode)(gathered), values), unroll=8)[0]

            # A zero that depends on the payloads: else XLA would allocate the sum first, while the gradient is alive.
            zero = jnp.where(ok, jnp.minimum(magnitude, 0.0), 0.0)
            zeros = jnp.full(self.layout.n, zero)
            return by_platform(zeros, cpu=one_by_one, tpu=one_by_one, default=decoded_at_once)

        ok = ok & is_intact & jnp.isfinite(magnitude)
        return SparseReduced(total, None, ok, contribution, jnp.sum(counts, axis=0), overfull)

    def _by_regions(self, vector: Accumulated, mask: jax.Array, ok: jax.Array, start: jax.Array) -> SparseReduced:
        return self.regions().exchange(vector.sum(), mask, start, self.status(ok, mask), self.axis_name)
