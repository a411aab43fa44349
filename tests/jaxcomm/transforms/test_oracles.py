"""Each method against a NumPy transcription of its paper's algorithm, over a dozen eventful steps."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.jaxcomm import cases
from tests.jaxcomm.cases import CASES, EPS, FEW, SETTINGS, gradients, simulated

STEPS = 12

# What can happen in a step. "grow" makes this gradient and all later ones three times larger, so that thresholds are
# too low until the next refresh.
EVENTS = ("normal", "grow", "heavy", "ties", "zeros", "single", "nan", "inf", "sum_overflows")

# Skips at the first refresh, at later ones of life spans 1 to 5, at two in a row, and in between.
SKIPS = [
    "nan",
    "normal",
    "grow",
    "inf",
    "sum_overflows",
    "nan",
    "grow",
    "normal",
    "inf",
    "ties",
    "nan",
    "zeros",
]
GROWTH_AND_TIES = [
    "normal",
    "grow",
    "grow",
    "ties",
    "normal",
    "heavy",
    "grow",
    "nan",
    "single",
    "grow",
    "zeros",
    "normal",
]


def gradient_of(event, scale, seed, tree, K):
    kind = event if event in cases.KINDS else "normal"
    grads = gradients(kind, seed, tree, K, scale)
    name = sorted(grads)[seed % len(grads)]
    flat = grads[name].reshape(K, -1)
    where = seed % flat.shape[1]
    if event in ("nan", "inf"):
        flat[seed % K, where] = float(event)
    elif event == "sum_overflows":
        flat[:, where] = 3e38 if grads[name].dtype != np.float16 else 0
    return grads


@cases.over([case for case in CASES if case.reference], SETTINGS, FEW)
@hypothesis.settings(max_examples=4)
@hypothesis.given(events=st.lists(st.sampled_from(EVENTS), min_size=STEPS, max_size=STEPS), seed=st.integers(0, 2**20))
@hypothesis.example(events=SKIPS, seed=1)
@hypothesis.example(events=GROWTH_AND_TIES, seed=2)
def test_method_equals_its_oracle(case, K, tree, events, seed):
    """Residuals, thresholds and counts to the bit, means to the rounding of a sum."""
    workers, oracle = simulated(case, tree, K), case.oracle()
    state, residual, scale = workers.first, None, 1.0
    for i, event in enumerate(events):
        scale = min(scale * 3.0, 27.0) if event == "grow" else scale  # float16 holds numbers up to 65,504
        grads = gradient_of(event, scale, seed + i, tree, K)
        sizes = cases.sizes(case, tree, grads, residual)
        out = workers.step(grads, state)
        state, residual = out.state, out.residual

        own = [{name: gradient[w] for name, gradient in grads.items()} for w in range(K)]
        own = [{name: np.asarray(gradient, np.float32) for name, gradient in worker.items()} for worker in own]
        expected = oracle.step(own, **({"drain": case.drains(i)} if case.drain_every else {}))

        assert out.skipped == expected.skipped, i
        assert bool(out.metrics.drained) == case.drains(i), i
        assert out.metrics.overflow == sum(expected.overflow), i
        assert out.metrics.sent == sum(expected.sent), i
        for name, mean in expected.mean.items():
            assert_close(out.means[name], mean, grads[name].dtype, tolerance=K * EPS * sizes[name].mean(0))
        if case.is_sparse:
            check_rows(case, tree, out, oracle)
        if hasattr(oracle, "thresholds"):
            check_thresholds(case, tree, out, oracle)


def assert_close(got, mean, dtype, tolerance):
    assert got.dtype == dtype
    if dtype != np.float32:  # means come back in the gradient's type
        info = cases.finfo(dtype)
        tolerance = tolerance + float(info.eps) * np.abs(mean) + float(info.smallest_subnormal)
    difference = np.abs(got.astype(np.float64) - mean)
    assert np.all((difference == 0) | (difference <= tolerance))  # the first, where a skipped step's sizes are NaN


def check_rows(case, tree, out, oracle):
    rows = cases.unflatten(case, tree, out.residual)
    for w, residual in enumerate(oracle.residuals):
        assert sorted(rows) == sorted(residual)
        for name, expected in residual.items():
            np.testing.assert_array_equal(rows[name][w], expected)


def check_thresholds(case, tree, out, oracle):
    rows = np.asarray(out.state.threshold.rows)
    rows = rows.reshape(len(rows), -1)
    for w, thresholds in enumerate(oracle.thresholds):
        expected = [thresholds[name] for name in cases.compressed(case, tree)]
        np.testing.assert_array_equal(rows[w], np.asarray(expected, np.float32))


@pytest.mark.parametrize("case", [case for case in CASES if case.drain_every], ids=str)
def test_a_dozen_steps_have_a_drain_and_a_step_without(case):
    """What the test above needs to mean something."""
    assert len({case.drains(i) for i in range(STEPS)}) == 2
