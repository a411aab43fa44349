import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from tests.jaxcomm.train_steps import init_state

PARAMS = {"b": np.ones(3, np.float32), "w": np.arange(900, dtype=np.float32).reshape(300, 3)}


def state_of(K, tx=None):
    """A state in which all numbers differ."""
    state = init_state(PARAMS, tx or optax.chain(jc.dct_dp(0.9), optax.adam(0.1)), K)
    rng = np.random.default_rng(K)

    def fill(leaf):
        if leaf.dtype == bool:
            return jnp.asarray(False)
        return jnp.asarray(rng.integers(1, 100, size=leaf.shape), leaf.dtype)

    return jax.tree.map(fill, state)


def find(exchange, name):
    return getattr(exchange if hasattr(exchange, name) else exchange.memory, name)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (4, 3), (3, 4), (4, 1), (1, 4), (2, 2), (8, 5)])
def test_the_mean_of_rows_stays(old, new):
    state = state_of(old)
    resized = jc.resize_workers(state, new)
    before, after = state.opt_state[0], resized.opt_state[0]
    for name in ("residual", "threshold"):
        rows, folded = np.asarray(find(before, name).rows), find(after, name).rows
        assert folded.shape == (new, *rows.shape[1:])
        assert folded.dtype == rows.dtype
        np.testing.assert_allclose(folded.mean(0, dtype=np.float64), rows.mean(0, dtype=np.float64), rtol=1e-6)
    assert bool(after.memory.due)
    assert int(after.step) == int(before.step)
    jax.tree.map(np.testing.assert_array_equal, after.metrics, before.metrics)
    jax.tree.map(np.testing.assert_array_equal, resized.opt_state[1:], state.opt_state[1:])
    jax.tree.map(np.testing.assert_array_equal, resized.params, state.params)
    assert int(resized.step) == int(state.step)
    assert jax.tree.structure(resized) == jax.tree.structure(state)


def test_rows_go_to_covering_workers():
    state = jc.topk(0.5).init(PARAMS)
    rows = np.zeros((4, 1024), np.float32)
    rows[:, 0] = [1, 2, 4, 8]
    state = state.replace(residual=jc.PerWorker(rows))
    assert jc.resize_workers(state, 2).residual.rows[:, 0].tolist() == [1.5, 6]
    np.testing.assert_allclose(jc.resize_workers(state, 3).residual.rows[:, 0], [1.25, 3, 7])
    assert jc.resize_workers(state, 8).residual.rows[:, 0].tolist() == [1, 1, 2, 2, 4, 4, 8, 8]
    assert jc.resize_workers(state, 1).residual.rows[:, 0].tolist() == [3.75]


@pytest.mark.slow
def test_a_run_goes_on():
    tx = optax.chain(jc.dct_dp(0.5, life_span=1000), optax.sgd(0.1))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] + params["b"]) ** 2)

    batch = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    state, _ = jc.simulate(loss_fn, tx, 4)(init_state(PARAMS, tx, 4), batch)
    assert not bool(state.opt_state[0].memory.due)
    state, metrics = jc.simulate(loss_fn, tx, 2)(jc.resize_workers(state, 2), batch)
    assert int(metrics["skipped"]) == 0
    assert int(state.opt_state[0].step) == 2
    assert not bool(state.opt_state[0].memory.due)


def test_sharded_parameters():
    """4, 8, 1 and 3 workers of two devices each: parameters + residuals of all shards equal those of a dense mean."""
    specs = {"copy": P(), "model": P(None, "model"), "whole": P("data")}
    tx = jc.chain(jc.dct_dp(0.9, dense_below=0), optax.sgd(0.5))
    rng = np.random.default_rng(0)
    shapes = {"copy": (40, 30), "model": (40, 60), "whole": (24, 5)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def loss(params, rows):  # whose gradient is the mean of the rows, of a shard that of its columns
        start = 30 * jax.lax.axis_index("model")
        columns = jax.lax.dynamic_slice_in_dim(rows["model"].mean(0), start, 30, 1)
        whole = jax.lax.psum(jnp.sum(params["whole"]), "data")
        return (
            jnp.sum(params["copy"] * rows["copy"].mean(0))
            + whole
            + jax.lax.psum(jnp.sum(params["model"] * columns), "model")
        )

    def step_of(workers):
        return jc.make_train_step(loss, tx, jc.make_mesh(data=workers, model=2), specs=specs)

    def take(step, state, dense):
        batch = {name: rng.normal(size=(12, *shapes[name])).astype(np.float32) for name in ("copy", "model")}
        state, metrics = step(state, batch)
        assert metrics["skipped"] == 0
        return state, {name: dense[name] - 0.5 * rows.mean(0) for name, rows in batch.items()}

    def check(state, dense, workers):
        copy, model = (np.asarray(holder[0].residual.rows) for holder in state.opt_state.exchange.exchanges)
        halves = model.reshape(workers, 2, -1).mean(0)[:, :1200].reshape(2, 40, 30)
        owed = {"copy": copy.mean(0)[:1200].reshape(40, 30), "model": np.concatenate(halves, axis=1)}
        for name, debt in owed.items():
            np.testing.assert_allclose(np.asarray(state.params[name]) - 0.5 * debt, dense[name], atol=2e-6)

    step = step_of(4)
    state, dense = take(step, step.init(params), params)
    for workers in (8, 1, 3):
        state = step.resize(state, workers)
        check(state, dense, workers)
    step = step_of(3)
    places = jax.tree.map(lambda leaf: leaf.sharding, step.shapes(params))
    state, dense = take(step, jax.device_put(jax.tree.map(np.asarray, state), places), dense)
    check(state, dense, 3)


@pytest.mark.parametrize("workers", [0, -1, 2.5])
def test_bad_numbers_of_workers(workers):
    with pytest.raises(ValueError, match=f"workers must be an integer of at least 1; got {workers}"):
        jc.resize_workers(state_of(2), workers)


@pytest.mark.parametrize("new", [1, 2, 6])
def test_random_keys(new):
    """Words of keys have no mean: new rows have the keys of old ones."""
    tx = jc.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1), jc.local_sgd(2, exchange=jc.plump_dp()))
    step = jc.make_train_step(lambda params, batch: jnp.mean((batch - params["w"]) ** 2), tx, jc.make_mesh(data=3))
    state, _ = step(step.init({"w": jnp.ones(2)}), np.ones((6, 2), np.float32))
    old = state.opt_state[0].rng_key.rows
    keys = jax.random.split(jax.random.key(5), 3) if jnp.issubdtype(old.dtype, jax.dtypes.prng_key) else None
    assert keys is not None
    link = state.opt_state[0]._replace(rng_key=dataclasses.replace(state.opt_state[0].rng_key, rows=keys))
    resized = jc.resize_workers((link, *state.opt_state[1:]), new)[0].rng_key.rows
    words = [tuple(row) for row in np.asarray(jax.random.key_data(keys))]
    places = {1: [0], 2: [0, 1], 6: [0, 0, 1, 1, 2, 2]}[new]
    assert [tuple(row) for row in np.asarray(jax.random.key_data(resized))] == [words[place] for place in places]
