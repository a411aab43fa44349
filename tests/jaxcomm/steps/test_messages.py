"""A newcomer's mistakes: each is refused, and the remedy in the message works, and trains."""

import warnings
from functools import partial

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.steps import mesh as meshes
from tests.marks import slow_except

K, ROWS, FEATURES, CLASSES = 4, 16, 12, 5
RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.normal(size=(ROWS, FEATURES)).astype(np.float32),
    "y": RANDOM.integers(0, CLASSES, ROWS),
}
PARAMS = {"w": jnp.zeros((FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)}
SPARSE = jc.topk(0.5, dense_below=0)


def logits_of(params, x):
    return x @ params["w"] + params["b"]


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def loss_fn(params, batch):
    return cross_entropy(logits_of(params, batch["x"]), batch["y"])


def chain(exchange=SPARSE, *links):
    return jc.chain(exchange, optax.sgd(0.5), *links)


def train(loss=loss_fn, tx=None, params=None, batch=None, mesh=None, **arguments):
    """Does three steps with a falling loss; returns step, state and metrics."""
    step = jc.make_train_step(loss, tx or chain(), mesh or jc.make_mesh(data=K), **arguments)
    state = step.init(PARAMS if params is None else params)
    losses = []
    for _ in range(3):
        state, metrics = step(state, BATCH if batch is None else batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    return step, state, metrics


def with_aux(aux):
    return lambda params, batch: (loss_fn(params, batch), aux(params, batch))


def accuracy(params, batch):
    return (logits_of(params, batch["x"]).argmax(-1) == batch["y"]).mean()


AUX = {
    "logits": (
        lambda p, b: {"logits": logits_of(p, b["x"])},
        r"'logits' must be a scalar; got shape \(4, 5\)\. Take its mean",
        lambda p, b: {"logits": logits_of(p, b["x"]).mean()},
    ),
    "a bare array": (
        accuracy,
        r'must be a dict of scalars; got an array of shape \(\)\. Return {"accuracy": accuracy}',
        lambda p, b: {"accuracy": accuracy(p, b)},
    ),
    "a tuple": (
        lambda p, b: (accuracy(p, b), 1.0),
        "must be a dict of scalars; got a tuple of 2",
        lambda p, b: {"accuracy": accuracy(p, b)},
    ),
    "a dict in a dict": (
        lambda p, b: {"train": {"accuracy": accuracy(p, b)}},
        "'train' must be a scalar; got dict. Return one flat dict of scalars",
        lambda p, b: {"train accuracy": accuracy(p, b)},
    ),
    "the loss": (
        lambda p, b: {"loss": loss_fn(p, b)},
        "must not be those of a step's own metrics, loss, sent, .*; got 'loss'. Give it another name",
        lambda p, b: {"cross entropy": loss_fn(p, b)},
    ),
    "a metric of the exchange": (
        lambda p, b: {"sent": 7.0},
        "got 'sent'. Give it another name",
        lambda p, b: {"sent words": 7.0},
    ),
}


@pytest.mark.parametrize("case", AUX)
def test_outputs_beside_the_loss(case):
    wrong, message, right = AUX[case]
    with pytest.raises(ValueError, match=message):
        train(with_aux(wrong), has_aux=True)
    step = jc.make_train_step(with_aux(right), chain(), jc.make_mesh(data=K), has_aux=True)
    _, metrics = jax.eval_shape(step, step.shapes(PARAMS), BATCH)
    (name,) = metrics.keys() - {"loss", *jc.types.ExchangeMetrics._fields}
    assert metrics[name].shape == ()


def test_flags():
    loss = with_aux(lambda p, b: {"accuracy": accuracy(p, b)})
    with pytest.raises(ValueError, match=r"got a tuple of 2\. Pass has_aux=True"):
        train(loss)
    with pytest.raises(ValueError, match=r"must return \(loss, dict of scalars\) with has_aux=True; got an array of"):
        train(has_aux=True)
    train(loss, has_aux=True)


def test_a_vector_as_a_loss():
    with pytest.raises(ValueError, match=r"A loss must be a scalar; got shape \(4,\)\. Take its mean"):
        train(lambda p, b: optax.softmax_cross_entropy_with_integer_labels(logits_of(p, b["x"]), b["y"]))


def test_other_arguments_of_a_loss():
    with pytest.raises(ValueError, match=r"must take \(params, batch\); got one of \(params, x, y\).*one batch"):
        train(lambda params, x, y: cross_entropy(logits_of(params, x), y))
    with pytest.raises(ValueError, match=r"must take \(params, batch, key\); got one of \(params, batch\)"):
        train(rng=jax.random.key(0))
    train(lambda params, batch: cross_entropy(logits_of(params, batch["x"]), batch["y"]))
    train(lambda params, batch, key: loss_fn(params, batch) + 0 * jax.random.normal(key), rng=jax.random.key(0))
    with pytest.raises(ValueError, match=r"rng must be a random key, or None; got 5\. .*jax\.random\.key\(5\)"):
        train(rng=5)


def test_a_key_in_a_batch():
    def loss(params, batch):
        return loss_fn(params, batch) + 0 * jax.random.normal(batch["key"])

    with pytest.raises(ValueError, match=r"must be a typed one; got two words at \"\['key'\]\".*jax\.random\.key"):
        train(loss, batch=BATCH | {"key": jax.random.PRNGKey(0)})
    train(loss, batch=BATCH | {"key": jax.random.key(0)})
    train(loss, batch=BATCH | {"key": jax.random.wrap_key_data(jax.random.PRNGKey(0))})


def test_a_state_of_none():
    step, state, _ = train()
    with pytest.raises(ValueError, match=r"must be a jaxcomm.state.TrainState; got tuple\. Make it by step\.init"):
        step(tuple(state), BATCH)
    restored = jax.tree.map(np.asarray, flax.serialization.to_state_dict(state))
    fresh = jc.make_train_step(loss_fn, chain(), jc.make_mesh(data=K))
    with pytest.raises(ValueError, match=r"got dict\..*restore a checkpoint into step\.shapes\(params\)"):
        fresh(restored, BATCH)
    with pytest.raises(ValueError, match=r"must have its types; got dicts and lists\. Restore .*as its target"):
        fresh(jc.state.TrainState(**restored), BATCH)
    target = step.shapes(PARAMS)
    fresh(
        jax.device_put(
            flax.serialization.from_state_dict(target, restored), jax.tree.map(lambda s: s.sharding, target)
        ),
        BATCH,
    )


@pytest.mark.slow
def test_a_state_of_other_workers():
    _, state, _ = train()
    host = jax.tree.map(np.asarray, state)
    two = jc.make_train_step(loss_fn, chain(), jc.make_mesh(data=2))
    with pytest.raises(ValueError, match=r"a row for each worker; got 4 rows for 2\..*jaxcomm\.resize_workers"):
        two(host, BATCH)
    two(jc.resize_workers(host, 2), BATCH)
    local_step = jax.shard_map(
        lambda g, s: chain().update(jax.lax.pcast(g, "data", to="varying"), s)[0],
        mesh=jc.make_mesh(data=2),
        in_specs=(P(), jc.state_specs(host.opt_state)),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"must hold one row of state, \(1, .*another number of workers goes through"):
        local_step(PARAMS, host.opt_state)


def test_a_state_without_rows():
    tx = chain()
    step = jc.make_train_step(loss_fn, tx, jc.make_mesh(data=K))
    with pytest.raises(ValueError, match=r"got 1 rows for 4\. Make it by step\.init\(params\)"):
        step(jc.state.TrainState(PARAMS, tx.init(PARAMS), jnp.zeros((), jnp.int32)), BATCH)


def test_parameters_of_local_workers():
    step, state, _ = train(tx=jc.chain(optax.sgd(0.1), jc.local_sgd(2, exchange=jc.plump_dp())))
    with pytest.raises(TypeError, match=r"rows, one for each worker; got \['w'\]\. The model .*step\.params\(state\)"):
        logits_of(state.params, BATCH["x"])
    with pytest.raises(AttributeError, match=r"got \.shape\. The model .*jaxcomm\.state\.global_params\(state\)"):
        _ = state.params.shape
    assert logits_of(step.params(state), BATCH["x"]).shape == (ROWS, CLASSES)
    assert logits_of(jc.state.global_params(state), BATCH["x"]).shape == (ROWS, CLASSES)


def test_sharded_parameters():
    """They keep their sharding, but are refused if it is over the workers."""
    flat, mesh = jc.make_mesh(data=K), jc.make_mesh(data=2, fsdp=2)
    over_workers = PARAMS | {"w": jax.device_put(PARAMS["w"], NamedSharding(flat, P("data")))}
    message = r"sharded over the workers, .*at \"\['w'\]\".*make_mesh\(data=2, fsdp=4\) and P\(\"fsdp\"\)"
    with pytest.raises(ValueError, match=message):
        jc.make_train_step(loss_fn, chain(), flat).init(over_workers)
    with pytest.raises(ValueError, match=r"sharded over the workers, .*Shard it along another axis, P\('fsdp'\)"):
        jc.make_train_step(loss_fn, chain(), mesh).init(over_workers)
    with pytest.raises(
        ValueError, match=r"some parameter must be sharded; got .*replicated parameters alone.*device_put"
    ):
        jc.make_train_step(loss_fn, chain(), mesh).init(PARAMS)
    params = PARAMS | {"w": jax.device_put(PARAMS["w"], NamedSharding(mesh, P("fsdp")))}
    _, state, _ = train(params=params, mesh=mesh)
    assert state.params["w"].sharding.spec[0] == "fsdp"


@pytest.mark.slow
def test_parameters_sharded_in_a_worker():
    """FSDP: over the axis of the workers, the loss gets shards; over another axis, whole tensors."""
    with pytest.raises(TypeError) as error:
        train(specs={"w": P("data"), "b": P()})
    (note,) = [note for note in error.value.__notes__ if "jaxcomm" in note or "specs=" in note]
    assert 'make_mesh(data=2, fsdp=4), specs P("fsdp") and auto=("fsdp",)' in note
    train(mesh=jc.make_mesh(data=2, fsdp=4), specs={"w": P("fsdp"), "b": P()}, auto=("fsdp",))


@pytest.mark.slow
def test_a_line_search_elsewhere():
    tx = optax.chain(jc.plump_dp(), optax.lbfgs())
    with pytest.raises(TypeError, match="'value_fn'") as error:
        train(tx=tx)
    assert any("Write jaxcomm.chain in the place of optax.chain" in note for note in error.value.__notes__)
    train(tx=jc.chain(jc.plump_dp(), optax.lbfgs()))


def test_an_exchange_in_multi_steps():
    with pytest.raises(ValueError, match=r"inside a transformation .*MultiStepsState.*accumulate=G\)"):
        train(tx=optax.MultiSteps(chain(), 2).gradient_transformation())
    step = jc.make_train_step(loss_fn, jc.chain(SPARSE, optax.sgd(0.5), accumulate=2), jc.make_mesh(data=K))
    state = step.init(PARAMS)
    for _ in range(2):
        state, _ = step(state, BATCH)
    assert state.opt_state.gradient_step == 1


@pytest.mark.parametrize("wrapper", slow_except(["masked", "partition"], "partition"))
def test_a_partial_exchange(wrapper):
    labels = {"w": "sent", "b": "frozen"}
    tx = {
        "masked": optax.chain(optax.masked(SPARSE, {"w": True, "b": False}), optax.sgd(0.5)),
        "partition": optax.partition({"sent": chain(), "frozen": optax.set_to_zero()}, labels),
    }[wrapper]
    with pytest.raises(ValueError, match=r"must be a link of the chain itself; got topk inside .*choose parameters by"):
        train(tx=tx)
    _, state, _ = train(tx=chain(jc.topk(0.5, dense_below=0, where="w", others=optax.set_to_zero())))
    np.testing.assert_array_equal(state.params["b"], PARAMS["b"])


def test_integer_parameters():
    params = PARAMS | {"steps": jnp.zeros(3, jnp.int32)}
    with pytest.raises(ValueError, match=r"got int32 at \"\['steps'\]\". Keep others out.*make_train_step leaves"):
        SPARSE.init(params)
    _, state, _ = train(params=params)
    np.testing.assert_array_equal(state.params["steps"], 0)


def test_parameters_that_are_no_arrays():
    step = jc.make_train_step(loss_fn, chain(), jc.make_mesh(data=K))
    for make in (step.init, step.shapes):
        with pytest.raises(ValueError, match=r"must be arrays; got a \w+\. .*eqx\.partition\(model, eqx\.is_array\)"):
            make(PARAMS | {"activation": jnp.tanh})


@pytest.mark.slow
def test_a_loop_of_steps():
    tx = chain()
    step, state, _ = train(tx=tx, donate=False)
    batches = jax.tree.map(lambda rows: np.stack([rows] * 5), BATCH)
    epoch = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))
    check = partial(jc.verify, epoch, state, batches, tx=tx, params=PARAMS, workers=K, other_bytes=16)
    with pytest.raises(ValueError, match=r"5 exchanges are in the usual step\. .*pass steps=5"):
        check()
    check(steps=5)


def test_threads(monkeypatch):
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setattr(meshes.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(meshes.jax, "__version_info__", (0, 10, 2))
    with pytest.warns(UserWarning, match=r"got 4 devices on 2 cores, without it\. Set PJRT_NPROC=16"):
        jc.make_mesh(data=4)
    monkeypatch.setenv("PJRT_NPROC", "4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jc.make_mesh(data=4)
        monkeypatch.delenv("PJRT_NPROC")
        jc.make_mesh(data=2)
        monkeypatch.setattr(meshes.jax, "__version_info__", (0, 12, 0))
        jc.make_mesh(data=4)


# A state that a step has taken, and arguments in the wrong place.


def test_a_donated_state():
    step = jc.make_train_step(loss_fn, chain(), jc.make_mesh(data=K))
    first = step.init(PARAMS)
    best = jax.tree.map(jnp.copy, step.params(first))
    second, _ = step(first, BATCH)
    with pytest.raises(
        ValueError, match=r"passed to a step before, deleted at \"\.params\['b'\]\".*or make the step with"
    ):
        step(first, BATCH)
    step(second, BATCH)
    jax.tree.map(np.testing.assert_array_equal, best, PARAMS)
    keeps = jc.make_train_step(loss_fn, chain(), jc.make_mesh(data=K), donate=False)
    state = keeps.init(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, keeps(state, BATCH)[0], keeps(state, BATCH)[0])


def test_parameters_as_a_state():
    step = jc.make_train_step(loss_fn, chain(), jc.make_mesh(data=K))
    for call in (step, step.verify, step.report):
        with pytest.raises(
            ValueError, match=r"must be a jaxcomm\.state\.TrainState; got dict\. Make it by step\.init\(params\)"
        ):
            call(PARAMS, BATCH)


def test_no_transformation():
    with pytest.raises(
        ValueError, match=r"A link of a chain must be a transformation.*got topk\. Call it: topk\(\.\.\.\)"
    ):
        jc.chain(jc.topk, optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"tx must be a transformation, with init and update; got dict\. Pass jaxcomm\.ch"
    ):
        jc.wire_report(PARAMS, chain(), workers=4)
    with pytest.raises(
        ValueError, match=r"params must be a tree of arrays.*got a custom_jvp at \"\['act'\]\"\. Pass what is"
    ):
        jc.wire_report(chain(), PARAMS | {"act": jax.nn.relu}, workers=4)


def test_units_of_a_rate():
    one, two = (jc.planner.estimate(PARAMS, workers=4, rate=rate) for rate in ("100mbit", 1e8))
    assert [prediction.step for prediction in one.predictions] == [prediction.step for prediction in two.predictions]
    with pytest.raises(ValueError, match=r"^rate must be a positive number with its unit; got 'fast'\. Write 100mbit"):
        jc.planner.estimate(PARAMS, workers=4, rate="fast")


def test_an_unknown_axis():
    mesh, tx = jc.make_mesh(data=K), chain()
    step = jc.make_train_step(lambda params, batch: jax.lax.pmean(loss_fn(params, batch), "batch"), tx, mesh)

    def own_step(params, state, batch):
        gradients = jax.lax.pmean(jax.grad(loss_fn)(params, batch), "batch")
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    foreign = partial(jc.data_parallel(own_step, mesh, batch=2), PARAMS, tx.init(PARAMS), BATCH)
    for call in (partial(step, step.init(PARAMS), BATCH), foreign):
        with pytest.raises((AssertionError, NameError)) as caught:
            call()
        assert "its axis must be one of the mesh, ('data',)" in "".join(caught.value.__notes__)


def test_injected_hyperparameters():
    with pytest.raises(ValueError, match=r"got Array.*put optax\.inject_hyperparams around the optimizer alone"):
        optax.inject_hyperparams(jc.topk)(sparsity=0.9).init(PARAMS)
    tx = jc.chain(jc.topk(0.9), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    assert jc.simulate(loss_fn, tx, K).init(PARAMS)
