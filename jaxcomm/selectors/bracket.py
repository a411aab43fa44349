"""The k-th largest magnitude of every tensor, exactly, without sorting."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.kernels import bits, noise
from jaxcomm.kernels.numerics import magnitude_bits
from jaxcomm.kernels.platforms import by_platform
from jaxcomm.kernels.scopes import SELECT
from jaxcomm.kernels.vectors import Stored, Vector
from jaxcomm.layout import BLOCK, Layout, in_blocks
from jaxcomm.selectors.selection import count_in_block, count_in_segment, rank_in_segment, slots_of

_SAMPLED = 64  # one coordinate in this many is in the sample
_DEVIATIONS = 5.0  # standard deviations of the sample on either side of the rank: one bracket in a million fails
_FEW = 8  # brackets pay if the vector is at least this many times as long as the room for candidates
_BEYOND = np.uint32(1 << 31)  # above the bits of every magnitude
_DIGIT = 4  # bits that a pass finds on a GPU, which takes longer to start a pass than for 15 counts in it
_DIGITS, _DIGITS_OF_ENDS = 8, 6  # passes; the ends of a bracket are rounded down by less than 2^-15


class Bracketed(NamedTuple):
    """The largest magnitudes, as one pass over a vector found them.

    Attributes:
      above: (n/32,) uint32, the mask of what is above its segment's bracket.
      n_above: (S,) int32, its counts.
      candidates: (C,) float32, what is inside the brackets; zeros in empty slots.
      position: (C,) int32, where they are, ascending.
      layout: the segments of the candidates.
      holds: () bool, whether the k-th largest of every segment is inside its bracket, and all candidates have a slot;
        otherwise the others are useless.
      ok: () bool, whether no number of the vector is broken.
    """

    above: jax.Array
    n_above: jax.Array
    candidates: jax.Array
    position: jax.Array
    layout: Layout
    holds: jax.Array
    ok: jax.Array

    def mark(self, is_selected: jax.Array) -> jax.Array:
        """Adds some of the candidates, (C,) bool, to the mask of what is above: (n/32,) uint32."""
        place = (self.position % bits.WORD).astype(jnp.uint32)
        bit = jnp.where(is_selected, jnp.left_shift(np.uint32(1), place), np.uint32(0))
        # Each bit is added once, to a word where it is not set.
        word = self.position // bits.WORD
        return self.above.at[word].add(bit, mode="promise_in_bounds", indices_are_sorted=True)


@jax.named_scope(SELECT)
def find_largest(vector: Vector, layout: Layout, k: jax.Array) -> tuple[jax.Array, Bracketed | None]:
    """Finds the k-th largest magnitude of every segment, exactly.

    A sample of one coordinate in 64 gives a bracket around it. One pass marks the magnitudes above the bracket and
    those inside. The few inside, the candidates, are compacted, and bisection on the bits of the float finds the right
    one among them. If most tensors are small, bisection goes over the whole vector instead, by `search_all`. So it must
    if a bracket is wrong or has too many candidates (ties), which the caller has to check.

    Args:
      vector: the flat vector.
      layout: its segments. The room for candidates is planned for a segment's `capacity` largest.
      k: (S,) int32, from 1; beyond the segment's size, the k-th largest is 0.

    Returns:
      The bits of the k-th largest of every segment, (S,) uint32, 0 where fewer are above 0; and what else is known,
      unless most tensors are small. If there are brackets, the bits are right only if these hold.
    """
    wide = dataclasses.replace(layout, capacities=_rooms(layout))
    if wide.n_slots * _FEW > layout.n:
        return search_all(vector, layout, k), None

    k = typed_as(vector, k)
    low, high = _brackets(vector, layout, wide.capacities, k)
    blocks = in_blocks(magnitude_bits(vector.sum()))
    reaches_high, reaches_low = (blocks >= layout.per_block(bound)[:, None, None] for bound in (high, low))
    above_mask, inside, broken = bits.pack_each(reaches_high.reshape(-1), reaches_low.reshape(-1), vector.broken())
    inside &= ~above_mask
    n_above = count_in_segment(above_mask, layout)
    rank, count = rank_in_segment(inside, layout)
    is_zero = (low == 1) & (k > n_above + count)
    fits = count <= np.asarray(wide.capacities, np.int32)
    holds = jnp.all(fits & (is_zero | ((n_above < k) & (k <= n_above + count))))

    slots = slots_of(inside, rank, wide)
    candidates = jnp.where(slots.filled, vector.at(slots.position), 0.0)
    room_layout = dataclasses.replace(
        wide, shapes=tuple((room,) for room in wide.capacities), compressed=(True,) * len(layout.sizes), chunk=None
    )
    smallest = jnp.where(is_zero, np.uint32(0), search_all(Stored(candidates), room_layout, k - n_above))
    return smallest, Bracketed(
        above_mask, n_above, candidates, slots.position, room_layout, holds, ~jnp.any(broken != 0)
    )


@jax.named_scope(SELECT)
def search_all(vector: Vector, layout: Layout, k: jax.Array) -> jax.Array:
    """Returns the bits of the k-th largest magnitude of every segment, or 0 where fewer are above 0: (S,) uint32.

    By 31 counting passes over the vector, each as cheap as a sum; on a GPU, by 8 over one that is in memory.
    """

    def count(bounds: Sequence[jax.Array]) -> jax.Array:
        # Takes the bits in each pass: else XLA would store them before the loop, which costs memory and a copy.
        operand, _ = lax.optimization_barrier((vector, bounds[0]))
        blocks = in_blocks(magnitude_bits(operand.sum()))
        return _count([blocks >= layout.per_block(bound)[:, None, None] for bound in bounds], layout)

    return _search(count, typed_as(vector, k)[None], is_stored=isinstance(vector, Stored))[0]


def largest_that(holds: Callable[[jax.Array], jax.Array], zeros: jax.Array, first_bit: int = 30) -> jax.Array:
    """Returns the largest integers, of bits up to `first_bit`, for which a condition holds that holds up to them."""

    def narrow(step: int, prefix: jax.Array) -> jax.Array:
        shift = jnp.asarray(first_bit - step, prefix.dtype)
        candidate = prefix | lax.shift_left(prefix.dtype.type(1), shift)
        return jnp.where(holds(candidate), candidate, prefix)

    return lax.fori_loop(0, first_bit + 1, narrow, zeros)


def typed_as(vector: Vector, k: jax.Array) -> jax.Array:
    """Gives counts the vector's type, which on a mesh differs between workers."""
    return k + (magnitude_bits(vector.at(jnp.zeros(1, jnp.int32))[0]) * np.uint32(0)).astype(jnp.int32)


def _rooms(layout: Layout) -> tuple[int, ...]:
    """Returns how many candidates there is room for in every segment, in whole blocks."""
    rooms = []
    for size, capacity, blocks in zip(layout.sizes, layout.capacities, layout.blocks, strict=True):
        gap = 2 * _DEVIATIONS * math.sqrt(capacity / _SAMPLED) + 3  # between the bracket's ends, in the sample
        room = _SAMPLED * (gap + 4 * math.sqrt(gap))
        rooms.append(BLOCK * (blocks if room >= size else math.ceil(room / BLOCK)))
    return tuple(rooms)


def _brackets(vector: Vector, layout: Layout, rooms: tuple[int, ...], k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns likely bounds of the k-th largest magnitude, inclusive (at least 1) and exclusive: (S,) uint32 each."""
    place = lax.iota(jnp.uint32, layout.n // _SAMPLED)
    # One at random in each 64: a fixed stride would sample some columns of a matrix only.
    place = place * np.uint32(_SAMPLED) + noise.mix(place) % np.uint32(_SAMPLED)
    sample = magnitude_bits(vector.at(place.astype(jnp.int32))).reshape(-1, BLOCK // _SAMPLED)  # (blocks, 16)
    expected = k.astype(jnp.float32) / _SAMPLED
    spread = np.float32(_DEVIATIONS) * jnp.sqrt(expected)
    ends = jnp.stack([jnp.ceil(expected + spread) + 1, jnp.floor(expected - spread)]).astype(jnp.int32)  # (2, S)

    def count(bounds: Sequence[jax.Array]) -> jax.Array:
        return _summed([sample >= layout.per_block(bound)[:, None] for bound in bounds], layout)

    low, high = _search(count, ends, _DIGITS_OF_ENDS)
    takes_all = np.asarray(rooms) >= np.asarray(layout.blocks) * BLOCK
    low = jnp.where(takes_all, np.uint32(1), jnp.maximum(low, np.uint32(1)))
    high = jnp.where(takes_all | (ends[1] < 1), _BEYOND, high)
    return low, jnp.maximum(low, high)


def _search(
    count: Callable[[Sequence[jax.Array]], jax.Array], k: jax.Array, digits: int = _DIGITS, is_stored: bool = True
) -> jax.Array:
    """Returns the largest bounds that at least k magnitudes reach, 0 where there are none: (R, S) uint32.

    Args:
      count: for a list of bounds, (S,) uint32 each, how many magnitudes' bits reach them: a row each, (..., S) int32.
      k: (R, S) int32, in the type of the counts.
      digits: how many a GPU finds; the others are 0.
      is_stored: whether what is counted is in memory. Else XLA for GPUs would store it for several counts in a pass.
    """

    def by_bit(zeros: jax.Array) -> jax.Array:
        return largest_that(lambda bounds: count([*bounds]) >= k, zeros)

    def by_digit(zeros: jax.Array) -> jax.Array:
        def narrow(step: int, prefix: jax.Array) -> jax.Array:
            shift = jnp.uint32(_DIGIT * (_DIGITS - 1 - step))
            bounds = prefix + lax.shift_left(np.arange(1, 1 << _DIGIT, dtype=np.uint32), shift)[:, None, None]
            reached = count([*bounds.reshape(-1, k.shape[1])]).reshape(bounds.shape) >= k
            return prefix + lax.shift_left(jnp.sum(reached, axis=0, dtype=jnp.uint32), shift)

        return lax.fori_loop(0, digits, narrow, zeros, unroll=True)

    default = by_digit if is_stored else by_bit
    return by_platform((k * 0).astype(jnp.uint32), cpu=by_bit, tpu=by_bit, default=default)


def _count(masks: Sequence[jax.Array], layout: Layout) -> jax.Array:
    """Counts the coordinates of every segment that masks in blocks mark: a row each, (..., S) int32."""

    def packed(*masks: jax.Array) -> jax.Array:
        # As packed bits: XLA for CPUs would store booleans as integers for a sum, 32 times the memory.
        return _per_segment([count_in_block(bits.pack(mask.reshape(-1))) for mask in masks], layout)

    return by_platform(*masks, cpu=packed, default=lambda *masks: _summed(masks, layout))


def _summed(masks: Sequence[jax.Array], layout: Layout) -> jax.Array:
    """Counts what masks (blocks, ...) mark in every segment, in one pass over what they are computed from."""
    ones, zeros = [mask.astype(jnp.int32) for mask in masks], [np.int32(0)] * len(masks)
    axes = range(len(layout.blocks) > 1, masks[0].ndim)  # of blocks, too, if they are all of one segment
    sums = lax.reduce(ones, zeros, lambda xs, ys: [x + y for x, y in zip(xs, ys, strict=True)], axes)
    return _per_segment(sums, layout) if sums[0].ndim else jnp.stack(sums)[:, None]


def _per_segment(counts: Sequence[jax.Array], layout: Layout) -> jax.Array:
    """Sums counts of every block, (blocks,) int32 each, over the blocks of each segment: a row each, (..., S)."""
    if len(counts) == 1:
        return layout.per_segment(counts[0])[None]
    return layout.per_segment(jnp.stack(counts, axis=1)).T
