"""Every index codec on random, clustered, empty and full selections, and its size against entropy."""

import functools
import math

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxcomm.codecs import choose_index_codec, entropy_bits
from jaxcomm.codecs.indices import INDEX_CODECS
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.selectors import compact
from tests.jaxcomm.formulas import index_words
from tests.marks import slow_except

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
    codec = INDEX_CODECS[codec_name](layout)

    def run(words):
        selection = compact(words, layout)
        payload = codec.encode(selection)
        return selection, payload, codec.decode(payload)

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


@pytest.mark.parametrize("layout_name", slow_except(LAYOUTS, "a-single-slot", "a-scalar"))
@pytest.mark.parametrize("codec_name", slow_except(INDEX_CODECS, "elias_fano", "bitmap"))
@hypothesis.given(
    kind=st.sampled_from(["random", "clustered", "at the end", "empty", "full"]), seed=st.integers(0, 2**20)
)
@hypothesis.example(kind="empty", seed=0)
@hypothesis.example(kind="full", seed=0)
@hypothesis.example(kind="clustered", seed=3)
def test_positions_return(codec_name, layout_name, kind, seed):
    codec, run = there_and_back(codec_name, layout_name)
    layout = layout_of(layout_name)
    selection, payload, position = run(selected(kind, seed, layout.sizes))
    position, filled = np.asarray(position), np.asarray(selection.slots.filled)
    assert position.shape == (layout.n_slots,)
    assert position.min() >= 0
    assert position.max() < layout.n
    np.testing.assert_array_equal(position[filled], np.asarray(selection.slots.position)[filled])
    words = jax.tree.leaves(payload)
    assert all(array.dtype == np.uint32 and array.ndim == 1 for array in words)
    assert sum(array.size for array in words) == codec.n_words


@functools.cache
def decoder_of(codec_name, layout):
    codec = INDEX_CODECS[codec_name](layout)
    shapes = jax.eval_shape(
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


@pytest.mark.parametrize(
    "layout_name", slow_except(["one-1%", "three-50%", "everything-and-padding", "a-scalar"], "one-1%", "a-scalar")
)
@pytest.mark.parametrize("codec_name", slow_except(INDEX_CODECS, "elias_fano", "plain"))
@hypothesis.given(kind=st.just("random"), seed=st.integers(0, 2**20))
@hypothesis.example(kind="zeros", seed=0)
@hypothesis.example(kind="ones", seed=0)
def test_damage_stays_in_range(codec_name, layout_name, kind, seed):
    """Callers scatter with `promise_in_bounds`."""
    assert_in_range(codec_name, layout_of(layout_name), kind, seed)


@pytest.mark.parametrize("slots", [5, 3000])
@pytest.mark.parametrize("codec_name", ["plain", "elias_fano"])
@hypothesis.given(kind=st.just("random"), seed=st.integers(0, 2**20))
@hypothesis.example(kind="ones", seed=0)
def test_damage_near_the_end_of_int32(codec_name, slots, kind, seed):
    """A shift that overflows int32 is negative."""
    layout = Layout(((2**31 - 1024,),), (np.dtype(np.float32),), (True,), (slots,))
    assert_in_range(codec_name, layout, kind, seed)


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03, 0.05, 0.1])
@pytest.mark.parametrize("n", [2**20, 3_000_000, 10**7])
def test_near_entropy(n, density):
    """Of the flat vector's entropy; the layout is static, so 10^7 coordinates cost nothing."""
    n = -(-n // 1024) * 1024
    layout = Layout(((n,),), (np.dtype(np.float32),), (True,), (math.ceil(n * density),))
    codec = choose_index_codec(layout)
    bits = 32 * codec.n_words / layout.n_slots
    assert bits <= (1.10 if density <= 0.05 else 1.12) * entropy_bits(n, layout.n_slots)
    assert bits >= entropy_bits(n, layout.n_slots)  # no code of fixed size is shorter


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_smallest_codec(layout_name):
    layout = layout_of(layout_name)
    assert choose_index_codec(layout).n_words == min(codec(layout).n_words for codec in INDEX_CODECS.values())


@hypothesis.given(n=st.integers(1, 2**31 - 1025), share=st.floats(1e-7, 1))
@hypothesis.example(n=1, share=1.0)
def test_elias_fano_split(n, share):
    n = -(-n // 1024) * 1024
    slots = max(1, int(n * share))
    layout = Layout(((n,),), (np.dtype(np.float32),), (True,), (slots,))
    assert INDEX_CODECS["elias_fano"](layout).n_words == index_words("elias_fano", n, slots)


def test_elias_fano_bits():
    layout = Layout(((2**20,),), (np.dtype(np.float32),), (True,), (2**10,))
    assert 32 * INDEX_CODECS["elias_fano"](layout).n_words / 2**10 == pytest.approx(2 + 10, abs=0.1)


@pytest.mark.parametrize(
    ("n", "k", "expected"), [(1000, 0, 0), (1000, 1000, 0), (1000, 500, 2.0), (100, 1, 8.07931359)]
)
def test_entropy(n, k, expected):
    assert entropy_bits(n, k) == pytest.approx(expected)
