"""The two schemes that lose accuracy equal the paper's in NumPy; their bytes, and a run of each."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxcomm as jc
from benchmarks.activation_ablations import make_ablation, sketch, topk_gradient
from configs.experiment import BoundaryFields
from configs.methods import PlumpDp
from jaxcomm.steps.pipeline.pipeline import Cut
from tests.jaxcomm.layers.crossing import CROSSINGS, numbers, seeds
from tests.reference.dct_mp import GaussianSketchReference, TopKGradientReference, n_kept_of_row
from tests.train.runs import EXPERIMENT, MLP, Told
from train.loop import train
from train.processes import Processes

pytestmark = pytest.mark.filterwarnings("error")

SCHEMES = {"sketch": sketch, "topk_gradient": topk_gradient}
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def cross(scheme, sparsity, x, residual, gradient, seed=0):
    """(what arrives, what comes back, the new residual)."""
    out, pull = jax.vjp(lambda x, residual: scheme(x, residual, sparsity, jnp.uint32(seed)), x, residual)
    return [np.asarray(leaf) for leaf in (out, *pull(jnp.asarray(gradient)))]


@every_scheme
def test_sparsity_0(name):
    x, gradient, residual = np.random.default_rng(0).normal(size=(3, 4, 7)).astype(np.float32)
    output, back, new = cross(SCHEMES[name], 0.0, x, 0 * residual, gradient)
    np.testing.assert_array_equal(output, x)
    np.testing.assert_array_equal(back, gradient)
    assert not new.any()


@pytest.mark.parametrize("name", ["back", "image"])
@hypothesis.given(kind=st.sampled_from(["normal", "heavy", "ties", "zeros", "few"]), seed=seeds)
def test_topk_of_the_gradient(name, kind, seed):
    """Three steps, each with the residual of the one before; activations arrive whole."""
    (shape, eta, *_), rng = CROSSINGS[name], np.random.default_rng(seed)
    reference, residual = TopKGradientReference(eta), np.zeros(shape, np.float32)
    for _ in range(3):
        x, gradient = numbers(rng, "normal", shape), numbers(rng, kind, shape)
        output, back, new = cross(topk_gradient, eta, x, residual, gradient)
        np.testing.assert_array_equal(output, x)
        np.testing.assert_array_equal(back, reference.backward(gradient))
        np.testing.assert_array_equal(new, reference.residual)
        np.testing.assert_array_equal(back + new, gradient + residual)
        residual = new


D, SEEDS = 12, 400


def test_sketches():
    """The unit vectors become S S^T; another seed has another S."""
    reference, rng = GaussianSketchReference(0.7), np.random.default_rng(0)
    x, gradient = rng.normal(size=(2, D, D)).astype(np.float32)
    products = [cross(sketch, 0.7, np.eye(D, dtype=np.float32), x, x, seed)[0] for seed in (5, 6)]
    assert np.abs(products[0] - products[1]).max() > 0.1
    values, vectors = np.linalg.eigh(products[0])
    m = reference.width(D)
    assert np.all(values[: D - m] < 1e-5)
    assert values[D - m] > 1e-3
    S = vectors[:, -m:] * np.sqrt(values[-m:])
    output, back, _ = cross(sketch, 0.7, x, x, gradient, 5)
    np.testing.assert_allclose(output, reference.forward(x, S), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(back, reference.backward(gradient))


def test_unbiased_sketches():
    """(x S S^T)_i has the mean x_i and the variance (|x|^2 + x_i^2) / m.

    The mean of N of them is within 5 standard errors for each of 60 numbers (this fails by chance once in 30,000 draws
    of seeds, and the seeds are fixed), and the sum of their squared errors is within 40% of the variance's.
    """
    x = numbers(np.random.default_rng(3), "normal", (5, D))
    run = jax.jit(jax.vmap(lambda key: sketch(x, x, 0.7, key)))
    output = np.asarray(run(jnp.arange(SEEDS, dtype=jnp.uint32)), np.float64)
    x = x.astype(np.float64)
    variance = ((x**2).sum(1, keepdims=True) + x**2) / n_kept_of_row(D, 0.7)
    assert np.abs((output.mean(0) - x) / np.sqrt(variance / SEEDS)).max() < 5
    assert 0.6 < np.mean((output - x) ** 2 / variance) < 1.4


@pytest.mark.slow
@every_scheme
def test_a_run_and_its_bytes(name, tmp_path):
    """Of 24 rows of 16 activations, 4 each are sent: as values, or as values and positions."""
    changes = {"architecture": MLP, "stages": 2, "workers": 1, "boundary": BoundaryFields(0.75), "out": tmp_path}
    experiment = dataclasses.replace(EXPERIMENT, **changes)
    job, progress = make_ablation(experiment, PlumpDp(), SCHEMES[name]), Told()
    run = train(experiment, PlumpDp(), Processes(), progress, job)
    assert run.losses[-1] < run.losses[0]
    forward, backward = Cut([jc.dct_mp(0.75).plan(jnp.zeros((24, 16)))], None).bytes_each_way()
    assert backward == 4 * 24 * 4
    whole = 4 * 24 * 16
    there, back = (backward, whole) if name == "sketch" else (whole, forward)
    assert f"{there:,} bytes would go forward and {back:,} back" in progress.messages[0]
    assert job.report.program.links() == {(0, 1): there, (1, 0): back}
    residual = np.asarray(run.state.model_state["residual"])
    assert residual.shape == (24, 16)
    assert np.all(np.sum(residual != 0, axis=1) <= 12)
    assert residual.any() == (name == "topk_gradient")


@pytest.mark.slow
@every_scheme
def test_fresh_draws(name, tmp_path):
    """With constant parameters, the losses of one batch differ only by the sketches."""
    changes = {"architecture": MLP, "stages": 2, "workers": 1, "boundary": BoundaryFields(0.5), "learning_rate": 0.0}
    experiment = dataclasses.replace(EXPERIMENT, **changes, weight_decay=0.0)
    job = make_ablation(experiment, PlumpDp(), SCHEMES[name])
    (_, batch), state, losses = job.inputs, job.start(0), set()
    batch = {name: jnp.ones(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    for _ in range(3):
        state, metrics = job.step(state, batch)
        losses.add(float(metrics["loss"]))
    assert len(losses) == (3 if name == "sketch" else 1)
