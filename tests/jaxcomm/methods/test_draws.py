"""Random draws: who publishes, how workers round, which coordinates are sent.

They are observed from outside, in the results of many steps, and compared with the papers': publishers and coordinates
are drawn uniformly, and every worker rounds independently. The oracles draw by the documented keys, so they would
repeat a bad key. Seeds are fixed; bounds are five standard deviations.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc
from jaxcomm.kernels import noise
from tests.marks import slow_except
from tests.reference import noise as documented

KEYS = [(0,), (7, 3, 0, 5), (1, 199, 2**31 - 2)]


@pytest.mark.parametrize("key", KEYS)
def test_numbers(key):
    """On which the oracles rely."""
    bounds = np.array([1, 2, 3, 1000, 2**24 + 1, 2**31 - 1], np.int32)
    assert int(noise.make_key(*key)) == documented.make_key(*key)
    np.testing.assert_array_equal(
        noise.uniform(noise.make_key(*key), 2000, 37), documented.uniform(documented.make_key(*key), 2000, 37)
    )
    np.testing.assert_array_equal(
        noise.integers(noise.make_key(*key), bounds, 5), documented.integers(documented.make_key(*key), bounds, 5)
    )


def returned(tx, updates, steps, params=None, counter="step"):
    """Every worker's result for its updates in step 0, 1, ..., each from the first state: (K, steps, ...).

    Args:
      counter: the field of the state, or of its memory, from which the step's random numbers are drawn.
    """
    first = tx.init(jax.tree.map(lambda rows: jnp.zeros(rows.shape[1:]), updates) if params is None else params)

    def worker(row):
        def step(_, i):
            fields = {"step": i} if counter == "step" else {"memory": first.memory._replace(**{counter: i})}
            out, state = tx.update(row, first.replace(**fields), params)
            return None, (out, jc.exchange_metrics(state).skipped)

        return jax.lax.scan(step, None, jnp.arange(steps, dtype=jnp.int32))[1]

    workers = jax.jit(jax.vmap(worker, axis_name="data"))
    out, skipped = workers(updates)
    assert not np.any(skipped)
    return jax.tree.map(np.asarray, out)


# Publishers.

K, R, LAYERS, STEPS = 8, 2, 5, 200


@functools.cache
def published(seed):
    """Whether a worker publishes a layer in a step, (STEPS, LAYERS, K): each has a coordinate of its own to show it."""
    tx = jc.iwp(
        1e-3, density=1.0, momentum=0.0, publishers=R, random_selection=False, value_dtype="float32", dense_below=0,
        seed=seed,
    )  # fmt: skip
    layers = {f"layer{s}": np.eye(K, dtype=np.float32) for s in range(LAYERS)}
    params = {name: jnp.ones(K) for name in layers}
    means = returned(tx, layers, STEPS, params)
    return np.stack([means[name][0] for name in sorted(means)], axis=1) != 0


def test_publishers_of_a_layer():
    is_publisher = published(1)
    assert np.all(is_publisher.sum(-1) == R)  # different ones, since every worker has a coordinate of its own
    p = R / K
    for counts, draws in ((is_publisher.sum(0), STEPS), (is_publisher.sum((0, 1)), STEPS * LAYERS)):
        assert np.all(np.abs(counts - draws * p) <= 5 * np.sqrt(draws * p * (1 - p)))
    pairs = np.einsum("tsa,tsb->ab", is_publisher.astype(int), is_publisher.astype(int))[np.triu_indices(K, 1)]
    assert is_uniform(pairs, STEPS * LAYERS / len(pairs), degrees=len(pairs) - 1)


def test_independent_publishers():
    one, two = published(0).astype(int), published(1).astype(int)
    for a, b in itertools.combinations(range(LAYERS), 2):
        check_overlaps(one[:, a], one[:, b])
    for lag in (1, 2, 3):
        for s in range(LAYERS):
            check_overlaps(one[lag:, s], one[:-lag, s])
        check_overlaps(one[lag:, 1:].reshape(-1, K), one[:-lag, :-1].reshape(-1, K))
    check_overlaps(one.reshape(-1, K), two.reshape(-1, K))


def check_overlaps(a, b):
    """Two independent draws of R from K have R^2 / K in common, with the variance of a hypergeometric distribution."""
    variance = R * (R / K) * (1 - R / K) * (K - R) / (K - 1)
    assert abs(np.sum(a * b) - len(a) * R * R / K) <= 5 * np.sqrt(len(a) * variance)


def is_uniform(counts, expected, degrees):
    """By chi-square; draws without replacement vary a little less than the degrees of freedom say."""
    return abs(np.sum((counts - expected) ** 2 / expected) - degrees) <= 5 * np.sqrt(3 * degrees)


# Rounding.

N, BITS, BUCKET, WORKERS, DRAWS = 2048, 8, 512, 4, 256


def equal_gradients():
    """The same on all workers, except for the coordinate that sets a bucket's scale, which cancels in the sum.

    So the levels of the sum are far finer than those of a worker, and with two shots only one rounding matters.
    """
    x = np.random.default_rng(0).uniform(-0.05, 0.05, (1, N)).astype(np.float32).repeat(WORKERS, 0)
    x[:, ::BUCKET] = np.array([1, -1, 1, -1], np.float32)[:, None]
    return x


def check_variance(means, of_one_worker, extra=0.0):
    """Independent errors of K workers average out: the variance of the mean is 1/K^2 of their sum's.

    Args:
      means: (DRAWS, n).
      of_one_worker: the variance of one worker's rounding, the same on all, (n,).
      added: how much more it may be, relative to that.
    """
    ratio = means.var(0, ddof=1).mean() / (of_one_worker.mean() / WORKERS)
    assert 0.9 <= ratio <= 1.1 + extra


def of_rounding(x, level):
    """The variance of unbiased random rounding to the level below or above."""
    fraction = np.abs(x) / level % 1
    return level**2 * fraction * (1 - fraction)


@pytest.mark.parametrize("collective", slow_except(["gather", "two_shot"], "gather"))
def test_quant_dp_by_worker(collective):
    x = equal_gradients()
    tx = jc.quant_dp(BITS, bucket=BUCKET, collective=collective)
    means = returned(tx, x, DRAWS)[0].astype(np.float64)
    equal = x[0] == x[1]
    check_variance(means[:, equal], of_rounding(x[0, equal].astype(np.float64), 1 / (2 ** (BITS - 1) - 1)))


def test_quant_dp_of_equal_gradients():
    """As documented: two shots multiply the mean's variance by K, as the sum's levels are K times a worker's."""
    x = np.random.default_rng(1).normal(size=(1, N)).astype(np.float32).repeat(WORKERS, 0)
    means = returned(jc.quant_dp(BITS, bucket=BUCKET, collective="two_shot"), x, DRAWS)[0].astype(np.float64)
    scales = np.abs(x[0]).reshape(-1, BUCKET).max(1).repeat(BUCKET).astype(np.float64)
    of_one_worker = of_rounding(x[0], scales / (2 ** (BITS - 1) - 1))
    assert 0.9 <= means.var(0, ddof=1).mean() / of_one_worker.mean() <= 1.1


@pytest.mark.parametrize("collective", ["gather", "two_shot"])
def test_terngrad_by_worker(collective):
    x = np.random.default_rng(0).normal(size=(1, N)).astype(np.float32).repeat(WORKERS, 0)
    means = returned(jc.terngrad(clip=None, collective=collective), x, DRAWS)[0].astype(np.float64)
    check_variance(means, of_rounding(x[0].astype(np.float64), np.abs(x).max()))


# Coordinates.


@pytest.mark.parametrize(("sizes", "sparsity"), [((1000,), 0.3), ((999, 1500), 0.6), ((2049,), 0.9)], ids=str)
def test_coordinates_of_random_k(sizes, sparsity):
    """k / N, where k does not divide N: strata have two widths, but coordinates alternate between them."""
    steps = 800
    tx = jc.random_k(sparsity, value_dtype="float32", collective="psum", dense_below=0)
    ones = {f"{s}": np.ones((1, n), np.float32) for s, n in enumerate(sizes)}
    for name, mean in returned(tx, ones, steps).items():
        picks = mean[0] != 0
        n, k = picks.shape[1], picks[0].sum()
        assert n % k != 0
        assert np.all(picks.sum(1) == k)
        assert is_uniform(picks.sum(0), steps * k / n, degrees=n - k), name
        check_independent(picks[1:], picks[:-1], k * k / n)


def check_independent(a, b, expected):
    """Draws of coordinates, (steps, n) each, have as many in common as expected by chance."""
    common = np.sum(a & b, axis=1)
    assert abs(common.mean() - expected) <= 5 * common.std(ddof=1) / np.sqrt(len(common))


MODEL = 400  # coordinates


@functools.cache
def explored(alpha, beta):
    """Whether a worker explores a coordinate in a communication, (workers, communications, n - core).

    Every worker pushes a different power of two, onto zeros at a rate of 2: it pulls other numbers than it pushed.
    """
    n, workers, communications = MODEL, WORKERS, 300
    tx = jc.slim_dp(alpha, beta, q=10**9, server_rate=2.0)
    core = round(beta * n)
    params = jnp.zeros(n).at[:core].set(1.0)  # the largest weights, which are the first core
    pushed = np.repeat(2.0 ** np.arange(workers), n).reshape(workers, n).astype(np.float32)
    out = returned(tx, pushed, communications, params, counter="round")
    is_pulled = out != pushed[:, None]
    assert np.all(is_pulled[:, :, :core])
    return is_pulled[:, :, core:]


SLIM_SETTINGS = [(0.8, 0.1), (0.3, 0.15)]


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "beta"), SLIM_SETTINGS)
def test_coordinates_of_explorers(alpha, beta):
    """A K-th of (alpha - beta) n in every owner's part, where that does not divide the part."""
    picks = explored(alpha, beta)
    workers, communications, m = picks.shape
    e = round((alpha - beta) * MODEL / workers)
    for part in np.array_split(np.arange(m), workers):  # the first m % K are one longer
        assert len(part) % e != 0
        assert np.all(picks[:, :, part].sum(-1) == e)
        counts = picks[:, :, part].sum((0, 1))
        assert is_uniform(counts, workers * communications * e / len(part), degrees=len(part) - e)


@pytest.mark.parametrize(("alpha", "beta"), slow_except(SLIM_SETTINGS, (0.3, 0.15)))
def test_independent_explorers(alpha, beta):
    picks = explored(alpha, beta)
    workers, _, m = picks.shape
    e = round((alpha - beta) * MODEL / workers)
    expected = sum(e * e / len(part) for part in np.array_split(np.arange(m), workers))
    for a, b in itertools.combinations(range(workers), 2):
        check_independent(picks[a], picks[b], expected)
    for a, b in itertools.product(range(workers), repeat=2):
        check_independent(picks[a, 1:], picks[b, :-1], expected)
