"""The k largest coordinates of every tensor, or of every row, exactly."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.kernels import bits
from jaxcomm.kernels.numerics import magnitude_bits
from jaxcomm.kernels.platforms import by_platform
from jaxcomm.kernels.scopes import SELECT
from jaxcomm.kernels.vectors import Stored, Vector
from jaxcomm.layout import Layout, in_blocks
from jaxcomm.selectors import chunks
from jaxcomm.selectors.bracket import find_largest, largest_that, search_all
from jaxcomm.selectors.selection import Selected, count_in_segment, rank_in_segment, select_threshold


@jax.named_scope(SELECT)
def select_topk(vector: Vector, layout: Layout, k: jax.Array | None = None) -> Selected:
    """Marks, in every segment, the k largest magnitudes: at most k bits of the mask.

    Ties at the smallest of them go to the lowest index. Zeros are never marked. One pass over the vector, unless a
    bracket fails or most tensors are small; see `jaxcomm.selectors.bracket`.

    Args:
      vector: the flat vector.
      layout: the segments.
      k: (S,) int32, up to the segment's size; its slots if not given.
    """
    if k is None:
        k = jnp.asarray(layout.rooms())
    searched = functools.partial(_select_searched, vector, layout, k)
    if layout.chunk not in chunks.SIZES:
        return searched()
    return by_platform(cpu=searched, tpu=searched, default=lambda: chunks.select_chunks(vector, layout, k))


def _select_searched(vector: Vector, layout: Layout, k: jax.Array) -> Selected:
    smallest, bracket = find_largest(vector, layout, k)

    def among_all(smallest: jax.Array) -> jax.Array:
        return _largest(vector.sum(), smallest, layout, k)

    if bracket is None:
        return Selected(among_all(smallest), ~jnp.any(bits.pack(vector.broken()) != 0))
    is_selected = bits.unpack(_largest(bracket.candidates, smallest, bracket.layout, k - bracket.n_above))
    words = bracket.mark(is_selected)
    words = lax.cond(bracket.holds, lambda: words, lambda: among_all(search_all(vector, layout, k)))
    return Selected(words, bracket.ok)


@jax.named_scope(SELECT)
def select_with_ties(vector: Vector, layout: Layout, k: jax.Array) -> tuple[Selected, jax.Array]:
    """Marks, in every segment, the k largest magnitudes and all that equal the smallest of them, but never zeros.

    One pass over the vector, unless a bracket fails or most tensors are small; see `jaxcomm.selectors.bracket`.

    Args:
      vector: the flat vector.
      layout: the segments.
      k: (S,) int32, from 1; beyond the segment's size, all nonzeros are marked.

    Returns:
      (selected, threshold): the mask, and the k-th largest magnitude of every segment, (S,) float32, 0 if k is beyond
      its size.
    """
    smallest, bracket = find_largest(vector, layout, k)

    def among_all(smallest: jax.Array) -> tuple[Selected, jax.Array]:
        threshold = lax.bitcast_convert_type(smallest, jnp.float32)
        return select_threshold(vector, threshold, layout), threshold

    if bracket is None:
        return among_all(smallest)

    def among_candidates() -> tuple[Selected, jax.Array]:
        threshold = lax.bitcast_convert_type(smallest, jnp.float32)
        selected = select_threshold(Stored(bracket.candidates), threshold, bracket.layout)
        return Selected(bracket.mark(bits.unpack(selected.words)), bracket.ok), threshold

    return lax.cond(bracket.holds, among_candidates, lambda: among_all(search_all(vector, layout, k)))


def _largest(vector: jax.Array, smallest: jax.Array, layout: Layout, k: jax.Array) -> jax.Array:
    """Marks, in every segment, the k largest magnitudes, of which the smallest is known by its bits."""
    blocks, bound = in_blocks(magnitude_bits(vector)), layout.per_block(smallest)[:, None, None]
    above_mask, tied = bits.pack_each((blocks > bound).reshape(-1), ((blocks == bound) & (bound > 0)).reshape(-1))
    room = layout.per_block(k - count_in_segment(above_mask, layout))
    rank, _ = rank_in_segment(tied, layout)
    return above_mask | bits.keep_first(tied, (room[:, None] - rank).reshape(-1))


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
    n_below = rows.shape[1] - k  # at most this many are below the smallest marked

    def is_reached(bounds: jax.Array) -> jax.Array:
        return jnp.sum(magnitude < bounds[:, None], axis=1, dtype=jnp.int32) <= n_below

    smallest = largest_that(is_reached, jnp.zeros_like(magnitude[:, 0]))[:, None]
    is_above, tied = magnitude > smallest, magnitude == smallest
    room = k - jnp.sum(is_above, axis=1, dtype=jnp.int32, keepdims=True)
    return is_above | (tied & (jnp.cumsum(tied, axis=1, dtype=jnp.int32) <= room))


def dropped(n: int, sparsity: float) -> int:
    """Returns floor(n * sparsity), with sparsity as the decimal number that was written, without binary rounding."""
    return math.floor(n * Fraction(repr(float(sparsity))))


def n_kept(n: int, sparsity: float) -> int:
    """Returns how many of n coordinates top-k keeps at a sparsity: at least one."""
    return max(1, n - dropped(n, sparsity))
