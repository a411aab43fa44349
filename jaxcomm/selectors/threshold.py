"""Coordinates whose magnitude reaches a threshold of their tensor."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import bits
from jaxcomm.layout import Layout, in_blocks
from jaxcomm.numerics import magnitude_bits
from jaxcomm.scopes import SELECT


@jax.named_scope(SELECT)
def select_threshold(vector: jax.Array, threshold: jax.Array, layout: Layout) -> jax.Array:
    """Marks |x| >= threshold, but never zeros.

    Args:
      vector: (n,) float32.
      threshold: (S,) float32, one per segment, not negative.
      layout: the segments.

    Returns:
      (n/32,) uint32, the bit-packed mask.
    """
    least = jnp.maximum(magnitude_bits(threshold), np.uint32(1))
    return bits.pack((in_blocks(magnitude_bits(vector)) >= layout.per_block(least)[:, None, None]).reshape(-1))


def select_above(vector: jax.Array, threshold: jax.Array, layout: Layout) -> jax.Array:
    """Marks |x| > threshold; arguments and result as for `select_threshold`."""
    bound = magnitude_bits(threshold)
    return bits.pack((in_blocks(magnitude_bits(vector)) > layout.per_block(bound)[:, None, None]).reshape(-1))
