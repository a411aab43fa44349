"""The exchange of values at coordinates that all workers agree on: random-k and importance weighted pruning share it.

They differ in how the coordinates are found. No index travels with the values, and the sum is as dense as what each
worker put in, whatever K is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.bits import Slots
from jaxcomm.codecs import ValueCodec, value_codec
from jaxcomm.collectives import axis_size, dense_mean
from jaxcomm.collectives.shared_mask import choose_sum, compact_sum
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.transforms.checks import count, narrow_is_finite, zero_unless
from jaxcomm.transforms.sparse import Accumulated, Exchanged


@dataclass(frozen=True)
class SharedExchange:
    """One compact all-reduce a step.

    Attributes:
      layout: the flat vector's segments and their capacities.
      values: how values are written.
      collective: how they are summed, one of `shared_mask.SUMS`.
      axis_name: the axis of workers.
    """

    layout: Layout
    values: ValueCodec
    collective: str
    axis_name: str

    def __call__(
        self, leaves: list[jax.Array], vector: Accumulated, slots: Slots, overflow: jax.Array | int = 0
    ) -> Exchanged:
        """Sends the values in the slots, and returns the mean over the workers.

        Each worker receives 2 (K-1)/K * C values (see `compact_sum`), and the ring all-reduce of the dense tensors
        where there are any. Nothing is lost: mean + pmean(new residual) equals pmean(vector), to float rounding. The
        exchange is skipped if a vector or a mean is not finite; the residual is then what it was.

        Args:
          leaves: the gradient's leaves in tree order; only the dense ones are read.
          vector: gradient + residual of the others.
          slots: the coordinates, C of them, the same on every worker.
          overflow: () int32, coordinates that every worker holds back for lack of a slot.
        """
        _, dense = self.layout.split(leaves)
        dense_means, dense_ok = dense_mean(dense, self.axis_name)
        workers, position = axis_size(self.axis_name), slots.position
        own = jnp.where(slots.filled, vector.at(position), 0.0)  # (C,)
        summed = compact_sum(own, vector.is_sound(), self.collective, self.values, self.axis_name)
        ok = dense_ok & summed.finite

        sums = jnp.where(ok & slots.filled, summed.total, 0.0)
        total = jnp.zeros(self.layout.n, jnp.float32).at[position].add(sums, mode="promise_in_bounds")
        means = self.layout.as_leaves(self.layout.unflatten(total / workers))
        ok, means = ok & narrow_is_finite(means), self.layout.join(means, dense_means)

        residual = vector.residual + jnp.where(ok, vector.gradient, 0.0)[None]
        residual = residual.at[0, position].multiply(~(ok & slots.filled), mode="promise_in_bounds")
        residual = residual.at[0, position].add(
            jnp.where(ok & slots.filled, summed.error, 0.0), mode="promise_in_bounds"
        )
        metrics = count(ok, workers * jnp.sum(slots.filled), workers * overflow)
        return Exchanged(zero_unless(ok, means), residual, ok, metrics, overfull=ok & jnp.asarray(False))


def plan_shared(
    tree: Any,
    *,
    capacity: Callable[[int], int],
    dense_below: int,
    value_dtype: Any,
    collective: str,
    axis_name: str,
) -> SharedExchange:
    """Makes the exchange of a gradient's shapes. Static; see `plan_layout` and `choose_sum` for the errors."""
    values = value_codec(value_dtype)
    layout = plan_layout(tree, dense_below=dense_below, capacity=capacity)
    return SharedExchange(layout, values, choose_sum(collective, values), axis_name)
