"""Weights gathered and gradients scattered in a few bits: against NumPy, conserved, bytes, training, refusals."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from jaxcomm.layers import quantized_gather

SHAPES = {"a": (2, 65), "b": (3,), "w": (5, 7, 9)}  # of a shard


def numbers(seed, *first, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=(*first, *s))).astype(np.float32) for name, s in SHAPES.items()}


def full(tree):
    """Tensors (K, m, ...) as the rows of all workers (K m, ...)."""
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in tree.items()}


@functools.cache
def program(K, bits, simulated=False):
    """(shards, held, residuals, gradients) -> (new held, gradients of shards, new residuals)."""

    def worker(shards, copies, residual, gradient):
        def loss(shards, residual, copies):
            weights, copies = quantized_gather(shards, copies, residual, bits=bits)
            return sum(jnp.vdot(weights[name], gradient[name]) for name in SHAPES), copies

        (gradients, residual), copies = jax.grad(loss, argnums=(0, 1), has_aux=True)(shards, residual, copies)
        return copies, gradients, residual

    if simulated:
        return jax.jit(jax.vmap(worker, in_axes=(0, None, 0, 0), out_axes=(None, 0, 0), axis_name="data"))

    def on_mesh(shards, copies, residual, gradient):
        local = [jax.tree.map(lambda x: x[0], tree) for tree in (shards, residual, gradient)]
        copies, *rows = worker(local[0], copies, local[1], local[2])
        return copies, *(jax.tree.map(lambda x: x[None], tree) for tree in rows)

    rows, mesh = P("data"), jc.make_mesh(data=K)
    return jax.jit(jax.shard_map(on_mesh, mesh=mesh, in_specs=(rows, P(), rows, rows), out_specs=(P(), rows, rows)))


def inputs(K, seed=0):
    """(shards (K, m, ...), held (K m, ...), residuals and gradients (K, K m, ...))."""
    shards, copies = numbers(seed, K), full(numbers(seed, K))
    residuals = {name: np.zeros((K, *x.shape), np.float32) for name, x in copies.items()}
    return shards, copies, residuals


def gradients_of(seed, K):
    return {name: x.reshape(K, -1, *x.shape[3:]) for name, x in numbers(seed, K, K).items()}


@pytest.mark.parametrize(("K", "bits", "simulated"), [(1, 4, False), (2, 8, False), (4, 4, False), (3, 4, True)])
def test_three_steps_are_numpys(K, bits, simulated):
    """To float32 rounding, except where a last bit decides a level: at most one in 500, by one level."""
    from tests.reference.quantized_gather import gather, scatter

    run = program(K, bits, simulated)
    shards, copies, residuals = inputs(K)
    for step in range(3):
        shards = {name: s + numbers(90 + step, K, scale=0.01)[name] for name, s in shards.items()}
        gradients = gradients_of(step, K)
        new, applied, owed = jax.tree.map(np.asarray, run(shards, copies, residuals, gradients))
        for name in SHAPES:
            expected = gather(shards[name], copies[name].reshape(K, *SHAPES[name]), bits)
            check(new[name].reshape(K, *SHAPES[name]), expected, 0.05 / (2 ** (bits - 1) - 1))
            cut = (K, K, *SHAPES[name])
            sums, left = scatter(gradients[name].reshape(cut), residuals[name].reshape(cut), bits)
            level = 5 / (2 ** (bits - 1) - 1)
            check(applied[name], sums, level)
            check(owed[name].reshape(cut), left, level)
        copies, residuals = new, owed


def check(result, expected, level):
    error = np.abs(result.astype(np.float64) - expected)
    assert np.all(error <= level)
    assert np.mean(error > 2e-6 * max(1, np.abs(expected).max())) <= 1 / 500


def test_nothing_is_lost():
    K, run, error = 4, program(4, 4), 0.0
    shards, copies, residuals = inputs(K)
    for step in range(5):
        gradients = gradients_of(step, K)
        went_in = {name: (gradients[name].astype(np.float64) + residuals[name]).sum(0) for name in SHAPES}
        copies, applied, residuals = jax.tree.map(np.asarray, run(shards, copies, residuals, gradients))
        for name in SHAPES:
            came_out = full(applied)[name] + residuals[name].astype(np.float64).sum(0)
            np.testing.assert_allclose(came_out, went_in[name], rtol=0, atol=1e-5)
            error = max(error, np.abs(residuals[name]).max())
    assert error > 0.1


def test_copies_follow_the_shards():
    """Each round leaves at most half a level of the previous difference: 1/14 of it."""
    K, run = 2, program(2, 8)
    shards, copies, residuals = inputs(K)
    shards = {name: s + 1 for name, s in shards.items()}
    for _ in range(3):
        copies, _, _ = run(shards, copies, residuals, gradients_of(0, K))
    for name in SHAPES:
        np.testing.assert_allclose(copies[name], full(shards)[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**100])
def test_bad_gradients(value):
    K, run = 4, program(4, 4)
    shards, copies, residuals = inputs(K)
    _, _, residuals = jax.tree.map(np.asarray, run(shards, copies, residuals, gradients_of(0, K)))
    bad = gradients_of(1, K)
    bad["w"][2, 3, 1, 1] = value
    _, applied, after = run(shards, copies, residuals, bad)
    for name in SHAPES:
        assert np.isnan(applied[name]).all()
        np.testing.assert_array_equal(after[name], residuals[name])


@pytest.mark.parametrize(("K", "bits"), [(2, 4), (4, 4), (4, 8)])
def test_bytes(K, bits):
    """Buckets of 128 values of `bits` bits and a scale of 32 bits, from every other worker, forward and backward."""
    compiled = program(K, bits).lower(*inputs(K), gradients_of(0, K)).compile()
    buckets = sum(math.ceil(math.prod(shape) / 128) for shape in SHAPES.values())
    assert read_program(compiled.as_text()).received == 2 * (K - 1) * buckets * (128 * bits + 32) / 8


def train(gather, K=4, steps=300):
    """Trains two layers by Adam on each worker's own rows; returns the final loss over all rows."""
    rng, sizes = np.random.default_rng(0), {"in": (16, 64), "out": (64, 4)}
    truth = [rng.normal(size=(16, 24)) / 4, rng.normal(size=(24, 4)) / 3]
    x = rng.normal(size=(K * 32, 16)).astype(np.float32)
    y = (np.tanh(x @ truth[0]) @ truth[1] + 0.1 * rng.normal(size=(K * 32, 4))).astype(np.float32)
    weights = {name: (rng.normal(size=s) / math.sqrt(s[0])).astype(np.float32) for name, s in sizes.items()}
    optimizer = optax.adam(3e-3)

    def step(carry, x, y):
        shards, copies, residual, state = carry

        def loss_fn(shards, residual, copies):
            weights, copies = gather(shards, copies, residual)
            return jnp.mean((jnp.tanh(x @ weights["in"]) @ weights["out"] - y) ** 2) / K, copies

        (loss, copies), (gradients, residual) = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(
            shards, residual, copies
        )
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(shards, updates), copies, residual, state), lax.psum(loss, "data")

    def worker(shards, copies, x, y):
        zeros = jax.tree.map(lambda h: lax.pcast(jnp.zeros_like(h), "data", to="varying"), copies)
        state = jax.tree.map(lambda s: lax.pcast(s, "data", to="varying") if s.ndim == 0 else s, optimizer.init(shards))
        _, losses = lax.scan(lambda carry, _: step(carry, x, y), (shards, copies, zeros, state), None, length=steps)
        return losses

    specs = (P("data"), P(), P("data"), P("data"))
    run = jax.jit(jax.shard_map(worker, mesh=jc.make_mesh(data=K), in_specs=specs, out_specs=P()))
    return np.asarray(run(weights, weights, x, y))


def test_adam_trains():
    def exactly(shards, copies, residual):
        return jax.tree.map(lambda s: lax.all_gather(s, "data", tiled=True), shards), copies

    dense, few = train(exactly), train(quantized_gather)
    print(f"loss after 300 steps: 32 bits {dense[-1]:.4f}, 4 bits {few[-1]:.4f}, before {dense[0]:.4f}")
    assert few[0] == pytest.approx(dense[0], rel=1e-6)
    assert dense[-1] < 0.1 * dense[0]
    assert few[-1] < 1.2 * dense[-1]


def test_refusals():
    good = (np.ones((2, 3), np.float32), np.ones((4, 3), np.float32), np.ones((4, 3), np.float32))

    def call(shards, copies, residual, **options):
        def worker(_):
            return quantized_gather(shards, copies, residual, **options)[0]

        jax.vmap(worker, axis_name="data")(jnp.zeros(2))

    call(*good)
    half = good[0].astype(np.float16)
    for bad in (
        (good[0], good[0], good[2]),
        (good[0], good[1], good[0]),
        (np.ones((2, 4), np.float32), *good[1:]),
        (half, *good[1:]),
        (np.float32(1), *good[1:]),
    ):
        with pytest.raises(ValueError, match="float32, with 2 times the rows of a shard in held and residual; got"):
            call(*bad)
    with pytest.raises(ValueError, match="held and residual must be trees like shards, of at least one array"):
        call({"w": good[0]}, good[1], good[2])
    with pytest.raises(ValueError, match="of at least one array"):
        call({}, {}, {})
    for bits in (2, 16, "4", True):
        with pytest.raises(ValueError, match=f"bits must be 4 or 8; got {bits!r}"):
            call(*good, bits=bits)
    with pytest.raises(ValueError, match="no axis 'workers'"):
        call(*good, axis_name="workers")
