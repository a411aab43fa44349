"""Each method against a NumPy transcription of its paper's algorithm, over a dozen eventful steps."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxcomm as jc
from tests.jaxcomm import cases, trees
from tests.jaxcomm.cases import CASES, FEW, SETTINGS, simulated
from tests.jaxcomm.oracles import Oracle
from tests.jaxcomm.trees import EPS, gradients
from tests.jaxcomm.workers import Simulated
from tests.reference.dct_dp import algorithm_1

STEPS = 12

# What can happen in a step. "grow" makes this gradient and all later ones three times larger, so that thresholds are
# too low until the next refresh.
EVENTS = ("normal", "grow", "heavy", "ties", "zeros", "single", "nan", "inf", "sum_overflows")

# Skips at the first refresh, at later ones for life-spans of 1 to 5, at two in a row, and in between.
SKIPS = ["nan", "normal", "grow", "inf", "sum_overflows", "nan", "grow", "normal", "inf", "ties", "nan", "zeros"]
GROWTH = ["normal", "grow", "grow", "ties", "normal", "heavy", "grow", "nan", "single", "grow", "zeros", "normal"]
# A threshold that equals many coordinates selects far too many, at the steps 0, 1 and 2, which find a new one.
TIES_AT_REFRESHES = ["ties"] * 3 + ["normal"] * 9

# Residuals accept numbers below 2^100.
LIMITS = {"limit": 2.0**100, "below": float(np.nextafter(np.float32(2.0**100), np.float32(0)))}
AROUND_THE_LIMIT = ["normal", "limit", "limit", "normal", "below", "below", *["normal"] * 6]


def gradient_of(event, scale, seed, tree, K):
    kind = event if event in trees.KINDS else "normal"
    grads = gradients(kind, seed, tree, K, scale)
    name = sorted(grads)[seed % len(grads)]
    flat = grads[name].reshape(K, -1)
    where = seed % flat.shape[1]
    if event in ("nan", "inf"):
        flat[seed % K, where] = float(event)
    elif event in LIMITS and grads[name].dtype != np.float16:
        flat[seed % K, where] = LIMITS[event]
    elif event == "sum_overflows":
        flat[:, where] = 3e38 if grads[name].dtype != np.float16 else 0
    return grads


@cases.over([case for case in CASES if case.has_oracle and not case.rounds_at_random], SETTINGS, FEW)
@hypothesis.settings(max_examples=3)
@hypothesis.given(events=st.lists(st.sampled_from(EVENTS), min_size=STEPS, max_size=STEPS), seed=st.integers(0, 2**20))
@hypothesis.example(events=SKIPS, seed=1)
@hypothesis.example(events=GROWTH, seed=2)
@hypothesis.example(events=TIES_AT_REFRESHES, seed=3)
@hypothesis.example(events=AROUND_THE_LIMIT, seed=3)
def test_oracles(case, K, tree, events, seed):
    """State and counts to the bit, means up to the rounding of a sum; see `Oracle` for the exceptions."""
    assert oracle_of_steps(case, K, tree, events, seed).adopted <= STEPS // 4


OF_THE_PAPERS = [case for case in CASES if case.momentum and case.option("momentum") == 0.9 and case.has_oracle]


@pytest.mark.parametrize("case", OF_THE_PAPERS, ids=str)
@pytest.mark.parametrize("events", [["normal"] * STEPS, ["normal", "grow", "normal", "nan"] * 3], ids=["even", "grows"])
def test_a_dozen_steps_of_momentum(case, events):
    """With the papers' momentum, which is not a power of two, and without adopting the library's state in between."""
    assert oracle_of_steps(case, 2, "odd", events, seed=0).adopted == 0


def test_algorithm_1_of_dct_dp():
    """With slots for all that a threshold selects; with the early refreshes, step 1 differs already."""
    grads = np.random.default_rng(0).normal(size=(STEPS, 2, 5, 823)).astype(np.float32)
    expected, residual = algorithm_1(grads.reshape(STEPS, 2, -1).astype(np.float64), 0.9, 5)
    options = {"life_span": 5, "slack": 10.0, "value_dtype": "float32", "collective": "gather"}
    workers = Simulated(jc.dct_dp(0.9, early=False, **options), "pair", 2)
    state = workers.first
    for grad, mean in zip(grads, expected, strict=True):
        out = workers.step({"b": np.zeros((2, 7), np.float32), "w": grad}, state)
        state = out.state
        assert_similar(out.means["w"].reshape(-1), mean)
        assert out.metrics.overflow == 0
    assert_similar(trees.cut(out.residual, {"w": (4115,)})["w"], residual)


def assert_similar(result, expected):
    """Equal, except where a float32 may be on the other side of a threshold: in one of a thousand coordinates."""
    assert np.mean(np.abs(result - expected) > 1e-5 * np.abs(expected).max()) < 1e-3


def test_a_close_call_of_float16():
    case = next(case for case in CASES if str(case) == "plump_dp(float16)")
    assert oracle_of_steps(case, 3, "half", ["normal"] * 9 + ["grow", "grow", "heavy"], seed=308).adopted == 0


def oracle_of_steps(case, K, tree, events, seed):
    """Checks every step, and returns the oracle; it adopts the state after a close decision that differs."""
    workers, oracle = simulated(case, tree, K), Oracle(case, tree, K)
    state = workers.first
    for i, (grads, local) in enumerate(steps_of(events, seed, tree, K)):
        _, sizes = case.inputs(tree, grads, state)
        out, expected = workers.step(grads, state), oracle.step(local, i, sizes)
        state = out.state
        try:
            check_counts(case, i, out, expected)
            check_means(case, out, expected, oracle, grads, sizes)
            check_state(case, tree, state, oracle, sizes)
        except AssertionError:
            if not oracle.is_close:
                raise
            oracle.adopt(state)
    return oracle


@cases.over([case for case in CASES if case.rounds_at_random], SETTINGS, FEW)
@hypothesis.settings(max_examples=3)
@hypothesis.given(events=st.lists(st.sampled_from(EVENTS), min_size=STEPS, max_size=STEPS), seed=st.integers(0, 2**20))
@hypothesis.example(events=SKIPS, seed=1)
@hypothesis.example(events=GROWTH, seed=2)
def test_oracles_of_random_rounding(case, K, tree, events, seed):
    """To 4e-6 of a scale, except for 1% of the coordinates, where a last bit decides: they may differ by a level."""
    workers, oracle = simulated(case, tree, K), Oracle(case, tree, K)
    state, close_calls, total = workers.first, 0, 0
    for i, (grads, local) in enumerate(steps_of(events, seed, tree, K)):
        _, sizes = case.inputs(tree, grads, state)
        out, expected = workers.step(grads, state), oracle.step(local, i, sizes)
        state = out.state
        check_counts(case, i, out, expected)
        for name, mean in expected.mean.items():
            scale, level = case.scale_and_level([g[name].astype(np.float64) for g in local])
            if name not in case.compressed(tree):
                level = 0
            result, dtype = out.means[name].astype(np.float64), grads[name].dtype
            error = 4e-6 * scale + (0 if dtype == np.float32 else float(trees.finfo(dtype).eps) * np.abs(mean))
            difference = np.where(result == mean, 0, np.abs(result - mean))  # a scale may be NaN in a skipped step
            assert np.all((difference == 0) | (difference <= error + level))
            close_calls += np.sum((difference != 0) & ~(difference <= error))
            total += mean.size
    assert close_calls <= 0.01 * total


def steps_of(events, seed, tree, K):
    """Yields every step's gradients, (K, *shape) by name, and as float32, a dict for each worker."""
    scale = 1.0
    for i, event in enumerate(events):
        scale = min(scale * 3.0, 27.0) if event == "grow" else scale  # float16 holds numbers up to 65,504
        grads = gradient_of(event, scale, seed + i, tree, K)
        yield grads, [{name: np.asarray(g[w], np.float32) for name, g in grads.items()} for w in range(K)]


def check_counts(case, i, out, expected):
    assert out.skipped == expected.skipped, i
    assert bool(out.metrics.drained) == case.drains(i), i
    assert out.metrics.overflow == sum(expected.overflow), i
    assert out.metrics.sent == sum(expected.sent), i


def check_means(case, out, expected, oracle, grads, sizes):
    for name, mean in expected.mean.items():
        error = max(8 * len(sizes[name]) * EPS * sizes[name].max(), oracle.tolerance[name])
        if not (case.state_error or case.momentum):  # whose dense means are sums over all steps before
            error = len(sizes[name]) * EPS * sizes[name].mean(0) + expected.near_ties.get(name, 0)
        assert_close(out.means[name], mean, grads[name].dtype, error, case.momentum)


def assert_close(result, mean, dtype, error, is_momentum):
    assert result.dtype == dtype
    if dtype != np.float32:  # means come back in the gradient's type, and momentum travels in it
        info = trees.finfo(dtype)
        size = error / EPS if is_momentum else np.abs(mean)
        error = error + float(info.eps) * size + float(info.smallest_subnormal)
    difference = np.abs(result.astype(np.float64) - mean)
    assert np.all((difference == 0) | (difference <= error))  # the first holds if a skipped step's sizes are NaN


def check_state(case, tree, state, oracle, sizes):
    for attribute, rows in case.state_rows(tree, state).items():
        for w, tensors in enumerate(getattr(oracle.reference, attribute)):
            assert sorted(rows) == sorted(tensors)
            for name, expected in tensors.items():
                if not case.state_error:
                    np.testing.assert_array_equal(rows[name][w], expected)
                else:
                    error = np.abs(rows[name][w].astype(np.float64) - expected)
                    assert np.all(error <= oracle.tolerance[name])
    if case.momentum:
        for name, u in case.dense_momentum(tree, state).items():
            # Relative to the workers' own momenta, of which it is the mean, as they may cancel one another.
            error = np.abs(u.astype(np.float64) - oracle.reference.momentum_dense[name])
            limit = max(8 * len(sizes[name]) * EPS * sizes[name].max(), oracle.tolerance[name])
            assert np.all(error <= limit) or np.isnan(limit)  # a skipped step keeps what was compared before
    case.check_memory(oracle.reference, tree, state)


@pytest.mark.parametrize("case", [case for case in CASES if case.options.get("drain_every")], ids=str)
def test_drains_in_a_dozen_steps(case):
    """Otherwise the test above would mean little."""
    assert len({case.drains(i) for i in range(STEPS)}) == 2
