"""Law 4: random rounding and selection are right on average. `test_draws` tests the draws themselves.

Seeds are fixed. Every bound is five or six standard deviations of the tested average: single coordinates would show an
error in one of them, all together a bias of a few thousandths of a level.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc

K, N, STEPS = 3, 3000, 256
X = np.random.default_rng(0).normal(size=(K, N)).astype(np.float32)


def steps_of(tx, gradients, params=None):
    """The means of many steps with the same gradients and from the same residual: (STEPS, N)."""
    first = tx.init(jnp.zeros(gradients.shape[1]))

    def worker(gradient):
        def step(_, i):
            mean, state = tx.update(gradient, first.replace(step=i), params)
            return None, (mean, jc.exchange_metrics(state).skipped)

        return jax.lax.scan(step, None, jnp.arange(STEPS))[1]

    workers = jax.jit(jax.vmap(worker, axis_name="data"))
    means, skipped = workers(gradients)
    assert not np.any(skipped)
    return np.asarray(means[0], np.float64)


def check_unbiased(means, level):
    """Means of random roundings that are at most `level` wide, over two shots and all workers."""
    error = means.mean(0) - X.astype(np.float64).mean(0)
    deviation = level / 2  # at most, for numbers within one level
    assert np.abs(error).max() <= 6 * deviation / np.sqrt(STEPS)
    # A bias away from zero, or upwards.
    assert abs(np.mean(error * np.sign(X.mean(0)))) <= 5 * deviation / np.sqrt(STEPS * N)
    assert abs(np.mean(error)) <= 5 * deviation / np.sqrt(STEPS * N)
    # It was random: no two steps are alike, and no coordinate's error depends on the one before.
    noise = means - means.mean(0)
    assert np.all(noise.std(0).mean() > 0.02 * level)
    pairs = np.mean(noise[:, 1:] * noise[:, :-1]) / np.mean(noise**2)
    assert abs(pairs) <= 5 / np.sqrt(STEPS * N)


@pytest.mark.parametrize(
    ("bits", "collective"), [*((b, c) for b in (2, 4, 8) for c in ("gather", "two_shot")), (8, "psum"), (16, "psum")]
)
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_quant_dp(bits, norm, collective):
    bucket = 32
    size = {"max": lambda x: np.abs(x).max(-1), "l2": lambda x: np.linalg.norm(x, axis=-1)}[norm]
    scales = size(np.pad(X, ((0, 0), (0, -N % bucket))).reshape(K, -1, bucket))
    levels = 2 ** (bits - 1) - 1
    level = np.sqrt(np.sum(scales.max(1) ** 2)) / levels / K  # of the mean of independent roundings
    if collective == "psum":
        level = np.sqrt(K) * scales.max() / (levels // K) / K
    if collective == "two_shot":
        of_sum = np.sum(scales.max(1)) * (1 + np.sqrt(bucket) / levels) / levels / K
        level = np.hypot(level, of_sum)
    check_unbiased(steps_of(jc.quant_dp(bits, bucket=bucket, norm=norm, collective=collective), X), level)


@pytest.mark.parametrize("collective", ["gather", "two_shot"])
def test_terngrad_without_clipping(collective):
    check_unbiased(steps_of(jc.terngrad(clip=None, collective=collective), X), np.abs(X).max() / np.sqrt(K))


def test_terngrad_clips_at_standard_deviations():
    means = steps_of(jc.terngrad(clip=1.5, collective="gather"), X)
    limit = 1.5 * X.std(1, keepdims=True)
    expected = np.clip(X, -limit, limit).astype(np.float64).mean(0)
    assert np.abs(means.mean(0) - expected).max() <= 6 * limit.max() / 2 / np.sqrt(STEPS * K)


def test_importance_of_iwp():
    """With one worker, the publisher, and a slot for everything, what arrives is what was selected."""
    weights = np.abs(np.random.default_rng(1).normal(size=N)).astype(np.float32) + 0.5
    tx = jc.iwp(2.0, density=1.0, momentum=0.0, eps=1e-6, value_dtype="float32")
    selected = steps_of(tx, X[:1], weights) != 0
    p = np.minimum(np.abs(X[0]) / (weights + 1e-6) / 2.0, 1).astype(np.float64)
    count = selected.sum(0)
    deviation = np.sqrt(STEPS * p * (1 - p))
    assert np.all(np.abs(count - STEPS * p) <= 6 * deviation + 1)
    assert abs(count.sum() - STEPS * p.sum()) <= 5 * np.sqrt(np.sum(deviation**2))
    assert np.all(count[p == 1] == STEPS)


@pytest.mark.parametrize("scale", [1e-35, 1e-25, 1e15])
def test_an_l2_norm_of_any_size(scale):
    """Whose squares may be too small for float32."""
    x = X / np.abs(X).max() * np.float32(scale)
    means = steps_of(jc.quant_dp(8, bucket=32, norm="l2"), x)
    np.testing.assert_allclose(means.mean(0) / scale, x.mean(0) / scale, atol=0.05)
