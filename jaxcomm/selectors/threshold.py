"""Coordinates whose magnitude reaches a threshold of their tensor."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import bits
from jaxcomm.layout import BLOCK, Layout
from jaxcomm.numerics import magnitude_bits
from jaxcomm.scopes import SELECT


def _by_block(vector: jax.Array) -> jax.Array:
    return magnitude_bits(vector).reshape(-1, BLOCK)


@jax.named_scope(SELECT)
def select_threshold(vector: jax.Array, threshold: jax.Array, layout: Layout) -> jax.Array:
    """Marks |x| >= threshold, zeros never.

    Args:
      vector: (n,) float32.
      threshold: (S,) float32, one a segment, not negative.
      layout: the segments.

    Returns:
      (n/32,) uint32, the bit-packed mask.
    """
    least = jnp.maximum(magnitude_bits(threshold), np.uint32(1))
    return bits.pack((_by_block(vector) >= layout.per_block(least)[:, None]).reshape(-1))


def select_above(vector: jax.Array, threshold: jax.Array, layout: Layout) -> jax.Array:
    """Marks |x| > threshold; arguments and result as for `select_threshold`."""
    bound = magnitude_bits(threshold)
    return bits.pack((_by_block(vector) > layout.per_block(bound)[:, None]).reshape(-1))
