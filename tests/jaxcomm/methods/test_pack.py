"""`pack` and `unpack`: a worker's payload without a collective, whose mean is that of the exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.exchange import Gradient
from tests.refusals import refused

K, STEPS, SHAPES = 3, 3, {"w": (40, 130), "v": (2049,), "b": (7,)}
PACKED = {
    "plump_dp": jc.plump_dp(),
    "plump_dp bfloat16": jc.plump_dp(value_dtype="bfloat16"),
    "topk": jc.topk(0.9, collective="gather"),
    "topk in bins": jc.topk(1 - 64 / 1024, chunk=1024, value_dtype="2bit", decay=0.9, collective="gather"),
    "demo": jc.demo(collective="gather"),
    "pulse": jc.pulse(0.9, value_dtype="float32", learning_rate=1e-3, collective="gather"),
    "random_k": jc.random_k(0.9, value_dtype="float32"),
    "sign": jc.sign(collective="gather"),
    "quant_dp": jc.quant_dp(4, collective="gather"),
}
ROUNDED_TWICE = {"plump_dp bfloat16"}  # by the exchange of several workers, as it sums by owners


def gradients():
    rng = np.random.default_rng(0)
    return [{name: rng.normal(size=(K, *shape)).astype(np.float32) for name, shape in SHAPES.items()} for _ in range(3)]


@pytest.mark.parametrize("name", PACKED)
def test_mean_and_residual_of_the_exchange(name):
    tx = PACKED[name]
    method = tx.method
    params = {key: jnp.ones(shape) for key, shape in SHAPES.items()}
    layout = method.plan(params)

    @functools.partial(jax.vmap, axis_name="data", in_axes=(0, None, 0, None), out_axes=(0, None, 0))
    def exchange(gradient, state, rows, params):
        residual = None if rows is None else method.per_worker(rows)
        means, state = tx.update(gradient, state.replace(residual=residual, worker=None), params)
        return means, state.replace(residual=None), None if rows is None else state.residual.rows

    @jax.jit
    def pack(gradient, row, step, worker):
        leaves = Gradient(layout, jax.tree.leaves(gradient), jax.tree.leaves(params), row)
        return method.pack(leaves, step, worker)

    unpack = jax.jit(lambda words, step: method.unpack(words, layout, step))
    state = tx.init(params)
    start = None if state.residual is None else jnp.zeros((K, 1, layout.n))
    rows, own = start, [None if start is None else start[k] for k in range(K)]
    for step, gradient in enumerate(gradients()):
        means, state, rows = jax.jit(exchange)(gradient, state, rows, params)
        totals = 0
        for k in range(K):
            packed = pack(jax.tree.map(lambda x, k=k: x[k], gradient), own[k], step, k)
            assert packed.words.dtype == jnp.uint32
            assert packed.ok
            own[k] = packed.residual
            leaves = unpack(packed.words, step)
            totals = jax.tree.map(jnp.add, totals, leaves) if k else leaves
        tolerance = 2**-7 if name in ROUNDED_TWICE else 3e-6
        for mean, total in zip(jax.tree.leaves(means), totals, strict=True):
            np.testing.assert_allclose(mean[0], total / K, rtol=tolerance, atol=tolerance)
        if rows is not None:
            np.testing.assert_allclose(rows, jnp.stack(own), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", PACKED)
def test_numbers_that_are_not_finite(name):
    method = PACKED[name].method
    leaves = [jnp.ones(shape) for shape in SHAPES.values()]
    layout = method.plan(leaves)
    row = jnp.zeros((1, layout.n)) if method.keeps_residual else None
    pack = jax.jit(lambda *leaves: method.pack(Gradient(layout, leaves, leaves, row), jnp.int32(0), 0).ok)
    assert pack(*leaves)
    for at in range(len(leaves)):
        broken = list(leaves)
        broken[at] = leaves[at].at[..., -1].set(np.nan)
        assert not pack(*broken)


@pytest.mark.parametrize("shapes", [{"w": (40, 130)}, {"b": (7,), "c": (3, 2)}], ids=["all compressed", "all dense"])
@pytest.mark.parametrize("name", ["plump_dp", "topk", "random_k", "sign", "quant_dp"])
def test_trees_of_one_kind(name, shapes):
    """What is read, and what is kept, add up to what was packed."""
    method = PACKED[name].method
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes.values()]
    layout = method.plan(leaves)
    row = jnp.zeros((1, layout.n)) if method.keeps_residual else None
    packed = method.pack(Gradient(layout, leaves, leaves, row), jnp.int32(0), 0)
    back = method.unpack(packed.words, layout, jnp.int32(0))
    kept = [0.0] * len(leaves)
    if row is not None:
        dense = [jnp.zeros_like(leaf) for leaf in layout.split(leaves)[1]]
        kept = layout.join(layout.unflatten(packed.residual[0]), dense)
    tolerance = 0.3 if name == "quant_dp" and "w" in shapes else 1e-6  # 4 bits, without a residual
    for leaf, read, rest in zip(leaves, back, kept, strict=True):
        np.testing.assert_allclose(read + rest, leaf, atol=tolerance * float(jnp.abs(leaf).max()))


@pytest.mark.parametrize(
    "tx",
    [
        jc.powersgd(2),
        jc.dct_dp(0.99),
        jc.dgc(0.9),
        jc.ef21(0.9),
        jc.iwp(0.1),
        jc.terngrad(),
        jc.slim_dp(),
        jc.topk(0.9, collective="balanced"),
        jc.quant_dp(8, collective="two_shot"),
        jc.plump_dp(value_dtype="float16"),
        jc.topk(0.9, where="w"),
    ],
    ids=lambda tx: tx.method.name,
)
def test_what_cannot_pack(tx):
    refused(tx.method.check_packs, "exchange", tx.method.name)


def test_optax_is_as_before():
    assert isinstance(jc.topk(), optax.GradientTransformation)
