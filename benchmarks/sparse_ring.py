"""The sparse ring all-reduce: what a ring does to the sparse gradients of Deep Gradient Compression.

Every worker chooses its own coordinates, so a partial sum has the coordinates of all workers that it has passed: the
payload gets denser with every hop, and the last ones are dense. This module shows that, and its cost. The library's
`balanced` drops the small sums instead, and its `shared_mask` agrees on the coordinates first.

Source: the ring all-reduce of Gibiansky, "Bringing HPC Techniques to Deep Learning", 2017, with the selections of Lin
et al., "Deep Gradient Compression", ICLR 2018.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.codecs import IndexCodec, ValueCodec, choose_index_codec
from jaxcomm.collectives.balanced import Regions
from jaxcomm.collectives.messages import all_gather_same, fuse, split_words
from jaxcomm.collectives.reduced import Sent, SparseReduced, read_status, write_status
from jaxcomm.collectives.sparse import Accumulated, SparseSum
from jaxcomm.exchange import transformation
from jaxcomm.kernels import bits
from jaxcomm.kernels.numerics import magnitude_bits
from jaxcomm.layout import Layout
from jaxcomm.methods.dct_dp import DctDp
from jaxcomm.methods.dgc import Dgc
from jaxcomm.methods.sparse import SparseExchange
from jaxcomm.methods.topk import TopK
from jaxcomm.selectors import compact, compact_rows
from jaxcomm.types import Payload


@dataclass(frozen=True)
class Hop:
    """How the partial sum of a region is encoded after so many workers have added to it. Static.

    Attributes:
      region: the layout of the region, with the capacity for one worker's selection.
      adders: h, the workers whose coordinates are in the sum.
      values: the codec of values.
    """

    region: Layout
    adders: int
    values: ValueCodec

    @cached_property
    def layout(self) -> Layout:
        """The region with the capacity for the coordinates of all adders, so that none that was accepted is dropped."""
        capacity = min(self.region.n, self.adders * self.region.n_slots)
        return Layout(self.region.shapes, self.region.dtypes, self.region.compressed, (capacity,))

    @cached_property
    def indices(self) -> IndexCodec | None:
        """The codec of positions; None if sending every value takes no more words."""
        layout = self.layout
        codec = choose_index_codec(layout)
        is_coded = codec.n_words + self._value_words(layout.n_slots) < self._value_words(layout.n)
        return codec if is_coded else None

    def _value_words(self, n: int) -> int:
        return -(-n * self.values.bits // bits.WORD)

    @property
    def n_words(self) -> int:
        """The 32-bit words of the positions and values."""
        if self.indices is None:
            return self._value_words(self.region.n)
        return self.indices.n_words + self._value_words(self.layout.n_slots)

    def encode(self, sums: jax.Array) -> Payload:
        """Encodes a region (size,) float32 of rounded sums; its nonzero ones fit."""
        if self.indices is None:
            return {"values": self.values.encode(sums)}
        selection = compact(nonzero(sums), self.layout)
        position, filled = selection.slots
        return {"values": self.values.encode(jnp.where(filled, sums[position], 0.0)), **self.indices.encode(selection)}

    def decode(self, payload: Payload) -> jax.Array:
        """Decodes the region's sums, (size,) float32."""
        if self.indices is None:
            return self.values.decode(payload["values"], self.region.n)
        values = self.values.decode(payload["values"], self.layout.n_slots)
        zeros = jnp.zeros(self.region.n, jnp.float32)
        return zeros.at[self.indices.decode(payload)].add(values, mode="promise_in_bounds")


def nonzero(vector: jax.Array) -> jax.Array:
    """Marks the nonzero numbers, however small, of a vector (n,) float32: (n/32,) uint32."""
    return bits.pack(magnitude_bits(vector) != 0)


def hops_of(regions: Regions) -> list[Hop]:
    """Returns the K messages of a region: K-1 from neighbour to neighbour, and the last from its owner to all."""
    return [Hop(regions.region, h, regions.values) for h in range(1, regions.workers + 1)]


def received_on_ring(regions: Regions) -> int:
    """Returns the bytes of payloads that each worker receives, without the all-reduce of K + 2 counts."""
    *middle, last = hops_of(regions)
    return 4 * (sum(hop.n_words for hop in middle) + (regions.workers - 1) * (last.n_words + 1))


def ring_sum(
    regions: Regions, vector: jax.Array, mask: jax.Array, start: jax.Array, status: jax.Array, axis_name: str
) -> tuple[SparseReduced, jax.Array]:
    """Sums the masked coordinates over the workers, region by region on a ring.

    Region j starts at worker j+1 and passes from neighbour to neighbour: each decodes what arrives, adds its own
    coordinates, and sends the union on, until the owner j sends the sum to all. A message after h workers has the
    capacity for the coordinates of all of them: what was accepted is never dropped. Each worker rounds once per region,
    and keeps the error in its residual: total + psum(errors) == psum(sent).

    Equals `lax.psum` of the masked vectors, up to the rounding of the values. Each worker receives a message of every
    hop h < K, K-1 messages of the last hop with a flag (`received_on_ring`), and an all-reduce of K + 2 numbers of 4
    bytes.

    Messages differ in size, so each hop is compiled by itself: 150 thousand elements at 1% take 5 s for K = 4, 7 s for
    8 and 12 s for 16 on two CPU cores, where a gather takes 2 s (all two to four times that if the cores are busy).
    Sensible up to K = 16.

    Args:
      regions: of the flat vector; each has the capacity for one worker's selection.
      vector: (n,) float32.
      mask: (n/32,) uint32, the selected coordinates. What a region has no slot for is not sent and counts as overflow.
      start: which coordinates of a region with too many are sent, see `compact`.
      status: () uint32, this worker's, of `write_status`.
      axis_name: the axis of workers.

    Returns:
      The sum, and the number of nonzero coordinates after every hop, over all regions: (K,) float32, the same on every
      worker. Unlike in a balanced exchange, the values sent are not rounded (sums are), and errors are nonzero wherever
      this worker has rounded.
    """
    k = regions.workers
    by_region, words = regions.cut(vector, mask)  # (K, size), (K, size/32)
    me = lax.axis_index(axis_name)
    selection = compact_rows(words, regions.region, start)
    local_rows = jnp.where(jax.vmap(bits.unpack)(selection.words), by_region, 0.0)
    onward = [(worker, (worker + 1) % k) for worker in range(k)]

    errors, counts, *middle, last = [], [], *hops_of(regions)
    total = local_rows[(me - 1) % k]

    def rounded(total: jax.Array) -> jax.Array:
        sums = regions.values.rounded(total)
        errors.append(total - sums)
        counts.append(jnp.sum(bits.popcount(nonzero(sums))))
        return sums

    for hop in middle:
        payload = hop.encode(rounded(total))
        payload = split_words(lax.ppermute(fuse(payload), axis_name, onward), payload)
        total = hop.decode(payload) + local_rows[(me - 1 - hop.adders) % k]
    sums = rounded(total)
    # Errors in the order of the regions; this worker rounded its own region last.
    errors_in_order = jnp.stack(errors)[(me - 1 - np.arange(k)) % k]
    # The new residual must be finite, or it could never be sent. (A sum that is not finite leaves such an error.)
    sound, overfull = read_status(status[None])
    status = write_status(sound & jnp.isfinite(by_region - local_rows + errors_in_order).all(), overfull)
    payload = {"header": status[None], **last.encode(sums)}
    rows = all_gather_same(fuse(payload), axis_name)  # (K, m)
    payloads = jax.vmap(lambda row: split_words(row, payload))(rows)

    n_sent = jnp.sum(selection.slots.filled), jnp.sum(selection.overflow)
    totals = lax.psum(jnp.stack([*n_sent, *counts]).astype(jnp.float32), axis_name)  # (K + 2,)
    values = jnp.where(selection.slots.filled, jnp.take_along_axis(local_rows, selection.slots.position, axis=1), 0.0)
    finite, overfull = read_status(payloads["header"][:, 0])
    total = jax.vmap(last.decode)(payloads).reshape(-1)[: vector.size]
    result = SparseReduced(
        lambda ok: jnp.where(ok, total, 0.0),
        (jnp.arange(vector.size, dtype=jnp.int32), errors_in_order.reshape(-1)[: vector.size]),
        finite,
        Sent(regions.place(selection.slots.position), selection.slots.filled.reshape(-1), values.reshape(-1)),
        totals[:2],
        overfull,
    )
    return result, totals[2:]


class RingSum(SparseSum):
    """The library's sum of sparse vectors, on a ring."""

    def __call__(self, vector: Accumulated, mask: jax.Array, ok: jax.Array, start: jax.Array) -> SparseReduced:
        """Sums the masked coordinates of a vector (n,) on a ring."""
        return ring_sum(self.regions(), vector.sum(), mask, start, self.status(ok, mask), self.axis_name)[0]


class OnRing(SparseExchange):
    """Makes a sparse exchange use a ring; its `collective` is ignored."""

    @property
    def checksum_remedy(self) -> str:
        """What to do instead: a ring has no checksum."""
        return "Pass it to the method of the library"

    def collective_of(self, layout: Layout) -> RingSum:
        """Returns the ring for a gradient's layout."""
        return RingSum(**vars(super().collective_of(layout)))


@dataclass(frozen=True)
class RingTopK(OnRing, TopK):
    """Top-k on a ring."""

    name: ClassVar[str] = "topk_ring"


@dataclass(frozen=True)
class RingDctDp(OnRing, DctDp):
    """DCT-DP on a ring."""

    name: ClassVar[str] = "dct_dp_ring"


@dataclass(frozen=True)
class RingDgc(OnRing, Dgc):
    """Deep Gradient Compression on a ring, with which importance weighted pruning is compared."""

    name: ClassVar[str] = "dgc_ring"


ring_topk, ring_dct_dp, ring_dgc = transformation(RingTopK), transformation(RingDctDp), transformation(RingDgc)
