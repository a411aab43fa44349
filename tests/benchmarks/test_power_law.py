"""The fit finds laws that are known, and its intervals cover what they should."""

import numpy as np
import pytest

from benchmarks.power_law import PowerLaw, draws, quantiles

SIZES = (1e5, 2e5, 4e5)


def law(E, A, a):
    return [E + A * size**-a for size in SIZES]


def test_known_laws():
    fit = PowerLaw.fit(SIZES, {"dense": law(1.25, 40, 0.3), "topk": law(1.25, 90, 0.35), "late": law(1.25, 11, 0.15)})
    assert abs(fit.E - 1.25) < 1e-4
    assert list(fit.A.values()) == pytest.approx([40, 90, 11], rel=1e-2)
    assert list(fit.a.values()) == pytest.approx([0.3, 0.35, 0.15], rel=1e-3)
    assert fit.loss("topk", 8e5) == pytest.approx(1.25 + 90 * 8e5**-0.35, abs=1e-4)


def test_without_a_least_loss():
    fit = PowerLaw.fit(SIZES, {"dense": law(0, 40, 0.3)})
    assert fit.E < 1e-3
    assert fit.loss("dense", 8e5) == pytest.approx(40 * 8e5**-0.3, abs=1e-4)


def test_two_sizes_are_refused():
    with pytest.raises(ValueError, match=r"at least 3 sizes; got 2\. Train more"):
        PowerLaw.fit(SIZES[:2], {"dense": [3.0, 2.0]})


def test_interval_of_a_mean():
    """The mean of two seeds with a deviation of 0.1: 90% lie within 1.645 * 0.1 / sqrt(2) of it."""
    rng = np.random.default_rng(0)
    losses = {"dense": rng.normal(2, 0.1, (40, 2)).tolist()}
    drawn = [means["dense"] - np.mean(losses["dense"], axis=1) for means in draws(losses)]
    low, high = quantiles(np.concatenate(drawn))
    assert (low, high) == pytest.approx((-0.1163, 0.1163), rel=0.15)


def test_what_methods_share_cancels():
    noise = np.random.default_rng(1).normal(0, 0.1, (3, 2))
    losses = {"dense": (2 + noise).tolist(), "topk": (2.5 + noise).tolist()}
    assert all(means["topk"] - means["dense"] == pytest.approx(0.5) for means in draws(losses))


def test_one_seed_is_refused():
    with pytest.raises(ValueError, match="at least 2 seeds; got 1"):
        next(draws({"dense": [[2.0], [1.9], [1.8]]}))
