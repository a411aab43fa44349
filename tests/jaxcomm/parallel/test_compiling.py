"""How steps are compiled."""

import re

import jax.numpy as jnp
import optax
import pytest

import jaxcomm as jc
from jaxcomm.parallel import compiling

WIDTH = 64


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


@pytest.fixture(autouse=True)
def asked_again():
    compiling.compiler_options.cache_clear()
    yield
    compiling.compiler_options.cache_clear()


def whole_step(mesh):
    step = jc.make_train_step(loss_fn, optax.chain(jc.plump_dp(), optax.sgd(0.1, momentum=0.9)), mesh)
    return step.lower(step.init({"w": jnp.ones((WIDTH, WIDTH))}), jnp.ones((4, WIDTH)))


def test_a_step_that_donates_its_state_copies_no_momentum():
    text = whole_step(jc.make_mesh(data=2)).compile().as_text()
    assert f"f32[{WIDTH},{WIDTH}]" in text
    assert not re.findall(rf"= f32\[{WIDTH},{WIDTH}\]\S* copy\(", text)


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setattr(compiling, "_REGIONS", {"xla_cpu_no_such_option": True})
    assert compiling.compiler_options() == {}
    assert whole_step(jc.make_mesh(data=2)).compile()
