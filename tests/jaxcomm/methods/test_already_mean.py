"""An exchange that passes some gradients by: skipping, state, order in the chain, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.types import AlreadyMean, already_mean_paths
from tests.jaxcomm.cases import CASES

K = 2
PARAMS = {
    "own": np.arange(3000, dtype=np.float32),
    "passed": np.ones((3, 2), np.float32),
    "small": np.ones(2, np.float32),
}
WHERE = {"own": False, "passed": True, "small": False}
FIRST = list({case.method: case for case in reversed(CASES)}.values())  # the first case of every method


def update_of(tx):
    """An update of K simulated workers, of gradients (K, ...), for `passed` one for all; and the first state."""
    state = jc.init_state(PARAMS, tx, K).opt_state
    own = jax.tree.map(lambda node: 0 if is_rows(node) else None, state, is_leaf=is_rows)
    axes = {"own": 0, "passed": None, "small": 0}

    def cut(state, index):
        def rows(node):
            return jax.tree.map(lambda leaf: leaf[index], node) if is_rows(node) else node

        return jax.tree.map(rows, state, is_leaf=is_rows)

    @jax.jit
    def update(gradients, state):
        workers = jax.vmap(
            lambda g, s: tx.update(g, s, PARAMS), in_axes=(axes, own), out_axes=(None, own), axis_name="data"
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
    own = rng.normal(size=(K, 3000)), rng.normal(size=(3, 2)), rng.normal(size=(K, 2))
    return dict(zip(PARAMS, map(np.float32, own), strict=True))


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_every_exchange_skips_all_if_a_passed_gradient_is_not_finite_and_the_other_way(case):
    update, state = update_of(jc.already_mean(case.make(**({"momentum": 0.0} if case.momentum else {})), WHERE))
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


def test_the_others_are_exchanged_as_without_the_passed():
    exchange = jc.topk(0.9, value_dtype="float32")
    update, state = update_of(jc.already_mean(exchange, WHERE))
    means, new = update(gradients(), state)
    others = {name: leaf for name, leaf in gradients().items() if name != "passed"}
    inner = exchange.init({name: PARAMS[name] for name in others})
    alone = jax.jit(jax.vmap(lambda g: exchange.update(g, inner)[1], axis_name="data"))(others)
    np.testing.assert_allclose(new.exchange.residual.rows, alone.residual.rows[:, 0], rtol=1e-6)
    assert int(jc.exchange_metrics(new).sent) == K * 300
    assert np.count_nonzero(means["own"]) <= K * 300


def test_all_may_be_passed_and_none_may_be():
    tx, axes = jc.already_mean(jc.topk(0.9), dict.fromkeys(PARAMS, True)), dict.fromkeys(PARAMS, None)
    update = jax.jit(jax.vmap(tx.update, in_axes=(axes, None), out_axes=None, axis_name="data", axis_size=K))
    same = {name: leaf + 1 for name, leaf in PARAMS.items()}
    means, state = update(same, tx.init(PARAMS))
    assert int(jc.exchange_metrics(state).skipped) == 0
    jax.tree.map(np.testing.assert_array_equal, means, same)
    means, state = update({**same, "small": np.full(2, np.inf, np.float32)}, state)
    assert int(jc.exchange_metrics(state).skipped) == 1
    assert not any(np.any(mean) for mean in means.values())
    assert jc.wire_report(tx, PARAMS, 4).received == 0
    none = jc.already_mean(jc.topk(0.9), dict.fromkeys(PARAMS, False))
    assert jc.wire_report(none, PARAMS, 4) == jc.wire_report(jc.topk(0.9), PARAMS, 4)


def test_a_report_counts_the_others_and_what_is_beside():
    tx = optax.chain(jc.already_mean(jc.plump_dp(), WHERE), optax.adam(0.1))
    report = jc.wire_report(tx, PARAMS, 4)
    assert report.received == 1.5 * 4 * 3002
    assert report.dense == 1.5 * 4 * 3008
    gather = jc.Traffic("all_gather", 8, 4)
    assert jc.wire_report(tx, PARAMS, 4, beside=[gather]).received == report.received + 3 * 8


def test_the_state_is_placed_resized_and_read_like_any_other():
    tx = optax.chain(jc.already_mean(jc.dct_dp(0.9), WHERE), optax.adam(0.1))
    state = jc.init_state(PARAMS, tx, 4)
    assert state.opt_state[0].passed == AlreadyMean(("['passed']",))
    assert already_mean_paths(state.opt_state) == {"['passed']"}
    assert already_mean_paths(optax.adam(0.1).init(PARAMS)) == frozenset()
    specs = jc.state_specs(state).opt_state[0]
    assert (specs.exchange.residual.rows, specs.exchange.step) == (P("data"), P())
    exchange, adam = state.opt_state
    rows = jc.PerWorker(jnp.arange(4 * 3072, dtype=jnp.float32).reshape(4, 3072))
    exchange = exchange._replace(exchange=exchange.exchange._replace(due=jnp.asarray(False), residual=rows))
    resized = jc.resize_workers(state._replace(opt_state=(exchange, adam)), 2)
    exchange = resized.opt_state[0].exchange
    np.testing.assert_allclose(exchange.residual.rows.mean(0), rows.rows.mean(0))
    assert exchange.residual.rows.shape == (2, 3072)
    assert bool(exchange.memory.due)
    assert jax.tree.structure(resized) == jax.tree.structure(state)


def test_a_chain_is_judged_by_the_exchange_inside():
    inside = jc.already_mean(jc.dct_dp(0.9), WHERE)
    assert jc.check_chain(optax.chain(inside, optax.adam(0.1))) == []
    with pytest.raises(ValueError, match=r"clip_by_global_norm after dct_dp would cut off"):
        jc.check_chain(optax.chain(inside, optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    with pytest.raises(ValueError, match="averages every gradient once"):
        jc.check_chain(optax.chain(inside, jc.plump_dp()))
    with pytest.raises(ValueError, match="trace before dct_dp would keep each worker's own"):
        jc.check_chain(optax.chain(optax.trace(0.9), inside))
    for method in (jc.dgc(0.9, momentum=0.9), jc.iwp(0.01, density=0.1, momentum=0.9)):
        with pytest.raises(
            ValueError, match=r"not inside already_mean, got .*none of its momentum; take momentum=0, and"
        ):
            jc.check_chain(optax.chain(jc.already_mean(method, WHERE), optax.sgd(0.1)))
    assert jc.check_chain(optax.chain(jc.already_mean(jc.dgc(0.9, momentum=0.0), WHERE), optax.sgd(0.1, 0.9))) == []


@pytest.mark.parametrize(
    "where",
    [
        {"own": False, "passed": True},
        lambda params: True,
        dict.fromkeys(PARAMS, 1),
        {"own": False, "passed": {"kernel": True}, "small": False},
    ],
)
def test_marks_that_do_not_fit_are_refused(where):
    with pytest.raises(ValueError, match=r"where has a bool for every parameter, True for those .* got"):
        jc.already_mean(jc.plump_dp(), where).init(PARAMS)


@pytest.mark.parametrize("exchange", [optax.sgd(0.1), jc.local_sgd(2, exchange=jc.plump_dp())])
def test_what_is_no_exchange_of_gradients_is_refused(exchange):
    with pytest.raises(ValueError, match=r"averaged by an exchange of gradients, got a transformation that is none \("):
        jc.already_mean(exchange, WHERE).init(PARAMS)


@pytest.mark.parametrize("workers", [2, "mesh"])
def test_a_local_method_around_it_is_refused(workers):
    tx = optax.chain(optax.sgd(0.1), jc.local_sgd(2, exchange=jc.already_mean(jc.plump_dp(), WHERE)))
    workers = jc.make_mesh(data=2) if workers == "mesh" else workers
    with pytest.raises(
        ValueError, match=r"got a local method with already_mean for \['passed'\]: give the local method"
    ):
        jc.init_state(PARAMS, tx, workers)


def test_outside_of_the_axis_it_is_refused():
    for where in (WHERE, dict.fromkeys(PARAMS, True)):
        tx = jc.already_mean(jc.plump_dp(), where)
        with pytest.raises(ValueError, match="got no axis 'data'"):
            tx.update(PARAMS, tx.init(PARAMS))


def test_a_marked_gradient_that_differs_between_workers_is_refused():
    tx, mesh = jc.already_mean(jc.plump_dp(), WHERE), jc.make_mesh(data=2)
    state = tx.init(PARAMS)

    def worker(gradients):
        own = jax.lax.pcast(gradients, "data", to="varying")
        return tx.update(own, state)[0]

    step = jax.shard_map(worker, mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"is the same on all workers, got one at .*'passed'.* differs along 'data'"):
        jax.jit(step).trace(PARAMS)
