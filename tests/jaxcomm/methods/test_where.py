"""An exchange of some leaves: others bypass it or go to a second exchange, with one vote for both."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.state import bypassing
from tests.jaxcomm.cases import FIRST
from tests.jaxcomm.train_steps import init_state
from tests.marks import slow_except
from tests.refusals import refusals, refused

K = 2
PARAMS = {
    "own": np.arange(3000, dtype=np.float32),
    "passed": np.ones((3, 2), np.float32),
    "small": np.ones(2, np.float32),
}
WHERE = "own|small"


def update_of(tx):
    """An update of K simulated workers, with gradients (K, ...), or one for all of `passed`; and the first state."""
    state = init_state(PARAMS, tx, K).opt_state
    state_axes = jax.tree.map(lambda node: 0 if is_rows(node) else None, state, is_leaf=is_rows)
    axes = {"own": 0, "passed": None, "small": 0}

    def cut(state, index):
        def rows(node):
            return jax.tree.map(lambda leaf: leaf[index], node) if is_rows(node) else node

        return jax.tree.map(rows, state, is_leaf=is_rows)

    @jax.jit
    def update(gradients, state):
        workers = jax.vmap(
            lambda g, s: tx.update(g, s, PARAMS),
            in_axes=(axes, state_axes),
            out_axes=(None, state_axes),
            axis_name="data",
        )
        means, new = workers(gradients, cut(state, np.s_[:, None]))
        return means, cut(new, np.s_[:, 0])

    return update, state


def is_rows(node):
    return isinstance(node, jc.PerWorker)


def rows_of(state):
    return [node for node in jax.tree.leaves(state, is_leaf=is_rows) if is_rows(node)]


def gradients(seed=0):
    rng = np.random.default_rng(seed)
    leaves = rng.normal(size=(K, 3000)), rng.normal(size=(3, 2)), rng.normal(size=(K, 2))
    return dict(zip(PARAMS, map(np.float32, leaves), strict=True))


@pytest.mark.parametrize(
    "case",
    slow_except((case for case in FIRST if case.name in ("plump_dp", "dct_dp", "iwp", "sign")), FIRST[0]),
    ids=str,
)
def test_bad_leaves_skip_all(case):
    update, state = update_of(case.make(where=WHERE, **({"momentum": 0.0} if case.momentum else {})))
    means, state = update(gradients(), state)
    np.testing.assert_array_equal(means["passed"], gradients()["passed"])
    np.testing.assert_allclose(means["small"], gradients()["small"].mean(0), rtol=1e-6)
    assert np.any(means["own"])
    assert int(jc.exchange_metrics(state).skipped) == 0
    for name in ("passed", "own"):
        bad = gradients()
        bad[name].flat[1] = np.nan
        means, new = update(bad, state)
        assert int(jc.exchange_metrics(new).skipped) == 1
        assert not any(np.any(mean) for mean in means.values())
        jax.tree.map(np.testing.assert_array_equal, rows_of(new), rows_of(state))


@pytest.mark.slow
def test_other_leaves():
    exchange = jc.topk(0.9, value_dtype="float32")
    update, state = update_of(jc.topk(0.9, value_dtype="float32", where=WHERE))
    means, new = update(gradients(), state)
    kept_leaves = {name: leaf for name, leaf in gradients().items() if name != "passed"}
    inner = exchange.init({name: PARAMS[name] for name in kept_leaves})
    reference = jax.jit(jax.vmap(lambda g: exchange.update(g, inner)[1], axis_name="data"))(kept_leaves)
    np.testing.assert_allclose(new.residual.rows, reference.residual.rows[:, 0], rtol=1e-6)
    assert int(jc.exchange_metrics(new).sent) == K * 300
    assert np.count_nonzero(means["own"]) <= K * 300


def test_all_or_no_leaves():
    tx, axes = jc.topk(0.9, where="none"), dict.fromkeys(PARAMS, None)
    update = jax.jit(jax.vmap(tx.update, in_axes=(axes, None), out_axes=None, axis_name="data", axis_size=K))
    changed_params = {name: leaf + 1 for name, leaf in PARAMS.items()}
    means, state = update(changed_params, tx.init(PARAMS))
    assert int(jc.exchange_metrics(state).skipped) == 0
    jax.tree.map(np.testing.assert_array_equal, means, changed_params)
    means, state = update({**changed_params, "small": np.full(2, np.inf, np.float32)}, state)
    assert int(jc.exchange_metrics(state).skipped) == 1
    assert not any(np.any(mean) for mean in means.values())
    assert jc.wire_report(tx, PARAMS, 4).received == 0
    empty = jc.topk(0.9, where=lambda path, leaf: path in PARAMS and leaf.size > 0)
    assert jc.wire_report(empty, PARAMS, 4) == jc.wire_report(jc.topk(0.9), PARAMS, 4)


def test_reports():
    tx = optax.chain(jc.plump_dp(where=WHERE), optax.adam(0.1))
    report = jc.wire_report(tx, PARAMS, 4)
    assert report.received == 1.5 * 4 * 3002
    assert report.dense == 1.5 * 4 * 3008
    gather = jc.accounting.Traffic("all_gather", 8, 4)
    assert jc.wire_report(tx, PARAMS, 4, beside=[gather]).received == report.received + 3 * 8


def test_state():
    tx = optax.chain(jc.dct_dp(0.9, where=WHERE), optax.adam(0.1))
    state = init_state(PARAMS, tx, 4)
    assert bypassing(state.opt_state, PARAMS) == {"['passed']"}
    assert bypassing(optax.adam(0.1).init(PARAMS), PARAMS) == frozenset()
    specs = jc.state_specs(state).opt_state[0]
    assert (specs.residual.rows, specs.step) == (P("data"), P())
    exchange, adam = state.opt_state
    rows = jc.PerWorker(jnp.arange(4 * 3072, dtype=jnp.float32).reshape(4, 3072))
    exchange = exchange.replace(memory=exchange.memory._replace(due=jnp.asarray(False)), residual=rows)
    resized = jc.resize_workers(state._replace(opt_state=(exchange, adam)), 2)
    exchange = resized.opt_state[0]
    np.testing.assert_allclose(exchange.residual.rows.mean(0), rows.rows.mean(0))
    assert exchange.residual.rows.shape == (2, 3072)
    assert bool(exchange.memory.due)
    assert jax.tree.structure(resized) == jax.tree.structure(state)


def test_momentum_inside():
    for factory in (jc.dgc, jc.iwp):
        with pytest.raises(ValueError, match=r"momentum must be 0 where some gradients bypass the exchange; got 0.9"):
            factory(momentum=0.9, where=WHERE)


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        (
            lambda: jc.dgc(where="own", others=jc.plump_dp()),
            ["0.9 in dgc", "0 in plump_dp", "jaxcomm.dgc(momentum=0.9"],
        ),
        (lambda: jc.topk(0.9, where="own", others=jc.dgc()), ["0 in topk", "0.9 in dgc", "jaxcomm.dgc(momentum=0.9"]),
        (lambda: jc.iwp(where="own", others=jc.dgc(momentum=0.5)), ["0.9 in iwp", "0.5 in dgc"]),
        (lambda: jc.dgc(where="own", others=jc.chain(optax.clip(1.0), jc.plump_dp())), ["0.9 in dgc", "0 in plump_dp"]),
        (lambda: jc.topk(where="own", others=jc.plump_dp(where="small", others=jc.dgc())), ["0 in plump_dp"]),
    ],
)
def test_another_momentum(exchange, said):
    refused(lambda: exchange().init(PARAMS), "the same momentum", *said)


def test_the_same_momentum():
    """As SGD with momentum on one device, whichever exchange a leaf goes through."""
    rest = jc.dgc(momentum=0.9, dense_below=2**31 - 1)
    tx = jc.chain(jc.dgc(0.0, value_dtype="float32", factor_masking=False, where="own", others=rest), optax.sgd(0.1))

    def loss(params, batch):
        return sum(jnp.sum(leaf * (1 + leaf)) for leaf in params.values()) * jnp.mean(batch)

    step, one = jc.simulate(loss, tx, K), optax.sgd(0.1, momentum=0.9)
    state, params, own = step.init(PARAMS), PARAMS, one.init(PARAMS)
    for _ in range(3):
        state, _ = step(state, np.ones(2 * K, np.float32))
        updates, own = one.update(jax.grad(loss)(params, np.ones(2 * K, np.float32)), own)
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), state.params, params)
    frozen = jc.dgc(where="own", others=optax.set_to_zero())
    assert frozen.init(PARAMS).method.momentum == 0.9


def local(exchange):
    return jc.local_sgd(exchange=exchange).init(PARAMS)


@refusals(
    (lambda: jc.topk(others=jc.plump_dp()), "others", "got no where="),
    (lambda: jc.topk(where="w", others=optax.sgd(0.1)).init(PARAMS), "others of topk", "got "),
    (lambda: jc.topk(where="w", others=jc.slim_dp()).init(PARAMS), "others of topk", "got "),
    (lambda: jc.topk(where="a("), "where", "got 'a('"),
    (lambda: jc.topk(where=5), "where", "got 5"),
    (lambda: jc.topk(where=lambda path: True), "where", "(path, leaf) -> bool", "got <function"),
    (lambda: jc.topk(where="", others=jc.plump_dp()).init(PARAMS), "where must leave some", "got ''", "chooses all"),
    (lambda: jc.topk(where="w", others=optax.set_to_zero()).init({"w": None}), "A gradient", "got an empty tree"),
    (lambda: jc.topk(where="none", others=jc.plump_dp()).init(PARAMS), "where", "got 'none'"),
    (lambda: jc.local_sgd(exchange=jc.plump_dp(), where="own"), "where", "got 'own'"),
    (lambda: jc.plump_dp(p=2, where="own"), "where", "got 'own'"),
    (lambda: local(jc.plump_dp(where=WHERE)), "exchange of local_sgd", "bypass it"),
    (lambda: local(jc.topk(0.9, axis_name="model")), "exchange of local_sgd must average over ('data',)", "('model',)"),
    (
        lambda: jc.topk(where="own", others=jc.plump_dp(axis_name="model")).init(PARAMS),
        "others of topk must average over ('data',); got plump_dp over ('model',)",
        "Pass axis_name='data' to it",
    ),
    (lambda: local(jc.topk(where="own", others=jc.plump_dp(where="small"))), "exchange of local_sgd", "bypass it"),
)
def test_refusals(call, said):
    refused(call, *said)


# A second exchange.


def second(bad=None):
    """The means and the state of one step with a second exchange; a gradient has NaN at `bad`."""
    tx = jc.topk(0.9, value_dtype="float32", where="own", others=jc.sign(dense_below=2))
    state = tx.init(PARAMS)
    rng = np.random.default_rng(0)
    grads = {name: rng.normal(size=(K, *leaf.shape)).astype(np.float32) for name, leaf in PARAMS.items()}
    if bad is not None:
        grads[bad].flat[1] = np.nan
    step = jax.jit(jax.vmap(lambda g: tx.update(g, state, PARAMS), axis_name="data"))
    return grads, state, *step(grads)


def test_parts_are_their_methods():
    grads, _, means, new = second()
    for tx, names in ((jc.topk(0.9, value_dtype="float32"), ["own"]), (jc.sign(dense_below=2), ["passed", "small"])):
        first, part = tx.init({name: PARAMS[name] for name in names}), {name: grads[name] for name in names}
        reference, state = jax.jit(jax.vmap(lambda g, tx=tx, first=first: tx.update(g, first), axis_name="data"))(part)
        jax.tree.map(np.testing.assert_array_equal, {name: means[name] for name in names}, reference)
        residual = new.residual if names == ["own"] else new.others.residual
        np.testing.assert_array_equal(residual.rows, state.residual.rows)
    assert new.metrics.sent[0] == K * 300 + K * 8


@pytest.mark.parametrize("bad", [None, "own", "passed", "small"])
def test_others_may_pass_leaves(bad):
    tx = jc.topk(0.9, value_dtype="float32", where="own", others=jc.plump_dp(where="small"))
    assert bypassing(tx.init(PARAMS), PARAMS) == {"['passed']"}
    (update, state), grads = update_of(tx), gradients()
    if bad is not None:
        grads[bad].flat[1] = np.nan
    means, new = update(grads, state)
    assert int(new.metrics.skipped) == int(bad is not None)
    if bad is not None:
        assert not any(np.any(mean) for mean in means.values())
        return
    np.testing.assert_array_equal(means["passed"], grads["passed"])
    np.testing.assert_allclose(means["small"], grads["small"].mean(0), rtol=1e-6)
    assert 0 < np.count_nonzero(means["own"]) <= K * 300


@pytest.mark.parametrize("bad", ["own", "passed"])
def test_parts_skip_together(bad):
    _, state, means, new = second(bad)
    assert new.metrics.skipped.tolist() == [1, 1]
    assert new.metrics.sent.tolist() == [0, 0]
    assert not any(np.any(mean) for mean in means.values())
    for before, after in ((state.residual, new.residual), (state.others.residual, new.others.residual)):
        np.testing.assert_array_equal(after.rows, np.broadcast_to(before.rows, after.rows.shape))


def test_bytes_of_a_second_exchange():
    tx = jc.chain(jc.topk(0.9, where="own", others=jc.plump_dp()), optax.sgd(0.1))
    reference = jc.wire_report(jc.topk(0.9), {"own": PARAMS["own"]}, 4).received
    report = jc.wire_report(tx, PARAMS, 4)
    assert report.received == reference + 1.5 * 4 * 8
    mesh, batch = jc.make_mesh(data=4), np.ones((8, 3000), np.float32)

    def loss(params, batch):
        return jnp.mean((batch @ params["own"]) ** 2) + jnp.sum(params["passed"] ** 2) + jnp.sum(params["small"])

    state, step = init_state(PARAMS, tx, mesh), jc.make_train_step(loss, tx, mesh, donate=False)
    jc.verify(step, state, batch, tx=tx, params=PARAMS, workers=4)
    simulated = jc.simulate(loss, tx, 4)(init_state(PARAMS, tx, 4), batch)[0].params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), step(state, batch)[0].params, simulated)


def test_outside_the_axis():
    for where in (WHERE, "none"):
        tx = jc.plump_dp(where=where)
        with pytest.raises(ValueError, match="got no axis 'data'"):
            tx.update(PARAMS, tx.init(PARAMS))


def test_a_local_gradient_that_passes():
    tx, mesh = jc.plump_dp(where=WHERE), jc.make_mesh(data=2)
    state = tx.init(PARAMS)

    def worker(gradients):
        varying = jax.lax.pcast(gradients, "data", to="varying")
        return tx.update(varying, state)[0]

    step = jax.shard_map(worker, mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"must be already reduced; got one at .*'passed'.* differs along 'data'"):
        jax.jit(step).trace(PARAMS)


def test_empty_leaves_and_nan():
    """No number of theirs could carry it to the other workers; the rest is the same on all."""
    params = {"empty": np.zeros((0, 4), np.float32), "full": np.ones(3, np.float32)}
    tx = jc.topk(0.9, where="empty")
    state = init_state(params, tx, K).opt_state
    axes = jax.tree.map(lambda node: 0 if is_rows(node) else None, state, is_leaf=is_rows)

    def worker(gradient, state):
        state = jax.tree.map(
            lambda n: jax.tree.map(lambda row: row[None], n) if is_rows(n) else n, state, is_leaf=is_rows
        )
        return tx.update(gradient, state, params)

    update = jax.vmap(worker, in_axes=({"empty": 0, "full": None}, axes), out_axes=(None, axes), axis_name="data")
    for last, skips in ((np.nan, 1), (2.0, 0)):
        gradient = {"empty": np.zeros((K, 0, 4), np.float32), "full": np.array([0, 1, last], np.float32)}
        out, new = update(gradient, state)
        assert int(jc.exchange_metrics(new).skipped) == skips
        np.testing.assert_array_equal(out["full"], 0 if skips else gradient["full"])
        assert out["empty"].shape == (0, 4)


def test_empty_leaves_of_a_second_exchange():
    params = {"empty": np.zeros((0, 4), np.float32), "full": np.ones(600, np.float32)}

    def loss_fn(params, batch):
        return jnp.vdot(params["full"], batch.mean(0)) + params["empty"].sum()

    step = jc.simulate(loss_fn, jc.chain(jc.topk(0.9, where="empty", others=jc.plump_dp()), optax.sgd(1.0)), K)
    batch = np.ones((K, 600), np.float32)
    bad = batch.copy()  # the first step may still be reading the other
    bad[1, 5] = np.nan
    state, _ = step(step.init(params), batch)
    state, metrics = step(state, bad)
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(step.params(state)["full"], 0)
