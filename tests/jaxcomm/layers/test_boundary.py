"""The boundary where a model is cut: DCT-MP against NumPy, on a mesh, bytes included."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxcomm as jc
from jaxcomm.codecs import ValueCodec
from jaxcomm.layers.activations import Whole
from jaxcomm.steps.pipeline.pipeline import Cut
from tests.jaxcomm.layers.crossing import (
    CROSSINGS,
    Crossing,
    assert_bytes,
    assert_bytes_of_large_activations,
    assert_permutes,
    assert_same,
    at,
    crossing,
    kinds,
    only_at,
    predicted_bytes,
    seeds,
    widths,
)
from tests.marks import slow_except
from tests.reference.dct_mp import DctMpReference, n_kept_of_row
from tests.reference.noise import make_key
from tests.reference.tiles import arrive, returned


@pytest.mark.parametrize("value_dtype", slow_except([None, "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("name", slow_except(CROSSINGS, "few"))
@hypothesis.given(kind=kinds, gradients=kinds, seed=seeds)
def test_dct_mp_is_the_papers(name, value_dtype, kind, gradients, seed):
    """Forward and backward, to the bit; NaN and infinity cross; all other positions receive zeros."""
    run = crossing(name, value_dtype=value_dtype)
    x, gradient = run.draw(kind, seed), run.draw(gradients, seed + 1)
    received, pulled = run(x, gradient)
    eta = CROSSINGS[name][1]

    def one(x, gradient):
        reference = DctMpReference(eta, widths(value_dtype))
        return [reference.forward(x), reference.backward(gradient)]

    expected = jax.tree.map(one, at(run.source, x), at(run.target, gradient))
    forward, backward = jax.tree.transpose(jax.tree.structure(x), None, expected)
    assert_same(received, only_at(run.target, forward, run.size))
    assert_same(pulled, only_at(run.source, backward, run.size))


@pytest.mark.parametrize(("dtype", "value_dtype"), [("bfloat16", None), ("bfloat16", "float32"), ("float16", None)])
@hypothesis.given(kind=st.sampled_from(["normal", "ties", "infinite", "nan"]), seed=seeds)
def test_narrow_activations(dtype, value_dtype, kind, seed):
    """They cross as they are."""
    run = crossing("back", dtype=dtype, value_dtype=value_dtype)
    x, gradient = run.draw(kind, seed), run.draw("normal", seed + 1)
    received, gradient_back = run(x, gradient)
    reference = DctMpReference(0.75)
    assert_same(received, only_at(1, reference.forward(x[2]), 3))
    assert_same(gradient_back, only_at(2, reference.backward(gradient[1]), 3))


def test_shares_of_samples():
    """Of ties, the first are kept; a large sample does not take slots from a small one."""
    run = crossing("few")  # 3 of 5 a sample
    x = np.zeros((2, 3, 5), np.float32)
    x[0] = [[1, -2, 3, -4, 5], [1e-9, -1e-9, 1e-9, 1e-9, 2e-9], [0, 0, 0, 0, 1e9]]
    received, pulled = run(x, np.ones_like(x))
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, 1], [1, 1, 0, 0, 1]])
    np.testing.assert_array_equal(received[1], x[0] * mask)
    np.testing.assert_array_equal(pulled[0], mask)


def test_bfloat16_beyond_its_range():
    """And never as a finite number, with which training could go on."""
    run = crossing("few", value_dtype="bfloat16")
    largest = np.finfo(np.float32).max
    x = np.broadcast_to(np.float32([largest, -largest, 1, 1, 1]), (2, 3, 5))
    received, pulled = run(x, x)
    np.testing.assert_array_equal(received[1], np.broadcast_to([np.inf, -np.inf, 1, 0, 0], (3, 5)))
    np.testing.assert_array_equal(pulled[0], np.broadcast_to([np.inf, -np.inf, 1, 0, 0], (3, 5)))


def test_sparsity_0_permutes():
    assert_permutes(jc.dct_mp)


def test_a_sample_of_one_number():
    run = Crossing({"a": (6,), "b": (6, 5)}, 0.9, 2, 0, 1)
    x, gradient = run.draw("normal", 0), run.draw("normal", 1)
    received, pulled = run(x, gradient)
    assert_same([received["a"], pulled["a"]], [only_at(1, x["a"][0], 2), only_at(0, gradient["a"][1], 2)])
    assert np.count_nonzero(pulled["b"]) == 6


def documented(whole, values, positions, gradients):
    return values + positions, gradients


@pytest.mark.parametrize("value_dtype", slow_except([None, "bfloat16", "int4"], None, "bfloat16"))
@pytest.mark.parametrize("name", CROSSINGS)
def test_bytes(name, value_dtype):
    assert_bytes(name, documented, value_dtype=value_dtype)


@pytest.mark.parametrize(("width", "words"), [(3, 32 * 7), (4, 32 * 9), (8, 32 * 17)])
def test_bytes_of_few_bits(width, words):
    """16 rows of 128 numbers are 32 tiles: a word and 2 per bit for each, and 6 words of pivots; 64 buckets back."""
    forward, backward = predicted_bytes(jc.dct_mp(0.0, value_dtype=f"int{width}"), (16, 128))
    assert (forward, backward) == (4 * (words + 6), 4 * 64 * (1 + max(width, 6)))


@pytest.mark.parametrize("sparsity", [0.0, 0.7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_of_4_bits(sparsity, dtype):
    """The values that DCT-MP keeps, in rows of tiles; all other positions receive zeros."""
    shapes = {"a": (6, 5, 40), "b": (6, 200)}
    run = Crossing(shapes, sparsity, 3, 2, 0, dtype=dtype, value_dtype="int4")
    x, gradient = run.draw("normal", 0), run.draw("normal", 1)
    received, pulled = run(x, gradient, seed=7)
    error = {"float32": 1e-5, "bfloat16": 0.02}[dtype]
    for number, name in enumerate(shapes):
        reference, activations = DctMpReference(sparsity), x[name][2]
        reference.forward(activations)
        mask = reference.mask
        back = gradient[name][0][mask]
        key = make_key(make_key(make_key(7), 1), number)
        crossings = (
            (activations[mask], received, 0, arrive(activations[mask], 4)),
            (back, pulled, 2, returned(back, 6, key)),
        )
        for values, result, place, (expected, close) in crossings:
            assert close.mean() < 0.5
            arrival = result[name][place][mask]
            np.testing.assert_allclose(arrival[~close], expected[~close], rtol=error, atol=error)
            assert not result[name][place][~mask].any()
            assert np.abs(expected - values).max() > 0.01  # it is not a copy
            assert not np.delete(result[name], place, axis=0).any()


def test_who_writes_and_reads():
    """And vice versa for the gradient."""
    calls = []

    class Listening(ValueCodec):
        def encode(self, values):
            jax.debug.callback(lambda position: calls.append(("encode", int(position))), jax.lax.axis_index("stage"))
            return super().encode(values)

        def decode(self, words, count):
            jax.debug.callback(lambda position: calls.append(("decode", int(position))), jax.lax.axis_index("stage"))
            return super().decode(words, count)

    class Listened(jc.layers.Boundary):
        def plan(self, like):
            return Whole(tuple(like.shape), like.dtype, Listening(jnp.dtype("float32")))

    run = Crossing((2, 6), 0.5, 3, 0, 2, make=Listened)
    run(run.draw("normal", 0), run.draw("normal", 1))
    jax.effects_barrier()
    assert sorted(calls) == [("decode", 0), ("decode", 2), ("encode", 0), ("encode", 2)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_infinity_in_4_bits(bad):
    run = Crossing((3, 64), 0.0, 2, 0, 1, value_dtype="int4")
    x, gradient = run.draw("normal", 0), run.draw("normal", 1)
    x[0, 1, 3] = gradient[1, 2, 5] = bad
    received, back = run(x, gradient)
    np.testing.assert_array_equal(np.isnan(received[1]).all(1), [False, True, False])
    assert np.isnan(received).sum() == 64
    np.testing.assert_array_equal(np.isfinite(back[0]).reshape(3, 2, 32).all(2), [[True] * 2] * 2 + [[False, True]])


@pytest.mark.parametrize("sparsity", [0.05, 0.5, 0.9, 0.99])
def test_bytes_of_large_activations(sparsity):
    assert_bytes_of_large_activations(jc.dct_mp, sparsity, documented)


def test_bits_of_large_activations():
    """64 samples of 4096 at 5%: 2 + log2(d/k) bits per position, and never more than d bits per sample."""
    like = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    for sparsity in (0.5, 0.95, 0.999):
        k = n_kept_of_row(4096, sparsity)
        forward, backward = Cut([jc.dct_mp(sparsity).plan(like)], None).bytes_each_way()
        assert backward == 2 * 64 * k
        assert forward - backward <= 64 * min(4096, k * (2 + math.log2(4096 / k))) / 8 + 8


def traced(x=None, size=2, sparsity=0.5, value_dtype=None, **arguments):
    x = jnp.ones((2, 6)) if x is None else x
    arguments = {"source": 0, "target": 1, "boundary": jc.dct_mp(sparsity, value_dtype=value_dtype), **arguments}
    cross = jax.vmap(
        lambda x: jc.layers.masked_boundary(x, **arguments), axis_name="stage", in_axes=None, axis_size=size
    )
    return jax.eval_shape(cross, x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity must be at least 0 and below 1 .*; got 1\.0. Use 0\.99"),
        ({"sparsity": -0.1}, r"sparsity must be at least 0 and below 1 .*; got -0\.1\. Use"),
        (
            {"value_dtype": "float16"},
            r"one of float32, bfloat16, int3, int4, int8; got 'float16'. Pass value_dtype='int4'",
        ),
        ({"source": 2}, r"source must be a position on the axis of 2; got 2. Positions count from 0"),
        ({"source": 0.0}, r"source must be a position on the axis of 2; got 0\.0"),
        ({"target": -1}, r"target must be a position on the axis of 2; got -1. Positions count from 0"),
        ({"target": 0}, r"target must be another position than source; got 0. Nothing has to move"),
        ({"axis_name": "stages"}, r"in scope; got no axis 'stages'. Call it inside jax\.shard_map"),
        (
            {"x": jnp.ones((2, 6), jnp.int32)},
            r"real floating activations .*; got int32\[2, 6\]. Let the next stage take integ",
        ),
        (
            {"x": jnp.ones((2, 6), jnp.complex64)},
            r"real floating activations with the samples as first .*; got complex64\[2, 6",
        ),
        (
            {"x": jnp.ones((0, 6))},
            r"real floating activations with the samples as first dimension; got float32\[0, 6\]. Let",
        ),
        ({"x": jnp.ones(())}, r"real floating activations with the samples as first dimension; got float32\[\]. Let"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        traced(**arguments)
