"""Dense steps at the beginning: the means of `plump_dp`, and then the method as from its own first step."""

import numpy as np
import optax
import pytest

import jaxcomm as jc
from tests.jaxcomm import trees
from tests.jaxcomm.workers import OnMesh, Simulated
from tests.refusals import refused

TREE, K, START = "pair", 4, 2
# Those whose every step is as the first, but for the number of the step.
METHODS = {
    "topk": lambda **options: jc.topk(0.9, **options),
    "topk, balanced": lambda **options: jc.topk(0.9, collective="balanced", **options),
    "topk, bfloat16 residual": lambda **options: jc.topk(0.9, residual_dtype="bfloat16", **options),
    "dct_dp": lambda **options: jc.dct_dp(0.9, early=False, **options),
    "random_k": lambda **options: jc.random_k(0.9, **options),
    "sign": lambda **options: jc.sign(**options),
    "quant_dp": lambda **options: jc.quant_dp(4, **options),
    "terngrad": lambda **options: jc.terngrad(**options),
    "powersgd": lambda **options: jc.powersgd(2, **options),
    "demo": lambda **options: jc.demo(8, **options),
    "pulse": lambda **options: jc.pulse(0.9, learning_rate=0.1, **options),
}


def rows(seed):
    return trees.gradients("normal", seed, TREE, K)


@pytest.mark.parametrize(
    ("on", "name"),
    [
        *((Simulated, name) for name in METHODS),
        *(pytest.param(OnMesh, name, marks=pytest.mark.slow) for name in ("topk", "dct_dp", "powersgd")),
    ],
)
def test_dense_and_then_as_ever(on, name):
    workers, dense = on(METHODS[name](start=START), TREE, K), on(jc.plump_dp(), TREE, K)
    state, dense_state = workers.first, dense.first
    for number in range(START):
        out, expected = workers.step(rows(number), state), dense.step(rows(number), dense_state)
        state, dense_state = out.state, expected.state
        for key, mean in expected.means.items():
            np.testing.assert_array_equal(out.means[key], mean)
        assert out.metrics.drained
        assert out.residual is None or not out.residual.any()
    usual = on(METHODS[name](), TREE, K)
    late = usual.first.replace(step=usual.first.step + START, worker=state.worker)
    out, expected = workers.step(rows(9), state), usual.step(rows(9), late)
    assert out.metrics == expected.metrics
    for key, mean in expected.means.items():
        np.testing.assert_array_equal(out.means[key], mean)
    np.testing.assert_array_equal(out.residual, expected.residual)
    assert any((out.means[key] != dense.step(rows(9), dense_state).means[key]).any() for key in out.means)


def test_a_bad_start():
    """A dense step that is skipped counts as one, and changes nothing else."""
    workers, grads = Simulated(METHODS["topk"](start=START), TREE, K), rows(0)
    key = next(iter(grads))
    grads[key] = grads[key].copy()
    grads[key][1].flat[3] = np.nan
    out = workers.step(grads, workers.first)
    assert out.skipped
    assert int(out.state.step) == 1
    assert not any(mean.any() for mean in out.means.values())
    assert not out.residual.any()


def test_ef21_starts_from_the_gradient():
    """Each worker's estimate is its last dense gradient: sent again, nothing is left to correct."""
    workers = Simulated(jc.ef21(0.9, value_dtype="float32", start=START), TREE, K)
    state = workers.first
    for _ in range(START):
        out = workers.step(rows(5), state)
        state, means = out.state, out.means
    again = workers.step(rows(5), state)
    for key, mean in means.items():
        np.testing.assert_allclose(again.means[key], mean, rtol=1e-6, atol=1e-7)
    cold = Simulated(jc.ef21(0.9, value_dtype="float32"), TREE, K)
    first = cold.step(rows(5), cold.first)
    assert any(np.abs(first.means[key] - mean).max() > 0.1 for key, mean in means.items())


def test_bytes():
    """A usual step sends what it sends without; a step at the beginning, a dense all-reduce."""
    params = {"w": np.zeros((64, 64), np.float32)}
    usual, started = (jc.wire_report(jc.topk(0.99, start=start), params, K) for start in (0, 100))
    assert started.received == usual.received
    rare = max(float(branch.received) for branch in started.program.conditionals[0])
    assert rare == 2 * (K - 1) / K * 4 * 64 * 64
    inner = jc.wire_report(jc.local_sgd(10, exchange=jc.topk(0.99, start=3)), params, K)
    assert inner.received == jc.wire_report(jc.local_sgd(10, exchange=jc.topk(0.99)), params, K).received


def test_a_step_verifies():
    mesh, tx = jc.make_mesh(data=2), jc.chain(jc.topk(0.9, start=1, dense_below=0), optax.sgd(0.1))
    step = jc.make_train_step(lambda params, x: (x @ params["w"]).mean(), tx, mesh)
    state, x = step.init({"w": np.zeros((4096, 8), np.float32)}), np.ones((4, 4096), np.float32)
    step.verify(state, x)
    for sent in (2 * 8 * 4096, 2 * 3277):
        state, metrics = step(state, x)
        assert int(metrics["sent"]) == sent


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: jc.plump_dp(start=3), "dense in every step"),
        (lambda: jc.dgc(start=3), "warmup_steps="),
        (lambda: jc.iwp(0.1, start=3), "warmup_steps="),
        (lambda: jc.local_sgd(4, exchange=jc.topk(0.9), start=3), "to the exchange inside"),
        (lambda: jc.hierarchical(jc.topk(0.9, axis_name="slice"), start=3), "to the exchange inside"),
        (lambda: jc.slim_dp(0.3, 0.1, start=3), "Take local_sgd"),
        (lambda: jc.topk(0.9, start=-1), "compresses from the first step"),
    ],
)
def test_refused(make, remedy):
    with pytest.raises(ValueError, match=f"start must be .*{remedy}"):
        make()


def test_rounds_have_none():
    refused(lambda: jc.topk(0.9, start=3).method.check_packs(), "start=3", "Leave start= out")
