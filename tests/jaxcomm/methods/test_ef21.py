"""EF21: its algorithm, what it promises, and its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from tests.jaxcomm.steps import init_state
from tests.reference.ef21 import Ef21Reference

K = 3
SHAPES = {"w": (50, 60), "v": (1025,), "b": (3,)}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def is_rows(node):
    return isinstance(node, jc.PerWorker)


def each_row(function, state):
    return jax.tree.map(lambda n: jax.tree.map(function, n) if is_rows(n) else n, state, is_leaf=is_rows)


def update_of(tx):
    """An update of K simulated workers, and their first state."""
    state = init_state(PARAMS, tx, K).opt_state
    axes = jax.tree.map(lambda node: 0 if is_rows(node) else None, state, is_leaf=is_rows)

    @jax.jit
    def update(gradients, state):
        rows = jax.tree.map(
            lambda n: jax.tree.map(lambda r: r[:, None], n) if is_rows(n) else n, state, is_leaf=is_rows
        )
        means, new = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")(gradients, rows)
        return means, each_row(lambda row: row[:, 0], new)

    return update, state


def gradients(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(K, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dense_below", [512, 2000])
def test_it_is_the_papers_algorithm(dense_below):
    update, state = update_of(jc.ef21(0.9, dense_below=dense_below, value_dtype="float32"))
    reference = Ef21Reference(0.9, dense_below)
    for seed in range(6):
        given = gradients(seed)
        means, state = update(given, state)
        expected = reference.step([{name: leaf[k] for name, leaf in given.items()} for k in range(K)])
        for name in SHAPES:
            np.testing.assert_allclose(means[name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("collective", ["gather", "balanced"])
@pytest.mark.parametrize("value_dtype", ["float32", "bfloat16"])
def test_the_estimate_is_the_mean_of_the_workers_and_reaches_a_gradient_that_stays(collective, value_dtype):
    update, state = update_of(jc.ef21(0.9, collective=collective, value_dtype=value_dtype))
    given, far = gradients(0), []
    for _ in range(40):
        means, state = update(given, state)
        np.testing.assert_allclose(state.memory, -state.residual.rows.mean(0), atol=1e-5)
        far.append(max(float(jnp.abs(means[name] - given[name].mean(0)).max()) for name in SHAPES))
    assert far[0] > 1 > 1e-4 > far[-1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**100])
def test_a_bad_step_changes_nothing_and_the_next_goes_on(bad):
    update, state = update_of(jc.ef21(0.9))
    _, state = update(gradients(0), state)
    given = gradients(1)
    given["w"][1, 3, 4] = bad
    means, new = update(given, state)
    assert int(new.metrics.skipped) == 1
    assert not any(np.any(mean) for mean in means.values())
    np.testing.assert_array_equal(new.residual.rows, state.residual.rows)
    np.testing.assert_array_equal(new.memory, state.memory)
    means, _ = update(gradients(1), new)
    expected, _ = update(gradients(1), state)
    jax.tree.map(np.testing.assert_array_equal, means, expected)


def test_its_bytes_are_those_of_topk_and_a_mesh_sends_them():
    tx = jc.chain(jc.ef21(0.9), optax.sgd(0.1))
    assert jc.wire_report(tx, PARAMS, 4).received == jc.wire_report(jc.topk(0.9), PARAMS, 4).received
    mesh, batch = jc.make_mesh(data=4), np.ones((8, 50), np.float32)

    def loss(params, batch):
        return jnp.mean((batch @ params["w"] - 1) ** 2) + jnp.sum(params["v"]) + jnp.sum(params["b"] ** 2)

    state, step = init_state(PARAMS, tx, mesh), jc.make_train_step(loss, tx, mesh, donate=False)
    jc.verify(step, state, batch, tx=tx, params=PARAMS, workers=4)
    simulated = jc.simulate(loss, tx, 4)(init_state(PARAMS, tx, 4), batch)[0].params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), step(state, batch)[0].params, simulated)


def test_another_number_of_workers_keeps_the_estimate():
    update, state = update_of(jc.ef21(0.9))
    _, state = update(gradients(0), state)
    resized = jc.resize_workers(state, 2)
    np.testing.assert_allclose(-resized.residual.rows.mean(0), state.memory, atol=1e-6)
