"""The exchange of sparse gradients with error feedback, which DCT-DP, top-k and DGC share.

They differ in the mask alone. From there on a worker's way is: the mask's coordinates get slots, slots are written as a
payload, payloads are gathered (or summed by the owners of regions, or on a ring), everyone adds them up, and what was
not sent is the new residual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.bits import popcount, unpack
from jaxcomm.codecs import IndexCodec, ValueCodec, choose_index_codec, value_codec
from jaxcomm.collectives import axis_size, dense_mean, fuse, gather_words, split_words
from jaxcomm.collectives.axis import to_varying
from jaxcomm.collectives.balanced import Regions
from jaxcomm.collectives.sparse_ring import ring_sum
from jaxcomm.collectives.status import read_status, write_status
from jaxcomm.layout import BLOCK_WORDS, Layout, plan_layout
from jaxcomm.selectors import compact
from jaxcomm.selectors.threshold import is_sound
from jaxcomm.transforms.checks import count, narrow_is_finite, zero_unless
from jaxcomm.types import ExchangeMetrics, Payload, PerWorker

HEADER = 3  # words of a payload: status, sent, overflow
COLLECTIVES = ("gather", "balanced", "ring")


class Exchanged(NamedTuple):
    """What comes back from an exchange.

    Attributes:
      means: the leaves' means in tree order, the same on every worker; zeros if the exchange was skipped.
      residual: (1, n) float32, this worker's own row.
      ok: () bool, the same on every worker; False if the exchange was skipped.
      metrics: the same on every worker.
      overfull: () bool, the same on every worker: whether some worker selected of some tensor more than twice as many
        coordinates as it has slots.
    """

    means: list[jax.Array]
    residual: jax.Array
    ok: jax.Array
    metrics: ExchangeMetrics
    overfull: jax.Array


class Sent(NamedTuple):
    """Coordinates as they are sent.

    Attributes:
      position: (C,) int32 in the flat vector; in range for empty slots as well.
      filled: (C,) bool.
      values: (C,) float32, rounded to the wire's type but on a ring, which rounds sums; 0 in an empty slot.
    """

    position: jax.Array
    filled: jax.Array
    values: jax.Array


class Accumulated(NamedTuple):
    """Gradient + residual of one worker, added where it is read: written down it would cost a pass and n floats.

    Attributes:
      gradient: (n,) float32.
      residual: (1, n) float32, the worker's row. It keeps its shape on the way into the new row, or XLA copies it.
    """

    gradient: jax.Array
    residual: jax.Array

    def sum(self) -> jax.Array:
        """Returns gradient + residual, (n,) float32."""
        return self.gradient + self.residual[0]

    def at(self, position: jax.Array) -> jax.Array:
        """Returns gradient + residual at some positions."""
        return self.gradient[position] + self.residual[0, position]

    def is_sound(self) -> jax.Array:
        """Returns whether gradient + residual is finite, and every gradient below 2^100 in magnitude: () bool."""
        return is_sound(self.sum(), self.gradient)


class Received(NamedTuple):
    """What came of one exchange, before the step is known to be sound everywhere.

    Attributes:
      total: () -> (n,) float32, the sum over the workers.
      sent: this worker's own coordinates.
      leftover: (n,) float32, of the sums of others what this worker dropped or rounded off; None where it met none.
      counts: (2,) float32, coordinates sent and overflow, all workers together.
      ok: () bool, the same on every worker.
      overfull: () bool, the same on every worker; see `Exchanged`.
    """

    total: Callable[[jax.Array], jax.Array]
    sent: Sent
    leftover: jax.Array | None
    counts: jax.Array
    ok: jax.Array
    overfull: jax.Array


@dataclass(frozen=True)
class SparseExchange:
    """One payload per worker and step.

    Attributes:
      layout: the flat vector's segments and their capacities.
      values: how values are written.
      index_codec: name of the codec of positions, or "auto".
      collective: "gather", "balanced", "ring", or "auto" for gather where it receives at most a quarter of the dense
        bytes, and beyond that for gather or balanced, whichever receives fewer. Nothing chooses the ring.
      always_fits: whether no more is ever selected of a tensor than it has slots (of a region there may be).
      axis_name: the axis of workers.
    """

    layout: Layout
    values: ValueCodec
    index_codec: str
    collective: str
    always_fits: bool
    axis_name: str

    @cached_property
    def indices(self) -> IndexCodec:
        """How positions are written where payloads are gathered."""
        return choose_index_codec(self.layout, self.index_codec)

    def regions(self) -> Regions:
        """The regions of an exchange that is not gathered."""
        return Regions(self.layout, axis_size(self.axis_name), self.values, self.index_codec)

    def is_balanced(self) -> bool:
        """Chooses between gathering and owners, for this K, n, capacity and codec."""
        if self.collective != "auto":
            return self.collective == "balanced"
        k, n = axis_size(self.axis_name), self.layout.n
        words = HEADER + self.indices.n_words + -(-self.layout.n_slots * self.values.bits // 32)
        gathered, dense = 4 * (k - 1) * words, 8 * (k - 1) * n / k
        return gathered > dense / 4 and self.regions().received < gathered

    def status(self, vector: Accumulated, mask: jax.Array) -> jax.Array:
        """Returns this worker's word for the others: () uint32, of `write_status`."""
        if self.always_fits:
            return write_status(vector.is_sound())
        selected = self.layout.per_segment(popcount(mask).reshape(-1, BLOCK_WORDS).sum(1)).astype(jnp.uint32)  # (S,)
        overfull = jnp.any(selected > 2 * np.asarray(self.layout.capacities, np.uint32))
        return write_status(vector.is_sound(), overfull)

    def encode(self, vector: Accumulated, mask: jax.Array, turn: jax.Array) -> tuple[Payload, Sent]:
        """Writes the masked coordinates of a worker's vector as a payload.

        Args:
          vector: gradient + residual.
          mask: (n/32,) uint32, the selected coordinates.
          turn: which of them have slots where there are too few, see `compact`.

        Returns:
          The payload's arrays, all uint32, and what the receivers will read.
        """
        selection = compact(mask, self.layout, None if self.always_fits else turn)
        indices, selection = self.indices.encode(selection)
        position, filled = selection.slots
        values = self.values.rounded(jnp.where(filled, vector.at(position), 0.0))  # (C,)
        header = [
            self.status(vector, mask),
            jnp.sum(filled).astype(jnp.uint32),
            selection.overflow.astype(jnp.uint32),
        ]
        payload = {"header": jnp.stack(header), "values": self.values.encode(values), **indices}
        return payload, Sent(position, filled, values)

    def decode(self, payload: Payload) -> tuple[jax.Array, jax.Array]:
        """Reads the positions and values of a payload, (C,) each; the value of an empty slot is 0."""
        values = self.values.decode(payload["values"], self.layout.n_slots)
        return self.indices.decode(payload), values

    def _gather(self, vector: Accumulated, mask: jax.Array, turn: jax.Array) -> Received:
        payload, sent = self.encode(vector, mask, turn)
        gathered = gather_words(fuse(payload), self.axis_name)  # (K, m)
        gathered = jax.vmap(lambda words: split_words(words, payload))(gathered)
        sound, overfull = read_status(gathered["header"][:, 0])
        counts = gathered["header"][:, 1:].astype(jnp.float32)  # (K, 2), sent and overflow
        # Of the values that have arrived: if this is finite, so is every number of the mean, wherever they are added.
        values = jax.vmap(lambda words: self.values.decode(words, self.layout.n_slots))(gathered["values"])  # (K, C)
        most = jnp.sum(jnp.abs(values))

        def total(ok: jax.Array) -> jax.Array:
            def add(total: jax.Array, received: Payload) -> tuple[jax.Array, None]:
                position, values = self.decode(received)
                return total.at[position].add(jnp.where(ok, values, 0.0), mode="promise_in_bounds"), None

            # Zero, in terms of the payloads: else XLA would make the sum's buffer first, beside that of the gradient.
            zero = jnp.where(ok, jnp.minimum(most, 0.0), 0.0)
            return lax.scan(add, jnp.full(self.layout.n, zero), gathered)[0]

        return Received(total, sent, None, jnp.sum(counts, axis=0), sound & jnp.isfinite(most), overfull)

    def _by_regions(self, vector: Accumulated, mask: jax.Array, turn: jax.Array) -> Received:
        regions, x, status = self.regions(), vector.sum(), self.status(vector, mask)
        if self.collective == "ring":
            out, _ = ring_sum(regions, x, mask, turn, status, self.axis_name)
        else:
            out = regions.exchange(x, mask, turn, status, self.axis_name)
        sent = Sent(out.position, out.filled, out.values)
        return Received(
            lambda ok: jnp.where(ok, out.total, 0.0), sent, out.leftover, out.counts, out.finite, out.overfull
        )

    def __call__(
        self,
        leaves: list[jax.Array],
        vector: Accumulated,
        select: Callable[[], jax.Array],
        turn: jax.Array,
    ) -> Exchanged:
        """Sends what is selected, and returns the mean of what arrived; see `exchange`.

        Where no tensor is compressed, `select` is not called.
        """
        if not self.layout.sizes:
            return drain(self.layout, leaves, vector, self.axis_name)
        return self.exchange(leaves, vector, select(), turn)[0]

    def exchange(
        self, leaves: list[jax.Array], vector: Accumulated, mask: jax.Array, turn: jax.Array
    ) -> tuple[Exchanged, Sent]:
        """Sends what the mask selects, and returns the mean of what arrived.

        Gathered, each worker receives (K-1) payloads; balanced, see `Regions`; on a ring, see `ring_sum`; and the ring
        all-reduce of the dense tensors where there are any. Nothing is lost: mean + pmean(new residual) equals
        pmean(vector), to float rounding.

        The exchange is skipped if some worker's vector is not sound (`Accumulated.is_sound`), or if what arrived is
        not finite; the residual is then what it was.

        Args:
          leaves: the gradient's leaves in tree order; only the dense ones are read.
          vector: gradient + residual of the others.
          mask: (n/32,) uint32.
          turn: of `draw_turn`, which of too many coordinates have slots: what has none may be selected again for ever.

        Returns:
          What came back, and what this worker sent.
        """
        is_gathered = self.collective != "ring" and not self.is_balanced()
        received = (self._gather if is_gathered else self._by_regions)(vector, mask, turn)
        _, dense = self.layout.split(leaves)
        dense_means, dense_ok = dense_mean(dense, self.axis_name)
        ok = received.ok & dense_ok

        mean = received.total(ok) / axis_size(self.axis_name)
        means = self.layout.as_leaves(self.layout.unflatten(mean))
        ok, means = ok & narrow_is_finite(means), self.layout.join(means, dense_means)

        sent = received.sent
        if received.leftover is None:
            # One pass, then the few coordinates that were sent: the old residual's buffer becomes the new one's.
            residual = vector.residual + jnp.where(ok, vector.gradient, 0.0)[None]
            residual = residual.at[0, sent.position].add(jnp.where(ok, -sent.values, 0.0), mode="promise_in_bounds")
        else:
            # Not so here: XLA would add the leftover first, and large numbers leave float32 on the way.
            taken = jnp.zeros(self.layout.n, jnp.float32).at[sent.position].add(sent.values, mode="promise_in_bounds")
            residual = jnp.where(ok, vector.sum() - taken + received.leftover, vector.residual)
        return Exchanged(zero_unless(ok, means), residual, ok, count(ok, *received.counts), received.overfull), sent


def lay_out(layout: Layout, leaves: list[jax.Array], residual: jax.Array) -> Accumulated:
    """Lays the compressed tensors' gradients beside the residual (1, n)."""
    compressed, _ = layout.split(leaves)
    return Accumulated(layout.flatten(compressed), residual)


def drain(layout: Layout, leaves: list[jax.Array], vector: Accumulated, axis_name: str) -> Exchanged:
    """Sends everything densely, and so empties the residual: 2 (K-1)/K * 4 bytes a parameter."""
    return exchange_densely(layout, leaves, vector, None, axis_name)


def exchange_densely(
    layout: Layout, leaves: list[jax.Array], vector: Accumulated, mask: jax.Array | None, axis_name: str
) -> Exchanged:
    """Sends the masked coordinates in one dense all-reduce of float32: 2 (K-1)/K * 4 bytes a parameter.

    For masks that are too dense to be worth coding. Nothing is rounded, and what the mask leaves out stays.

    Args:
      layout: the segments.
      leaves: the gradient's leaves in tree order; only the dense ones are read.
      vector: gradient + residual of the others.
      mask: (n/32,) uint32; None sends everything, and counts as drained.
      axis_name: the axis of workers.
    """
    _, dense = layout.split(leaves)
    x = vector.sum()
    sends = x if mask is None else jnp.where(unpack(mask), x, 0.0)
    n_sent = sum(layout.sizes) * axis_size(axis_name) if mask is None else lax.psum(jnp.sum(popcount(mask)), axis_name)
    # One more element where a number that is not sent may be the one that is not finite.
    flag = [] if mask is None else [jnp.where(vector.is_sound(), 0.0, jnp.nan)]
    means, ok = dense_mean([*layout.unflatten(sends), *dense, *flag], axis_name)
    n = len(layout.sizes)
    compressed = layout.as_leaves(means[:n])
    ok, means = ok & narrow_is_finite(compressed), layout.join(compressed, means[n : n + len(dense)])
    rest = jnp.zeros_like(vector.residual) if mask is None else (x - sends)[None]
    residual = jnp.where(ok, rest, vector.residual)
    drained = mask is None and bool(layout.sizes)
    overfull = ok & jnp.asarray(False)  # varies as `ok` does, as where payloads are exchanged
    return Exchanged(zero_unless(ok, means), residual, ok, count(ok, n_sent, drained=drained), overfull)


def plan_exchange(
    tree: Any,
    *,
    capacity: Callable[[int], int],
    dense_below: int,
    value_dtype: Any,
    index_codec: str,
    collective: str,
    always_fits: bool,
    axis_name: str,
) -> SparseExchange:
    """Makes the exchange of a gradient's shapes. Static; see `SparseExchange` and `plan_layout`, also for errors."""
    if collective not in (*COLLECTIVES, "auto"):
        raise ValueError(
            f"Payloads travel by one of {', '.join(COLLECTIVES)}, got collective={collective!r}: pass one, or 'auto'."
        )
    layout = plan_layout(tree, dense_below=dense_below, capacity=capacity)
    exchange = SparseExchange(layout, value_codec(value_dtype), index_codec, collective, always_fits, axis_name)
    _ = exchange.indices  # its error comes before any work
    return exchange


def own_row(rows: PerWorker, n: int, axis_name: str) -> jax.Array:
    """Returns this worker's own row (1, n) of a state.

    Raises:
      ValueError: if the state was made for another tree, or holds the rows of several workers.
    """
    if rows.rows.shape != (1, n):
        raise ValueError(
            f"A worker holds one row of state, (1, {n}) for this gradient, got {rows.rows.shape}: initialise the "
            "state with the parameters that are trained, and shard its PerWorker leaves over the axis of workers "
            "(jaxcomm.init_state and jaxcomm.state_specs do both)."
        )
    return to_varying(rows.rows, axis_name)
