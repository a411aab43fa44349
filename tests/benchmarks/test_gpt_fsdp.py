"""Weights sharded over the workers: with 32 bits, training equals that of one device; with fewer, it stays close."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from benchmarks import gpt, gpt_fsdp
from benchmarks.gpt_fsdp import Config, make_step
from configs.methods import PlumpDp
from train.records import Records
from train.seeds import train_seeds

SMALL = Config(experiment="gpt_stdlib", layers=1, width=16, steps=6, batch=4, workers=2, seeds=1)


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["y"]) ** 2)


@pytest.mark.parametrize(("bits", "tolerance"), [(32, 1e-6), (8, 0.01), (4, 0.1)])
def test_sharded_step(bits, tolerance):
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(8, 16)).astype(np.float32), "out": rng.normal(size=(16, 4)).astype(np.float32)}
    batch = {"x": rng.normal(size=(16, 8)).astype(np.float32), "y": rng.normal(size=(16, 4)).astype(np.float32)}
    optimizer = optax.sgd(0.1, momentum=0.9)
    whole, opt_state = params, optimizer.init(params)
    step, state = make_step(loss_fn, params, optimizer, jc.make_mesh(data=4), bits)
    assert state[0]["in"].addressable_shards[0].data.shape == (2, 16)
    for number in range(20):
        expected, gradient = jax.value_and_grad(loss_fn)(whole, batch)
        updates, opt_state = optimizer.update(gradient, opt_state)
        whole = optax.apply_updates(whole, updates)
        state, loss = step(state, batch)
        if number == 0:
            np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(loss, expected, rtol=tolerance)


@pytest.mark.slow
def test_run_of_32_bits(tmp_path):
    records = Records(tmp_path / "runs.json")
    experiment = gpt.experiment_of(gpt.Config(evaluations=1, **vars(SMALL) | {"json": None}))
    runs = {bits: gpt_fsdp.train(records, experiment, bits, 0) for bits in (32, 4)}
    (dense,) = train_seeds(Records(None), experiment, PlumpDp(), 1)
    assert runs[32]["loss"] == pytest.approx(dense["scores"]["loss"], rel=1e-5)
    assert runs[4]["loss"] == pytest.approx(dense["scores"]["loss"], rel=0.05)
    assert runs[32]["bytes_per_step"] == pytest.approx(dense["bytes_per_step"], rel=0.01)
    assert runs[4]["bytes_per_step"] < runs[32]["bytes_per_step"] / 5
    assert gpt_fsdp.train(records, experiment, 4, 0) == runs[4]
