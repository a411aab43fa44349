"""Rotated tiles of a few bits: equal to the reference, exact where possible, unbiased with a key, NaN stays NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.codecs.tiles import Tiles
from tests.jaxcomm.layers.crossing import numbers
from tests.reference.tiles import H, arrive

WIDTHS = (3, 4, 8)


@functools.cache
def jitted(width, n, has_key):
    tiles = Tiles(width)

    def there_and_back(x, key):
        words = tiles.encode(x, key if has_key else None)
        return words, tiles.decode(words, n)

    return jax.jit(there_and_back)


def cross(x, width, key=None, dtype="float32"):
    words, got = jitted(width, x.size, key is not None)(jnp.asarray(x, dtype), np.uint32(key or 0))
    tiles = -(-x.size // 64)
    assert words.shape == (-(-tiles // 2) + tiles * 64 * width // 32,) == (Tiles(width).n_words(x.size),)
    assert words.dtype == jnp.uint32
    return np.asarray(got)


@pytest.mark.parametrize("key", [None, 12345])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [1, 64, 200, 5000])
def test_numbers_arrive_as_the_references(n, width, key):
    """Except in tiles in which a float32 may be on the other side of a level: fewer than a tenth of them."""
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=n).astype(np.float32) * np.float32(10.0 ** (9 * (seed - 1)))
        expected, close = arrive(x, width, key)
        got = cross(x, width, key)
        np.testing.assert_allclose(got[~close], expected[~close], rtol=1e-5, atol=1e-6 * np.abs(x).max())
        assert close.mean() < 0.1 or n < 5000


@pytest.mark.parametrize("width", WIDTHS)
def test_what_has_one_magnitude_after_the_rotation_is_exact(width):
    """Zeros; a constant and a column of the matrix, which rotate to one number; one number, which rotates to 64."""
    for tile in (np.zeros(64), np.full(64, -3.0), H[17] * 20, np.eye(64)[5] * 1e30, np.eye(64)[5] * 2.0**-100):
        tile = tile.astype(np.float32).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_allclose(cross(tile, width), tile, rtol=1e-6, atol=1e-6 * np.abs(tile).max())
        np.testing.assert_allclose(cross(tile, width, 7), tile, rtol=1e-6, atol=1e-6 * np.abs(tile).max())


@pytest.mark.parametrize("kind", ["heavy", "few", "ties", "normal"])
@pytest.mark.parametrize("width", WIDTHS)
def test_an_error_is_at_most_half_a_step_of_the_rotated_numbers(kind, width):
    """With a key, at most a step. The scale is at most 1/127 larger for being rounded up to bfloat16."""
    x = np.clip(numbers(np.random.default_rng(3), kind, (40, 64)), -1e25, 1e25)
    step = np.abs(x.astype(float) @ H).max(1, keepdims=True) * (1 + 1 / 127) / (2 ** (width - 1) - 1)
    for key, most in ((None, 0.5), (3, 1.0)):
        error = np.abs((cross(x.reshape(-1), width, key).reshape(40, 64) - x.astype(float)) @ H)
        assert np.all(error <= most * step + 1e-5 * np.abs(x).max(1, keepdims=True))


@pytest.mark.parametrize("width", WIDTHS)
def test_with_a_key_it_is_unbiased(width):
    """The mean over 2,000 keys is within 5.5 standard errors for each of 64 numbers; rounded to nearest, it is not."""
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    tiles = Tiles(width)
    draw = jax.jit(jax.vmap(lambda key: tiles.decode(tiles.encode(x, key), 64)))
    got = np.asarray(draw(np.arange(2000, dtype=np.uint32)), np.float64)
    step = np.abs(x.astype(float) @ H).max() * (1 + 1 / 127) / (2 ** (width - 1) - 1)
    assert np.abs(got.mean(0) - x).max() < 5.5 * step / 2 / np.sqrt(2000)
    assert np.mean((got - x) ** 2) < step**2 / 4
    nearest = cross(x, width)
    assert np.abs(nearest - x).max() > 5.5 * step / 2 / np.sqrt(2000)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_tile_nan_and_no_other(bad):
    """With more elements than it takes for XLA's maximum on CPUs to lose NaN."""
    x = np.ones(64 * 200, np.float32)
    x[64 * 150 + 3] = bad
    for key in (None, 5):
        got = cross(x, 4, key)
        is_bad = np.arange(x.size) // 64 == 150
        assert np.isnan(got[is_bad]).all()
        np.testing.assert_allclose(got[~is_bad], 1, rtol=1e-6)


def test_narrow_types_are_rotated_in_float32():
    x = np.random.default_rng(1).normal(size=300).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(cross(x, 4, dtype="bfloat16"), cross(x, 4))
