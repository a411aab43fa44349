import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from tests.jaxcomm.train_steps import init_state
from tests.refusals import refusals, refused

PARAMS = {"b": np.ones(3, np.float32), "w": np.arange(900, dtype=np.float32).reshape(300, 3)}
TX = optax.chain(jc.dct_dp(0.9), optax.adam(0.1))


def test_rows_are_sharded():
    mesh = jc.make_mesh(data=4)
    state = init_state(PARAMS, TX, mesh)
    specs = jc.state_specs(state)
    exchange = specs.opt_state[0]
    assert exchange.residual.rows == exchange.memory.threshold.rows == P("data")
    assert {exchange.step, exchange.memory.due, *exchange.metrics, specs.step, *specs.params.values()} == {P()}
    assert specs.opt_state[1][0].mu == {"b": P(), "w": P()}
    for array, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    rows = state.opt_state[0].residual.rows
    assert rows.shape == (4, 1024)
    assert [shard.data.shape for shard in rows.addressable_shards] == [(1, 1024)] * 4


def test_specs_of_shapes():
    tx = jc.chain(jc.dct_dp(0.9, axis_name="workers"), optax.adam(0.1))
    specs = jc.state_specs(jax.eval_shape(tx.init, PARAMS))
    assert specs[0].residual.rows == P("workers")
    assert specs[0].step == P()


def test_simulated_workers():
    state = init_state(PARAMS, TX, 5)
    assert state.opt_state[0].residual.rows.shape == (5, 1024)
    assert state.opt_state[0].memory.threshold.rows.shape == (5, 1)
    assert state.opt_state[0].step.shape == ()
    assert bool(state.opt_state[0].memory.due)
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"])
    assert int(state.step) == 0


def test_a_mesh_or_a_number():
    on_mesh, simulated = init_state(PARAMS, TX, jc.make_mesh(data=2)), init_state(PARAMS, TX, 2)
    jax.tree.map(np.testing.assert_array_equal, on_mesh, simulated)
    assert isinstance(on_mesh.params["w"].sharding, NamedSharding)


@pytest.mark.parametrize("workers", [2, "mesh"])
def test_no_shared_buffers(workers):
    """A state is donated whole, and a buffer only once."""
    state = init_state(PARAMS, TX, jc.make_mesh(data=2) if workers == "mesh" else workers)
    pointers = [
        shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards
    ]
    assert len(set(pointers)) == len(pointers)


@refusals(
    (lambda: init_state(PARAMS, optax.chain(optax.clip(1.0), optax.adam(0.1)), 2), "averages", "got a chain without"),
    *(
        (lambda workers=n: init_state(PARAMS, TX, workers), "workers", "at least 1", f"got {n}")
        for n in (0, -3, 2.5, None)
    ),
    (lambda: init_state(PARAMS, TX, ()), "workers", "got ()"),
    (lambda: init_state(PARAMS, TX, jc.make_mesh(model=2)), "got 'data' and a mesh with ('model',)"),
)
def test_refusals(call, said):
    refused(call, *said)


def test_metrics_in_a_chain():
    state = init_state(PARAMS, TX, 2)
    assert jc.exchange_metrics(state.opt_state) is state.opt_state[0].metrics
    assert jc.exchange_metrics(optax.adam(0.1).init(PARAMS)) is None


@pytest.mark.parametrize("layout", ["workers", "simulated", "shards", "stages"])
def test_an_array_twice(layout):
    tied = jnp.ones((8, 8))
    tx = jc.chain(jc.plump_dp(), optax.sgd(0.1))
    stages = jc.Pipeline([lambda p, x, b: b @ p, lambda p, x, b: x @ p], lambda x, b: (jnp.mean(x), {}), [tied, tied])

    def loss_fn(params, batch):
        return jnp.mean(batch @ params[0] @ params[1])

    step = {
        "workers": lambda: jc.make_train_step(loss_fn, tx, jc.make_mesh(data=2)),
        "simulated": lambda: jc.simulate(loss_fn, tx, 2),
        "shards": lambda: jc.make_train_step(
            loss_fn, tx, jc.make_mesh(data=2, fsdp=2), specs=P("fsdp"), auto=("fsdp",)
        ),
        "stages": lambda: jc.make_train_step(stages, tx, jc.make_mesh(data=2, stage=2)),
    }[layout]()
    with pytest.raises(
        ValueError, match=r"must be at one place of the parameters; got one at '\[0\]' and at '\[1\]'.*copy"
    ):
        step.init([tied, tied])
    step(step.init([tied, jnp.copy(tied)]), np.ones((4, 8), np.float32))


def cut(rows, workers):
    """What Orbax restores with `strict=False`: rows are cut off, or padded with zeros."""
    rows_ = np.concatenate([np.asarray(rows), np.zeros_like(rows, shape=(workers, *rows.shape[1:]))])
    return rows_[:workers]


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("layout", ["workers", "one line", "simulated"])
def test_rows_of_other_workers(layout, workers):
    tx = jc.chain(jc.topk(0.9), optax.sgd(0.1))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] + params["b"]) ** 2)

    def train_step(state, batch):
        params, opt_state, step = state
        _, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return jc.state.TrainState(optax.apply_updates(params, updates), opt_state, step + 1), {}

    def make(workers):
        mesh = jc.make_mesh(data=workers)
        return {
            "workers": lambda: jc.make_train_step(loss_fn, tx, mesh),
            "one line": lambda: jc.data_parallel(lambda s, b: train_step(s[:3], b), mesh),
            "simulated": lambda: jc.simulate(loss_fn, tx, workers),
        }[layout]()

    batch = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32)
    start = init_state(PARAMS, tx, jc.make_mesh(data=4))
    state, _ = make(4)(start, batch)
    host = jax.device_get(state)
    wrong = jax.tree.map(
        lambda node: jax.tree.map(lambda rows: cut(rows, workers), node) if isinstance(node, jc.PerWorker) else node,
        host,
        is_leaf=lambda node: isinstance(node, jc.PerWorker),
    )
    message = rf"rows of topk must be those of {workers} workers; got rows of 4, .*strict=False.*resize_workers"
    with pytest.raises(ValueError, match=message):
        make(workers)(wrong, batch)
    new, _ = make(workers)(jc.resize_workers(host, workers), batch)
    assert int(jc.exchange_metrics(new.opt_state).skipped) == 0


def test_rows_without_a_number():
    """Checkpoints of earlier versions have the index alone."""
    tx = jc.chain(jc.topk(0.9), optax.sgd(0.1))

    def make():
        mesh = jc.make_mesh(data=4)
        return jc.make_train_step(lambda p, b: jnp.mean((b @ p["w"] + p["b"]) ** 2), tx, mesh, donate=False)

    step = make()
    batch = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32)
    state, _ = step(step.init(PARAMS), batch)
    exchange = state.opt_state[0]
    old = exchange.replace(worker=jax.tree.map(lambda rows: rows & 0xFFFF, exchange.worker))
    result, metrics = make()(state._replace(opt_state=(old, *state.opt_state[1:])), batch)
    right, _ = step(state, batch)
    assert int(metrics["skipped"]) == 0
    jax.tree.map(np.testing.assert_array_equal, result.params, right.params)
