"""Every index codec on random, clustered, empty and full selections, and its size against entropy."""

import functools
import math

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxcomm as jc
from jaxcomm.codecs import choose_index_codec, entropy_bits
from jaxcomm.codecs.indices import INDEX_CODECS, make_index_codec
from jaxcomm.codecs.rice import Rice
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.selectors import compact

# (sizes, the fraction of slots): one segment and several, sparse and dense, whole blocks and not.
LAYOUTS = {
    "one-1%": ((20_000,), 0.01),
    "three-10%": ((2049, 600, 1024), 0.1),
    "three-50%": ((2049, 600, 1024), 0.5),
    "a-single-slot": ((5000,), 0.0),
    "everything": ((1024, 2048), 1.0),
    "everything-and-padding": ((1025, 7), 1.0),
    "a-scalar": ((1,), 1.0),
}


@functools.cache
def layout_of(name):
    sizes, fraction = LAYOUTS[name]
    tree = [jax.ShapeDtypeStruct((size,), np.float32) for size in sizes]
    return plan_layout(tree, dense_below=0, capacity=lambda n: max(1, math.ceil(n * fraction)))


@functools.cache
def there_and_back(codec_name, layout_name):
    layout = layout_of(layout_name)
    codec = make_index_codec(codec_name, layout)

    def run(words):
        selection = compact(words, layout)
        payload, kept = codec.encode(selection)
        return selection, payload, kept, codec.decode(payload)

    return codec, jax.jit(run)


def selected(kind, seed, sizes):
    """A mask over the flat vector, as words."""
    rng, masks = np.random.default_rng(seed), []
    for size in sizes:
        mask = np.zeros(-(-size // 1024) * 1024, bool)
        if kind == "random":
            mask[:size] = rng.random(size) < rng.choice([0.001, 0.01, 0.1, 0.6])
        elif kind == "clustered":
            start = rng.integers(size)
            mask[start : min(size, start + rng.integers(1, size + 1))] = True
        elif kind == "at the end":
            mask[max(size - rng.integers(1, 60), 0) : size] = True
        elif kind == "full":
            mask[:size] = True
        masks.append(mask)
    return np.packbits(np.concatenate(masks), bitorder="little").view(np.uint32)


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("codec_name", INDEX_CODECS)
@hypothesis.given(
    kind=st.sampled_from(["random", "clustered", "at the end", "empty", "full"]), seed=st.integers(0, 2**20)
)
@hypothesis.example(kind="empty", seed=0)
@hypothesis.example(kind="full", seed=0)
@hypothesis.example(kind="clustered", seed=3)
def test_positions_are_read_as_written(codec_name, layout_name, kind, seed):
    codec, run = there_and_back(codec_name, layout_name)
    layout = layout_of(layout_name)
    selection, payload, kept, position = run(selected(kind, seed, layout.sizes))
    position, filled = np.asarray(position), np.asarray(kept.slots.filled)
    assert position.shape == (layout.n_slots,)
    assert position.min() >= 0
    assert position.max() < layout.n
    np.testing.assert_array_equal(position[filled], np.asarray(selection.slots.position)[filled])
    np.testing.assert_array_equal(kept.slots.position, selection.slots.position)

    # Positions that do not fit are counted; only Rice code may be short of bits.
    lost = int(np.sum(selection.slots.filled)) - int(filled.sum())
    assert int(kept.overflow) == int(selection.overflow) + lost
    assert not np.any(filled & ~np.asarray(selection.slots.filled))
    if codec_name != "rice":
        assert lost == 0

    words = jax.tree.leaves(payload)
    assert all(array.dtype == np.uint32 and array.ndim == 1 for array in words)
    assert sum(array.size for array in words) == codec.n_words


@functools.cache
def decoder_of(codec_name, layout):
    codec = make_index_codec(codec_name, layout)
    shapes, _ = jax.eval_shape(
        lambda words: codec.encode(compact(words, layout)), jax.ShapeDtypeStruct((layout.n_words,), np.uint32)
    )
    return jax.jit(codec.decode), shapes


def damaged(kind, shapes, seed):
    """Words that no encoder has written."""
    if kind != "random":
        return {
            name: np.full(like.shape, {"zeros": 0, "ones": 2**32 - 1}[kind], np.uint32) for name, like in shapes.items()
        }
    rng, words = np.random.default_rng(seed), {}
    for name, like in shapes.items():
        density = rng.choice([0.01, 0.1, 0.5, 0.9])
        words[name] = np.packbits(rng.random(32 * like.size) < density, bitorder="little").view(np.uint32)
    return words


def assert_in_range(codec_name, layout, kind, seed):
    decode, shapes = decoder_of(codec_name, layout)
    position = np.asarray(decode(damaged(kind, shapes, seed)))
    assert position.shape == (layout.n_slots,)
    assert position.min() >= 0
    assert position.max() < layout.n


@pytest.mark.parametrize("layout_name", ["one-1%", "three-50%", "everything-and-padding", "a-scalar"])
@pytest.mark.parametrize("codec_name", INDEX_CODECS)
@hypothesis.given(kind=st.just("random"), seed=st.integers(0, 2**20))
@hypothesis.example(kind="zeros", seed=0)
@hypothesis.example(kind="ones", seed=0)
def test_positions_of_damaged_words_are_in_range(codec_name, layout_name, kind, seed):
    """Callers scatter with `promise_in_bounds`."""
    assert_in_range(codec_name, layout_of(layout_name), kind, seed)


@pytest.mark.parametrize("slots", [5, 3000])
@pytest.mark.parametrize("codec_name", ["plain", "elias_fano", "rice"])
@hypothesis.given(kind=st.just("random"), seed=st.integers(0, 2**20))
@hypothesis.example(kind="ones", seed=0)
def test_positions_of_damaged_words_are_in_range_where_int32_nearly_ends(codec_name, slots, kind, seed):
    """A shift that overflows int32 is negative."""
    layout = Layout(((2**31 - 1024,),), (np.dtype(np.float32),), (True,), (slots,))
    assert_in_range(codec_name, layout, kind, seed)


def test_what_clusters_too_much_for_rice_code_stays_in_the_residual():
    """One long gap takes more bits than the budget, so the last positions do not fit."""
    n = 100_000
    x = np.linspace(1e-3, 1, n, dtype=np.float32)  # the largest tenth is the last
    tx = jc.topk(0.9, index_codec="rice", value_dtype="float32")
    state = jax.tree.map(lambda leaf: leaf[None], tx.init({"w": x}))
    means, state = jax.jit(jax.vmap(tx.update, axis_name="data"))({"w": x[None]}, state)
    mean, residual = np.asarray(means["w"])[0], np.asarray(state.residual.rows).reshape(-1)[:n]
    overflow, sent = int(state.metrics.overflow[0]), int(state.metrics.sent[0])
    assert overflow > 0
    assert sent + overflow == n // 10
    assert np.flatnonzero(mean).tolist() == list(range(n - n // 10, n - overflow))
    np.testing.assert_array_equal(mean + residual, x)


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03, 0.05, 0.1])
@pytest.mark.parametrize("n", [2**20, 3_000_000, 10**7])
def test_auto_is_within_a_tenth_of_entropy(n, density):
    """Of the flat vector's entropy; the layout is static, so 10^7 coordinates cost nothing."""
    n = -(-n // 1024) * 1024
    layout = Layout(((n,),), (np.dtype(np.float32),), (True,), (math.ceil(n * density),))
    codec = choose_index_codec(layout)
    bits = 32 * codec.n_words / layout.n_slots
    assert bits <= 1.10 * entropy_bits(n, layout.n_slots)
    assert bits >= entropy_bits(n, layout.n_slots)  # no code of fixed size is shorter


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_auto_is_the_smallest_that_holds_the_capacity(layout_name):
    layout = layout_of(layout_name)
    codec = choose_index_codec(layout, "auto")
    others = [make_index_codec(name, layout) for name in INDEX_CODECS]
    assert codec.n_words == min(o.n_words for o in others if not isinstance(o, Rice) or o.is_roomy)


@pytest.mark.parametrize("density", [0.01, 0.05, 0.1])
def test_evenly_spread_positions_fit_a_roomy_rice_code(density):
    """`is_roomy` promises four standard deviations."""
    n = 2**17
    layout = Layout(((n,),), (np.dtype(np.float32),), (True,), (math.ceil(n * density),))
    codec = make_index_codec("rice", layout)
    assert codec.is_roomy
    encode = jax.jit(lambda words: codec.encode(compact(words, layout))[1].overflow)
    rng = np.random.default_rng(0)
    for _ in range(5):
        mask = np.zeros(n, bool)
        mask[rng.choice(n, layout.n_slots, replace=False)] = True
        assert int(encode(np.packbits(mask, bitorder="little").view(np.uint32))) == 0


def test_elias_fano_takes_two_bits_and_the_logarithm():
    layout = Layout(((2**20,),), (np.dtype(np.float32),), (True,), (2**10,))
    assert 32 * make_index_codec("elias_fano", layout).n_words / 2**10 == pytest.approx(2 + 10, abs=0.1)


@pytest.mark.parametrize(
    ("n", "k", "expected"), [(1000, 0, 0), (1000, 1000, 0), (1000, 500, 2.0), (100, 1, 8.07931359)]
)
def test_entropy_in_bits_an_index(n, k, expected):
    assert entropy_bits(n, k) == pytest.approx(expected)


def test_an_unknown_codec_is_refused():
    with pytest.raises(ValueError, match=r"one of plain, bitmap, elias_fano, rice; got 'huffman'. Pass one.*'auto'"):
        choose_index_codec(layout_of("one-1%"), "huffman")
