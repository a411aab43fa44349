import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxcomm.kernels import bits
from tests.marks import slow_except

WORDS = 40  # of every mask here: one shape, one compilation
words_of_any_density = st.builds(
    lambda seed, density: np.packbits(np.random.default_rng(seed).random(WORDS * 32) < density, bitorder="little").view(
        np.uint32
    ),
    st.integers(0, 2**20),
    st.sampled_from([0.0, 0.002, 0.1, 0.5, 0.97, 1.0]),
)
many = hypothesis.settings(max_examples=40)

pack, unpack = jax.jit(bits.pack), jax.jit(bits.unpack)
popcount, rank_of_words = jax.jit(bits.popcount), jax.jit(bits.rank_of_words)
select_bit, keep_first = jax.jit(bits.select_bit), jax.jit(bits.keep_first)
positions = jax.jit(bits.positions, static_argnums=2)


def mask_of(words):
    return np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)


@many
@hypothesis.given(words=words_of_any_density)
def test_packing_is_numpys(words):
    mask = mask_of(words)
    np.testing.assert_array_equal(pack(mask), words)
    np.testing.assert_array_equal(unpack(words), mask)


def test_places_of_bits():
    mask = np.zeros(96, bool)
    mask[[0, 33, 95]] = True
    assert np.asarray(bits.pack(jnp.asarray(mask))).tolist() == [1, 2, 1 << 31]


def test_several_masks():
    masks = np.random.default_rng(0).random((3, 32 * WORDS)) < [[0.1], [0.5], [1.0]]
    packed = jax.jit(bits.pack_each)(*masks)
    for mask, words, by_matrices in zip(masks, packed, bits._pack_each_by_matmul(*masks), strict=True):
        np.testing.assert_array_equal(words, np.packbits(mask, bitorder="little").view(np.uint32))
        np.testing.assert_array_equal(by_matrices, words)


@pytest.mark.parametrize("shape", [(31,), (33,), (2, 32), ()])
def test_partial_words(shape):
    with pytest.raises(ValueError, match=r"n a multiple of 32; got shape .*. Flatten it, and pad it with False"):
        bits.pack(jnp.zeros(shape, bool))


@pytest.mark.parametrize("n", slow_except([1, 32, 1000], 32))
@pytest.mark.parametrize("width", [1, 2, 5, 8, 16, 31])
def test_numbers(n, width):
    numbers = np.random.default_rng(n).integers(0, 2**31, size=n).astype(np.int32)
    words = np.asarray(bits.pack_numbers(jnp.asarray(numbers), width))
    assert words.shape == (bits.packed_words(n, width),) == (width * -(-n // 32),)
    low = numbers & np.int32(2**width - 1)
    np.testing.assert_array_equal(bits.unpack_numbers(jnp.asarray(words), n, width), low)

    expected, first = [], 0
    for field in (f for f in (1, 2, 4, 8, 16) if width & f):
        size = field * -(-n // 32)
        field_words = [0] * size
        for place, number in enumerate(low.tolist()):
            field_words[place % size] |= (number >> first) % 2**field << place // size * field
        expected, first = expected + field_words, first + field
    assert words.tolist() == expected


@many
@hypothesis.given(words=words_of_any_density)
def test_counts_and_ranks(words):
    count = mask_of(words).reshape(-1, 32).sum(1)
    np.testing.assert_array_equal(popcount(words), count)
    np.testing.assert_array_equal(rank_of_words(words), np.cumsum(count) - count)


@many
@hypothesis.given(words=words_of_any_density)
def test_select_bit(words):
    mask = mask_of(words).reshape(-1, 32)
    for rank in range(32):
        positions = np.asarray(select_bit(words, np.full(WORDS, rank, np.int32)))
        for word in np.flatnonzero(mask.sum(1) > rank):
            assert positions[word] == np.flatnonzero(mask[word])[rank]


@many
@hypothesis.given(words=words_of_any_density, quotas=st.lists(st.integers(-2, 40), min_size=WORDS, max_size=WORDS))
def test_keep_first(words, quotas):
    prefix = mask_of(np.asarray(keep_first(words, np.asarray(quotas, np.int32)))).reshape(-1, 32)
    for mask, word, quota in zip(mask_of(words).reshape(-1, 32), prefix, quotas, strict=True):
        assert np.flatnonzero(word).tolist() == np.flatnonzero(mask)[: max(quota, 0)].tolist()


@pytest.mark.parametrize("n_slots", [1, 100, WORDS * 32])
@hypothesis.given(words=words_of_any_density)
def test_positions(n_slots, words):
    expected = np.flatnonzero(mask_of(words))[:n_slots]
    slots = positions(words, rank_of_words(words), n_slots)
    position, filled = np.asarray(slots.position), np.asarray(slots.filled)
    assert filled.tolist() == [True] * len(expected) + [False] * (n_slots - len(expected))
    assert position[: len(expected)].tolist() == expected.tolist()
    assert np.all(np.diff(position) >= 0)
    assert position.min() >= 0
    assert position.max() < WORDS * 32


@hypothesis.given(words=words_of_any_density, capacity=st.sampled_from([1, 7, 30]))
def test_positions_of_two_segments(words, capacity):
    """The second half's slots start at `capacity`, whatever the first half has; surplus positions are not found."""
    halves = mask_of(words).reshape(2, -1)
    ranks = np.concatenate([np.cumsum(h.reshape(-1, 32).sum(1)) - h.reshape(-1, 32).sum(1) for h in halves])
    first = np.minimum(ranks, capacity) + np.repeat([0, capacity], WORDS // 2)
    slots = positions(words, first.astype(np.int32), 2 * capacity)
    position, filled = np.asarray(slots.position), np.asarray(slots.filled)
    for i, half in enumerate(halves):
        expected = np.flatnonzero(half)[:capacity] + i * WORDS * 16
        segment = slice(i * capacity, (i + 1) * capacity)
        assert position[segment][filled[segment]].tolist() == expected.tolist()
    assert np.all(np.diff(position) >= 0)


@pytest.mark.parametrize("n_words", [1, 127, 128, 300, 33_000])
def test_programs_of_tpus(n_words):
    """It is only compiled for TPUs, but runs on any device."""
    rng = np.random.default_rng(n_words)
    words = rng.integers(0, 2**32, n_words, dtype=np.uint32)
    mask = mask_of(words)
    np.testing.assert_array_equal(jax.jit(bits._pack_by_matmul)(mask), words)
    np.testing.assert_array_equal(jax.jit(bits._unpack_by_matmul)(words), mask)
    np.testing.assert_array_equal(jax.jit(bits._sum_by_matmul)(words), np.cumsum(words, dtype=np.uint32))
    signed = words.view(np.int32)
    np.testing.assert_array_equal(jax.jit(bits._sum_by_matmul)(signed), np.cumsum(signed, dtype=np.int32))


def test_numbers_of_no_bits():
    assert bits.pack_numbers(jnp.arange(40), 0).shape == (0,)
    np.testing.assert_array_equal(bits.unpack_numbers(jnp.zeros(0, jnp.uint32), 40, 0), np.zeros(40, np.int32))
