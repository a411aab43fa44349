"""The late-multiplying layer in place of `nnx.Linear`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxcomm as jc
from models.late_linear import LateLinear
from tests.jaxcomm.train_steps import init_state

ROWS, K = 8, 2


class Two(nnx.Module):
    """Two layers, of which a plan for 8 rows multiplies only the first late."""

    def __init__(self, dense, *, rngs):
        self.blocks = nnx.List([dense(12, 40, rngs=rngs), dense(40, 3, use_bias=False, rngs=rngs)])

    def __call__(self, x):
        return self.blocks[1](nnx.relu(self.blocks[0](x)))


def split(dense):
    graph, variables = nnx.split(Two(dense, rngs=nnx.Rngs(0)), nnx.Param)
    return graph, nnx.to_pure_dict(variables)


def batches():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(ROWS, 12)).astype(np.float32) for _ in range(3)]


def train(dense, exchange, workers, make):
    graph, params = split(dense)
    tx = optax.chain(exchange, optax.sgd(0.1))
    state = init_state(params, tx, workers)
    step = make(lambda params, x: jnp.mean((nnx.merge(graph, params, copy=True)(x) - x[:, :3]) ** 2), tx, workers)
    for batch in batches():
        state, _ = step(state, batch)
    return jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("use_bias", [True, False])
def test_outside_the_axis(use_bias, dtype):
    layers = [kind(12, 5, use_bias=use_bias, dtype=dtype, rngs=nnx.Rngs(3)) for kind in (LateLinear, nnx.Linear)]
    states = [nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in layers]
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert {leaf.dtype for leaf in jax.tree.leaves(states)} == {np.dtype("float32")}
    late, linear = (layer(batches()[0].reshape(2, 4, 12)) for layer in layers)
    assert (late.shape, late.dtype) == ((2, 4, 5), dtype or jnp.float32)
    np.testing.assert_array_equal(late, linear)


def test_training():
    plan = jc.planner.plan_late_multiply(split(nnx.Linear)[1], ROWS, K)
    assert [plan.mode(f"blocks/{index}") for index in range(2)] == ["late", "reduce"]
    expected = train(nnx.Linear, jc.plump_dp(), K, jc.simulate)
    for workers, make in ((jc.make_mesh(data=K), jc.make_train_step), (K, jc.simulate)):
        result = train(LateLinear, jc.plump_dp(where=plan.exchanges), workers, make)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), result, expected)
        assert np.abs(result["blocks"][0]["kernel"] - split(nnx.Linear)[1]["blocks"][0]["kernel"]).max() > 1e-3


@pytest.mark.parametrize("mode", ["late", "reduce"])
def test_modes_and_axes(mode):
    dense = partial(LateLinear, mode=mode, axis_name="workers")
    graph, params = split(dense)
    tx, mesh = jc.chain(jc.plump_dp(axis_name="workers"), optax.sgd(0.1)), jc.make_mesh(workers=K)
    step = jc.make_train_step(
        lambda params, x: jnp.mean(nnx.merge(graph, params, copy=True)(x)), tx, mesh, axis_name="workers"
    )
    state = init_state(params, tx, mesh, axis_name="workers")
    if mode == "late":
        with pytest.raises(ValueError, match="of late_multiply must be replicated"):
            step.trace(state, batches()[0])
    else:
        step.trace(state, batches()[0])


def test_a_sharding_of_outputs():
    with pytest.raises(ValueError, match=r"out_sharding must be None, .*; got .*data"):
        LateLinear(2, 3, rngs=nnx.Rngs(0))(jnp.ones((1, 2)), out_sharding=jax.sharding.PartitionSpec("data"))
