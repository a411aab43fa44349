"""Law 8: a skip is never permanent. After one bad step and 20 good ones, training goes on, for every method.

Through the public train step, with gradients from the batch. There are more than 4096 elements, as from there on a
maximum that XLA (JAX 0.10) compiles for a CPU loses NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from tests.jaxcomm.cases import FIRST
from tests.jaxcomm.train_steps import init_state
from tests.marks import slow_except

K, SHAPES = 4, {"b": (10,), "m": (64, 70), "w": (4106,)}
SGD = optax.sgd(0.1)
OF_THE_TABLE = {
    f"{case.name} {change}".strip(): optax.chain(case.factory(**options), SGD)
    for case in FIRST
    for change, options in case.recovers.items()
}
SKIPPED_BY_ALL = OF_THE_TABLE | {
    "powersgd": optax.chain(jc.powersgd(2), SGD),
    "slim_dp": optax.chain(SGD, jc.slim_dp(q=7)),
    "slim_dp carry": optax.chain(SGD, jc.slim_dp(q=7, unsent="carry")),
}
MOMENTUM = optax.sgd(0.1, momentum=0.9)
SKIPPED_BY_ITS_WORKER = {
    "local_sgd": optax.chain(SGD, jc.local_sgd(2, exchange=jc.topk(0.9))),
    # The bad step is one without an exchange.
    "local_sgd between": optax.chain(MOMENTUM, jc.local_sgd(3, exchange=jc.topk(0.9))),
    "local_sgd in fragments": optax.chain(MOMENTUM, jc.local_sgd(6, exchange=jc.topk(0.9), fragments=2, overlap=1)),
    "slim_dp between": optax.chain(MOMENTUM, jc.slim_dp(p=3, q=3)),
}
CHAINS = SKIPPED_BY_ALL | SKIPPED_BY_ITS_WORKER
FAULTS = {
    "NaN in a tensor of ten": ("b", 3, np.nan),
    "NaN in one coordinate": ("w", 4097, np.nan),
    "infinity": ("m", 17, -np.inf),
    "3.4e38 in one coordinate": ("w", 11, 3.4e38),
    "1e38 everywhere": ("w", slice(None), 1e38),
    "1e38 of both signs": ("m", slice(None), 1e38 * (-1.0) ** np.arange(64 * 70)),
    "1e37 in one coordinate": ("w", 5, 1e37),
    "1e30 in one coordinate": ("m", 5, 1e30),
}
SKIPS_FOR_SURE = ("NaN", "infinity")
# On one worker; what is finite, whose sum may not be, also on all.
EVENTS = [
    (fault, workers)
    for fault in FAULTS
    for workers in ([K - 1], range(K))
    if workers == [K - 1] or not fault.startswith(SKIPS_FOR_SURE)
]
GOOD = 20


def program(name):
    def loss(params, rows):
        return sum(jnp.sum(params[name] * jnp.mean(rows[name], 0)) for name in params)

    params = {name: np.random.default_rng(7).normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return init_state(params, CHAINS[name], K), jc.simulate(loss, CHAINS[name], K)


def rows_of(step):
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(K, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


GOOD_ROWS = [rows_of(step) for step in range(4 + GOOD)]


def bad_rows(fault, workers):
    rows, (tensor, where, value) = rows_of(3), FAULTS[fault]
    flat = rows[tensor].reshape(K, -1)
    for worker in workers:
        flat[worker, where] = value
    return rows


@pytest.mark.parametrize("name", slow_except(CHAINS, "plump_dp"), ids=[f"{name}()" for name in CHAINS])
def test_training_goes_on(name):
    start, step = program(name)
    for fault, workers in EVENTS:
        state, skipped = jax.tree.map(jnp.array, start), []  # the step donates what it is given
        for i, rows in enumerate(GOOD_ROWS):
            state, metrics = step(state, bad_rows(fault, workers) if i == 3 else rows)
            skipped.append(metrics["skipped"])
            if i == GOOD:
                before = jax.tree.map(np.array, jc.state.global_params(state))
        assert not any(skipped[:3] + skipped[4:]), (fault, workers)
        if fault.startswith(SKIPS_FOR_SURE) and name in SKIPPED_BY_ALL:
            assert skipped[3] == 1, (fault, workers)
        after = jax.tree.map(np.array, jc.state.global_params(state))
        assert all(np.isfinite(after[tensor]).all() for tensor in SHAPES), (fault, workers)
        assert any(np.any(before[tensor] != after[tensor]) for tensor in SHAPES), (fault, workers)


def test_a_residual_decays_in_a_warm_up_too():
    tx, spec = jc.dgc(0.9, decay=0.5, momentum=0.0, warmup_steps=9, dense_below=0), jax.sharding.PartitionSpec()
    gradient = {"w": jnp.arange(1.0, 2049.0)}

    def run(gradient):
        _, state = tx.update(gradient, tx.init(gradient), gradient)
        return state.residual.rows

    mapped = jax.shard_map(run, mesh=jc.make_mesh(data=2), in_specs=spec, out_specs=spec, check_vma=False)
    row = np.asarray(jax.jit(mapped)(gradient))[0, :2048]
    kept = row != 0
    assert 100 < kept.sum() < 2048
    np.testing.assert_array_equal(row[kept], 0.5 * np.asarray(gradient["w"])[kept])
