"""Selection by a threshold, and from a mask over the flat vector to the slots of a payload."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.kernels import bits, noise
from jaxcomm.kernels.numerics import magnitude_bits
from jaxcomm.kernels.scopes import SELECT
from jaxcomm.kernels.vectors import Vector
from jaxcomm.layout import BLOCK_WORDS, Layout, in_blocks

_START = 2**31 - 1  # takes the place of a worker index in a key, and is none


class Selected(NamedTuple):
    """What one pass over a vector found.

    Attributes:
      words: (n/32,) uint32, the bit-packed mask of what is selected.
      ok: () bool, whether no number of the vector is broken.
    """

    words: jax.Array
    ok: jax.Array


class Selection(NamedTuple):
    """The coordinates that one worker sends.

    Attributes:
      words: (n/32,) uint32, the bit-packed mask of exactly the coordinates that have a slot.
      slots: their positions, ascending, with each tensor's slots together. `filled` says which slots are in use.
      overflow: () int32, coordinates that were selected but have no slot.
    """

    words: jax.Array
    slots: bits.Slots
    overflow: jax.Array


def rank_in_segment(words: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Counts set bits from the start of each segment.

    Returns:
      (rank, count): for every word the set bits before it in its segment, (blocks, words a block) int32, and the set
      bits of every segment, (S,) int32.
    """
    rank = bits.rank_of_words(words).reshape(-1, BLOCK_WORDS)
    if len(layout.blocks) > 1:
        first_block = np.cumsum((0, *layout.blocks[:-1]))
        rank = rank - layout.per_block(rank[first_block, 0])[:, None]
    return rank, count_in_segment(words, layout)


def count_in_segment(words: jax.Array, layout: Layout) -> jax.Array:
    """Counts the set bits of every segment: (S,) int32."""
    return layout.per_segment(count_in_block(words))


def count_in_block(words: jax.Array) -> jax.Array:
    """Counts the set bits of every block: (blocks,) int32."""
    return bits.popcount(words).reshape(-1, BLOCK_WORDS).sum(1, dtype=jnp.int32)


def slots_of(words: jax.Array, rank: jax.Array, layout: Layout) -> bits.Slots:
    """Gives the r-th set bit of every segment the segment's r-th slot."""
    capacity = np.asarray(layout.capacities, np.int32)
    # A bit beyond its segment's capacity points at the next segment's first slot, whose own word comes later and wins.
    first = layout.per_block(jnp.asarray(np.cumsum(capacity) - capacity, jnp.int32))[:, None]
    first_slot = first + jnp.minimum(rank, layout.per_block(jnp.asarray(capacity))[:, None])
    return bits.positions(words, first_slot.reshape(-1), layout.n_slots)


def draw_start(seed: int, step: jax.Array) -> jax.Array:
    """Draws a step's start offset for overfull masks, the same on all workers: () float32, below 1."""
    return noise.uniform(noise.make_key(seed, step, _START), 1)[0]


def compact(words: jax.Array, layout: Layout, start: jax.Array | None = None) -> Selection:
    """Gives slots to the selected coordinates of every segment.

    Args:
      words: (n/32,) uint32, the mask of what was selected.
      layout: the segments and their capacities.
      start: () float32 in [0, 1), from `draw_start`: the start offset as a fraction of the selected count. If more
        coordinates are selected than fit, those from there on, with wrap-around, get the slots, so that none is
        starved. None starts at the lowest index, for masks that fit.
    """
    return _compact(words, layout, start, lambda function: function)


def compact_rows(words: jax.Array, layout: Layout, start: jax.Array) -> Selection:
    """Does `compact` for the masks (K, n/32) of K vectors of one layout; its results have K rows.

    Unlike `jax.vmap(compact)`, it skips the rotation where no mask overflows: `lax.cond` stays a real branch.
    """
    return _compact(words, layout, start, jax.vmap)


@jax.named_scope(SELECT)
def _compact(words: jax.Array, layout: Layout, start: jax.Array | None, mapping: Callable[..., Any]) -> Selection:
    """Does `compact`, or `compact_rows` where `mapping` maps functions over rows."""
    rank, count = mapping(partial(rank_in_segment, layout=layout))(words)
    if start is not None:
        words, rank = lax.cond(
            jnp.any(count > layout.rooms()),
            lambda: mapping(partial(_wrap_around, start=start, layout=layout))(words, rank, count),
            lambda: (words, rank),
        )
    return mapping(partial(_with_slots, layout=layout))(words, rank, count)


def _wrap_around(
    words: jax.Array, rank: jax.Array, count: jax.Array, start: jax.Array, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """Keeps only as many set bits of every segment as fit, from the start offset on; also returns their ranks."""
    capacity = jnp.asarray(layout.rooms())
    first = jnp.minimum((start * count.astype(jnp.float32)).astype(jnp.int32), count - 1)
    first = jnp.where(count > capacity, first, 0)

    def up_to(limit: jax.Array) -> jax.Array:
        return bits.keep_first(words, (layout.per_block(limit)[:, None] - rank).reshape(-1))

    window = (up_to(first + capacity) & ~up_to(first)) | up_to(first + capacity - count)
    return window, rank_in_segment(window, layout)[0]


def _with_slots(words: jax.Array, rank: jax.Array, count: jax.Array, layout: Layout) -> Selection:
    """Gives slots to the first set bits of every segment, of which `count` were selected."""
    capacity = layout.rooms()
    room = layout.per_block(jnp.asarray(capacity))[:, None] - rank
    return Selection(
        words=bits.keep_first(words, room.reshape(-1)),
        slots=slots_of(words, rank, layout),
        overflow=jnp.sum(jnp.maximum(count - capacity, 0), dtype=jnp.int32),
    )


@jax.named_scope(SELECT)
def select_threshold(vector: Vector, threshold: jax.Array, layout: Layout) -> Selected:
    """Marks |x| >= the threshold of the segment, but never zeros.

    Args:
      vector: the flat vector.
      threshold: (S,) float32, one per segment, not negative.
      layout: the segments.
    """
    bound = jnp.maximum(magnitude_bits(threshold), np.uint32(1))
    reaches = in_blocks(magnitude_bits(vector.sum())) >= layout.per_block(bound)[:, None, None]
    words, broken = bits.pack_each(reaches.reshape(-1), vector.broken())
    return Selected(words, ~jnp.any(broken != 0))
