"""Residuals in bfloat16: half the memory, rounded at random, nothing lost in the mean.

A step equals that of float32, with the residual rounded to a neighbour. A small gradient enters a large residual in the
mean. Unchanged rows, of a skipped step or of zeros, stay the same to the bit.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.kernels import noise
from tests.jaxcomm import trees
from tests.jaxcomm.workers import OnMesh, Simulated
from tests.refusals import refused

TREE, K = "pair", 4
EXCHANGES = {
    "topk": lambda **options: jc.topk(0.9, **options),
    "powersgd": lambda **options: jc.powersgd(2, **options),
    "sign": lambda **options: jc.sign(**options),
    "random_k": lambda **options: jc.random_k(0.9, **options),
}


def neighbours(x):
    """The bfloat16 numbers next to x, (below, above), both x if x is one: from the upper half of the 32 bits."""
    words = np.ascontiguousarray(x, np.float32).view(np.uint32)
    toward = (words & np.uint32(0xFFFF0000)).view(np.float32)
    away = ((words & np.uint32(0xFFFF0000)) + np.where(words & 0xFFFF, 0x10000, 0).astype(np.uint32)).view(np.float32)
    return np.minimum(toward, away), np.maximum(toward, away)


def test_rounding():
    x = np.concatenate([np.geomspace(1e-30, 1e30, 500), -np.geomspace(1e-38, 1e5, 500), [0.0, -0.0, 1.0, 1.0078125]])
    x = x.astype(np.float32)
    rounding = jax.jit(noise.round_to_bfloat16)
    draws = np.stack([np.asarray(rounding(x, noise.make_key(7, k))).astype(np.float64) for k in range(400)])
    low, high = neighbours(x)
    assert ((draws == low) | (draws == high)).all()
    gap = (high - low).astype(np.float64)
    error = np.abs(draws.mean(0) - x)
    assert (error <= 5 * gap / 2 / np.sqrt(400)).all()  # five standard deviations
    assert len({draw.tobytes() for draw in draws}) == 400


@pytest.mark.parametrize(
    ("on", "name"),
    [*((Simulated, name) for name in EXCHANGES), pytest.param(OnMesh, "topk", marks=pytest.mark.slow)],
)
def test_a_step_is_a_neighbour(on, name):
    """The first step has the same gradients and residuals; rows of different workers are rounded independently."""
    grads = {key: value.copy() for key, value in trees.gradients("normal", 3, TREE, K).items()}
    for value in grads.values():
        value[1:] = value[0]  # all workers have the same residual
    exact, half = (on(EXCHANGES[name](residual_dtype=kind), TREE, K) for kind in ("float32", "bfloat16"))
    expected, result = exact.step(grads, exact.first), half.step(grads, half.first)
    for key in grads:
        np.testing.assert_array_equal(result.means[key], expected.means[key])
    assert result.residual.dtype == ml_dtypes.bfloat16
    low, high = neighbours(expected.residual)
    residual = result.residual.astype(np.float32)
    assert ((residual == low) | (residual == high)).all()
    assert (residual[0] != residual[1]).mean() > 0.1


def test_small_gradients_add_up():
    """1/2048 per step, for 512 steps, on top of 1: the next number is 1.0078, so rounding to nearest stays at 1."""
    tx = jc.topk(0.9, residual_dtype="bfloat16", dense_below=0)
    workers = Simulated(tx, "blocks", 2)
    first = trees.gradients("zeros", 0, "blocks", 2)
    first["w"][:, 3, 512:] = 1.0
    first["w"][:, :2] = 8.0  # is sent
    later = {key: np.zeros_like(value) for key, value in first.items()}
    later["w"][:, 3, 512:] = 2.0**-11
    later["w"][:, :2] = 8.0
    state, total = workers.step(first, workers.first).state, 0.0
    for _ in range(512):
        out = workers.step(later, state)
        state, total = out.state, total + out.means["w"][3, 512:].astype(np.float64)
    left = trees.cut(out.residual.astype(np.float32), {"b": (7,), "w": (4, 1024)})["w"][:, 3, 512:].mean(0)
    assert total.max() == 0
    assert left.mean() == pytest.approx(1.25, abs=0.01)
    assert (np.abs(left - 1.25) < 0.25).all()


def test_a_skip_changes_no_bit():
    tx = jc.topk(0.9, residual_dtype="bfloat16")
    workers = Simulated(tx, TREE, K)
    grads = trees.gradients("normal", 5, TREE, K)
    before = workers.step(grads, workers.first)
    grads["w"][2, 0, 0] = np.nan
    after = workers.step(grads, before.state)
    assert after.skipped
    np.testing.assert_array_equal(after.residual.view(np.uint16), before.residual.view(np.uint16))


def test_bytes():
    params = {"w": np.zeros((64, 1024), np.float32)}
    sizes = {}
    for kind in ("float32", "bfloat16"):
        tx = jc.dct_dp(0.99, residual_dtype=kind)
        sizes[kind] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tx.init(params)))
    assert sizes["float32"] - sizes["bfloat16"] == 2 * 64 * 1024
    reports = [jc.wire_report(jc.dct_dp(0.99, residual_dtype=kind), params, 4) for kind in ("float32", "bfloat16")]
    assert reports[0].received == reports[1].received


def test_other_types_and_methods():
    refused(lambda: jc.topk(0.9, residual_dtype="float16"), "residual_dtype", "got 'float16'")
    with pytest.raises(ValueError, match="residual_dtype must be float32 for plump_dp, which keeps no residual itself"):
        jc.plump_dp(residual_dtype="bfloat16")
    with pytest.raises(ValueError, match="residual_dtype must be float32 for local_sgd"):
        jc.local_sgd(4, exchange=jc.topk(0.9), residual_dtype="bfloat16")


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_resizing_keeps_the_mean(workers):
    rows = np.linspace(-0.9, 0.9, 12).reshape(4, 3).astype(ml_dtypes.bfloat16)
    state = jc.resize_workers(jc.PerWorker(rows, ("data",)), workers)
    assert state.rows.dtype == ml_dtypes.bfloat16
    exact = rows.astype(np.float64).mean(0)
    np.testing.assert_allclose(state.rows.astype(np.float64).mean(0), exact, atol=2.0**-8)


def test_workers_train():
    """A quadratic whose minimum is known, through `simulate`, with half of the coordinates sent."""
    target = np.linspace(-1, 1, 2048).astype(np.float32)

    def loss(params, batch):
        return jnp.mean((params["w"] - batch["t"]) ** 2) * 1024

    tx = jc.chain(jc.topk(0.5, residual_dtype="bfloat16", dense_below=0), optax.sgd(0.2))
    step = jc.simulate(loss, tx, 2)
    state = step.init({"w": np.zeros(2048, np.float32)})
    batch = {"t": np.stack([target + 0.1, target - 0.1])}
    for _ in range(100):
        state, _ = step(state, batch)
    np.testing.assert_allclose(step.params(state)["w"], target, atol=0.02)
