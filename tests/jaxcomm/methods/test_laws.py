"""The laws that every method keeps, on simulated workers."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import jaxcomm as jc
from tests.jaxcomm import cases, trees
from tests.jaxcomm.cases import CASES, FEW, LARGEST, SETTINGS, simulated
from tests.jaxcomm.methods import plump_dp
from tests.jaxcomm.train_steps import repeated
from tests.jaxcomm.trees import EPS, gradients
from tests.jaxcomm.workers import Simulated

FLOAT32_MAX = float(np.finfo(np.float32).max)
WITH_RESIDUAL = [case for case in CASES if case.conserves]

several_steps = st.lists(st.sampled_from(trees.KINDS), min_size=3, max_size=3)
seeds = st.integers(0, 2**20)


def steps_of(case, tree, K, kinds, seed, growth):
    """Yields (gradients, state before, outcome) of every step."""
    workers = simulated(case, tree, K)
    state = workers.first
    for i, kind in enumerate(kinds):
        grads = gradients(kind, seed + i, tree, K, scale=growth**i)
        out = workers.step(grads, state)
        yield grads, state, out
        state = out.state


@cases.over(WITH_RESIDUAL, SETTINGS, FEW)
@hypothesis.settings(max_examples=4)
@hypothesis.given(kinds=several_steps, seed=seeds, growth=st.sampled_from([1.0, 3.0]))
@hypothesis.example(kinds=["largest", "normal", "huge"], seed=0, growth=1.0)
@hypothesis.example(kinds=["normal", "normal", "normal"], seed=0, growth=3.0)
def test_nothing_is_lost(case, K, tree, kinds, seed, growth):
    """mean + pmean(residual') == pmean(input + residual), up to the rounding of K + 3 float32 operations.

    The input is the gradient; for methods with momentum, it is the new momentum, also for dense tensors.
    """
    for grads, state, out in steps_of(case, tree, K, kinds, seed, growth):
        before, after = case.owed(tree, K, state), case.owed(tree, K, out.state)
        exact, sizes = case.inputs(tree, grads, state)
        if out.skipped:
            # Only where a number is too large for a residual, or finite ones can add up to an infinite mean.
            of_workers = sum(max(size[w].max() for size in sizes.values()) for w in range(K))
            too_large = any(np.abs(exact[name]).max() >= case.limit for name in case.compressed(tree))
            assert (
                too_large
                or of_workers > 0.9999 * FLOAT32_MAX
                or any(
                    gradient.dtype != np.float32 and narrow_size(case, sizes[name]) > 0.99 * largest(gradient.dtype)
                    for name, gradient in grads.items()
                )
            )
            np.testing.assert_equal(after, before)
            assert all(not mean.any() for mean in out.means.values())
            continue
        for name, gradient in grads.items():
            mean = out.means[name]
            if name in case.compressed(tree) and not out.metrics.drained:
                assert np.abs(exact[name]).max() <= case.limit * (1 + 1e-5)
            assert mean.dtype == gradient.dtype
            assert mean.shape == gradient.shape[1:]
            left = mean.astype(np.float64) + after[name].mean(0)
            right = (exact[name] + before[name]).mean(0)
            tolerance = (K + 3) * EPS * sizes[name].mean(0)
            if case.momentum and case.option("clip"):
                tolerance *= 8  # the norm is a sum of thousands of squares
            if gradient.dtype != np.float32:  # means come back in the gradient's type, and momentum travels in it
                info, size = trees.finfo(gradient.dtype), np.abs(mean.astype(np.float64))
                size = sizes[name].mean(0) if case.momentum else size
                tolerance += float(info.eps) * size + float(info.smallest_subnormal)
            assert np.all(np.abs(left - right) <= tolerance), name


def narrow_size(case, size):
    """What has to fit into 16 bits: the mean, or each worker's momentum if that is sent in the gradient's type."""
    return size.max() if case.momentum else size.mean(0).max()


def largest(dtype):
    return float(trees.finfo(dtype).max)


@cases.over([case for case in WITH_RESIDUAL if case.is_dyadic], [(K, tree) for K, tree in SETTINGS if K != 3], FEW)
@hypothesis.settings(max_examples=4)
@hypothesis.given(seed=seeds, growth=st.sampled_from([1, 3]))
def test_nothing_is_lost_of_dyadic_numbers(case, K, tree, seed, growth):
    for grads, state, out in steps_of(case, tree, K, ["dyadic"] * 4, seed, growth):
        before, after = case.owed(tree, K, state), case.owed(tree, K, out.state)
        exact, _ = case.inputs(tree, grads, state)
        assert not out.skipped
        for name in grads:
            np.testing.assert_array_equal(out.means[name] + after[name].mean(0), (exact[name] + before[name]).mean(0))


@pytest.mark.parametrize("case", cases.first_rows([case for case in CASES if case.can_overflow]))
def test_growth_overflows(case):
    """The law above would also hold without overflow; this proves that there was some."""
    K, tree = case.setting or FEW[0]
    outs = [out for _, _, out in steps_of(case, tree, K, ["normal"] * 8, 0, 3.0)]  # the first refresh their thresholds
    assert any(out.metrics.overflow > 0 for out in outs)
    assert all(out.metrics.sent > 0 for out in outs)


def dct_dp_steps(tx, gradients):
    """Yields (mean, metrics) of every step of one worker's gradients (steps, n)."""
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, None), axis_name="data"))
    state = tx.init(jnp.zeros(gradients.shape[1]))
    for gradient in gradients:
        mean, new = step(gradient[None], state)
        state = jax.tree.map(lambda x: x[0], new)
        yield np.asarray(mean[0]), jax.tree.map(int, state.metrics)


@pytest.mark.parametrize(("n", "sparsity"), [(512, 0.999), (700, 0.99), (1999, 0.99), (1000, 0.5), (600, 0.0)])
def test_fresh_thresholds_fit(n, sparsity):
    """N - floor(N eta) + 1 coordinates reach the floor(N eta)-th smallest, without any slack."""
    gradients = np.random.default_rng(n).normal(size=(3, n)).astype(np.float32)
    tx = jc.dct_dp(sparsity, life_span=1, slack=1, value_dtype="float32")
    for _, metrics in dct_dp_steps(tx, gradients):
        assert metrics.overflow == 0
        assert metrics.sent == min(n, n - int(n * sparsity) + 1)


def test_a_threshold_of_zeros():
    """And so does a threshold that the gradient has outgrown, however long the life-span."""
    n, k = 2000, 21
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(12, n)).astype(np.float32)
    gradients[:6] = 0  # past the refreshes of steps 0, 1, 2 and 4
    gradients[10:] *= 1000
    tx = jc.dct_dp(0.99, life_span=1000, slack=1, value_dtype="float32")
    overflow, residual = [], np.zeros(n)
    for i, (mean, metrics) in enumerate(dct_dp_steps(tx, gradients)):
        overflow.append(metrics.overflow)
        residual += gradients[i]
        if i in (7, 11):  # the step after, and the largest are sent
            assert set(np.flatnonzero(mean)) == set(np.argsort(np.abs(residual))[-k:])
        residual -= mean
    assert overflow[6] == n - k
    assert overflow[10] > n / 2
    assert overflow[7] == overflow[11] == 0


@pytest.mark.parametrize("collective", ["gather", "balanced"])
@pytest.mark.parametrize(
    ("factory", "options", "ones"),
    [(jc.dct_dp, {"life_span": 10**6}, 4096), (jc.topk, {}, 2048)],
    ids=["dct_dp", "topk"],
)
def test_no_coordinate_starves(factory, options, ones, collective):
    """Equal gradients all reach every threshold; with top-k, all selected ones are in one owner's region."""
    K, n = 2, 4096
    gradient = np.zeros((K, n), np.float32)
    gradient[:, :ones] = 1
    tx = optax.chain(factory(0.9, collective=collective, **options), optax.sgd(1.0))
    state, overflow = repeated(tx, gradient, 120)
    assert (overflow > 0) == (ones == n or collective != "gather")
    np.testing.assert_array_equal(state.params["w"] != 0, gradient[0] != 0)


@cases.over(CASES, SETTINGS, FEW)
def test_bad_gradients(case, K, tree):
    workers = simulated(case, tree, K)
    first = workers.step(gradients("normal", 0, tree, K), workers.first)
    for i, name in enumerate(trees.TREES[tree]):  # dense and compressed tensors alike
        grads = gradients("normal", 1, tree, K)
        grads[name].reshape(K, -1)[K - 1, -1] = [np.nan, np.inf, -np.inf][i % 3]
        skipped = workers.step(grads, first.state)
        assert (skipped.metrics.sent, skipped.metrics.overflow, skipped.metrics.skipped) == (0, 0, 1)
        assert all(not mean.any() for mean in skipped.means.values())
        jax.tree.map(np.testing.assert_array_equal, kept(first.state), kept(skipped.state))
        after = workers.step(gradients("normal", 2, tree, K), skipped.state)
        assert after.metrics.skipped == 0
        assert all(np.isfinite(mean.astype(np.float32)).all() for mean in after.means.values())
        assert any(mean.any() for mean in after.means.values())


def kept(state):
    """The parts of the state that a skipped step must not change."""
    memory = state.memory._replace(due=None) if hasattr(state.memory, "due") else state.memory
    return state.residual, memory


@cases.over(CASES, [(4, "pair")], FEW)
def test_resizing_keeps_the_debt(case, K, tree):
    """K -> 3 -> 8 -> 1 -> K: the mean over the workers of all that a method keeps is preserved, and is sent at last."""
    *_, (_, _, out) = steps_of(case, tree, K, ["normal"] * 3, 0, 1.0)
    state, owed = out.state, case.owed(tree, K, out.state)
    for workers in (3, 8, 1, K):
        before, state = state, jc.resize_workers(state, workers)
        old, new = case.state_rows(tree, before), case.state_rows(tree, state)
        for row in old:
            for name, rows in old[row].items():
                assert len(new[row][name]) == workers
                mean, size = rows.astype(np.float64).mean(0), np.abs(rows).max(0)
                assert np.all(np.abs(new[row][name].astype(np.float64).mean(0) - mean) <= EPS * size), (row, name)
    grads = gradients("normal", 9, tree, K)
    exact, sizes = case.inputs(tree, grads, state)
    out = simulated(case, tree, K).step(grads, state)
    assert not out.skipped
    if case.conserves:
        left = case.owed(tree, K, out.state)
        for name, mean in out.means.items():
            difference = np.abs(mean + left[name].mean(0) - exact[name].mean(0) - owed[name].mean(0))
            assert np.all(difference <= 16 * EPS * (sizes[name].mean(0) + np.abs(owed[name]).max(0))), name


@cases.over([case for case in CASES if "clip" not in case.options], [(2, "odd"), (4, "pair"), LARGEST], FEW)
def test_infinite_sums(case, K, tree):
    workers = simulated(case, tree, K)
    first = workers.step(gradients("normal", 0, tree, K), workers.first)
    for name in trees.TREES[tree]:  # dense and compressed tensors alike, where it is certain that both are sent
        is_sent = case.sends_largest and not case.is_balanced
        if name in case.compressed(tree) and not is_sent:
            continue
        grads = gradients("zeros", 1, tree, K)
        grads[name].reshape(K, -1)[:2, 0] = 3e38
        out = workers.step(grads, first.state)
        assert (out.metrics.sent, out.metrics.overflow, out.metrics.skipped) == (0, 0, 1)
        assert all(not mean.any() for mean in out.means.values())
        jax.tree.map(np.testing.assert_array_equal, kept(first.state), kept(out.state))


@pytest.mark.parametrize(
    "tx",
    [
        jc.plump_dp(),
        jc.topk(0.0),
        jc.dct_dp(0.0),
        jc.dct_dp(0.5, drain_every=1),
        jc.dct_dp(0.0, collective="balanced"),
        jc.random_k(0.0),
        jc.sign(),
    ],
    ids=["plump", "topk", "dct", "drain", "balanced", "random", "sign"],
)
def test_a_mean_beyond_its_type(tx):
    """Finite float16 gradients on top of a residual, or rounded up to bfloat16: 65,504 is the largest float16."""
    x = np.full((2, 600), 65504, np.float16)
    state = tx.init(jnp.zeros(600, jnp.float16))
    rows = getattr(state, "residual", None)
    if rows is not None:
        state = state.replace(residual=jc.PerWorker(jnp.full((1, 1024), 1000.0).at[:, 600:].set(0)))
    update = jax.vmap(lambda g: tx.update(g, state), axis_name="data")
    mean, new = jax.jit(update)(x)
    skipped = np.asarray(jc.exchange_metrics(new).skipped)
    if rows is None:
        assert skipped.tolist() == [0, 0]
        np.testing.assert_array_equal(mean, x)
        return
    assert skipped.tolist() == [1, 1]
    assert not np.any(mean)
    np.testing.assert_array_equal(new.residual.rows[:, 0, :600], 1000.0)


@cases.over([case for case in CASES if case.sends_largest], [(4, "pair")], FEW)
def test_the_mean(case, K, tree):
    """Of what all workers sent, whatever the method: every worker sends a coordinate far above all others at once."""
    workers = simulated(case, tree, K)
    grads = gradients("zeros", 0, tree, K)
    wide = max(grads, key=lambda name: grads[name].size)
    grads[wide].reshape(K, -1)[:2, 77] = [0.125, 1.25]
    grads["b"][:2, 3] = [0.5, -1]
    out = workers.step(grads, workers.first)
    assert np.flatnonzero(out.means[wide]).tolist() == [77]
    error = 0 if case.is_dyadic else 4 * EPS  # levels are multiples of 1/127
    np.testing.assert_allclose(out.means[wide].reshape(-1)[77], 1.375 / K, rtol=error)
    if case.rounds_at_random and case.dense_below == 0:  # one level, and nothing of it in between
        return
    assert out.means["b"].tolist() == [0, 0, 0, -0.5 / K, 0, 0, 0]


WITH_ALL = [case for case in CASES if case.all_options(1)]


@cases.over([case for case in WITH_ALL if not case.is_balanced], [(2, "odd"), (3, "pair")], FEW)
def test_everything_is_plump_dp(case, K, tree):
    """To the bit for small integers, and for one or two workers, whose sum has one order; otherwise to rounding."""
    check_that_it_equals_plump_dp(case, K, tree)


@cases.over([case for case in WITH_ALL if case.is_balanced], [(2, "blocks")], [(4, "blocks")])
def test_everything_is_plump_dp_with_room(case, K, tree):
    check_that_it_equals_plump_dp(case, K, tree)


def check_that_it_equals_plump_dp(case, K, tree):
    full = Simulated(case.make(**case.all_options(K)), tree, K)
    dense = simulated(plump_dp.CASES[0], tree, K)
    state, dense_state = full.first, dense.first
    for i, kind in enumerate(["normal", "ties", "heavy", "huge", "zeros", "single", "normal"]):
        grads = gradients(kind, i, tree, K)
        out, expected = full.step(grads, state), dense.step(grads, dense_state)
        state, dense_state = out.state, expected.state
        assert out.metrics.overflow == 0
        assert not out.residual.any()
        for name in grads:
            if K <= 2 or kind in ("ties", "zeros", "single"):
                np.testing.assert_array_equal(out.means[name], expected.means[name])
            else:
                tolerance = K * EPS * np.abs(grads[name].astype(np.float64)).mean(0)
                difference = np.abs(out.means[name].astype(np.float64) - expected.means[name])
                assert np.all(difference <= tolerance)
