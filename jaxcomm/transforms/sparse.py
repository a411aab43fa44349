"""The exchange of sparse gradients with error feedback, which DCT-DP and top-k share.

They differ in the mask alone. From there on a worker's way is: the mask's coordinates get slots, slots are written as a
payload, payloads are gathered, everyone adds them up, and what was not sent is the new residual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.codecs import IndexCodec, ValueCodec, choose_index_codec, value_codec
from jaxcomm.collectives import axis_size, dense_mean, fuse, gather_words, split_words
from jaxcomm.collectives.axis import to_varying
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.selectors import compact
from jaxcomm.selectors.threshold import is_finite
from jaxcomm.transforms.checks import count, narrow_is_finite, zero_unless
from jaxcomm.types import ExchangeMetrics, Payload, PerWorker


class Exchanged(NamedTuple):
    """What comes back from an exchange.

    Attributes:
      means: the leaves' means in tree order, the same on every worker; zeros if the exchange was skipped.
      residual: (1, n) float32, this worker's own row.
      ok: () bool, the same on every worker; False if the exchange was skipped.
      metrics: the same on every worker.
    """

    means: list[jax.Array]
    residual: jax.Array
    ok: jax.Array
    metrics: ExchangeMetrics


class Sent(NamedTuple):
    """Coordinates as they arrive.

    Attributes:
      position: (C,) int32 in the flat vector.
      values: (C,) float32, rounded to the wire's type; 0 in an empty slot.
    """

    position: jax.Array
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


@dataclass(frozen=True)
class SparseExchange:
    """One payload per worker and step, gathered by all.

    Attributes:
      layout: the flat vector's segments and their capacities.
      values: how values are written.
      indices: how positions are written.
      axis_name: the axis of workers.
    """

    layout: Layout
    values: ValueCodec
    indices: IndexCodec
    axis_name: str

    def vector(self, leaves: list[jax.Array], residual: jax.Array) -> Accumulated:
        """Lays the compressed tensors' gradients beside the residual."""
        compressed, _ = self.layout.split(leaves)
        return Accumulated(self.layout.flatten(compressed), residual)

    def encode(self, vector: Accumulated, mask: jax.Array) -> tuple[Payload, Sent]:
        """Writes the masked coordinates of a worker's vector as a payload.

        Args:
          vector: gradient + residual.
          mask: (n/32,) uint32, the selected coordinates.

        Returns:
          The payload's arrays, all uint32, and what the receivers will read.
        """
        selection = compact(mask, self.layout)
        indices, selection = self.indices.encode(selection)
        position, filled = selection.slots
        values = self.values.rounded(jnp.where(filled, vector.at(position), 0.0))  # (C,)
        header = [
            is_finite(vector.sum()).astype(jnp.uint32),
            lax.bitcast_convert_type(jnp.max(jnp.abs(values)), jnp.uint32),
            jnp.sum(filled).astype(jnp.uint32),
            selection.overflow.astype(jnp.uint32),
        ]
        payload = {"header": jnp.stack(header), "values": self.values.encode(values), **indices}
        return payload, Sent(position, values)

    def decode(self, payload: Payload) -> Sent:
        """Reads the positions and values of a payload; the value of an empty slot is 0."""
        values = self.values.decode(payload["values"], self.layout.n_slots)
        return Sent(self.indices.decode(payload), values)

    def __call__(self, leaves: list[jax.Array], vector: Accumulated, mask: jax.Array) -> Exchanged:
        """Sends what the mask selects, and returns the mean of what all workers sent.

        Each worker receives (K-1) payloads, and the ring all-reduce of the dense tensors where there are any. Nothing
        is lost: mean + pmean(new residual) equals pmean(vector), to float rounding.

        The exchange is skipped if a gradient, a vector or a mean is not finite, or if the workers' largest values add
        up to more than float32 holds; the residual is then what it was.

        Args:
          leaves: the gradient's leaves in tree order; only the dense ones are read.
          vector: gradient + residual of the others.
          mask: (n/32,) uint32.
        """
        payload, sent = self.encode(vector, mask)
        gathered = gather_words(fuse(payload), self.axis_name)  # (K, m)
        gathered = jax.vmap(lambda words: split_words(words, payload))(gathered)
        finite, largest = gathered["header"][:, 0], gathered["header"][:, 1]  # (K,) each
        counts = gathered["header"][:, 2:].astype(jnp.float32)  # (K, 2), sent and overflow
        largest = jnp.sum(lax.bitcast_convert_type(largest, jnp.float32))
        _, dense = self.layout.split(leaves)
        dense_means, dense_ok = dense_mean(dense, self.axis_name)
        ok = finite.all() & jnp.isfinite(largest) & dense_ok

        def add(total: jax.Array, received: Payload) -> tuple[jax.Array, None]:
            position, values = self.decode(received)
            return total.at[position].add(jnp.where(ok, values, 0.0), mode="promise_in_bounds"), None

        # Zero, in terms of the payloads: else XLA would make the sum's buffer first, beside that of the gradient.
        zero = jnp.where(ok, jnp.minimum(largest, 0.0), 0.0)
        total, _ = lax.scan(add, jnp.full(self.layout.n, zero), gathered)
        means = self.layout.as_leaves(self.layout.unflatten(total / axis_size(self.axis_name)))
        ok, means = ok & narrow_is_finite(means), self.layout.join(means, dense_means)

        # One pass, then the few coordinates that were sent: the old residual's buffer becomes the new one's.
        residual = vector.residual + jnp.where(ok, vector.gradient, 0.0)[None]
        residual = residual.at[0, sent.position].add(jnp.where(ok, -sent.values, 0.0), mode="promise_in_bounds")
        return Exchanged(zero_unless(ok, means), residual, ok, count(ok, *jnp.sum(counts, axis=0)))

    def drain(self, leaves: list[jax.Array], vector: Accumulated) -> Exchanged:
        """Sends everything densely, and so empties the residual: 2 (K-1)/K * 4 bytes a parameter."""
        _, dense = self.layout.split(leaves)
        compressed = self.layout.unflatten(vector.sum())
        means, ok = dense_mean([*compressed, *dense], self.axis_name)
        compressed = self.layout.as_leaves(means[: len(compressed)])
        ok, means = ok & narrow_is_finite(compressed), self.layout.join(compressed, means[len(compressed) :])
        n_sent = sum(self.layout.sizes) * axis_size(self.axis_name)
        residual = jnp.where(ok, jnp.zeros_like(vector.residual), vector.residual)
        return Exchanged(zero_unless(ok, means), residual, ok, count(ok, n_sent, drained=bool(self.layout.sizes)))


def plan_exchange(
    tree: Any,
    *,
    capacity: Callable[[int], int],
    dense_below: int,
    value_dtype: Any,
    index_codec: str,
    axis_name: str,
) -> SparseExchange:
    """Makes the exchange of a gradient's shapes. Static; see `plan_layout` for the arguments and errors."""
    layout = plan_layout(tree, dense_below=dense_below, capacity=capacity)
    return SparseExchange(layout, value_codec(value_dtype), choose_index_codec(layout, index_codec), axis_name)


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
