"""The cheap random numbers: the properties on which rounding and drawing coordinates depend.

Every bound is five standard deviations of what independent uniform numbers would give; the keys are fixed.
"""

import itertools

import jax
import numpy as np
import pytest

from jaxcomm.kernels import noise

N = 2**17
KEYS = [(0, 0), (0, 1), (1, 0), (7, 3, 0, 5), (0, 0, 1), (2**31 - 1, 12345)]

uniform = jax.jit(noise.uniform, static_argnums=1)


def numbers(*key):
    return np.asarray(uniform(noise.make_key(*key), N), np.float64)


@pytest.mark.parametrize("key", KEYS)
def test_uniform_numbers(key):
    u = numbers(*key)
    assert u.min() >= 0
    assert u.max() < 1
    np.testing.assert_array_equal(u * 2**24, np.floor(u * 2**24))
    assert abs(u.mean() - 1 / 2) <= 5 * np.sqrt(1 / 12 / N)
    assert abs(u.var() - 1 / 12) <= 5 * np.sqrt(1 / 180 / N)
    for shift in (0, 8, 16):  # high, middle and low bits
        count = np.bincount(((u * 2**24).astype(np.int64) >> (16 - shift)) & 255, minlength=256)
        chi_square = np.sum((count - N / 256) ** 2 / (N / 256))
        assert abs(chi_square - 255) <= 5 * np.sqrt(2 * 255)


def correlation(a, b):
    return np.mean((a - 0.5) * (b - 0.5)) * 12


@pytest.mark.parametrize("key", KEYS)
def test_neighbours(key):
    u = numbers(*key)
    for lag in (1, 2, 3, 32, 512, 1024):
        assert abs(correlation(u[:-lag], u[lag:])) <= 5 / np.sqrt(N - lag)


def test_independent_sequences():
    keys = [(seed, step, 0, worker) for seed in (0, 1) for step in (0, 1, 2) for worker in range(4)]
    keys += [(0, 0, 1), (0, 1, 1), (0, 0), (0, 1), (1, 0)]
    rows = [numbers(*key) for key in keys]
    for (a, x), (b, y) in itertools.combinations(zip(keys, rows, strict=True), 2):
        assert abs(correlation(x, y)) <= 5 / np.sqrt(N), (a, b)
        assert abs(correlation(x[1:], y[:-1])) <= 5 / np.sqrt(N), (a, b)
        assert abs(correlation(x, y[::-1])) <= 5 / np.sqrt(N), (a, b)


def test_parts_of_a_sequence():
    key = noise.make_key(3, 4)
    whole = np.asarray(uniform(key, 4096))
    for start in (0, 1, 1024, 3000):
        np.testing.assert_array_equal(noise.uniform(key, 1000, start), whole[start : start + 1000])


def test_keys():
    keys = [noise.make_key(*numbers) for numbers in itertools.product(range(8), repeat=3)]
    assert len({int(key) for key in keys}) == 512
