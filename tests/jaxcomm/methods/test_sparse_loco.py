"""SparseLoCo against its algorithm, and its parts: chunks, values of few bits, decay."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from tests.jaxcomm import trees
from tests.jaxcomm.train_steps import linear as loss
from tests.jaxcomm.train_steps import normal
from tests.jaxcomm.workers import Simulated
from tests.marks import slow_except
from tests.reference.local_sgd import LocalSgdReference
from tests.reference.sparse_loco import ChunkedTopKReference

K, TREE = 3, "chunks"
trees.TREES[TREE] = {"w": (50, 60), "v": (2049,), "b": (3,)}
LARGE = {"w": jax.ShapeDtypeStruct((1024, 4096), np.float32), "v": jax.ShapeDtypeStruct((1 << 20,), np.float32)}


def gradients(seed):
    return trees.gradients("normal", seed, TREE, K)


def of_worker(grads, k):
    return {name: np.asarray(leaf[k], np.float32) for name, leaf in grads.items()}


@pytest.mark.parametrize(("bits", "decay"), slow_except([(2, 0.95), (4, 0.5)], (2, 0.95)))
def test_the_exchange_is_the_papers(bits, decay):
    tx = jc.topk(0.95, chunk=1024, value_dtype=f"{bits}bit", decay=decay, collective="gather")
    workers, reference = Simulated(tx, TREE, K), ChunkedTopKReference(0.95, 1024, bits, decay)
    state = workers.first
    for seed in range(6):
        grads = gradients(seed)
        out = workers.step(grads, state)
        state, expected = out.state, reference.step([of_worker(grads, k) for k in range(K)])
        for name in grads:
            np.testing.assert_allclose(out.means[name], expected.mean[name], rtol=1e-5, atol=1e-6)
        residuals = trees.cut(out.residual, {name: trees.TREES[TREE][name] for name in ("v", "w")})
        for name, rows in residuals.items():
            for k in range(K):
                np.testing.assert_allclose(rows[k], reference.residuals[k][name], rtol=1e-5, atol=1e-5)
        assert out.metrics.sent == sum(expected.sent)


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(jc.topk(0.9, value_dtype="2bit", collective="gather"), id="topk"),
        pytest.param(jc.dct_dp(0.9, value_dtype="4bit", collective="balanced"), id="dct_dp balanced"),
        pytest.param(
            jc.dgc(0.9, value_dtype="4bit", collective="gather", momentum=0), id="dgc", marks=pytest.mark.slow
        ),
    ],
)
def test_nothing_is_lost(tx):
    workers = Simulated(tx, TREE, K)
    state = workers.first
    for seed in range(4):
        grads, before = gradients(seed), trees.cut(np.asarray(state.residual.rows).reshape(K, -1), shapes())
        out = workers.step(grads, state)
        state, after = out.state, trees.cut(out.residual, shapes())
        for name in shapes():
            went_in = (np.asarray(grads[name], np.float64) + before[name]).mean(0)
            np.testing.assert_allclose(out.means[name] + after[name].mean(0), went_in, rtol=1e-4, atol=1e-4)
        assert not out.skipped


def shapes():
    return {name: trees.TREES[TREE][name] for name in ("v", "w")}


def test_a_skip_keeps_the_residual():
    workers = Simulated(jc.topk(0.9, chunk=1024, value_dtype="2bit", decay=0.5), TREE, K)
    state, bad = workers.step(gradients(0), workers.first).state, gradients(1)
    bad["w"][1, 3, 4] = np.nan
    out = workers.step(bad, state)
    assert out.skipped
    np.testing.assert_array_equal(out.state.residual.rows, state.residual.rows)


def test_outer_steps():
    """With H = 2, 64 sent of each chunk of 1024, and a decaying residual, the global model is the paper's."""
    shapes = {"w": (50, 60), "v": (2049,)}
    params = normal(shapes)
    tx = jc.chain(optax.sgd(0.125), jc.sparse_loco(2, chunk=1024))
    step = jc.simulate(loss, tx, K, donate=False)
    state = step.init(params)
    exchange = ChunkedTopKReference(1 - 64 / 1024, 1024, 2, 0.95)
    reference = LocalSgdReference(params, K, H=2, lr=1.0, momentum=0.0, nesterov=False, exchange=exchange)
    for number in range(8):
        batch = normal(shapes, 1 + number, K)
        state, _ = step(state, batch)
        reference.step([{name: -np.float32(0.125) * rows[k] for name, rows in batch.items()} for k in range(K)])
        for name in shapes:
            np.testing.assert_allclose(step.params(state)[name], reference.global_model[name], rtol=1e-5, atol=1e-5)


def test_size_of_a_payload():
    """With 64 of 4096, to one other worker; and at 1%, a coordinate costs at most 10.8 bits."""
    n = sum(leaf.size for leaf in LARGE.values())
    report = jc.wire_report(jc.sparse_loco(), LARGE, workers=2)
    assert report.every == 30
    assert 4 * n / report.received_in_exchange >= 195
    report = jc.wire_report(jc.topk(0.99, value_dtype="2bit", collective="gather"), LARGE, workers=2)
    assert 8 * report.received / (0.01 * n) <= 10.8


@pytest.mark.parametrize("chunk", [1024, 3072, 4096, 11264, 12288, 15360])
def test_64_of_any_chunk(chunk):
    sparsity = jc.sparse_loco(1, chunk=chunk).method.exchange.method.sparsity
    assert chunk - math.floor(chunk * sparsity) == 64


def test_compiled_bytes():
    mesh, params = jc.make_mesh(data=2), {"w": jnp.ones((64, 128))}

    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    step = jc.make_train_step(loss, jc.chain(optax.sgd(0.01), jc.sparse_loco(3)), mesh)
    batch = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    state = step.init(params)
    first = None
    report = step.verify(state, batch)
    assert report.received_in_exchange < 4 * 64 * 128 / 100
    for _ in range(9):
        state, metrics = step(state, batch)
        first = metrics["loss"] if first is None else first
    assert metrics["loss"] < first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 1000}, "chunk must be a multiple of 1024, or None; got 1000"),
        ({"chunk": 0}, "chunk must be a multiple of 1024"),
        ({"decay": 0}, "decay must be above 0 and at most 1; got 0"),
        ({"decay": 1.5}, "decay must be above 0 and at most 1; got 1.5"),
        ({"value_dtype": "3bit"}, "one of float32, bfloat16, 4bit, 2bit; got '3bit'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        jc.topk(0.9, **options).init(jnp.zeros(2000))


def test_ef21_does_not_decay():
    with pytest.raises(ValueError, match=r"decay must be 1 for ef21; got 0\.9"):
        jc.ef21(0.9, decay=0.9)
