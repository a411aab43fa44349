"""A step leaves its work to the device: it is compiled once, and no later step waits for a number on the host."""

from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc

PARAMS = {"w": np.ones((16, 8), np.float32), "v": np.ones((8, 4), np.float32)}
BATCH = np.ones((16, 16), np.float32)
COMPILED = "/jax/core/compile/backend_compile_duration"


def loss_fn(params, x):
    return ((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2).mean()


def chain(delay=0):
    return jc.chain(jc.dct_dp(0.5, dense_below=0), optax.adam(1e-2), delay=delay)


def whole(tx, **options):
    step = jc.make_train_step(loss_fn, tx, jc.make_mesh(data=4), **options)
    return step, step.init(PARAMS)


def local():
    return whole(jc.chain(optax.sgd(0.1), jc.local_sgd(2, exchange=jc.topk(0.5))))


def simulated():
    step = jc.simulate(loss_fn, chain(), 4)
    return step, step.init(PARAMS)


def sharded(**options):
    mesh = jc.make_mesh(data=2, model=2)
    specs = {"w": jax.P(None, "model"), "v": jax.P("model")}
    step = jc.make_train_step(loss_fn, chain(), mesh, specs=specs, auto=("model",), **options)
    return step, step.init(PARAMS)


def in_stages(**options):
    stages = [lambda params, x, batch: jnp.tanh(batch @ params["w"]), lambda params, x, batch: x @ params["v"]]
    params = [{"w": PARAMS["w"]}, {"v": PARAMS["v"]}]
    pipeline = jc.Pipeline(stages, lambda out, batch: ((out**2).mean(), {}), params)
    step = jc.make_train_step(pipeline, chain(), jc.make_mesh(data=2, stage=2), **options)
    return step, step.init(params)


def scripted(**options):
    tx = chain()

    def update(state, x):
        value, grads = jax.value_and_grad(loss_fn)(state[0], x)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), value

    return jc.data_parallel(update, jc.make_mesh(data=4), **options), (PARAMS, tx.init(PARAMS))


STEPS = {
    "whole": lambda: whole(chain()),
    "delayed": lambda: whole(chain(delay=1)),
    "local": local,
    "simulated": simulated,
    "sharded": sharded,
    "scripted": scripted,
}


@contextmanager
def compilations():
    """Yields a list that collects the events that JAX times in the block, such as compilations."""
    names = []

    def listen(event, *_, **__):
        names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("kind", STEPS)
def test_later_steps_compile_and_read_nothing(kind, monkeypatch):
    step, state = STEPS[kind]()
    state, _ = step(state, BATCH)
    array = type(jnp.zeros(()))

    def read(*_):
        pytest.fail("a step has read a number of the device")

    with compilations() as names, monkeypatch.context() as reading:
        reading.setattr(array, "_value", property(read))
        for _ in range(3):
            state, metrics = step(state, BATCH)
    assert COMPILED not in names
    assert jax.tree.all(jax.tree.map(lambda leaf: bool(np.isfinite(leaf).all()), metrics))


def test_the_test_sees_compilations_and_reads(monkeypatch):
    array = jnp.zeros(3)
    with compilations() as names:
        jax.jit(lambda x: x * 3 + 1)(array)
    assert COMPILED in names

    def read(_):
        raise RuntimeError("read")

    monkeypatch.setattr(type(array), "_value", property(read))
    with pytest.raises(RuntimeError, match="read"):
        float(array[0])


@pytest.mark.parametrize("options", [partial(whole, chain()), sharded, in_stages, scripted])
def test_compiler_options(options):
    step, state = options(compiler_options={"xla_no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        step(state, BATCH)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        step.lower(state, BATCH).compile()
    step, state = options(compiler_options={"xla_embed_ir_in_executable": True})
    step(state, BATCH)
