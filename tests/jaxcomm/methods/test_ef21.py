"""EF21: its algorithm, what it promises, and its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from tests.jaxcomm import trees
from tests.jaxcomm.train_steps import init_state
from tests.jaxcomm.workers import Simulated
from tests.reference.ef21 import Ef21Reference
from tests.refusals import refused

K, TREE = 3, "matrix and vectors"
trees.TREES[TREE] = {"w": (50, 60), "v": (1025,), "b": (3,)}
PARAMS = trees.zeros_of(TREE)


def gradients(seed):
    return trees.gradients("normal", seed, TREE, K)


@pytest.mark.parametrize("dense_below", [512, 2000])
def test_the_papers_algorithm(dense_below):
    workers = Simulated(jc.ef21(0.9, dense_below=dense_below, value_dtype="float32"), TREE, K)
    state, reference = workers.first, Ef21Reference(0.9, dense_below)
    for seed in range(6):
        grads = gradients(seed)
        out = workers.step(grads, state)
        state = out.state
        expected = reference.step([{name: leaf[k] for name, leaf in grads.items()} for k in range(K)])
        for name in PARAMS:
            np.testing.assert_allclose(out.means[name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("collective", ["gather", "balanced"])
@pytest.mark.parametrize("value_dtype", ["float32", "bfloat16"])
def test_the_estimate_reaches_the_gradient(collective, value_dtype):
    workers = Simulated(jc.ef21(0.9, collective=collective, value_dtype=value_dtype), TREE, K)
    state, grads, far = workers.first, gradients(0), []
    for _ in range(40):
        out = workers.step(grads, state)
        state = out.state
        np.testing.assert_allclose(state.memory, -out.residual.mean(0), atol=1e-5)
        far.append(max(np.abs(out.means[name] - grads[name].mean(0)).max() for name in PARAMS))
    assert far[0] > 1 > 1e-4 > far[-1]


@pytest.mark.parametrize(("name", "bad"), [("w", np.nan), ("w", np.inf), ("w", 2.0**100), ("b", np.nan)])
def test_bad_steps(name, bad):
    workers = Simulated(jc.ef21(0.9), TREE, K)
    state = workers.step(gradients(0), workers.first).state
    grads = gradients(1)
    grads[name][1].reshape(-1)[2] = bad  # "b" travels dense
    out = workers.step(grads, state)
    assert out.skipped
    assert not any(np.any(mean) for mean in out.means.values())
    np.testing.assert_array_equal(out.state.residual.rows, state.residual.rows)
    np.testing.assert_array_equal(out.state.memory, state.memory)
    means, expected = (workers.step(gradients(1), state).means for state in (out.state, state))
    jax.tree.map(np.testing.assert_array_equal, means, expected)


def test_bytes_of_topk():
    tx = jc.chain(jc.ef21(0.9), optax.sgd(0.1))
    assert jc.wire_report(tx, PARAMS, 4).received == jc.wire_report(jc.topk(0.9), PARAMS, 4).received
    mesh, batch = jc.make_mesh(data=4), np.ones((8, 50), np.float32)

    def loss(params, batch):
        return jnp.mean((batch @ params["w"] - 1) ** 2) + jnp.sum(params["v"]) + jnp.sum(params["b"] ** 2)

    state, step = init_state(PARAMS, tx, mesh), jc.make_train_step(loss, tx, mesh, donate=False)
    jc.verify(step, state, batch, tx=tx, params=PARAMS, workers=4)
    simulated = jc.simulate(loss, tx, 4)(init_state(PARAMS, tx, 4), batch)[0].params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), step(state, batch)[0].params, simulated)


def test_another_number_of_workers():
    workers = Simulated(jc.ef21(0.9), TREE, K)
    state = workers.step(gradients(0), workers.first).state
    resized = jc.resize_workers(state.replace(residual=jc.PerWorker(state.residual.rows[:, 0])), 2)
    np.testing.assert_allclose(-resized.residual.rows.mean(0), state.memory, atol=1e-6)


def test_rows_of_16_bits():
    """Their mean would move away from the estimate, step after step."""
    refused(
        lambda: jc.ef21(0.9, residual_dtype="bfloat16"), "residual_dtype must be float32 for ef21", "got 'bfloat16'"
    )
