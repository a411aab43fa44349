"""Bytes of steps for sharded parameters: predicted, traced, and in the compiled text."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks.dense_ways import plan_split_dense
from jaxcomm.accounting.hlo import read_program
from tests.jaxcomm.steps import sharded
from tests.jaxcomm.train_steps import state_shapes
from tests.marks import slow_except

SGD = jc.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.1, momentum=0.9))
METHODS = {"plump_dp": jc.plump_dp(), "quant_dp": jc.quant_dp(8)}


def program_of(lowered):
    """The collectives of a compiled program."""
    return read_program(lowered.compile().as_text())


def wire_of(name, tx, data, model=None):
    """The compiled and the traced program of a step that is never run."""
    make, loss_fn, specs, _ = sharded.WAYS[name]
    mesh = sharded.explicit_mesh(data, model) if name == "unreduced" else sharded.auto_mesh(data, model)
    state = state_shapes(sharded.start(name, data), tx, mesh, specs)
    step, batch = make(loss_fn, tx, mesh, specs), next(sharded.batches(1))
    traced = jc.accounting.step_report(step, state, batch, params=state.params, workers=data)
    return program_of(step.lower(state, batch)), traced.program


def test_hybrid_step():
    tx, K = jc.chain(METHODS["quant_dp"], SGD), 4
    compiled, traced = wire_of("split", tx, K)
    assert compiled.received == traced.received
    layers = plan_split_dense((sharded.FEATURES, sharded.HIDDEN, sharded.CLASSES), sharded.ROWS, K)
    by_hand = 2 * 4 * sharded.ROWS * (sharded.FEATURES + sharded.CLASSES) * (K - 1) / K  # by outputs, then by inputs
    assert layers.received <= by_hand
    exchange = jc.wire_report(METHODS["quant_dp"], sharded.params()["bottom"], K)
    scalars = 2 * (K - 1) / K * (4 + 16)  # the loss; the counts
    assert float(traced.received) == by_hand + exchange.received + scalars


def test_one_worker():
    tx, K = jc.chain(jc.plump_dp(), SGD), 4
    compiled, traced = wire_of("one worker", tx, K)
    assert compiled.received == traced.received
    features, labels = 4 * sharded.ROWS * sharded.FEATURES, 4 * sharded.ROWS * sharded.CLASSES
    volume = (K - 1) / K * (2 * features + labels)  # over all workers
    scalars = 2 * (K - 1) / K * (4 + 4 + 4 + 16)  # the loss and its derivative, the mean loss, the counts
    exchange = jc.wire_report(jc.plump_dp(), sharded.params()["bottom"], K)
    assert float(traced.received) == volume / K + exchange.received + scalars


def slices_over_model():
    """The shapes on one device, with a model axis of 2, by group: sharded ones, and the others."""
    params_, specs = sharded.params(), sharded.OVER_MODEL
    kernel = jax.ShapeDtypeStruct((sharded.FEATURES, sharded.HIDDEN // 2), jnp.float32)
    bias = jax.ShapeDtypeStruct((sharded.HIDDEN // 2,), jnp.float32)
    down = jax.ShapeDtypeStruct((sharded.HIDDEN // 2, sharded.CLASSES), jnp.float32)
    assert specs["down"]["bias"] == P()
    return [kernel, bias, down], [params_["bottom"], params_["down"]["bias"]]


@pytest.mark.parametrize(
    ("name", "method"),
    slow_except(
        [("tensor parallel", "quant_dp"), ("partitioned", "quant_dp"), ("unreduced", "plump_dp")],
        ("unreduced", "plump_dp"),
    ),
)
def test_sliced_gradient(name, method):
    """On 4 x 2 devices, by the number of participants: over the workers, only the shards' exchange is sent; over the
    model axis, only less than the smallest sharded gradient."""
    exchange = METHODS[method]
    compiled, traced = wire_of(name, jc.chain(exchange, SGD), 4, 2)
    over = {K: [t for _, t in compiled.operations() if t.workers == K] for K in (2, 4, 8)}
    sliced_shapes, copies = slices_over_model()
    predicted = sum(jc.wire_report(exchange, shapes, 4).received for shapes in (sliced_shapes, copies))
    loss, counts = 2 * 3 / 4 * 4, 2 * 7 / 8 * 16
    assert float(sum(t.received for t in over[4])) == pytest.approx(predicted + loss)
    assert float(sum(t.received for t in over[8])) == counts
    activations = 4 * sharded.ROWS // 4 * max(sharded.FEATURES, sharded.CLASSES)
    copied_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(copies))
    assert sum(t.operand_bytes for t in over[2]) <= 2 * activations + copied_bytes
    assert max((t.operand_bytes for t in over[2]), default=0) < 4 * sharded.FEATURES * sharded.HIDDEN // 2
    assert not [t for t in over[2] if t.op == "all_gather"]
    if name == "tensor parallel":
        assert compiled.received == traced.received


def test_gradient_over_workers_alone():
    """The region over all axes is there to avoid this, as the same count shows."""
    mesh, tx = jc.make_mesh(data=4, model=2), jc.quant_dp(8)
    kernel = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
    rows = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def worker(kernel, rows):
        params_ = lax.pcast(kernel, "data", to="varying")
        gradient = jax.grad(lambda kernel: jnp.mean(jnp.tanh(rows @ kernel) ** 2))(params_)
        return tx.update(gradient, tx.init(kernel), kernel)[0]

    step = jax.shard_map(worker, mesh=mesh, axis_names={"data"}, in_specs=(P(), P("data")), out_specs=P())
    program = program_of(jax.jit(step).lower(kernel, rows))
    gathered = [t for _, t in program.operations() if t.workers == 2 and t.op == "all_gather"]
    assert max(t.operand_bytes for t in gathered) >= 4 * 64 * 32


# Verification only counts what is sent over the workers.


@pytest.mark.parametrize(
    "name", ["split", "one worker", "tensor parallel", pytest.param("partitioned", marks=pytest.mark.slow), "unreduced"]
)
def test_verified_step(name):
    make, loss_fn, specs, mesh = sharded.WAYS[name]
    mesh, tx = mesh(), jc.chain(jc.topk(0.9, dense_below=16), SGD)
    step, batch = make(loss_fn, tx, mesh, specs), next(sharded.batches(1))
    state = step.shapes(sharded.start(name, mesh.shape["data"]))
    report = step.verify(state, sharded.on(mesh, batch))
    loss = 2 * 4 * (mesh.shape["data"] - 1) / mesh.shape["data"]  # its mean, which the compiler adds for a global loss
    surplus = loss if name in ("partitioned", "unreduced") else 0
    assert 0 < report.program.received <= step.report(state, batch).program.received + surplus


def test_dense_all_reduce_is_found():
    mesh, tx = sharded.auto_mesh(2, 2), jc.chain(jc.topk(0.9, dense_below=16), SGD)

    def loss(params, batch):
        return sharded.whole(params, batch) + 0.0 * jnp.sum(lax.psum(jnp.outer(*2 * [batch["label"][:, 0]]), "data"))

    step, batch = sharded.partitioned(loss, tx, mesh, sharded.OVER_MODEL), next(sharded.batches(1))
    with pytest.raises(ValueError, match="a dense all-reduce is left in the usual step"):
        step.verify(step.shapes(sharded.params()), sharded.on(mesh, batch), other_bytes=20)


def test_scan_of_steps():
    tx, mesh = jc.chain(jc.topk(0.9), SGD), jc.make_mesh(data=2)
    step = jc.make_train_step(sharded.whole, tx, mesh)
    state, batch = step.shapes(sharded.params()), sharded.on(mesh, next(sharded.batches(1)))
    batches = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), batch)
    scan = jax.jit(lambda state, batches: jax.lax.scan(step._step, state, batches))
    options = {"tx": tx, "params": sharded.params(), "workers": 2}
    one = step.verify(state, batch).program.received
    assert jc.verify(scan, state, batches, **options, steps=3).program.received == 3 * one
    for steps, message in ((2, "a dense all-reduce is left"), (4, "must send its whole exchange")):
        with pytest.raises(ValueError, match=message):
            jc.verify(scan, state, batches, **options, steps=steps, other_bytes=8)
