"""MuLoCo: Optax's Muon before `local_sgd`, against its algorithm; its order, its bytes, and a resumed run."""

import warnings

import flax.serialization
import jax
import numpy as np
import optax
import pytest

import jaxcomm as jc
from tests.jaxcomm.train_steps import KINDS, make_step, normal
from tests.jaxcomm.train_steps import linear as loss
from tests.marks import slow_except
from tests.reference.local_sgd import LocalSgdReference
from tests.reference.muon import MuonReference
from tests.reference.plump_dp import PlumpDpReference

K, H, RATE = 2, 3, 0.125
SHAPES = {"b": (12,), "down": (20, 12), "up": (12, 16)}
N = 12 + 240 + 192


def muloco():
    muon = optax.contrib.muon(RATE, beta=0.75, nesterov=False, adam_b1=0.75, adam_b2=0.875)
    return jc.chain(muon, jc.local_sgd(H, exchange=jc.plump_dp()))


def first_params():
    return normal(SHAPES)


def batch_of(step):
    return normal(SHAPES, (step, 3), K)


@pytest.fixture(scope="module", params=slow_except(KINDS, "simulated"))
def step(request):
    return make_step(request.param, loss, muloco(), workers=K, donate=False)


def started(step):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the chain's order raises no warning
        return step.init(first_params())


def test_steps_are_the_papers(step):
    state, inner = started(step), [MuonReference(RATE, 0.75, 0.75, 0.875) for _ in range(K)]
    options = {"lr": 0.7, "momentum": 0.9, "nesterov": True, "exchange": PlumpDpReference()}
    reference = LocalSgdReference(first_params(), K, H=H, **options)
    for number in range(3 * H + 1):
        batch = batch_of(number)
        state, _ = step(state, batch)
        rows_of = [{name: rows[k] for name, rows in batch.items()} for k in range(K)]
        reference.step([muon.update(gradient) for muon, gradient in zip(inner, rows_of, strict=True)])
        for name in SHAPES:
            np.testing.assert_allclose(step.params(state)[name], reference.global_model[name], atol=2e-5)
            rows = np.asarray(state.params.rows[name]).reshape(K, *SHAPES[name])
            for k in range(K):
                np.testing.assert_allclose(rows[k], reference.params[k][name], atol=2e-5)
    assert any(np.any(reference.params[0][name] != reference.params[1][name]) for name in SHAPES)


def test_bytes():
    step = make_step("mesh", loss, muloco(), workers=K)
    report = step.verify(started(step), batch_of(0))
    assert report.every == H
    assert report.received_in_exchange == pytest.approx(2 * (K - 1) / K * 4 * N, rel=0.01)  # and a loss, a flag


def test_checkpoints(step):
    """After an exchange and a local step: the momentum of every worker is in the state."""
    state = started(step)
    for number in range(H + 1):
        state, _ = step(state, batch_of(number))
    read = flax.serialization.from_bytes(started(step), flax.serialization.to_bytes(jax.tree.map(np.asarray, state)))
    for number in range(H + 1, 2 * H + 1):
        (state, _), (read, _) = step(state, batch_of(number)), step(read, batch_of(number))
    jax.tree.map(np.testing.assert_array_equal, read, state)


def test_another_number_of_workers(step):
    state = started(step)
    for number in range(H):
        state, _ = step(state, batch_of(number))
    model = jax.tree.map(np.asarray, step.params(state))
    third = jc.simulate(loss, muloco(), 3, donate=False)
    resized = step.resize(state, 3)
    jax.tree.map(np.testing.assert_array_equal, third.params(resized), model)
    batch = {name: np.concatenate([rows, rows[:1]]) for name, rows in batch_of(H).items()}
    state, _ = third(resized, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params.rows))
