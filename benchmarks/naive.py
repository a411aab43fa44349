"""The baseline that a user would write first: `lax.top_k` with int32 indices and float32 values."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from jaxcomm.exchange import Exchange, Exchanged, ExchangeState, Gradient, transformation
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.types import ExchangeMetrics


@dataclass(frozen=True)
class Naive(Exchange):
    """Sends the k largest coordinates of the whole gradient uncompressed, with error feedback.

    It takes 64 bits per entry. It has no thresholds, codecs, capacities or checks.
    """

    sparsity: float

    name: ClassVar[str] = "naive_topk"

    def plan(self, tree: Any) -> Layout:
        """Lays out all tensors."""
        return plan_layout(tree, dense_below=0, capacity=lambda n: n)

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        """Gathers the coordinates and values of all workers."""
        layout, vector = gradient.layout, gradient.accumulated().sum()  # (n,)
        k = max(1, math.ceil((1 - self.sparsity) * sum(layout.sizes)))
        _, index = lax.top_k(jnp.abs(vector), k)
        value = vector[index]
        residual = vector.at[index].set(0)
        all_values = lax.all_gather(value, self.axis_name, to="invarying")  # (K, k)
        all_indices = lax.all_gather(index, self.axis_name, to="invarying")  # (K, k)
        total = jnp.zeros(vector.size, jnp.float32).at[all_indices.reshape(-1)].add(all_values.reshape(-1))
        means = layout.as_leaves(layout.unflatten(total / lax.axis_size(self.axis_name)))
        return Exchanged(means, residual[None], ExchangeMetrics.zeros()), state.memory


naive_topk = transformation(Naive)
