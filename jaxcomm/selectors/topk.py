"""The k largest coordinates of every tensor, or of every row, exactly."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import bits
from jaxcomm.layout import Layout
from jaxcomm.numerics import magnitude_bits
from jaxcomm.scopes import SELECT
from jaxcomm.selectors.bracket import order_statistic
from jaxcomm.selectors.selection import rank_in_segment
from jaxcomm.selectors.threshold import select_above, select_threshold


@jax.named_scope(SELECT)
def select_topk(vector: jax.Array, layout: Layout, k: jax.Array | None = None) -> jax.Array:
    """Marks, in every segment, the k largest magnitudes.

    Ties at the smallest of them go to the lowest index. Zeros are never marked.

    Args:
      vector: (n,) float32.
      layout: the segments.
      k: (S,) int32, from 1 to the segment's size; its capacity if not given.

    Returns:
      (n/32,) uint32, the bit-packed mask, with at most k bits in every segment.
    """
    if k is None:
        k = jnp.asarray(layout.capacities, jnp.int32)
    smallest = order_statistic(vector, layout, jnp.asarray(layout.sizes, jnp.int32) - k + 1)
    above = select_above(vector, smallest, layout)
    tied = select_threshold(vector, smallest, layout) & ~above
    _, n_above = rank_in_segment(above, layout)
    room = layout.per_block(k - n_above)
    rank, _ = rank_in_segment(tied, layout)
    return above | bits.keep_first(tied, (room[:, None] - rank).reshape(-1))


@jax.named_scope(SELECT)
def select_rows(rows: jax.Array, k: int) -> jax.Array:
    """Marks the k largest magnitudes of every row, exactly k.

    Ties at the smallest of them go to the lowest index. NaN counts as larger than any number.

    Args:
      rows: (B, d) float32.
      k: from 1 to d.

    Returns:
      (B, d) bool.
    """
    if k == rows.shape[1]:
        return jnp.ones_like(rows, bool)
    magnitude = magnitude_bits(rows)
    n_below = rows.shape[1] - k  # bisection on the bits of the float: at most this many are below the smallest marked

    def narrow(step: int, known: jax.Array) -> jax.Array:
        candidate = known | lax.shift_left(np.uint32(1), jnp.uint32(30 - step))
        below = jnp.sum(magnitude < candidate[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(below <= n_below, candidate, known)

    smallest = lax.fori_loop(0, 31, narrow, jnp.zeros_like(magnitude[:, 0]))[:, None]
    above, tied = magnitude > smallest, magnitude == smallest
    room = k - jnp.sum(above, axis=1, dtype=jnp.int32, keepdims=True)
    return above | (tied & (jnp.cumsum(tied, axis=1, dtype=jnp.int32) <= room))


def dropped(n: int, sparsity: float) -> int:
    """Returns floor(n * sparsity), with sparsity as the decimal number that was written, without binary rounding."""
    return math.floor(n * Fraction(repr(float(sparsity))))


def kept(n: int, sparsity: float) -> int:
    """Returns how many of n coordinates top-k keeps at a sparsity: at least one."""
    return max(1, n - dropped(n, sparsity))
