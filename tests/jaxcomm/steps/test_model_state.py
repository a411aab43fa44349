"""The model's own state in the train step: averaged with the losses, or a row of each worker; kept in skipped steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from jaxcomm.traffic import Traffic
from tests.jaxcomm.train_steps import init_state
from tests.jaxcomm.workers import is_per_worker
from tests.marks import slow_except
from train.checkpoints import Checkpoints

K, ROWS, BAD_STEP = 4, 8, 2
PARAMS = {"w": np.arange(10, dtype=np.float32).reshape(5, 2) / 10}
START = {"mean": jnp.zeros(5), "spread": {"size": jnp.ones((), jnp.bfloat16)}}
GRADIENTS = optax.chain(jc.dct_dp(0.5, dense_below=0), optax.sgd(0.1))
LOCAL = {
    "slim_dp": optax.chain(optax.sgd(0.1), jc.slim_dp(0.3, 0.15)),
    "local_sgd": optax.chain(optax.sgd(0.1), jc.local_sgd(3, exchange=jc.plump_dp())),
}
WITHOUT_EXCHANGE = {"local_sgd": 1}  # a step without an exchange, in which the other workers go on


def batches(rows=ROWS):
    rng = np.random.default_rng(0)
    for _ in range(4):
        yield rng.normal(size=(rows, 5)).astype(np.float32)


def loss_fn(params, model_state, batch):
    """A linear model of the input minus the running mean."""
    new = {
        "mean": 0.75 * model_state["mean"] + 0.25 * batch.mean(0),
        "spread": {"size": jnp.abs(batch).mean().astype(jnp.bfloat16)},
    }
    outputs = (batch - model_state["mean"]) @ params["w"]
    return jnp.mean(outputs**2), ({"size": jnp.abs(batch).mean()}, new)


def on_mesh(tx, **options):
    mesh = jc.make_mesh(data=K)
    state = init_state(PARAMS, tx, mesh, model_state=START)
    return state, jc.make_train_step(loss_fn, tx, mesh, has_state=True, **options)


def simulated(tx, workers=K, **options):
    state = init_state(PARAMS, tx, workers, model_state=START)
    return state, jc.simulate(loss_fn, tx, workers, has_state=True, **options)


def eleven(tx, **options):
    """Eleven workers: the computed mean of eleven equal numbers may be a different number."""
    return simulated(tx, 11, **options)


def on_one_device(steps):
    """Plain SGD on the whole batch: the mean over all rows is the mean over the workers' means."""
    params, model_state, losses = PARAMS, START, []
    for batch in steps:
        (loss, (_, new)), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, model_state, batch)
        size = np.mean([np.abs(part).mean().astype(jnp.bfloat16).astype(np.float32) for part in np.split(batch, K)])
        model_state = {"mean": new["mean"], "spread": {"size": size.astype(jnp.bfloat16)}}
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        losses.append(loss)
    return params, model_state, losses


def assert_close(one, two):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(*np.float32([a, b]), rtol=1e-5, atol=1e-6), one, two)


@pytest.mark.parametrize("place", [on_mesh, simulated])
def test_workers_are_one_device(place):
    state, step = place(optax.chain(jc.plump_dp(), optax.sgd(0.1)))
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        np.testing.assert_allclose(metrics["size"], np.abs(batch).mean(), rtol=1e-6)
    params, model_state, expected = on_one_device(batches())
    assert_close([state.params, state.model_state, losses], [params, model_state, expected])
    assert state.model_state["spread"]["size"].dtype == jnp.bfloat16
    assert np.abs(state.model_state["mean"]).min() > 0


@pytest.mark.parametrize("place", slow_except([on_mesh, eleven], on_mesh))
def test_a_skip_keeps_it(place):
    state, step = place(GRADIENTS, donate=False)
    for index, batch in enumerate(batches(44)):
        batch[-1] = np.nan if index == BAD_STEP else batch[-1]
        new, metrics = step(state, batch)
        assert int(metrics["skipped"]) == int(index == BAD_STEP)
        equalities = jax.tree.map(np.array_equal, new.model_state, state.model_state)
        assert jax.tree.leaves(equalities) == [index == BAD_STEP] * 2
        state = new


@pytest.mark.parametrize("place", slow_except([on_mesh, simulated], on_mesh))
@pytest.mark.parametrize("name", slow_except(LOCAL, "local_sgd"))
def test_local_methods(name, place):
    state, step = place(LOCAL[name])
    means = [np.zeros(5)] * K
    for index, batch in enumerate(batches()):
        last = means[-1]
        means = [
            0.75 * old + 0.25 * part.mean(0, dtype=np.float64)
            for old, part in zip(means, np.split(batch, K), strict=True)
        ]
        if index == WITHOUT_EXCHANGE.get(name):
            batch[-1], means[-1] = np.inf, last
        state, metrics = step(state, batch)
        assert int(metrics["skipped"]) == 0
        np.testing.assert_allclose(step.model_state(state)["mean"], np.mean(means, axis=0), rtol=1e-5, atol=1e-6)
    assert is_per_worker(state.params)
    assert is_per_worker(state.model_state["mean"]) == (name == "local_sgd")  # slim_dp exchanges in every step


@pytest.mark.parametrize(
    "tx", slow_except([GRADIENTS, *LOCAL.values()], GRADIENTS, LOCAL["local_sgd"]), ids=["dct_dp", *LOCAL]
)
def test_bytes(tx):
    state, step = on_mesh(tx)
    batch = next(batches())
    predicted = jc.accounting.step_report(step, state, batch, params=PARAMS, workers=K).program
    compiled = read_program(step.lower(state, batch).compile().as_text())
    scalars = Traffic("all_reduce", 4 * (2 + 5 + 1), K)  # loss, size; mean, size
    if tx is LOCAL["local_sgd"]:
        assert not predicted.always
        assert predicted.received == compiled.received == jc.wire_report(tx, PARAMS, K).program.received
        jc.verify(step, state, batch, tx=tx, params=PARAMS, workers=K, other_bytes=0)
        return
    assert scalars in predicted.always
    assert predicted.received == compiled.received
    assert predicted.received == jc.wire_report(tx, PARAMS, K).program.received + scalars.received
    losses = int(Traffic("all_reduce", 4 * 2, K).received)  # `verify` does not count the state's numbers as others
    jc.verify(step, state, batch, tx=tx, params=PARAMS, workers=K, other_bytes=losses)
    with pytest.raises(ValueError, match="a dense all-reduce is left"):
        jc.verify(step, state, batch, tx=tx, params=PARAMS, workers=K, other_bytes=losses - 1)


def test_all_workers_have_the_same():
    state, _ = on_mesh(GRADIENTS)
    plain = init_state(PARAMS, GRADIENTS, jc.make_mesh(data=K))
    assert plain.model_state == ()
    paths = [[path for path, _ in jax.tree_util.tree_leaves_with_path(tree)] for tree in (state, plain)]
    assert paths[0][: len(paths[1])] == paths[1]  # a checkpoint without a model's state reads as before
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.model_state))
    assert set(jax.tree.leaves(jc.state_specs(state).model_state)) == {jax.sharding.PartitionSpec()}


@pytest.mark.parametrize("workers", slow_except([K, 2], K))
def test_checkpoints_and_resizing(workers, tmp_path):
    state, step = on_mesh(GRADIENTS)
    state, _ = step(state, next(batches()))
    assert_close(jc.resize_workers(state, 3).model_state, state.model_state)
    checkpoints, about = Checkpoints(tmp_path / "checkpoints"), {"workers": K}
    checkpoints.save(1, state, {"step": 1}, about)
    checkpoints.wait()
    mesh = jc.make_mesh(data=workers)
    like = init_state(PARAMS, GRADIENTS, mesh, model_state=START)
    restored = checkpoints.restore(1, like, jc.resize_workers, {"workers": workers}).state
    checkpoints.close()
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    jax.tree.map(np.testing.assert_array_equal, restored.model_state, state.model_state)
    restored, _ = jc.make_train_step(loss_fn, GRADIENTS, mesh, has_state=True)(restored, next(batches()))
    assert int(restored.step) == 2


def test_donation():
    state, step = simulated(GRADIENTS)
    step(state, next(batches()))
    np.testing.assert_array_equal(START["mean"], np.zeros(5))
    assert state.model_state["mean"].is_deleted()


@pytest.mark.parametrize(("leaf", "dtype"), [(jnp.zeros(3, jnp.int32), "int32"), (jax.random.key(0), r"key<fry>")])
def test_integers_with_a_local_method(leaf, dtype):
    with pytest.raises(
        ValueError, match=rf"real floating type, since they .*; got {dtype} at .*'count'.*\. Keep counters and random"
    ):
        init_state(PARAMS, LOCAL["local_sgd"], 2, model_state={"count": leaf})


@pytest.mark.parametrize(
    "change",
    [
        lambda new: {"mean": new["mean"]},
        lambda new: {**new, "mean": new["mean"][None]},
        lambda new: {**new, "mean": new["mean"].astype(jnp.bfloat16)},
    ],
    ids=["structure", "shape", "type"],
)
@pytest.mark.parametrize("place", [on_mesh, simulated])
def test_another_kind_of_state(place, change):
    def changed(params, model_state, batch):
        loss, (scalars, new) = loss_fn(params, model_state, batch)
        return loss, (scalars, change(new))

    state, _ = place(GRADIENTS)
    workers = jc.make_mesh(data=K) if place is on_mesh else K
    make = jc.make_train_step if place is on_mesh else jc.simulate
    with pytest.raises(
        ValueError, match=r"structure, shapes and types of the old one; got .*Return from loss_fn what it"
    ):
        make(changed, GRADIENTS, workers, has_state=True)(state, next(batches()))


def test_a_loss_without_it():
    state, _ = simulated(GRADIENTS)
    with pytest.raises(ValueError, match=r"got a state of 2 arrays for a loss without. Pass has_state=True"):
        jc.simulate(lambda params, batch: jnp.mean(batch @ params["w"]), GRADIENTS, K)(state, next(batches()))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("workers", ["mesh", "simulated", "sharded"])
def test_counters_and_keys(workers, accumulate):
    def loss(params, state, batch):
        new = {"key": jax.random.split(state["key"])[0], "mean": batch.mean(0), "turns": state["turns"] + 1}
        return jnp.mean((batch @ params["w"]) ** 2), ({}, new)

    def counting(params, state, batch):
        value, (scalars, new) = loss(params, state, batch)
        return value, (scalars, new | {"turns": state["turns"] + (batch > 0).sum(dtype=jnp.int32)})

    def make(loss):
        tx, options = jc.chain(jc.plump_dp(), optax.sgd(0.1)), {"has_state": True, "accumulate": accumulate}
        if workers == "simulated":
            return jc.simulate(loss, tx, K, **options)
        shards = {"specs": {"w": jax.P(None, "fsdp")}, "auto": ("fsdp",)} if workers == "sharded" else {}
        mesh = jc.make_mesh(data=K // 2, fsdp=2) if shards else jc.make_mesh(data=K)
        return jc.make_train_step(loss, tx, mesh, **options, **shards)

    start = {"key": jax.random.key(1), "mean": jnp.zeros(5), "turns": jnp.int32(3)}
    step = make(loss)
    state, _ = step(step.init(PARAMS, start), next(batches()))
    start_state, key = step.model_state(state), start["key"]
    for _ in range(accumulate):
        key = jax.random.split(key)[0]
    assert start_state["turns"] == 3 + accumulate
    assert (jax.random.key_data(start_state["key"]) == jax.random.key_data(key)).all()
    wrong = make(counting)
    state = wrong.init(PARAMS, start)
    with pytest.raises(ValueError, match="turns"):
        wrong(state, next(batches()))
