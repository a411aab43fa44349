"""Bit-packed masks: pack, count, and the positions of the set bits.

A mask over n coordinates is n/32 words of 32 bits, bit i % 32 of word i // 32. Compaction works on the words, which are
32 times fewer than the coordinates, and so costs less than one copy of what the mask selects from.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.kernels.platforms import by_platform, in_memory

WORD = 32  # bits a word
LANES = 128  # numbers in a row of a TPU


def pack(mask: jax.Array) -> jax.Array:
    """Packs a boolean mask of shape (n,), n a multiple of 32, into (n/32,) uint32 words."""
    return pack_each(mask)[0]


def pack_each(*masks: jax.Array) -> tuple[jax.Array, ...]:
    """Packs masks of one shape as `pack` does, in one pass over what they are computed from."""
    for mask in masks:
        if mask.ndim != 1 or mask.shape[0] % WORD:
            raise ValueError(
                f"A mask must have the shape (n,), n a multiple of {WORD}; got shape {mask.shape}. Flatten it, and pad "
                "it with False."
            )
    return by_platform(*masks, tpu=_pack_each_by_matmul, default=_pack_in_one_pass)


def unpack(words: jax.Array) -> jax.Array:
    """Returns the boolean mask (32 W,) of (W,) uint32 words; the inverse of `pack`."""
    return by_platform(words, tpu=_unpack_by_matmul, default=_unpack_octets)


def _pack_in_one_pass(*masks: jax.Array) -> tuple[jax.Array, ...]:
    bit = np.arange(WORD, dtype=np.uint32)
    rows = [mask.reshape(-1, WORD).astype(jnp.uint32) << bit for mask in masks]
    zeros = [np.uint32(0)] * len(masks)
    return tuple(lax.reduce(rows, zeros, lambda xs, ys: [x | y for x, y in zip(xs, ys, strict=True)], [1]))


def _unpack_octets(words: jax.Array) -> jax.Array:
    octets = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)  # (4 W,)
    return jnp.unpackbits(octets, bitorder="little").astype(bool)


def _pack_each_by_matmul(*masks: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_pack_by_matmul(mask) for mask in masks)


def _pack_by_matmul(mask: jax.Array) -> jax.Array:
    """Packs rows of 128 words on a TPU, which would pad shorter rows, of 8 bits or 4 octets, to 128 numbers."""
    n_words = mask.size // WORD
    rows = jnp.pad(mask, (0, -mask.size % (WORD * LANES))).reshape(-1, WORD * LANES)  # (R, 4096)
    bit, column = (lax.broadcasted_iota(jnp.int32, (WORD * LANES, 2 * LANES), axis) for axis in (0, 1))
    # A column for each half of a word: sums below 2^16 are exact.
    is_in = (bit // WORD == column % LANES) & (bit % WORD // 16 == column // LANES)
    weight = jnp.where(is_in, jnp.left_shift(1, bit % 16), 0).astype(jnp.bfloat16)
    halves = lax.dot(rows.astype(jnp.bfloat16), weight, preferred_element_type=jnp.float32)  # (R, 256)
    halves = halves.astype(jnp.int32).astype(jnp.uint32)
    return (halves[:, :LANES] | halves[:, LANES:] << 16).reshape(-1)[:n_words]


def _unpack_by_matmul(words: jax.Array) -> jax.Array:
    n_words = words.size
    rows = jnp.pad(words, (0, -words.size % LANES)).reshape(-1, LANES)  # (R, 128)
    octets = jnp.concatenate([rows >> shift & 255 for shift in (0, 8, 16, 24)], axis=1)  # (R, 512)
    row, bit = (lax.broadcasted_iota(jnp.int32, (4 * LANES, WORD * LANES), axis) for axis in (0, 1))
    spread = (bit // WORD == row % LANES) & (bit % WORD // 8 == row // LANES)  # each bit's octet
    octet = lax.dot(
        octets.astype(jnp.int32).astype(jnp.bfloat16), spread.astype(jnp.bfloat16), preferred_element_type=jnp.bfloat16
    )
    bits = octet.astype(jnp.int32) >> np.arange(WORD * LANES, dtype=np.int32) % 8 & 1
    return bits.astype(bool).reshape(-1)[: n_words * WORD]


def packed_words(n: int, width: int) -> int:
    """Returns the words that n numbers of `width` bits take."""
    return width * -(-n // WORD)


def pack_numbers(numbers: jax.Array, width: int) -> jax.Array:
    """Packs the low `width` bits of numbers (C,) int32: (packed_words(C, width),) uint32.

    A width of 5 bits is a field of 1 bit and then one of 4. A field of f bits takes W = f * ceil(C / 32) words. Word i
    holds the numbers i, W + i, 2 W + i, ..., from the lowest bits on: neighbours are read together, and a number is
    computed only once.
    """
    padded = jnp.pad(numbers, (0, -numbers.size % WORD)).astype(jnp.uint32)
    words, first = [], 0
    for field in _fields(width):
        parts = (padded >> first & np.uint32((1 << field) - 1)).reshape(WORD // field, -1)
        words.append(functools.reduce(jnp.bitwise_or, (part << place * field for place, part in enumerate(parts))))
        first += field
    return jnp.concatenate(words) if words else jnp.zeros(0, jnp.uint32)


def unpack_numbers(words: jax.Array, n: int, width: int) -> jax.Array:
    """Returns the low `width` bits of the n numbers, (n,) int32; the inverse of `pack_numbers`."""
    numbers, first = jnp.zeros(n, jnp.int32), 0
    for field in _fields(width):
        size = packed_words(n, field)
        shift = np.arange(0, WORD, field, dtype=np.uint32)[:, None]
        parts = words[first * size // field :][:size] >> shift & np.uint32((1 << field) - 1)  # (32 / field, size)
        numbers = numbers | parts.reshape(-1)[:n].astype(jnp.int32) << first
        first += field
    return numbers


def _fields(width: int) -> list[int]:
    """Returns powers of two that sum to a width, from the smallest on."""
    return [1 << place for place in range(WORD.bit_length()) if width >> place & 1]


def popcount(words: jax.Array) -> jax.Array:
    """Returns the number of set bits of every word, int32, in the shape of `words`."""
    return lax.population_count(words).astype(jnp.int32)


def select_bit(words: jax.Array, rank: jax.Array) -> jax.Array:
    """Returns the position, within every word, of its set bit number `rank`.

    Five halvings: if the bit is not in the low half, drop that half and its count.

    Args:
      words: uint32, any shape.
      rank: int32, the same shape, from 0; the result is meaningless unless it is below the word's popcount.

    Returns:
      int32 positions, 0 to 31.
    """
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        low = words & np.uint32((1 << half) - 1)
        in_low = popcount(low)
        skip = rank >= in_low
        rank = jnp.where(skip, rank - in_low, rank)
        position = jnp.where(skip, position + half, position)
        words = jnp.where(skip, words >> half, low)
    return position


def rank_of_words(words: jax.Array) -> jax.Array:
    """Returns, for every word, how many bits are set in all words before it: (W,) int32."""
    count = popcount(words)
    return running_sum(count) - count


def running_sum(numbers: jax.Array) -> jax.Array:
    """Returns the cumulative sum of 32-bit numbers (n,), each number included, modulo 2^32."""
    return by_platform(numbers, tpu=_sum_by_matmul, default=lambda numbers: jnp.cumsum(numbers, dtype=numbers.dtype))


def _sum_by_matmul(numbers: jax.Array) -> jax.Array:
    """Sums rows of 128, octet by octet: XLA takes 20 s to compile a cumulative sum of a million numbers for a TPU."""
    rows = jnp.pad(numbers, (0, -numbers.size % LANES)).reshape(-1, LANES)
    place, column = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    up_to = (place <= column).astype(jnp.bfloat16)
    inner = jnp.zeros_like(rows)
    for shift in (0, 8, 16, 24):
        octets = (rows >> shift & 255).astype(jnp.int32).astype(jnp.bfloat16)
        sums = lax.dot(octets, up_to, preferred_element_type=jnp.float32)  # below 2^15, exact
        inner += sums.astype(jnp.int32).astype(rows.dtype) << shift
    if len(rows) > 1:
        before = _sum_by_matmul(inner[:, -1]) - inner[:, -1]
        inner += before[:, None]
    return inner.reshape(-1)[: numbers.size]


class Slots(NamedTuple):
    """Where the set bits of a mask are, one per slot.

    Attributes:
      position: (C,) int32, ascending. An empty slot holds the last position of some word after the filled slots before
        it, so that the sequence stays sorted and in range.
      filled: (C,) bool.
    """

    position: jax.Array
    filled: jax.Array


def positions(words: jax.Array, first_slot: jax.Array, n_slots: int) -> Slots:
    """Finds the position of the set bit that belongs to every slot.

    Args:
      words: (W,) uint32.
      first_slot: (W,) int32, never descending, 0 for the first word: the slot of the word's first set bit. A bit whose
        slot would belong to a later word is not found.
      n_slots: C.

    Returns:
      C slots, sorted by position.
    """
    # The word of a slot is the last one that starts at or before it: count the starts up to the slot.
    starts = jnp.zeros(n_slots + 1, jnp.int32)
    starts = starts.at[jnp.minimum(first_slot, n_slots)].add(1, mode="promise_in_bounds")
    word = running_sum(starts[:n_slots]) - 1  # (C,)
    # Each in a loop of its own: XLA for CPUs vectorizes `select_bit`, but not together with a gather.
    rank = in_memory(jnp.arange(n_slots, dtype=jnp.int32) - first_slot[word])
    content = in_memory(words[word])
    filled = rank < popcount(content)
    bit = in_memory(jnp.where(filled, select_bit(content, rank), WORD - 1))
    return Slots(word * WORD + bit, filled)


def keep_first(words: jax.Array, quota: jax.Array) -> jax.Array:
    """Keeps the lowest `quota` set bits of every word.

    Args:
      words: (W,) uint32.
      quota: (W,) int32; 0 or less keeps none, the popcount or more keeps all.

    Returns:
      (W,) uint32.
    """
    count = popcount(words)
    last = select_bit(words, jnp.clip(quota - 1, 0, WORD - 1)).astype(jnp.uint32)
    up_to_last = np.uint32(0xFFFFFFFF) >> (WORD - 1 - last)
    head = jnp.where(quota >= count, words, words & up_to_last)
    return jnp.where(quota > 0, head, np.uint32(0))
