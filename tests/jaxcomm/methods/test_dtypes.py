"""Types of numbers: every method under jax_enable_x64 and strict promotion; float64 stays float64, or is refused."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.exchange import is_local
from jaxcomm.kernels import platforms
from tests.jaxcomm.cases import CASES

K = 3
# Two tensors that are compressed, small ones, and one without elements.
SHAPES = {"b": (7,), "e": (0, 5), "s": (), "v": (3000,), "w": (40, 50)}

SETTINGS = {
    **{str(case): case.make for case in CASES},
    "topk(0.9,balanced,4bit)": lambda: jc.topk(0.9, collective="balanced", value_dtype="4bit"),
    "topk(0)": lambda: jc.topk(0.0),
    "topk(0.9,chunk)": lambda: jc.topk(0.9, chunk=1024),
    "topk(0.9,bfloat16 residual)": lambda: jc.topk(0.9, residual_dtype="bfloat16"),
    "topk(0.9,others)": lambda: jc.topk(0.9, where="w", others=jc.plump_dp()),
    "dct_dp(0.9,drains)": lambda: jc.dct_dp(0.9, drain_every=2),
    "dgc(0.9,clip)": lambda: jc.dgc(0.9, clip=1.0, warmup_steps=4),
    "ef21(0.9)": lambda: jc.ef21(0.9),
    "hierarchical(topk)": lambda: jc.hierarchical(jc.topk(0.9, axis_name="slice")),
    "powersgd()": jc.powersgd,
    "slim_dp()": jc.slim_dp,
    "local_sgd(plump_dp)": lambda: jc.local_sgd(2, exchange=jc.plump_dp()),
    "local_sgd(topk)": lambda: jc.local_sgd(2, exchange=jc.topk(0.9)),
    "local_sgd(fragments)": lambda: jc.local_sgd(4, exchange=jc.quant_dp(4), fragments=2, overlap=1, mix=0.5),
    "plump_dp(p=2)": lambda: jc.plump_dp(p=2),
    "sparse_loco(2)": lambda: jc.sparse_loco(2),
}
VARIANTS = {str(case) for case in CASES if case.is_variant}


@contextlib.contextmanager
def strictly(x64):
    with jax.enable_x64(x64), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def kinds(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def traced(tx, params):
    """The types of the updates, and those of the state before and after, on a mesh without devices."""
    axes = {"slice": 2, "data": K} if isinstance(tx.method, jc.methods.Hierarchical) else {"data": K}
    spec, dtypes = P(tuple(axes)), []

    def update(rows):
        row = jax.tree.map(lambda row: row[0], rows)
        state = tx.init(params)
        updates, new = tx.update(row, state, row if is_local(tx) else params)
        dtypes.extend(map(kinds, (updates, state, new)))
        return jax.tree.map(lambda leaf: leaf.reshape(-1).sum(keepdims=True), updates)

    count = int(np.prod(list(axes.values())))
    rows = {name: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype) for name, leaf in params.items()}
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    jax.eval_shape(jax.shard_map(update, mesh=mesh, in_specs=(spec,), out_specs=spec), rows)
    return dtypes


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in SETTINGS]
)
def test_x64_and_strict_promotion(setting, monkeypatch):
    """Types of updates and state stay; traced for every platform, as without JAX_PLATFORMS."""
    monkeypatch.setattr(platforms, "_setting", lambda: "")
    with strictly(True):
        updates, before, after = traced(
            SETTINGS[setting](), {name: jnp.ones(shape, jnp.float32) for name, shape in SHAPES.items()}
        )
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {np.dtype(np.float32)}
    assert before == after


@pytest.mark.parametrize("setting", ["topk(0.9,balanced,4bit)", "dgc(0.9,clip)", "dct_dp(0.9,drains)", "slim_dp()"])
def test_bytes_under_x64(setting):
    tree = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}
    tx = SETTINGS[setting]()
    plain = jc.wire_report(tx, tree, K).program
    with jax.enable_x64(True):
        assert jc.wire_report(tx, tree, K).program == plain


REFUSED = r"at most 32 bits; got float64 at .*'w'.*Keep these parameters in float32, or .* by plump_dp\(\)"


@pytest.mark.parametrize("setting", ["topk(0)", "powersgd()", "slim_dp()", "local_sgd(topk)", "hierarchical(topk)"])
def test_compressed_float64(setting):
    with jax.enable_x64(True), pytest.raises(ValueError, match=REFUSED):
        traced(SETTINGS[setting](), {"w": jnp.ones((40, 50), jnp.float64)})


@pytest.mark.parametrize("make", [lambda: jc.topk(0.9, where="v", others=jc.plump_dp()), jc.plump_dp])
def test_the_remedy(make):
    with jax.enable_x64(True):
        params = {"w": jnp.ones((40, 50), jnp.float64), "v": jnp.ones(3000, jnp.float32)}
        updates, before, after = traced(make(), params)
        assert updates == kinds(params)
        assert before == after
        wide = [t for t in jc.wire_report(make(), params, 4).program.always if t.dtype == "float64"]
        assert [t.operand_bytes for t in wide] == [8 * 2000]


def test_numpy_float64():
    dtypes, *_ = traced(jc.topk(0.9), {"w": np.ones((40, 50))})
    assert dtypes["w"].dtype == np.float32


ROWS = np.random.default_rng(0).normal(size=(12, 5))
W = np.random.default_rng(1).normal(size=(5,))
RATE = 0.5


def loss_fn(params, batch):
    return jnp.mean(jnp.square(batch @ params["w"] - 1.0))


def by_hand():
    """One step on all rows, in NumPy and float64."""
    error = ROWS @ W - 1
    return W - RATE * 2 * ROWS.T @ error / len(ROWS), float(np.mean(np.square(error)))


@pytest.mark.parametrize(
    ("chain", "options", "steps"),
    [
        (lambda: jc.chain(jc.plump_dp(), optax.sgd(RATE)), {}, 1),
        (lambda: jc.chain(jc.topk(0.5), optax.sgd(RATE)), {}, 1),
        (lambda: jc.chain(jc.dgc(0.5, momentum=0.0, clip=1e9), optax.sgd(RATE)), {}, 1),
        (lambda: jc.chain(jc.plump_dp(), optax.sgd(RATE)), {"accumulate": 2}, 1),
        (lambda: jc.chain(jc.plump_dp(), optax.sgd(RATE), accumulate=2), {}, 2),
        (lambda: jc.chain(optax.sgd(RATE), jc.local_sgd(1, exchange=jc.plump_dp(), outer=optax.sgd(1.0))), {}, 1),
    ],
)
def test_exact_float64(chain, options, steps):
    """Means, loss, accumulation, and the anchor of a local method; small tensors of compressors too."""
    expected, loss = by_hand()
    with jax.enable_x64(True):
        step = jc.simulate(loss_fn, chain(), 3, **options)
        state = step.init({"w": jnp.asarray(W)})
        for _ in range(steps):
            state, metrics = step(state, ROWS)
        result = np.asarray(step.params(state)["w"])
    assert result.dtype == metrics["loss"].dtype == np.float64
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=1e-14)


def test_model_state_of_float64():
    def with_state(params, state, batch):
        return loss_fn(params, batch), ({"third": jnp.float64(1 / 3)}, {"m": jnp.mean(batch)})

    with jax.enable_x64(True):
        tx = jc.chain(jc.plump_dp(), optax.sgd(RATE))
        step = jc.make_train_step(with_state, tx, jc.make_mesh(data=4), has_state=True)
        state = step.init({"w": jnp.asarray(W)}, {"m": jnp.zeros(())})
        report = step.verify(state, ROWS)
        state, metrics = step(state, ROWS)
    assert float(metrics["third"]) == 1 / 3
    np.testing.assert_allclose(float(state.model_state["m"]), ROWS.mean(), rtol=1e-14)
    assert report.received == 2 * 3 / 4 * 8 * (5 + 3)  # the gradient; the loss, a scalar and the state


@pytest.mark.parametrize(
    ("tx", "steps"),
    [
        (lambda: jc.chain(jc.topk(0.5, dense_below=0), optax.sgd(RATE)), 1),
        (lambda: jc.chain(jc.plump_dp(), optax.sgd(RATE), accumulate=2), 2),
        (lambda: jc.chain(jc.plump_dp(), optax.sgd(RATE), delay=1), 1),
        (lambda: jc.chain(optax.sgd(RATE), jc.local_sgd(2, exchange=jc.plump_dp())), 2),
    ],
)
def test_steps_under_strict_promotion(tx, steps):
    with strictly(False):
        step = jc.simulate(loss_fn, tx(), 3)
        state = step.init({"w": jnp.asarray(W, jnp.float32)})
        for _ in range(steps):
            state, metrics = jax.eval_shape(step, state, ROWS.astype(np.float32))
    assert metrics["loss"].dtype == np.float32


@pytest.mark.parametrize("wide", ["parameters", "activations"])
def test_a_pipeline_of_float64(wide):
    with jax.enable_x64(True):
        params = [{"w": jnp.ones((5, 5), jnp.float64 if wide == "parameters" else jnp.float32)}] * 2

        def stage(params, x, batch):
            rows = batch.astype(jnp.float64 if wide == "activations" else jnp.float32) if x is None else x
            return rows @ params["w"]

        pipe = jc.Pipeline([stage, stage], lambda x, batch: (jnp.mean(x), {}), params)
        with pytest.raises(ValueError, match=r"at most 32 bits a number.*got float64 in stage 0\. Cast them to"):
            pipe.report(jc.chain(jc.plump_dp(), optax.sgd(RATE)), jax.ShapeDtypeStruct((4, 5), np.float32), 2)
