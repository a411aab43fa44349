"""The k-th largest magnitude of every tensor, exactly, without sorting."""

import dataclasses
import math
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
from jaxcomm.selectors.selection import count_in_segment, rank_in_segment, slots_of

_SAMPLED = 64  # one coordinate in this many is in the sample
_DEVIATIONS = 5.0  # standard deviations of the sample on either side of the rank: one bracket in a million fails
_FEW = 8  # brackets pay if the vector is at least this many times as long as the room for candidates
_BEYOND = np.uint32(1 << 31)  # above the bits of every magnitude


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


class Found(NamedTuple):
    """The k-th largest magnitudes.

    Attributes:
      smallest: (S,) uint32, the bits of the k-th largest of every segment; 0 where fewer are above 0.
      bracketed: what else is known, unless most tensors are small.
    """

    smallest: jax.Array
    bracketed: Bracketed | None


@jax.named_scope(SELECT)
def find_largest(vector: Vector, layout: Layout, k: jax.Array) -> Found:
    """Finds the k-th largest magnitude of every segment, exactly.

    A sample of one coordinate in 64 gives a bracket around it. One pass marks the magnitudes above the bracket and
    those inside. The few inside, the candidates, are compacted, and bisection on the bits of the float finds the right
    one among them. If a bracket is wrong or has too many candidates (ties), or if most tensors are small, bisection
    goes over the whole vector instead: 31 counting passes, each as cheap as a sum.

    Args:
      vector: the flat vector.
      layout: its segments. The room for candidates is planned for a segment's `capacity` largest.
      k: (S,) int32, from 1; beyond the segment's size, the k-th largest is 0.
    """
    # This gives k the vector's type, which on a mesh differs between workers.
    k = k + (magnitude_bits(vector.at(jnp.zeros(1, jnp.int32))[0]) * np.uint32(0)).astype(jnp.int32)
    wide = dataclasses.replace(layout, capacities=_rooms(layout))
    if wide.n_slots * _FEW > layout.n:
        return Found(_bisect(vector, layout, k), None)

    low, high = _brackets(vector, layout, wide.capacities, k)
    blocks = in_blocks(magnitude_bits(vector.sum()))
    is_above = blocks >= layout.per_block(high)[:, None, None]
    is_inside = (blocks >= layout.per_block(low)[:, None, None]) & ~is_above
    above_mask, inside, broken = bits.pack_each(is_above.reshape(-1), is_inside.reshape(-1), vector.broken())
    n_above = count_in_segment(above_mask, layout)
    rank, count = rank_in_segment(inside, layout)
    is_zero = (low == 1) & (k > n_above + count)
    fits = count <= np.asarray(wide.capacities, np.int32)
    is_known = fits & (is_zero | ((n_above < k) & (k <= n_above + count)))

    slots = slots_of(inside, rank, wide)
    candidates = jnp.where(slots.filled, vector.at(slots.position), 0.0)
    room_layout = dataclasses.replace(
        wide, shapes=tuple((room,) for room in wide.capacities), compressed=(True,) * len(layout.sizes), chunk=None
    )
    smallest = jnp.where(is_zero, np.uint32(0), _bisect(Stored(candidates), room_layout, k - n_above))
    holds = jnp.all(is_known)
    searched = _bisect(vector, layout, k, jnp.where(holds, 0, 31))
    bracketed = Bracketed(above_mask, n_above, candidates, slots.position, room_layout, holds, ~jnp.any(broken != 0))
    return Found(jnp.where(is_known, smallest, searched), bracketed)


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

    def narrow(step: int, prefix: jax.Array) -> jax.Array:
        candidate = prefix | lax.shift_left(np.uint32(1), jnp.uint32(30 - step))
        counts = [
            layout.per_segment(jnp.sum(sample >= layout.per_block(bound)[:, None], axis=1, dtype=jnp.int32))
            for bound in candidate
        ]
        return jnp.where(jnp.stack(counts) >= ends, candidate, prefix)

    low, high = lax.fori_loop(0, 31, narrow, (ends * 0).astype(jnp.uint32))
    takes_all = np.asarray(rooms) >= np.asarray(layout.blocks) * BLOCK
    low = jnp.where(takes_all, np.uint32(1), jnp.maximum(low, np.uint32(1)))
    high = jnp.where(takes_all | (ends[1] < 1), _BEYOND, high)
    return low, jnp.maximum(low, high)


def _bisect(vector: Vector, layout: Layout, k: jax.Array, passes: jax.Array | int = 31) -> jax.Array:
    """Returns the bits of the k-th largest magnitude, or 0 where fewer are above 0: (S,) uint32."""

    def narrow(step: int, prefix: jax.Array) -> jax.Array:
        candidate = prefix | lax.shift_left(np.uint32(1), jnp.uint32(30 - step))
        # Takes the bits in each pass: else XLA would store them before the loop, which costs memory and a copy.
        operand, _ = lax.optimization_barrier((vector, prefix))
        counts = _count(in_blocks(magnitude_bits(operand.sum())) >= layout.per_block(candidate)[:, None, None], layout)
        return jnp.where(counts >= k, candidate, prefix)

    return lax.fori_loop(0, passes, narrow, (k * 0).astype(jnp.uint32))


def _count(mask: jax.Array, layout: Layout) -> jax.Array:
    """Counts the coordinates of every segment that a mask in blocks marks: (S,) int32."""
    # As packed bits: XLA for CPUs would store booleans as integers for a sum, 32 times the memory.
    return by_platform(
        mask,
        tpu=lambda mask: layout.per_segment(jnp.sum(mask, axis=(1, 2), dtype=jnp.int32)),
        default=lambda mask: count_in_segment(bits.pack(mask.reshape(-1)), layout),
    )
