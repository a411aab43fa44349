"""Seeds of rows: no pattern that a model's noise could show."""

import numpy as np
import pytest

from train.data.seeds import mix, row_seeds

N = 1 << 16


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_fair_and_independent_bits(seed):
    seeds = row_seeds(seed, np.arange(N))
    bits = np.unpackbits(seeds.view(np.uint8)).reshape(N, 32) * 2.0 - 1  # of mean 0 and variance 1
    bound = 5 / np.sqrt(N)  # five deviations of a mean of N fair bits
    assert np.abs(bits.mean(axis=0)).max() < bound
    assert np.abs((bits[1:] * bits[:-1]).mean(axis=0)).max() < bound  # of the next row
    correlation = bits.T @ bits / N - np.eye(32)
    assert np.abs(correlation).max() < bound


def test_neighbouring_seeds():
    runs = [row_seeds(seed, np.arange(1000)) for seed in range(20)]
    assert len(set(np.concatenate(runs).tolist())) == 20_000


def test_seeds_of_places():
    places = np.array([5, 2**40, 0, 7])
    np.testing.assert_array_equal(row_seeds(3, places), [row_seeds(3, places[i : i + 1])[0] for i in range(4)])


def test_mix():
    # The generator of SplitMix64 adds the golden ratio and mixes: the first outputs of seed 0, as published.
    golden = 0x9E3779B97F4A7C15
    words = np.array([golden * i % 2**64 for i in (1, 2, 3)], np.uint64)
    assert [hex(word) for word in mix(words).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]
