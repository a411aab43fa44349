import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.parallel.state import state_shardings
from tests.jaxcomm.steps import init_state

PARAMS = {"b": np.ones(3, np.float32), "w": np.arange(900, dtype=np.float32).reshape(300, 3)}
TX = optax.chain(jc.dct_dp(0.9), optax.adam(0.1))


def test_rows_of_workers_are_sharded_and_the_rest_is_replicated():
    mesh = jc.make_mesh(data=4)
    state = init_state(PARAMS, TX, mesh)
    specs, shardings = jc.state_specs(state), state_shardings(state, mesh)
    exchange = specs.opt_state[0]
    assert exchange.residual.rows == exchange.memory.threshold.rows == P("data")
    assert {exchange.step, exchange.memory.due, *exchange.metrics, specs.step, *specs.params.values()} == {P()}
    assert specs.opt_state[1][0].mu == {"b": P(), "w": P()}
    for array, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert sharding.mesh == mesh
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
    rows = state.opt_state[0].residual.rows
    assert rows.shape == (4, 1024)
    assert [shard.data.shape for shard in rows.addressable_shards] == [(1, 1024)] * 4


def test_specs_of_shapes_and_of_another_axis():
    tx = jc.chain(jc.dct_dp(0.9, axis_name="workers"), optax.adam(0.1))
    specs = jc.state_specs(jax.eval_shape(tx.init, PARAMS))
    assert specs[0].residual.rows == P("workers")
    assert specs[0].step == P()


def test_simulated_workers_have_a_row_each_and_share_the_rest():
    state = init_state(PARAMS, TX, 5)
    assert state.opt_state[0].residual.rows.shape == (5, 1024)
    assert state.opt_state[0].memory.threshold.rows.shape == (5, 1)
    assert state.opt_state[0].step.shape == ()
    assert bool(state.opt_state[0].memory.due)
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"])
    assert int(state.step) == 0


def test_a_mesh_and_a_number_of_workers_give_the_same_state():
    on_mesh, simulated = init_state(PARAMS, TX, jc.make_mesh(data=2)), init_state(PARAMS, TX, 2)
    jax.tree.map(np.testing.assert_array_equal, on_mesh, simulated)
    assert isinstance(on_mesh.params["w"].sharding, NamedSharding)


@pytest.mark.parametrize("workers", [2, "mesh"])
def test_no_two_leaves_share_a_buffer(workers):
    """A state is donated whole, and a buffer only once."""
    state = init_state(PARAMS, TX, jc.make_mesh(data=2) if workers == "mesh" else workers)
    pointers = [
        shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards
    ]
    assert len(set(pointers)) == len(pointers)


def test_a_chain_without_an_exchange_is_refused():
    message = r"the transformation that averages over the workers; got a chain without. Put jaxcomm.plump_dp\(\)"
    with pytest.raises(ValueError, match=message):
        init_state(PARAMS, optax.chain(optax.clip(1.0), optax.adam(0.1)), 2)


@pytest.mark.parametrize("workers", [0, -3])
def test_fewer_than_one_worker_is_refused(workers):
    with pytest.raises(
        ValueError, match=f"workers must be at least 1; got {workers}. Pass a mesh or a positive integer"
    ):
        init_state(PARAMS, TX, workers)


def test_no_number_of_workers_is_refused():
    with pytest.raises(ValueError, match=r"workers must have one number for each axis of workers; got \(\)"):
        init_state(PARAMS, TX, ())


def test_a_mesh_without_the_axis_is_refused():
    with pytest.raises(ValueError, match=r"got 'data' and a mesh with \('model',\)"):
        init_state(PARAMS, TX, jc.make_mesh(model=2))


def test_metrics_are_found_in_a_chain_and_missed_where_there_are_none():
    state = init_state(PARAMS, TX, 2)
    assert jc.exchange_metrics(state.opt_state) is state.opt_state[0].metrics
    assert jc.exchange_metrics(optax.adam(0.1).init(PARAMS)) is None
