"""The baseline that a user would write first: `lax.top_k` with int32 indices and float32 values."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import ExchangeMetrics, PerWorker


class NaiveState(NamedTuple):
    """State of `naive_topk`: a row of residual per worker (K, n), and counts that stay zero."""

    residual: PerWorker
    metrics: ExchangeMetrics


def naive_topk(sparsity: float, axis_name: str = "data") -> optax.GradientTransformation:
    """Sends the k largest coordinates of the whole gradient as they are, with error feedback.

    64 bits an entry. No thresholds, codecs, capacities or checks: what everything else is measured against.
    """

    def init(params: Any) -> Any:
        n = sum(leaf.size for leaf in jax.tree.leaves(params))
        return NaiveState(PerWorker(jnp.zeros((1, n), jnp.float32)), ExchangeMetrics.zeros())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        vector = jnp.concatenate([leaf.reshape(-1) for leaf in leaves]) + state.residual.rows[0]  # (n,)
        k = max(1, math.ceil((1 - sparsity) * vector.size))
        _, index = lax.top_k(jnp.abs(vector), k)
        value = vector[index]
        rest = vector.at[index].set(0)
        all_values = lax.all_gather(value, axis_name, to="invarying")  # (K, k)
        all_indices = lax.all_gather(index, axis_name, to="invarying")  # (K, k)
        total = jnp.zeros(vector.size, jnp.float32).at[all_indices.reshape(-1)].add(all_values.reshape(-1))
        mean = total / lax.axis_size(axis_name)
        means, start = [], 0
        for leaf in leaves:
            means.append(mean[start : start + leaf.size].reshape(leaf.shape))
            start += leaf.size
        return treedef.unflatten(means), NaiveState(PerWorker(rest[None]), state.metrics)

    return optax.GradientTransformation(init, update)
