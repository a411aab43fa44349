"""The names of operations in compiled programs say which part of a step they are."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.layers import masked_boundary

COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(")
PARTS = re.compile(
    r"jaxcomm/(select|encode|exchange|decode)(?=[/)])"
)  # a transformation has brackets around what it transforms
PARAMS = {"w": jnp.zeros((48, 64)), "v": jnp.zeros((48, 64)), "b": jnp.zeros(7)}
BATCH = np.ones((8, 48), np.float32)
ALL = {"select", "encode", "exchange", "decode"}
SLOW = pytest.mark.slow


def loss_fn(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + batch @ params["v"]) ** 2) + jnp.sum(params["b"] ** 2)


def operations(text):
    """The instructions of a compiled program that have a name, with it; without scalars inside reductions."""
    pairs = [(line, re.search(r'op_name="(jit\([^"]*)"', line)) for line in text.splitlines()]
    return [(line, name[1]) for line, name in pairs if name]


@pytest.mark.parametrize(
    ("link", "parts"),
    [
        pytest.param(jc.dct_dp(0.9), ALL, id="dct_dp"),
        pytest.param(jc.plump_dp(), {"exchange"}, id="plump_dp"),
        pytest.param(jc.topk(0.9, collective="balanced", checksum=True), ALL, id="balanced", marks=SLOW),
        pytest.param(jc.random_k(0.9, collective="ring"), ALL, id="ring", marks=SLOW),
        pytest.param(jc.iwp(0.01, density=0.1, mask_codec="coded"), ALL, id="iwp", marks=SLOW),
        pytest.param(jc.dgc(0.9, warmup_steps=2), ALL, id="dgc", marks=SLOW),
        pytest.param(jc.quant_dp(8), ALL - {"select"}, id="quant_dp", marks=SLOW),
        pytest.param(jc.powersgd(2), ALL - {"select"}, id="powersgd", marks=SLOW),
    ],
)
def test_exchanges(link, parts):
    step = jc.make_train_step(loss_fn, jc.chain(link, optax.sgd(0.1)), jc.make_mesh(data=4))
    text = jax.jit(step).lower(step.init(PARAMS), BATCH).compile().as_text()
    pairs = operations(text)
    inside = [(line, name) for line, name in pairs if "jaxcomm.update" in name]
    assert {part for _, name in inside for part in PARTS.findall(name)} == parts
    # Apart from the exchange, the library sends the mean of the loss, and computes none of the parts.
    assert {part for _, name in pairs for part in PARTS.findall(name) if "jaxcomm.update" not in name} <= {"exchange"}
    for lines in (inside, pairs):
        traffic = [name for line, name in lines if COLLECTIVE.search(line)]
        assert traffic
        assert {PARTS.findall(name)[-1] for name in traffic} == {"exchange"}


def test_hierarchical_collectives():
    mesh = jc.make_mesh(slice=2, data=2)
    inner = jc.hierarchical(jc.plump_dp(axis_name="slice"), inside="data", across="slice")
    step = jc.make_train_step(loss_fn, jc.chain(inner, optax.sgd(0.1)), mesh, axis_name=("slice", "data"))
    text = jax.jit(step).lower(step.init(PARAMS), BATCH).compile().as_text()
    collectives = [name for line, name in operations(text) if COLLECTIVE.search(line) and "jaxcomm.update" in name]
    assert len(collectives) >= 3
    assert all(PARTS.findall(name)[-1] == "exchange" for name in collectives)


def test_activations():
    mesh = jc.make_mesh(stage=2)

    def move(x):
        def loss(x):
            return jnp.sum(masked_boundary(x, source=0, target=1, boundary=jc.dct_mp(0.75)) ** 2)

        return jax.grad(loss)(x)

    spec = jax.sharding.PartitionSpec("stage")
    program = jax.jit(jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=spec))
    pairs = operations(program.lower(jnp.ones((8, 64))).compile().as_text())
    assert {part for _, name in pairs for part in PARTS.findall(name)} == ALL
    permutations = [name for line, name in pairs if " collective-permute(" in line]
    assert len(permutations) == 2  # forward and back
    assert all(PARTS.findall(name)[-1] == "exchange" for name in permutations)
