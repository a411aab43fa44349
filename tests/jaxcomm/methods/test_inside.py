"""Exchanges inside other exchanges: what is frozen, refused, skipped and clipped there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.order import check_chain
from tests.refusals import refused

PARAMS = {"v": jnp.ones(3), "w": jnp.zeros(4)}
FROZEN = {"where": "w", "others": optax.set_to_zero()}
RIGHT = optax.sgd(0.7, momentum=0.9, nesterov=True)


def loss(params, batch):
    return jnp.mean(jnp.sum((params["w"] - batch["x"]) ** 2, -1)) + 0.0 * params["v"].sum()


def trained(tx, mesh, axis_name="data", steps=4):
    step = jc.make_train_step(loss, tx, mesh, axis_name=axis_name)
    state, batch = step.init(PARAMS), {"x": np.arange(32, dtype=np.float32).reshape(8, 4)}
    for _ in range(steps):
        state, _ = step(state, batch)
    return state, step.params(state)


def test_frozen_in_a_group():
    tx = jc.chain(jc.hierarchical(jc.plump_dp(axis_name="slice", **FROZEN)), optax.adamw(0.1, weight_decay=0.1))
    _, params = trained(tx, jc.make_mesh(slice=2, data=2), ("slice", "data"))
    np.testing.assert_array_equal(params["v"], 1.0)
    assert (params["w"] != 0).all()


@pytest.mark.parametrize("options", [{}, {"fragments": ["w", ""]}])
def test_frozen_in_local_steps(options):
    """On the workers, whose optimizer decays, and in the model, whose outer optimizer does."""
    outer = optax.adamw(0.1, weight_decay=0.5)
    tx = jc.chain(
        optax.adamw(0.1, weight_decay=0.5), jc.local_sgd(2, exchange=jc.plump_dp(**FROZEN), outer=outer, **options)
    )
    state, params = trained(tx, jc.make_mesh(data=2), steps=5)
    np.testing.assert_array_equal(params["v"], 1.0)
    np.testing.assert_array_equal(state.params.rows["v"], 1.0)
    assert (params["w"] != 0).all()


WRONG = {
    "an optimizer": (jc.chain(jc.plump_dp(), optax.sgd(0.1)), "links that change it"),
    "a deeper one": (
        jc.plump_dp(where="w", others=jc.chain(jc.plump_dp(where="v", others=optax.set_to_zero()), optax.scale(2.0))),
        "others= of plump_dp",
    ),
    "accumulate": (jc.chain(jc.plump_dp(), accumulate=2), "accumulate="),
}


@pytest.mark.parametrize(("inner", "got"), WRONG.values(), ids=WRONG)
def test_an_optimizer_inside(inner, got):
    tx = jc.chain(optax.sgd(0.1), jc.local_sgd(2, exchange=inner))
    with pytest.raises(ValueError, match=r"must (return the mean gradient|be an exchange)") as raised:
        trained(tx, jc.make_mesh(data=2))
    assert got in str(raised.value) or got == "accumulate="


@pytest.mark.parametrize("outer", [optax.scale_by_adam(), optax.identity(), optax.trace(0.9)])
def test_an_outer_optimizer_that_goes_up(outer, tmp_path):
    tx = jc.chain(optax.sgd(0.1), jc.local_sgd(2, exchange=jc.plump_dp(), outer=outer))
    refused(lambda: trained(tx, jc.make_mesh(data=2)), "outer", "adds gradients")
    options = {"exchange": jc.topk(0.5), "steps": 2, "outer": outer}
    refused(lambda: jc.rounds(str(tmp_path), (loss, optax.sgd(0.1)), PARAMS, **options), "outer", "adds gradients")


def test_a_descending_outer_optimizer():
    inner = jc.chain(optax.clip_by_global_norm(1.0), jc.topk(0.5))
    tx = jc.chain(optax.sgd(0.1), jc.local_sgd(2, exchange=inner, outer=optax.sgd(optax.linear_schedule(0.0, 1.0, 5))))
    assert trained(tx, jc.make_mesh(data=2))


def grouped(exchange, gradients):
    """The mean of two groups of two workers, whose gradients are equal, and whether it was skipped."""
    tx, axes = jc.hierarchical(exchange), ("slice", "data")
    mesh = jc.make_mesh(slice=2, data=2)

    def run(gradients):
        state = tx.init(gradients)
        means, state = tx.update(gradients, state, gradients)
        return means, state.metrics.skipped

    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert axes == mesh.axis_names
    return jax.jit(run)(gradients)


def test_a_mean_out_of_the_range_of_float16():
    exchange = jc.plump_dp(axis_name="slice")
    means, skipped = grouped(exchange, {"w": jnp.asarray([60000.0, 1.0], jnp.float16)})
    assert (skipped, float(means["w"][0])) == (0, 60000.0)
    tx = jc.topk(0.0, value_dtype="float32", dense_below=0, axis_name="slice")
    axis = jc.hierarchical(tx)
    x = {"w": jnp.asarray([60000.0, 1.0, 1.0, 1.0], jnp.float16)}

    def run(x):
        state = axis.init(x)
        rows = state.memory.residual.rows
        residual = state.memory.replace(residual=dataclasses.replace(state.memory.residual, rows=rows + 60000.0))
        means, new = axis.update(x, state.replace(memory=residual), x)
        return means, new.metrics.skipped

    spec, mesh = jax.sharding.PartitionSpec(), jc.make_mesh(slice=2, data=2)
    means, skipped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x)
    assert skipped == 1
    assert not means["w"].any()


def test_what_a_share_cannot_be():
    def first(exchange, dtype=jnp.float32):
        shapes = {"w": jax.ShapeDtypeStruct((8, 8), dtype)}
        jc.wire_report(jc.hierarchical(exchange), shapes, (2, 2), axis_name=("slice", "data"))

    first(jc.topk(0.5, axis_name="slice"))
    refused(lambda: first(jc.dgc(clip=1.0, axis_name="slice")), "exchange", "dgc with clip=", "norm of its own")
    refused(lambda: first(jc.powersgd(2, axis_name="slice")), "exchange", "['powersgd']", "vectors")
    refused(lambda: first(jc.topk(0.5, axis_name="slice"), jnp.complex64), "complex64")


def test_other_leaves_with_the_state_of_before():
    """As where layers are unfrozen one after another."""
    first, second = (jc.plump_dp(where=where, others=optax.set_to_zero()) for where in ("w", "v|w"))
    mesh, spec = jc.make_mesh(data=2), jax.sharding.PartitionSpec()
    ones = jax.tree.map(jnp.ones_like, PARAMS)

    def run(ones):
        chains = [jc.chain(tx, optax.sgd(1.0)) for tx in (first, second)]
        _, state = chains[0].update(ones, chains[0].init(ones), ones)
        updates, _ = chains[1].update(ones, state, ones)
        return updates

    updates = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(ones)
    np.testing.assert_array_equal(updates["v"], -1.0)


def test_a_clip_behind_a_residual_deep_inside():
    inner = jc.plump_dp(where="v", others=jc.topk(0.5))
    tx = jc.chain(jc.plump_dp(where="w", others=inner), optax.clip_by_global_norm(1.0))
    params = PARAMS | {"u": jnp.ones(2)}
    with pytest.raises(ValueError, match="clip"):
        check_chain(tx, jax.eval_shape(tx.init, params), params)
