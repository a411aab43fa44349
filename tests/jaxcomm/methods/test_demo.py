"""DeMo against its paper's algorithm, with a decaying momentum and the sign; the basis, and what does not fit.

Nothing lost, bad steps, bytes, and other numbers of workers are tested by the laws: see `demo.py`.
"""

import jax
import numpy as np
import optax
import pytest

import jaxcomm as jc
from tests.jaxcomm import trees
from tests.jaxcomm.methods.demo import momenta
from tests.jaxcomm.train_steps import linear, warnings_of
from tests.jaxcomm.workers import Simulated
from tests.marks import slow_except
from tests.reference.demo import DemoReference

K, TREE = 3, "cosines"
# One that is sent dense; chunks of 54 x 20, of 48 x 64, 14 x 50 and 64 x 64.
trees.TREES[TREE] = {"b": (3,), "c": (3, 3, 6, 20), "u": (96, 64), "v": (700,), "w": (128, 128)}
SHAPES = {name: shape for name, shape in trees.TREES[TREE].items() if name != "b"}  # of the compressed ones


def gradients(seed):
    return trees.gradients("normal", seed, TREE, K)


def owns(grads):
    return [{name: leaf[k] for name, leaf in grads.items()} for k in range(K)]


@pytest.mark.parametrize(("k", "decay"), slow_except([(32, 0.999), (1, 0.5)], (32, 0.999)))
def test_the_exchange_is_the_papers(k, decay):
    workers = Simulated(jc.demo(k, decay=decay, value_dtype="float32", collective="gather"), TREE, K)
    state, reference = workers.first, DemoReference(k, 4096, decay)
    for seed in range(6):
        grads = gradients(seed)
        out, expected = workers.step(grads, state), reference.step(owns(grads))
        state = out.state
        for name in grads:
            np.testing.assert_allclose(out.means[name], expected.mean[name], rtol=1e-5, atol=1e-5)
        assert out.metrics.sent == sum(expected.sent)
        for name, rows in trees.cut(out.residual, SHAPES).items():
            for row, expected_own in zip(rows, reference.residuals, strict=True):
                np.testing.assert_allclose(row.reshape(-1), expected_own[name], atol=1e-4)


def test_sign_of_updates():
    """Of the paper's mean, times the learning rate; also those whose gradients are sent dense."""
    shapes = trees.TREES[TREE]
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    tx = jc.chain(jc.demo(8, value_dtype="float32"), optax.sign_sgd(0.125))
    assert warnings_of(tx, params, K) == []
    step = jc.simulate(linear, tx, K, donate=False)
    state, reference = step.init(params), DemoReference(8, 4096, 0.999)
    expected = {name: np.zeros(shape) for name, shape in shapes.items()}
    for seed in range(4):
        grads = gradients(seed)
        state, _ = step(state, grads)
        mean = reference.step(owns(grads)).mean
        for name in shapes:
            expected[name] -= 0.125 * np.sign(mean[name])
            is_clear = np.abs(mean[name]) > 1e-5  # rounding decides the sign of the others
            assert np.mean(is_clear) > 0.9
            expected[name] = np.where(is_clear, expected[name], step.params(state)[name])
            np.testing.assert_array_equal(step.params(state)[name], expected[name])


@pytest.mark.parametrize(
    ("value_dtype", "collective"), slow_except([("float32", "gather"), ("4bit", "balanced")], ("float32", "gather"))
)
def test_nothing_else_is_lost(value_dtype, collective):
    decay = 0.75
    workers = Simulated(jc.demo(64, decay=decay, value_dtype=value_dtype, collective=collective), TREE, K)
    state = workers.first
    for seed in range(4):
        grads, before = (
            gradients(seed),
            momenta(trees.cut(np.asarray(state.residual.rows).reshape(K, -1), SHAPES), 4096),
        )
        out = workers.step(grads, state)
        state, after = out.state, momenta(trees.cut(out.residual, SHAPES), 4096)
        for name in SHAPES:
            went_in = (grads[name].astype(np.float64) + before[name]).mean(0)
            np.testing.assert_allclose(out.means[name] + after[name].mean(0) / decay, went_in, atol=1e-4)


def test_a_cosine_is_one_coefficient():
    """Every chunk has a different cosine, which is sent whole: the mean is the gradient at once."""
    place = (np.arange(64) + 0.5) * np.pi / 64
    waves = [[np.outer(np.cos(3 * i * place), np.cos((5 * j + 1) * place)) for j in range(3)] for i in range(2)]
    tx, gradient = jc.demo(1, value_dtype="float32"), np.float32(np.block(waves))
    assert gradient.shape == (128, 192)
    state = tx.init(gradient)
    mean, new = jax.jit(jax.vmap(lambda g: tx.update(g, state), axis_name="data"))(np.stack([gradient] * 2))
    np.testing.assert_allclose(mean[0], gradient, atol=1e-5)
    assert jc.exchange_metrics(new).sent.tolist() == [2 * 6] * 2
    assert np.abs(new.residual.rows).max() < 1e-4


def test_bits():
    params = {"w": jax.ShapeDtypeStruct((1024, 4096), np.float32)}
    report = jc.wire_report(jc.demo(collective="gather"), params, workers=2)
    assert 8 * report.received <= 26 * 32 * 1024


def test_l2_is_warned_of():
    params = {"w": np.zeros((64, 64), np.float32)}
    tx = jc.chain(optax.add_decayed_weights(0.1), jc.demo(), optax.sign_sgd(0.1))
    assert ["is L2, which" in message for message in warnings_of(tx, params, 2)] == [True]
    tx = jc.chain(jc.demo(), optax.scale_by_sign(), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.1))
    assert warnings_of(tx, params, 2) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be an integer of at least 1; got 0. The paper trains with 1 to 32 of 4096"),
        ({"k": 0.01}, "k must be an integer of at least 1; got 0.01"),
        ({"chunk": 2048}, "chunk must be a multiple of 1024 and a square; got 2048. The paper has 4096"),
        ({"chunk": None}, "chunk must be a multiple of 1024 and a square; got None"),
        ({"chunk": 64}, "chunk must be a multiple of 1024 and a square; got 64"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        jc.demo(**options)
