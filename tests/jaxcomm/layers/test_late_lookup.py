"""Late lookup: a table's step equals NumPy's, on a mesh and simulated; its bytes; what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from jaxcomm.layers import late_lookup, late_lookup_traffic
from tests.jaxcomm.train_steps import init_state
from tests.refusals import refused

R, D, K, N, RATE = 11, 3, 4, 6, 0.5  # rows, columns, workers, ids of a worker, learning rate
BUT_TABLE = {"where": "scale"}
PLACES = pytest.mark.parametrize("place", ["mesh", "simulated"])


def parameters():
    return {"table": np.random.default_rng(0).normal(size=(R, D)).astype(np.float32), "scale": np.ones(D, np.float32)}


def make_batch():
    """Ids that repeat within a worker and among workers; the first and the last row are touched, others are not."""
    rng = np.random.default_rng(1)
    ids = rng.choice([0, 3, 4, 9, R - 1], size=(K * N // 2, 2)).astype(np.int32)
    return {"ids": ids, "y": rng.normal(size=(K * N // 2, 2, D)).astype(np.float32)}


def loss_with(look_up):
    def loss_fn(params, batch):
        error = params["scale"] * look_up(params["table"], batch["ids"]) - batch["y"]
        return jnp.mean(jnp.sum(error**2, axis=(1, 2)))

    return loss_fn


def make_step(place, look_up, tx):
    workers = jc.make_mesh(data=K) if place == "mesh" else K
    make = jc.make_train_step if place == "mesh" else jc.simulate
    return make(loss_with(look_up), tx, workers), init_state(parameters(), tx, workers)


def sgd(**options):
    return optax.chain(jc.plump_dp(**options), optax.sgd(RATE))


@PLACES
def test_a_step_is_numpys(place):
    """Row by row of the global batch: a table row gets the errors of all its lookups."""
    step, state = make_step(place, late_lookup, sgd(**BUT_TABLE))
    batch, start = make_batch(), parameters()
    state, metrics = step(state, batch)
    gradient = np.zeros((R, D))
    for row in zip(batch["ids"], batch["y"], strict=True):
        for index, y in zip(*row, strict=True):
            gradient[index] += 2 * (start["table"][index] - y) / len(batch["ids"])
    np.testing.assert_allclose(state.params["table"], start["table"] - RATE * gradient, rtol=1e-5, atol=1e-6)
    untouched = [row for row in range(R) if row not in batch["ids"]]
    assert untouched
    np.testing.assert_array_equal(state.params["table"][np.array(untouched)], start["table"][untouched])
    expected, exchanged = make_step(place, lambda table, ids: table[ids], sgd())
    exchanged, expected_metrics = expected(exchanged, batch)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.params, exchanged.params)


def test_bytes():
    step, state = make_step("mesh", late_lookup, sgd(**BUT_TABLE))
    traffic = late_lookup_traffic(N, D, K)
    assert traffic.received == (K - 1) * N * 4 * (1 + D)
    compiled = read_program(step.lower(state, make_batch()).compile().as_text())
    assert [t for t in compiled.always if t.op == "all_gather"] == [traffic]
    assert all(t.operand_bytes <= 4 * (D + 1) for t in compiled.always if t.op == "all_reduce")
    assert step.report(state, make_batch()).received == compiled.received
    step.verify(state, make_batch(), other_bytes=16, beside=[traffic])
    with pytest.raises(ValueError, match="a dense all-reduce is left"):
        step.verify(state, make_batch(), other_bytes=16)


@PLACES
def test_bad_errors(place):
    """In one worker's row, where both the table's and the scale's gradient have it; later steps go on."""
    step, state = make_step(place, late_lookup, sgd(**BUT_TABLE))
    bad = make_batch()
    bad["y"][0, 0, 0] = np.inf
    state, metrics = step(state, bad)
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, parameters())
    state, metrics = step(state, make_batch())
    assert int(metrics["skipped"]) == 0
    assert np.any(state.params["table"] != parameters()["table"])


@PLACES
@pytest.mark.parametrize("outside", [-1, -R, -R - 1, R, 2**31 - 1])
def test_an_id_outside_the_table(place, outside):
    batch = make_batch()
    batch["ids"][-1, 0] = outside
    value, right = jax.value_and_grad(loss_with(lambda table, ids: table[ids]))(parameters(), batch)
    step, state = make_step(place, late_lookup, sgd(**BUT_TABLE))
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    gradient = (parameters()["table"] - state.params["table"]) / RATE
    np.testing.assert_allclose(gradient, right["table"], atol=1e-5)


def test_no_workers():
    batch, params = make_batch(), parameters()
    result, expected = (
        jax.value_and_grad(loss_with(look_up))(params, batch)
        for look_up in (late_lookup, lambda table, ids: table[ids])
    )
    jax.tree.map(np.testing.assert_array_equal, result, expected)


@PLACES
def test_lookup_and_exchange_disagree(place):
    step, state = make_step(place, late_lookup, sgd())
    with pytest.raises(
        ValueError, match=r"The table of late_lookup must be replicated, .* a where= that leaves the table"
    ):
        step.trace(state, make_batch())
    step, state = make_step(place, lambda table, ids: table[ids], sgd(**BUT_TABLE))
    with pytest.raises(ValueError, match=r"by late_lookup or late_multiply alone; got a loss that uses \['table'\]"):
        step.trace(state, make_batch())


@pytest.mark.parametrize(
    ("table", "ids"),
    [
        (np.zeros((R, D), np.float16), np.int32),
        (np.zeros(R, np.float32), np.int32),
        (np.zeros((R, D), np.float32), np.int16),
    ],
)
def test_another_table(table, ids):
    with pytest.raises(ValueError, match=r"A table must be \(R, D\) of float32, and ids of int32; got"):
        late_lookup(jnp.asarray(table), jnp.zeros(2, ids))


def test_a_gradient_of_a_gradient_is_refused():
    def loss(params, batch):
        inner = jax.grad(lambda table: loss_with(late_lookup)(params | {"table": table}, batch))
        return loss_with(late_lookup)(params | {"table": params["table"] - 0.1 * inner(params["table"])}, batch)

    step = jc.simulate(loss, jc.chain(jc.plump_dp(where="scale"), optax.sgd(0.1)), K)
    state = step.init(parameters())
    refused(lambda: step(state, make_batch()), "differentiated once", "late_lookup", "table[ids]")
