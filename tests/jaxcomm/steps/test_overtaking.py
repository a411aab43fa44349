"""Between processes on CPUs, a collective that comes after a loop or a conditional must need a result of it.

XLA for CPUs goes on while a loop or a conditional that communicates is under way, and Gloo then mixes the messages.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.accounting.hlo import _Computations, _reachable
from jaxcomm.accounting.text import operands_of
from jaxcomm.rounds import model as rounds_model
from jaxcomm.steps import sharding

PARAMS = {"w": np.ones((64, 64), np.float32), "b": np.ones(64, np.float32), "v": np.ones((64, 64), np.float32)}
SPECS = {"w": P(None, "fsdp"), "b": P(), "v": P("fsdp", None)}
BATCH = np.ones((8, 64), np.float32)


def loss_fn(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"] + params["b"]) @ params["v"]))


def overtaking(text):
    """Returns pairs of a loop or conditional that communicates, and a later collective that needs nothing of it."""
    computations, pairs = _Computations(text), []
    for instructions in computations.instructions.values():
        names = {match["name"] for match in instructions}
        feeds = {match["name"]: operands_of(match["rest"], names) for match in instructions}
        before = []
        for match in instructions:  # in the order of the schedule
            program = jc.traffic.Program()
            computations.add(program, match)
            if not program.communicates:
                continue
            needs = _reachable(match["name"], feeds)
            pairs += [(name, match["name"]) for name in before if name not in needs]
            before += [match["name"]] if match["op"] in ("while", "conditional", "call") else []
    return pairs


TEXT = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%sent (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %s = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
}

%kept (x: f32[4]) -> f32[4] {
  ROOT %k = f32[4]{0} parameter(0)
}

ENTRY %main (p: pred[], x: f32[4], y: f32[4]) -> (f32[4], f32[4]) {
  %p = pred[] parameter(0)
  %x = f32[4]{0} parameter(1)
  %y = f32[4]{0} parameter(2)
  %cond = f32[4]{0} conditional(%p, %x, %x), true_computation=%sent, false_computation=%kept
  %z = f32[4]{0} add(%y, OPERAND)
  %sum = f32[4]{0} all-reduce(%z), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (f32[4]{0}, f32[4]{0}) tuple(%cond, %sum)
}
"""


def test_what_is_found():
    assert overtaking(TEXT.replace("OPERAND", "%y")) == [("cond", "sum")]
    assert overtaking(TEXT.replace("OPERAND", "%cond")) == []


def step_text(tx, mesh, **options):
    step = jc.make_train_step(loss_fn, tx, mesh, **options)
    specs = options.get("specs", jax.tree.map(lambda _: P(), PARAMS))
    params = jax.device_put(PARAMS, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})
    return step.lower(step.init(params), BATCH).compile().as_text()


EXCHANGES = {
    "topk": jc.topk(0.9),
    "start": jc.topk(0.9, start=4),
    "drain": jc.dct_dp(0.9, drain_every=4, checksum=True),
    "dgc": jc.dgc(0.9, warmup_steps=5),
    "powersgd": jc.powersgd(2),
}
LOCAL = {
    "local_sgd": jc.local_sgd(5, exchange=jc.topk(0.9)),
    "slim_dp": jc.slim_dp(q=4),
    "fragments": jc.local_sgd(6, fragments=2, exchange=jc.plump_dp()),
}
CHAINS = {name: jc.chain(tx, optax.sgd(0.1)) for name, tx in EXCHANGES.items()}
CHAINS |= {name: jc.chain(optax.sgd(0.1), tx) for name, tx in LOCAL.items()}


@pytest.mark.parametrize("name", ["start", "drain", "slim_dp", *(pytest.param(n, marks=pytest.mark.slow) for n in
    ("topk", "dgc", "powersgd", "local_sgd", "fragments"))])  # fmt: skip
def test_steps(name):
    assert overtaking(step_text(CHAINS[name], jc.make_mesh(data=4))) == []


def test_masks_of_iwp():
    tx = jc.chain(jc.iwp(0.1, life_span=5), optax.sgd(0.1))
    assert overtaking(step_text(tx, jc.make_mesh(data=4))) == []


@pytest.mark.parametrize("name", ["start", "local_sgd", pytest.param("slim_dp", marks=pytest.mark.slow)])
def test_sharded_steps(name, monkeypatch):
    """Where parameters are sharded in two ways, two exchanges follow one another."""
    monkeypatch.setattr(sharding, "mixes_messages", lambda mesh: True)
    assert overtaking(step_text(CHAINS[name], jc.make_mesh(data=2, fsdp=2), specs=SPECS, auto=("fsdp",))) == []


@pytest.mark.parametrize("is_gloo", [True, False])
def test_payloads_of_a_worker_of_several_processes(is_gloo, monkeypatch):
    """What is selected is the same where no loop communicates."""
    texts, mesh = [], jc.make_mesh(fsdp=2)
    monkeypatch.setattr(rounds_model, "mixes_messages", lambda mesh: is_gloo)
    rng = np.random.default_rng(0)
    w = jax.device_put(rng.standard_normal((64, 64), np.float32), NamedSharding(mesh, P("fsdp")))
    params = {"w": w, "b": jax.device_put(np.ones(3, np.float32), NamedSharding(mesh, P()))}
    shapes = jax.tree.map(jax.typeof, params)
    model = rounds_model.Model(jc.topk(0.9).method, optax.sgd(0.1), shapes)
    pack, unsent = model._pack, model.unsent(params)

    def recorded(*args):
        texts.append(pack.lower(*args).compile().as_text())
        return pack(*args)

    model._pack = recorded
    moved = jax.tree.map(lambda x: x - 0.1 * jnp.sin(50 * x), params)
    packing = model.pack(model.first(params).params, moved, 8.0, unsent, 3, np.uint32(1))
    assert not is_gloo or overtaking(texts[0]) == []
    assert packing.words.is_fully_replicated
    assert packing.late.change["w"].sharding == w.sharding
    assert packing.counted.residual.sharding == unsent.residual.sharding
    one = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), (params, moved))
    alone = rounds_model.Model(jc.topk(0.9).method, optax.sgd(0.1), shapes)
    expected = alone.pack(alone.first(one[0]).params, one[1], 8.0, alone.unsent(one[0]), 3, np.uint32(1))
    jax.tree.map(np.testing.assert_array_equal, packing, expected)
