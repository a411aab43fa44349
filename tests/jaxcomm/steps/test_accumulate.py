"""Several micro-batches per exchange: in one step, and over several calls. Keys, and line searches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.exchange import get_exchange
from tests.jaxcomm.train_steps import KINDS, make_step
from tests.marks import slow_except

K, ROWS, FEATURES, CLASSES = 4, 32, 12, 5
make = functools.partial(make_step, workers=K)
PARAMS = {"w": jnp.linspace(-0.3, 0.3, FEATURES * CLASSES).reshape(FEATURES, CLASSES), "b": jnp.zeros(CLASSES)}
SPARSE = jc.topk(0.5, dense_below=0)


def batches(count):
    random = np.random.default_rng(0)
    x = random.normal(size=(count, ROWS, FEATURES)).astype(np.float32)
    return [{"x": x[i], "y": random.integers(0, CLASSES, ROWS)} for i in range(count)]


def loss_fn(params, batch):
    logits = batch["x"] @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def by_worker(batch, count, part):
    """The rows of one part of each worker's own."""
    part_of_batch = {name: rows.reshape(K, count, -1, *rows.shape[1:])[:, part] for name, rows in batch.items()}
    return {name: rows.reshape(-1, *rows.shape[2:]) for name, rows in part_of_batch.items()}


@pytest.mark.parametrize("kind", slow_except(KINDS, "mesh"))
def test_micro_batches_are_one_batch(kind):
    """With a model's state, which sees the micro-batches one after another."""

    def loss(params, model_state, batch):
        mean = 0.5 * model_state["mean"] + 0.5 * batch["x"].mean()
        return loss_fn(params, batch), ({"size": jnp.abs(batch["x"]).mean()}, {"mean": mean})

    tx, (batch, *_) = jc.chain(SPARSE, optax.adam(1e-2)), batches(1)
    whole = make(kind, loss_fn, tx)
    parts = make(kind, loss, tx, accumulate=4, has_state=True)
    expected, expected_metrics = whole(whole.init(PARAMS), batch)
    state, metrics = parts(parts.init(PARAMS, {"mean": jnp.zeros(())}), batch)
    close((state.params, state.opt_state), (expected.params, expected.opt_state))
    assert metrics["loss"] == pytest.approx(float(expected_metrics["loss"]), rel=1e-5)
    rows = batch["x"].reshape(K, 4, -1)
    assert metrics["size"] == pytest.approx(np.abs(rows).mean(), rel=1e-5)
    means = np.zeros(K)
    for part in range(4):
        means = 0.5 * means + 0.5 * rows[:, part].mean(-1)
    assert state.model_state["mean"] == pytest.approx(means.mean(), rel=1e-4)


def test_rows_must_divide():
    step = make("mesh", loss_fn, jc.chain(SPARSE, optax.sgd(0.1)), accumulate=3)
    with pytest.raises(
        ValueError, match=r"got 32 rows at .* for 4 workers of 3 micro-batches each. Use a batch size of 24"
    ):
        step(step.init(PARAMS), batches(1)[0])
    with pytest.raises(ValueError, match="accumulate must be an integer of at least 1; got 0"):
        make("mesh", loss_fn, SPARSE, accumulate=0)


@pytest.mark.slow
def test_sharded_parameters():
    mesh, tx = jc.make_mesh(data=2, model=2), jc.chain(SPARSE, optax.sgd(0.1))
    specs = {"w": jax.P("model"), "b": jax.P()}
    steps = [jc.make_train_step(loss_fn, tx, mesh, specs=specs, auto=("model",), accumulate=count) for count in (1, 4)]
    (one, loss), (four, expected_loss) = (step(step.init(PARAMS), batches(1)[0]) for step in steps)
    close(one.params, four.params)
    assert loss["loss"] == pytest.approx(float(expected_loss["loss"]), rel=1e-5)


def test_keys():
    def loss(params, batch, key):
        return loss_fn(params, batch), {"draw": jax.random.uniform(key), "square": jax.random.uniform(key) ** 2}

    draws = {}
    for kind in KINDS:
        step = make(kind, loss, jc.chain(SPARSE, optax.sgd(0.1)), has_aux=True, rng=jax.random.key(3), accumulate=2)
        state = step.init(PARAMS)
        for number, batch in enumerate(batches(2)):
            state, metrics = step(state, batch)
            step_key = jax.random.fold_in(jax.random.key(3), number)
            step_key = [jax.random.fold_in(step_key, part) for part in range(2)]
            expected = np.array(
                [jax.random.uniform(jax.random.fold_in(key, worker)) for key in step_key for worker in range(K)]
            )
            assert len(set(expected.tolist())) == 2 * K
            assert metrics["draw"] == pytest.approx(expected.mean(), rel=1e-5)
            assert metrics["square"] == pytest.approx((expected**2).mean(), rel=1e-5)
        draws[kind] = metrics
    close(draws["mesh"], draws["simulated"])


@pytest.mark.parametrize("kind", slow_except(KINDS, "mesh"))
def test_chains_take_the_mean_gradient(kind):
    batch, count = batches(1)[0], 3
    batch = jax.tree.map(lambda rows: np.concatenate([rows] * 3)[: 2 * 3 * K * 4], batch)
    tx = jc.chain(SPARSE, optax.adam(1e-2))
    whole = make(kind, loss_fn, tx)
    parts = make(kind, loss_fn, jc.chain(SPARSE, optax.adam(1e-2), accumulate=count))
    expected, state = whole.init(PARAMS), parts.init(PARAMS)
    for turn in range(2 * count):
        before = jax.tree.map(np.asarray, state.params)
        state, metrics = parts(state, by_worker(batch, count, turn % count))
        assert (state.opt_state.mini_step, state.opt_state.gradient_step) == ((turn + 1) % count, (turn + 1) // count)
        if turn % count < count - 1:
            jax.tree.map(np.testing.assert_array_equal, before, state.params)
            assert metrics["sent"] == 0
        else:
            expected, _ = whole(expected, batch)
            assert metrics["sent"] > 0
    close(state.params, expected.params)
    inner = get_exchange(state.opt_state)
    close(inner.residual.rows, get_exchange(expected.opt_state).residual.rows)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state.acc_grads))


@pytest.mark.slow
def test_dense_is_multi_steps():
    library = jc.make_train_step(loss_fn, jc.chain(jc.plump_dp(), optax.adam(1e-2), accumulate=2), jc.make_mesh(data=K))
    optax_steps = optax.MultiSteps(optax.adam(1e-2), 2)
    state, params = library.init(PARAMS), PARAMS
    inner = optax_steps.init(params)
    for batch in batches(4):
        state, _ = library(state, batch)
        updates, inner = optax_steps.update(jax.grad(loss_fn)(params, batch), inner, params)
        params = optax.apply_updates(params, updates)
    close(state.params, params)
    assert set(inner._fields) - {"skip_state"} <= vars(state.opt_state).keys()


def test_a_skip_leaves_nothing():
    step = jc.make_train_step(loss_fn, jc.chain(SPARSE, optax.adam(1e-2), accumulate=2), jc.make_mesh(data=K))
    state, data = step.init(PARAMS), batches(6)
    data[2] = {**data[2], "x": np.full_like(data[2]["x"], np.nan)}
    skipped, counts = [], []
    for batch in data:
        state, metrics = step(state, batch)
        skipped.append(int(metrics["skipped"]))
        counts.append(int(state.opt_state.inner_opt_state[1][0].count))
    assert skipped == [0, 0, 0, 1, 0, 0]
    assert counts == [0, 1, 1, 1, 1, 2]  # Adam's steps: not of the one that was skipped
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_state_without_nan(kind):
    """Of a batch that is not finite it keeps nothing, in a call without an exchange as in one with it."""

    def loss(params, state, batch):
        rows = batch["x"] @ params["w"]
        return jnp.square(rows).mean(), ({}, 0.9 * state + 0.1 * batch["x"].mean(0))

    chain = jc.chain(jc.plump_dp(), optax.sgd(0.1), accumulate=2)
    step = make(kind, loss, chain, has_state=True)
    good, state = np.ones((2 * K, 3), np.float32), step.init({"w": jnp.ones(3)}, model_state=jnp.zeros(3))
    expected = np.zeros(3, np.float32)
    for place, batch in enumerate([np.nan * good, good, good, np.nan * good, good, good]):
        state, metrics = step(state, {"x": batch})
        expected = 0.9 * expected + 0.1 if place in (2, 4, 5) else expected  # 1 and 3 are skipped
        np.testing.assert_allclose(state.model_state, expected, rtol=1e-5)
        assert int(metrics["skipped"]) == (place in (1, 3))


@pytest.mark.slow
def test_bytes_of_a_chain():
    tx, single_use = jc.chain(SPARSE, optax.adam(1e-2), accumulate=4), jc.chain(SPARSE, optax.adam(1e-2))
    report, whole = jc.wire_report(tx, PARAMS, K), jc.wire_report(single_use, PARAMS, K)
    assert report.received_in_exchange == whole.received
    assert report.received == whole.received / 4
    step = jc.make_train_step(loss_fn, tx, jc.make_mesh(data=K))
    assert step.verify(step.init(PARAMS), batches(1)[0], other_bytes=8).every == 4


def test_chains_that_cannot_accumulate():
    bypass = jc.chain(jc.topk(0.5, where="a"), optax.sgd(0.1), accumulate=2)
    with pytest.raises(ValueError, match=r"accumulate must be 1 where gradients bypass topk.*to make_train_step"):
        bypass.init({"a": jnp.ones(3), "b": jnp.ones(3)})
    local = jc.chain(optax.sgd(0.1), jc.local_sgd(2, exchange=jc.plump_dp()), accumulate=2)
    with pytest.raises(ValueError, match=r"accumulate must be 1 for local_sgd, .* got 2. Pass it more steps"):
        local.init(PARAMS)
    specs = {"w": jax.P("model"), "b": jax.P()}
    mesh, tx = jc.make_mesh(data=2, model=2), jc.chain(SPARSE, optax.sgd(0.1), accumulate=2)
    with pytest.raises(
        ValueError, match=r"accumulate must be 1 in a chain that is split.*Pass accumulate= to make_train"
    ):
        jc.make_train_step(loss_fn, tx, mesh, specs=specs, auto=("model",)).init(PARAMS)


SEARCHES = {
    "lbfgs": optax.lbfgs,
    "polyak": lambda: optax.polyak_sgd(1.0),
}


def search(tx):
    """A script's own step: the search is over the loss of its rows."""

    def step(state, batch):
        params, opt_state = state
        value, grad = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(
            grad, opt_state, params, value=value, grad=grad, value_fn=lambda p: loss_fn(p, batch)
        )
        return (optax.apply_updates(params, updates), opt_state), value

    return step, (PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("name", slow_except(SEARCHES, "polyak"))
def test_line_searches(name):
    reference, state = search(optax.with_extra_args_support(SEARCHES[name]()))
    tx = jc.chain(jc.plump_dp(), SEARCHES[name]())
    result, path = search(tx)
    result = jc.data_parallel(result, jc.make_mesh(data=K), check_every=1)
    steps = {kind: make(kind, loss_fn, tx) for kind in KINDS}
    states = {kind: step.init(PARAMS) for kind, step in steps.items()}
    batch = batches(1)[0]
    for _ in range(4):
        state, _ = reference(state, batch)
        path, _ = result(path, batch)
        states = {kind: step(states[kind], batch)[0] for kind, step in steps.items()}
    for params in (path[0], *(state.params for state in states.values())):
        close(params, state[0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_one_axis_name():
    """By the exchange: the step, the reports and the verification take it from there."""
    mesh, axes = jc.make_mesh(replica=2, shard=2), ("replica", "shard")
    tx = jc.chain(jc.topk(0.5, dense_below=0, axis_name=axes), optax.sgd(0.1))
    step, plain = jc.make_train_step(loss_fn, tx, mesh), make("mesh", loss_fn, jc.chain(SPARSE, optax.sgd(0.1)))
    state, expected = step.init(PARAMS), plain.init(PARAMS)
    for batch in batches(3):
        state, expected = step(state, batch)[0], plain(expected, batch)[0]
    close(state.params, expected.params)
    assert step.verify(state, batches(1)[0]).workers == jc.wire_report(tx, PARAMS, (2, 2)).workers == K


@pytest.mark.parametrize("kind", slow_except(KINDS, "mesh"))
def test_integers_and_keys_stay(kind):
    params = PARAMS | {"shift": jnp.arange(CLASSES), "key": jax.random.key(0), "flag": jnp.ones((), bool)}

    def loss(params, batch):
        return loss_fn(params, {**batch, "y": (batch["y"] + params["shift"][0]) % CLASSES})

    for tx in (
        jc.chain(SPARSE, optax.adam(1e-2)),
        jc.chain(optax.sgd(0.1), jc.local_sgd(2, exchange=jc.plump_dp())),
    ):
        steps = make(kind, loss, tx), make(kind, loss_fn, tx)
        state, expected = steps[0].init(params), steps[1].init(PARAMS)
        for batch in batches(2):
            state, expected = steps[0](state, batch)[0], steps[1](expected, batch)[0]
        result, expected_params = steps[0].params(state), steps[1].params(expected)
        close({name: result[name] for name in expected_params}, expected_params)
        np.testing.assert_array_equal(result["shift"], np.arange(CLASSES))
        assert result["key"] == params["key"]
    assert jc.wire_report(tx, params, K).parameters == FEATURES * CLASSES + CLASSES


@pytest.mark.slow
def test_frozen_parameters_are_not_sent():
    frozen = jc.chain(jc.topk(0.5, dense_below=0, where="w", others=optax.set_to_zero()), optax.sgd(0.1))
    single = jc.chain(SPARSE, optax.sgd(0.1))
    received = jc.wire_report(single, {"w": PARAMS["w"]}, K).received
    assert jc.wire_report(frozen, PARAMS, K).received == received
    for kind in KINDS:
        step = make(kind, loss_fn, frozen)
        state, _ = step(step.init(PARAMS), batches(1)[0])
        np.testing.assert_array_equal(state.params["b"], PARAMS["b"])
        assert np.any(state.params["w"] != PARAMS["w"])
    left = jc.topk(0.5, dense_below=0, where="w", others=optax.identity())
    with pytest.raises(ValueError, match="others of topk must be an exchange of gradients; got a transformation that"):
        left.init(PARAMS)


def test_the_norm_of_the_mean():
    tx = jc.chain(SPARSE, optax.snapshot("norm", optax.tree.norm), optax.sgd(1.0))
    step = make("mesh", loss_fn, tx)
    state, _ = step(step.init(PARAMS), batches(1)[0])
    change = jax.tree.map(jnp.subtract, state.params, PARAMS)
    assert optax.tree.get(state.opt_state, "norm") == pytest.approx(float(optax.tree.norm(change)), rel=1e-5)
