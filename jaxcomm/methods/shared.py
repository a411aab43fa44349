"""The exchanges of values at coordinates that all workers agree on: random-k and importance weighted pruning.

No index travels with the values, and the sum is no denser than what each worker put in, whatever K is.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxcomm.checks import DenseBelow
from jaxcomm.codecs import ValueDtype, value_codec
from jaxcomm.collectives import axis_size, dense_mean
from jaxcomm.collectives.shared_mask import choose_sum, compact_sum
from jaxcomm.collectives.sparse import Accumulated
from jaxcomm.exchange import Exchange, Exchanged, Gradient, zeros_unless
from jaxcomm.kernels.bits import Slots
from jaxcomm.kernels.numerics import is_finite_narrow
from jaxcomm.kernels.vectors import add_at
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.types import ExchangeMetrics, PyTree


@dataclass(frozen=True, kw_only=True)
class SharedExchange(Exchange):
    """One all-reduce of a compact buffer per step; what is not sent stays in the residual.

    Nothing is lost: mean + pmean(new residual) == pmean(gradient + residual), to float rounding.

    Received: 2 (K-1)/K values a slot, no index. Memory: 4 bytes a parameter.

    Attributes:
      dense_below: tensors with fewer elements are sent dense, as float32.
      value_dtype: "bfloat16" (16 bits a value) or "float32".
      collective: how the values are summed: "psum" (float32 alone), "two_shot", "ring", or "auto" for psum of float32
        and two_shot of bfloat16.
    """

    dense_below: DenseBelow = 512
    value_dtype: ValueDtype = "bfloat16"
    collective: str = "auto"

    @property
    def checksum_remedy(self) -> str | None:
        summed = choose_sum(self.collective, value_codec(self.value_dtype)) == "psum"
        return "Pass collective='two_shot' or 'ring', or value_dtype='bfloat16'" if summed else None

    def capacity(self, n: int) -> int:
        """Returns the slots of a tensor of n elements in the buffer."""
        raise NotImplementedError

    def plan(self, tree: PyTree) -> Layout:
        choose_sum(self.collective, value_codec(self.value_dtype))  # raises before any work is done
        return plan_layout(tree, dense_below=self.dense_below, capacity=self.capacity)

    def send(self, gradient: Gradient, vector: Accumulated, slots: Slots, overflow: jax.Array | int = 0) -> Exchanged:
        """Sends the values in the slots, and returns the mean over the workers.

        Args:
          gradient: the worker's gradient; only its dense leaves are read.
          vector: gradient + residual of the compressed leaves.
          slots: the C coordinates, the same on every worker.
          overflow: () int32, coordinates that every worker holds back for lack of a slot.
        """
        layout, workers, position = gradient.layout, axis_size(self.axis_name), slots.position
        dense_means, dense_ok = dense_mean(gradient.dense, self.axis_name)
        local_values = jnp.where(slots.filled, vector.at(position), 0.0)  # (C,)
        values = value_codec(self.value_dtype)
        name = choose_sum(self.collective, values)
        summed = compact_sum(local_values, vector.is_ok(), name, values, self.axis_name, self.checksum)
        ok = dense_ok & summed.ok

        sums = jnp.where(slots.filled, summed.total(ok), 0.0)
        total = add_at(jnp.zeros(layout.n, jnp.float32), position, sums)
        means = layout.as_leaves(layout.unflatten(total / workers))
        ok, means = ok & is_finite_narrow(means), layout.join(means, dense_means)

        residual = vector.residual + jnp.where(ok, vector.gradient, 0.0)[None]
        is_sent = ok & slots.filled
        residual = add_at(residual, position, jnp.where(is_sent, -residual[0, position], 0.0))
        residual = add_at(residual, position, jnp.where(is_sent, summed.residual(), 0.0))
        metrics = ExchangeMetrics.of(ok, workers * jnp.sum(slots.filled, dtype=jnp.float32), workers * overflow)
        return Exchanged(zeros_unless(ok, means), residual, metrics)
