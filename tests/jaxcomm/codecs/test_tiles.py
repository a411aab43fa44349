"""Tiles of a few bits and their gradients: equal to the reference, as exact as the published code, NaN stays NaN."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.codecs.tiles import GradientLevels, Tiles
from tests.jaxcomm.numbers import numbers
from tests.reference.tiles import arrive, published, returned, turned

WIDTHS = (3, 4, 8)


@functools.cache
def jitted(width, n, has_key):
    def there_and_back(x, key):
        codec = GradientLevels(width, key) if has_key else Tiles(width)
        words = codec.encode(x)
        return words, codec.decode(words, n)

    return jax.jit(there_and_back)


def cross(x, width, key=None, dtype="float32"):
    words, result = jitted(width, x.size, key is not None)(jnp.asarray(x, dtype), np.uint32(key or 0))
    tiles, buckets = -(-x.size // 64), -(-x.size // 32)
    if key is None:
        assert words.shape == (tiles + 6 * -(-tiles // 32) + 2 * tiles * width,) == (Tiles(width).n_words(x.size),)
    else:
        assert words.shape == (buckets * (1 + width),)
    assert words.dtype == jnp.uint32
    return np.asarray(result)


@pytest.mark.parametrize("key", [None, 12345])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [1, 64, 200, 5000])
def test_numbers_of_the_reference(n, width, key):
    """Except in tiles in which a float32 may be on the other side of a level; some tiles have an outlier."""
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=n).astype(np.float32) * np.float32(10.0 ** (9 * (seed - 1)))
        x[5::130] *= 10
        x[7 : n // 2] = np.maximum(x[7 : n // 2], 0)
        expected, close = arrive(x, width) if key is None else returned(x, width, key)
        result = cross(x, width, key)
        np.testing.assert_allclose(result[~close], expected[~close], rtol=1e-5, atol=1e-6 * np.abs(x).max())
        assert close.mean() < (0.5 if width == 8 else 0.2) or n < 5000


def test_a_number_of_twice_the_second():
    """Exactly twice is enough; 1.9999999 is the next float32 below."""
    tiles = np.tile(np.random.default_rng(0).uniform(0.1, 0.9, 64), (2, 1)).astype(np.float32)
    tiles[:, 3], tiles[:, 40] = -1.0, [2.0, 1.9999999]
    expected, close = arrive(tiles, 4)
    assert not close.any()
    assert np.abs(expected[0] - expected[1]).max() > 0.05  # one is rotated
    np.testing.assert_allclose(cross(tiles.reshape(-1), 4), expected.reshape(-1), rtol=0, atol=1e-5)


NORMAL = np.random.default_rng(0).normal(size=(500, 64))
ACTIVATIONS = {
    "normal": NORMAL,
    "relu": np.maximum(NORMAL, 0),
    "gelu": NORMAL * (1 + np.vectorize(math.erf)(NORMAL / 2**0.5)) / 2,
    "shifted": NORMAL + 1,
    "far": 3 + NORMAL / 10,
    "outliers": np.where(np.arange(64) == np.arange(500)[:, None] % 64, 20, NORMAL),
    "few": np.where(NORMAL[::-1] > 1, NORMAL, 0),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_loss_of_the_published_code(name, width):
    """Steps are rounded up to bfloat16, by .4% on average and .8% at most, of which the square counts."""
    x = ACTIVATIONS[name].astype(np.float32)
    error = np.sum((cross(x.reshape(-1), width).reshape(x.shape) - x.astype(float)) ** 2)
    assert 0 < error < 1.05 * np.sum((published(x, width) - x) ** 2)


@pytest.mark.parametrize("width", WIDTHS)
def test_zeros_and_constants(width):
    """One number 64 times, or once among zeros, is a zero point alone: to half an eighth of 1/4095."""
    for tile in (np.zeros(64), np.full(64, -3.0), np.eye(64)[5] * 1e30, np.eye(64)[5] * 2.0**-100):
        tile, most = tile.astype(np.float32), np.abs(tile).max()
        np.testing.assert_allclose(cross(tile, width), tile, rtol=0, atol=most / 2**14)
        np.testing.assert_allclose(cross(tile, width, 7), tile, rtol=1e-6, atol=1e-6 * most)
    half = ACTIVATIONS["relu"][:40].reshape(-1).astype(np.float32)
    assert not cross(half, width)[half == 0].any()


@pytest.mark.parametrize("kind", ["heavy", "few", "ties", "normal"])
@pytest.mark.parametrize("width", WIDTHS)
def test_errors_of_half_a_step(kind, width):
    """Of a tile's span, rotated if it is; or of 1/4095 of its smallest number. With a key: a step of a bucket."""
    x = np.clip(numbers(np.random.default_rng(3), kind, (40, 64)), -1e25, 1e25)
    y, _ = turned(x.astype(float))
    step = np.maximum(np.ptp(y, 1, keepdims=True) / (2**width - 1), np.abs(y.min(1, keepdims=True)) / 4095)
    result = cross(x.reshape(-1), width).reshape(40, 64)
    error = np.linalg.norm(result - x.astype(float), axis=1)  # a rotation keeps it
    assert np.all(error <= 8 * (1 + 1 / 127) * step[:, 0] / 2 + 1e-5 * np.abs(x).max(1))
    scale = np.abs(x.reshape(-1, 32).astype(float)).max(1, keepdims=True)
    error = np.abs(cross(x.reshape(-1), width, 3).reshape(-1, 32) - x.reshape(-1, 32).astype(float))
    assert np.all(error <= scale / (2 ** (width - 1) - 1) * (1 + 1e-5))


@pytest.mark.parametrize("width", WIDTHS)
def test_unbiased_gradients(width):
    """The mean over 2,000 keys is within 5.5 standard errors for each of 64 numbers; rounded to nearest, it is not."""
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)

    def there_and_back(key):
        codec = GradientLevels(width, key)
        return codec.decode(codec.encode(x), 64)

    result = np.asarray(jax.jit(jax.vmap(there_and_back))(np.arange(2000, dtype=np.uint32)), np.float64)
    step = np.repeat(np.abs(x.reshape(2, 32)).max(1) / (2 ** (width - 1) - 1), 32)
    assert np.all(np.abs(result.mean(0) - x) < 5.5 * step / 2 / np.sqrt(2000))
    assert np.all(np.mean((result - x) ** 2, axis=0) < step**2 / 4 * 1.05)
    nearest = cross(x, width)
    assert np.any(np.abs(nearest - x) > 5.5 * step / 2 / np.sqrt(2000))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_stays_in_its_tile(bad):
    """With more elements than it takes for XLA's maximum on CPUs to lose NaN."""
    x = np.ones(64 * 200, np.float32)
    x[64 * 150 + 3] = bad
    for key, size in ((None, 64), (5, 32)):
        result = cross(x, 4, key)
        is_bad = np.arange(x.size) // size == 150 * 64 // size
        assert not np.isfinite(result[is_bad]).any()
        assert key is not None or np.isnan(result[is_bad]).all()
        np.testing.assert_allclose(result[~is_bad], 1, rtol=1e-4)


def test_narrow_types():
    x = np.random.default_rng(1).normal(size=300).astype(jnp.bfloat16).astype(np.float32)
    for key in (None, 3):
        np.testing.assert_array_equal(cross(x, 4, key, dtype="bfloat16"), cross(x, 4, key))
