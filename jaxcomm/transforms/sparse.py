"""The exchange of sparse gradients with error feedback, which DCT-DP and top-k share.

They differ in the mask alone. From there on a worker's way is: the mask's coordinates get slots, slots are written as a
payload, payloads are gathered, everyone adds them up, and what was not sent is the new residual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.codecs import IndexCodec, ValueCodec, choose_index_codec, value_codec
from jaxcomm.collectives import axis_size, dense_mean, fuse, gather_words, split_words
from jaxcomm.collectives.axis import to_varying
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.selectors import compact
from jaxcomm.transforms.checks import all_finite, zero_unless
from jaxcomm.types import ExchangeMetrics, Payload, PerWorker


class Exchanged(NamedTuple):
    """What comes back from an exchange.

    Attributes:
      means: the leaves' means in tree order, the same on every worker; zeros if the exchange was skipped.
      residual: (n,) float32, this worker's own.
      ok: () bool, the same on every worker; False if the exchange was skipped.
      metrics: the same on every worker.
    """

    means: list[jax.Array]
    residual: jax.Array
    ok: jax.Array
    metrics: ExchangeMetrics


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

    def add_residual(self, leaves: list[jax.Array], residual: jax.Array) -> jax.Array:
        """Returns gradient + residual of the compressed tensors: (n,) float32."""
        compressed, _ = self.layout.split(leaves)
        return self.layout.flatten(compressed) + residual

    def encode(self, vector: jax.Array, mask: jax.Array) -> tuple[Payload, jax.Array]:
        """Writes the masked coordinates of a worker's vector as a payload.

        Args:
          vector: (n,) float32, gradient + residual.
          mask: (n/32,) uint32, the selected coordinates.

        Returns:
          (payload, rest): the payload's arrays, all uint32, and vector less what the receivers will read, (n,) float32.
        """
        selection = compact(mask, self.layout)
        indices, selection = self.indices.encode(selection)
        position, filled = selection.slots
        values = self.values.rounded(jnp.where(filled, vector[position], 0.0))  # (C,)
        header = [all_finite([vector]), jnp.sum(filled), selection.overflow]
        payload = {
            "header": jnp.stack([count.astype(jnp.uint32) for count in header]),
            "values": self.values.encode(values),
            **indices,
        }
        return payload, vector.at[position].add(-values, mode="promise_in_bounds")

    def decode(self, payload: Payload) -> tuple[jax.Array, jax.Array]:
        """Reads a payload: positions (C,) int32 and values (C,) float32, 0 in empty slots."""
        values = self.values.decode(payload["values"], self.layout.n_slots)
        return self.indices.decode(payload), values

    def __call__(self, leaves: list[jax.Array], vector: jax.Array, mask: jax.Array, residual: jax.Array) -> Exchanged:
        """Sends what the mask selects, and returns the mean of what all workers sent.

        Each worker receives (K-1) payloads, and the ring all-reduce of the dense tensors where there are any. Nothing
        is lost: mean + pmean(new residual) equals pmean(vector), to float rounding.

        Args:
          leaves: the gradient's leaves in tree order; only the dense ones are read.
          vector: (n,) float32, gradient + residual.
          mask: (n/32,) uint32.
          residual: (n,) float32, before this step; it is what remains if the step is skipped.
        """
        payload, rest = self.encode(vector, mask)
        gathered = gather_words(fuse(payload), self.axis_name)  # (K, m)

        def add(total: jax.Array, words: jax.Array) -> tuple[jax.Array, jax.Array]:
            received = split_words(words, payload)
            position, values = self.decode(received)
            total = total.at[position].add(values, mode="promise_in_bounds")
            return total, received["header"]

        total, headers = lax.scan(add, jnp.zeros(self.layout.n, jnp.float32), gathered)
        _, dense = self.layout.split(leaves)
        compressed_mean = self.layout.unflatten(total / axis_size(self.axis_name))
        means = self.layout.join(compressed_mean, dense_mean(dense, self.axis_name))
        means, ok = zero_unless(means, headers[:, 0].all())
        counts = jnp.where(ok, jnp.sum(headers[:, 1:].astype(jnp.int32), axis=0), 0)
        metrics = ExchangeMetrics(counts[0], counts[1], 1 - ok.astype(jnp.int32))
        return Exchanged(means, jnp.where(ok, rest, residual), ok, metrics)

    def drain(self, leaves: list[jax.Array], vector: jax.Array, residual: jax.Array) -> Exchanged:
        """Sends everything densely, and so empties the residual: 2 (K-1)/K * 4 bytes a parameter."""
        _, dense = self.layout.split(leaves)
        tensors = self.layout.join(self.layout.unflatten(vector), dense)
        means, ok = zero_unless(dense_mean(tensors, self.axis_name), jnp.asarray(True))
        n_sent = sum(self.layout.sizes) * axis_size(self.axis_name)
        metrics = ExchangeMetrics(
            jnp.where(ok, np.int32(n_sent), 0),
            jnp.zeros((), jnp.int32),
            1 - ok.astype(jnp.int32),
        )
        empty = to_varying(jnp.zeros_like(residual), self.axis_name)
        return Exchanged(means, jnp.where(ok, empty, residual), ok, metrics)


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
    """Returns this worker's own (n,) from its row (1, n) of a state.

    Raises:
      ValueError: if the state was made for another tree, or holds the rows of several workers.
    """
    if rows.rows.shape != (1, n):
        raise ValueError(
            f"A worker holds one row of state, (1, {n}) for this gradient, got {rows.rows.shape}: initialise the "
            "state with the parameters that are trained, and shard its PerWorker leaves over the axis of workers "
            "(jaxcomm.init_state and jaxcomm.state_specs do both)."
        )
    return to_varying(rows.rows[0], axis_name)
