"""Steps for sharded parameters with compressed exchanges: all ways agree."""

import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from tests.jaxcomm.steps import sharded
from tests.jaxcomm.train_steps import init_state

METHODS = {"dct_dp": jc.dct_dp(0.9, life_span=2), "powersgd": jc.powersgd(2), "quant_dp": jc.quant_dp(8)}
LEVEL = {"quant_dp": 2e-3}  # a number between two levels may fall to either side


@pytest.mark.parametrize(
    ("method", "ways"),
    [
        pytest.param("dct_dp", ["partitioned"], marks=pytest.mark.slow),
        pytest.param("powersgd", ["partitioned"], marks=pytest.mark.slow),
        ("quant_dp", ["unreduced"]),
    ],
)
def test_ways_agree_with_compression(method, ways):
    """By hand, by the compiler, and on a mesh of Explicit axes."""
    tx = jc.chain(METHODS[method], optax.sgd(0.1, momentum=0.9))
    by_hand, metrics = sharded.trained("tensor parallel", tx, 3)
    dense = sharded.trained_on_one_device(optax.sgd(0.1, momentum=0.9), 3)
    assert 1e-6 < np.abs(np.asarray(by_hand.params["up"]["kernel"]) - dense["up"]["kernel"]).max() < 0.1
    near = {"rtol": 1e-3, "atol": LEVEL.get(method, 1e-4)}
    for name in ways:
        params_, metrics_ = sharded.trained(name, tx, 3)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **near), by_hand.params, params_.params)
        for count in jc.types.ExchangeMetrics._fields:
            assert int(metrics[count]) == int(metrics_[count])


@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(jc.iwp(0.2, life_span=2), id="iwp"),
        pytest.param(jc.iwp(0.2, life_span=2, warmup_steps=2, checksum=True), id="iwp warm-up", marks=pytest.mark.slow),
        pytest.param(jc.dgc(0.9, warmup_steps=2), id="dgc", marks=pytest.mark.slow),
        pytest.param(jc.topk(0.9, start=2), id="start", marks=pytest.mark.slow),
        pytest.param(jc.dct_dp(0.9, drain_every=2), id="drains", marks=pytest.mark.slow),
    ],
)
def test_conditionals_of_shards(exchange):
    """Branches of which one has what differs between shards, and the other what does not."""
    tx = jc.chain(exchange, optax.sgd(0.1))
    (by_hand, metrics), (also, _) = (sharded.trained(way, tx, 4) for way in ("tensor parallel", "partitioned"))
    assert int(metrics["skipped"]) == 0
    assert np.abs(np.asarray(by_hand.params["up"]["kernel"]) - sharded.params()["up"]["kernel"]).max() > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), by_hand.params, also.params)


@pytest.mark.slow
def test_without_slices():
    tx, mesh = jc.chain(jc.sign(), optax.sgd(0.1, momentum=0.9)), jc.make_mesh(data=4)
    state, expected_state = init_state(sharded.params(), tx, mesh, specs=P()), init_state(sharded.params(), tx, mesh)
    step = sharded.compiled(jc.make_train_step(sharded.whole, tx, mesh, specs=P()), state)
    expected = sharded.compiled(jc.make_train_step(sharded.whole, tx, mesh), expected_state)
    for batch in sharded.batches(3):
        batch = sharded.on(mesh, batch)
        (state, metrics), (expected_state, expected_metrics) = step(state, batch), expected(expected_state, batch)
        assert metrics.keys() == expected_metrics.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(value, expected_metrics[name], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.params, expected_state.params
    )
    (result,), reference = state.opt_state.exchange.exchanges[0], expected_state.opt_state[0]
    np.testing.assert_allclose(result.residual.rows, reference.residual.rows, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", ["bottom|up/bias", "kernel"], ids=str)
def test_where_of_all_or_none_of_a_group(where):
    """Of the parameters with one spec `where` may choose all, or none, as long as it does not of all."""

    def tx(others):
        exchange = jc.topk(0.5, value_dtype="float32", where=where, others=others)
        return jc.chain(exchange, optax.sgd(0.1, momentum=0.9))

    dense = jc.topk(0.0, value_dtype="float32")
    by_hand, _ = sharded.trained("tensor parallel", tx(jc.plump_dp()), 2)
    also, _ = sharded.trained("tensor parallel", tx(dense), 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), by_hand.params, also.params)
    frozen, _ = sharded.trained("tensor parallel", tx(optax.set_to_zero()), 2)
    moved = jax.tree_util.tree_map_with_path(
        lambda path, new, old: (
            bool(np.any(new != old)) == bool(re.search(where, jax.tree_util.keystr(path, simple=True, separator="/")))
        ),
        frozen.params,
        sharded.params(),
    )
    assert all(jax.tree.leaves(moved))
    with pytest.raises(ValueError, match="where must choose some parameters; got 'none'"):
        sharded.trained("tensor parallel", jc.chain(jc.topk(0.5, where="none", others=dense), optax.sgd(0.1)), 1)
