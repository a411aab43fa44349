"""The two boundaries that lose accuracy equal the paper's in NumPy, on a mesh and in a pipeline, bytes included."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import jaxcomm as jc
from benchmarks.activation_ablations import SketchBoundary, TopKGradientBoundary
from tests.jaxcomm.layers.crossing import (
    CROSSINGS,
    Crossing,
    assert_bytes,
    assert_bytes_of_large_activations,
    assert_permutes,
    assert_same,
    at,
    crossing,
    only_at,
    seeds,
    widths,
)
from tests.jaxcomm.steps.pipeline.stages import batches, cut
from tests.reference.dct_mp import GaussianSketchReference, TopKGradientReference, n_kept_of_row

pytestmark = pytest.mark.filterwarnings("error")

# (forward, backward) bytes, given those of all values, of the kept values, and of positions.
DOCUMENTED = {
    SketchBoundary: lambda whole, chosen, positions, gradients: (chosen, whole),
    TopKGradientBoundary: lambda whole, chosen, positions, gradients: (whole, gradients + positions),
}
every_boundary = pytest.mark.parametrize("make", DOCUMENTED)


@every_boundary
def test_with_sparsity_0_it_is_a_permutation(make):
    assert_permutes(make)


def test_a_sample_of_one_number_is_sent_back_whole_beside_others_that_are_not():
    run = Crossing({"a": (6,), "b": (6, 5)}, 0.9, 2, 0, 1, make=TopKGradientBoundary)
    x, gradient = run.draw("normal", 0), run.draw("normal", 1)
    received, returned, new = run(x, gradient, jax.tree.map(np.asarray, run.zeros()))
    assert_same([received["a"], returned["a"]], [only_at(1, x["a"][0], 2), only_at(0, gradient["a"][1], 2)])
    assert np.count_nonzero(returned["b"]) == 6
    assert not new["a"].any()
    np.testing.assert_array_equal(new["b"][1] + returned["b"][0], gradient["b"][1])


@pytest.mark.parametrize("value_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["back", "tree"])
@hypothesis.given(kind=st.sampled_from(["normal", "heavy", "ties", "zeros", "few"]), seed=seeds)
def test_topk_of_the_gradient_is_the_papers_and_loses_nothing(name, value_dtype, kind, seed):
    """Three steps, each with the residual of the one before; activations arrive whole."""
    run, eta = crossing(name, make=TopKGradientBoundary, value_dtype=value_dtype), CROSSINGS[name][1]
    references = jax.tree.map(lambda _: TopKGradientReference(eta, widths(value_dtype)), run.zeros())
    residual = jax.tree.map(np.asarray, run.zeros())
    for step in range(3):
        x, gradient = run.draw("normal", seed + step), run.draw(kind, seed + 5 * step)
        received, returned, new = run(x, gradient, residual)
        rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(widths(value_dtype))).astype(np.float32), x)
        assert_same(received, only_at(run.target, at(run.source, rounded), run.size))
        own = at(run.target, gradient)
        sent = jax.tree.map(lambda reference, g: reference.backward(g), references, own)
        assert_same(at(run.target, new), jax.tree.map(lambda reference: reference.residual, references))
        assert_same(returned, only_at(run.source, sent, run.size))
        total = jax.tree.map(np.add, own, at(run.target, residual))
        assert_same(jax.tree.map(np.add, at(run.source, returned), at(run.target, new)), total)
        residual = new


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_crosses_by_topk_too(bad):
    run = crossing("back", make=TopKGradientBoundary, value_dtype=None)
    x, gradient = run.draw("normal", 0), run.draw("normal", 1)
    gradient[1, 3, 32] = bad
    _, returned, _ = run(x, gradient, np.zeros_like(x))
    np.testing.assert_array_equal(returned[2, 3, 32], bad)


D, SEEDS = 12, 400


def test_a_sketch_is_a_projection_of_every_sample_and_returns_the_whole_gradient():
    """The unit vectors become S S^T; another seed has another S."""
    run, reference = Crossing((D, D), 0.7, 2, 0, 1, make=SketchBoundary), GaussianSketchReference(0.7)
    rng = np.random.default_rng(0)
    x, gradient = rng.normal(size=(2, 2, D, D)).astype(np.float32)
    products = [run(only_at(0, np.eye(D, dtype=np.float32), 2), x, seed=seed)[0][1] for seed in (5, 6)]
    assert np.abs(products[0] - products[1]).max() > 0.1
    values, vectors = np.linalg.eigh(products[0])
    m = reference.width(D)
    assert np.all(values[: D - m] < 1e-5)
    assert values[D - m] > 1e-3
    S = vectors[:, -m:] * np.sqrt(values[-m:])
    received, returned, _ = run(x, gradient, seed=5)
    np.testing.assert_allclose(received, only_at(1, reference.forward(x[0], S), 2), rtol=1e-4, atol=1e-4)
    assert_same(returned, only_at(0, reference.backward(gradient[1]), 2))


def test_a_sketch_is_unbiased():
    """(x S S^T)_i has the mean x_i and the variance (|x|^2 + x_i^2) / m.

    The mean of N of them is within 5 standard errors for each of 60 numbers (this fails by chance once in 30,000 draws
    of seeds, and the seeds are fixed), and the sum of their squared errors is within 40% of the variance's.
    """
    run = Crossing((5, D), 0.7, 2, 0, 1, make=SketchBoundary)
    x = run.draw("normal", 3)
    got = np.stack([run(x, x, seed=seed)[0][1] for seed in range(SEEDS)]).astype(np.float64)
    own = x[0].astype(np.float64)
    variance = ((own**2).sum(1, keepdims=True) + own**2) / n_kept_of_row(D, 0.7)
    assert np.abs((got.mean(0) - own) / np.sqrt(variance / SEEDS)).max() < 5
    assert 0.6 < np.mean((got - own) ** 2 / variance) < 1.4


@pytest.mark.parametrize("value_dtype", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("name", "make"), [("back", TopKGradientBoundary), ("tree", TopKGradientBoundary), ("few", SketchBoundary)]
)
def test_bytes_are_predicted_compiled_and_those_of_the_formula(name, make, value_dtype):
    assert_bytes(name, DOCUMENTED[make], make=make, value_dtype=value_dtype)


@every_boundary
@pytest.mark.parametrize("sparsity", [0.05, 0.5, 0.9, 0.99])
def test_bytes_of_large_activations_are_those_of_the_formula(sparsity, make):
    assert_bytes_of_large_activations(make, sparsity, DOCUMENTED[make])


def test_a_residual_that_is_missing_is_refused():
    def cross(x):
        return jc.layers.masked_boundary(x, source=0, target=1, boundary=TopKGradientBoundary(0.5))

    with pytest.raises(ValueError, match=r"where a format keeps one, .* none for \['LargestGradient'\]. Pass zeros"):
        jax.eval_shape(jax.vmap(cross, axis_name="stage"), jnp.ones((2, 2, 6)))


def test_a_sketch_is_another_one_in_every_step():
    """With constant parameters, the losses of one batch differ only by the sketches."""
    tx = optax.chain(jc.plump_dp(), optax.sgd(0.0))
    run = cut(2, tx, boundaries=[SketchBoundary(0.5)])
    _, metrics = run(batches(1) * 3)
    assert len({float(each["loss"]) for each in metrics}) == 3
