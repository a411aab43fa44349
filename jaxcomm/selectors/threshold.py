"""Coordinates whose magnitude reaches a threshold of their tensor."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import bits
from jaxcomm.layout import BLOCK, BLOCK_WORDS, Layout
from jaxcomm.numerics import magnitude_bits
from jaxcomm.scopes import SELECT


def _by_block(vector: jax.Array) -> jax.Array:
    return magnitude_bits(vector).reshape(-1, BLOCK)


@jax.named_scope(SELECT)
def order_statistic(vector: jax.Array, layout: Layout, ranks: Sequence[int] | jax.Array) -> jax.Array:
    """Finds the m-th smallest magnitude of every segment, exactly, without sorting.

    Bisection on the bits of the float: 31 passes that count, each as cheap as a sum.

    Args:
      vector: (n,) float32, the flat vector.
      layout: its segments.
      ranks: m for every segment, from 1; 0 gives magnitude 0.

    Returns:
      (S,) float32.
    """
    magnitude = _by_block(vector)
    padding = layout.padding()
    rank = jnp.asarray(ranks, jnp.int32)

    def narrow(step: int, known: jax.Array) -> jax.Array:
        candidate = known | lax.shift_left(np.uint32(1), jnp.uint32(30 - step))
        # Counted as packed bits: XLA would write a sum of booleans down as integers, 32 times the memory.
        below = bits.popcount(bits.pack((magnitude < layout.per_block(candidate)[:, None]).reshape(-1)))
        below = layout.per_segment(below.reshape(-1, BLOCK_WORDS).sum(1))
        below = below - padding  # the padding's zeros are below every candidate
        return jnp.where(below < rank, candidate, known)

    # Zero, but of the vector's own type: on a mesh it differs between workers.
    start = jnp.zeros_like(magnitude, shape=rank.shape)
    start = start + magnitude[0, 0] * np.uint32(0)
    return lax.bitcast_convert_type(lax.fori_loop(0, 31, narrow, start), jnp.float32)


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
