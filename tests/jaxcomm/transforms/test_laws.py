"""The laws that every method keeps, on simulated workers."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxcomm as jc
from tests.jaxcomm import cases
from tests.jaxcomm.cases import CASES, EPS, FEW, SETTINGS, Simulated, gradients, owed, simulated

FLOAT32_MAX = float(np.finfo(np.float32).max)

several_steps = st.lists(st.sampled_from(cases.KINDS), min_size=3, max_size=3)
seeds = st.integers(0, 2**20)


def first_residual(workers):
    residual = getattr(workers.first, "residual", None)
    return None if residual is None else np.asarray(residual.rows)[:, 0]


def steps_of(case, tree, K, kinds, seed, growth):
    """Yields (gradients, residual before, outcome) of every step."""
    workers = simulated(case, tree, K)
    state, residual = workers.first, first_residual(workers)
    for i, kind in enumerate(kinds):
        grads = gradients(kind, seed + i, tree, K, scale=growth**i)
        out = workers.step(grads, state)
        yield grads, residual, out
        state, residual = out.state, out.residual


@cases.over(CASES, SETTINGS, FEW)
@hypothesis.given(kinds=several_steps, seed=seeds, growth=st.sampled_from([1.0, 3.0]))
@hypothesis.example(kinds=["largest", "normal", "huge"], seed=0, growth=1.0)
@hypothesis.example(kinds=["normal", "normal", "normal"], seed=0, growth=3.0)
def test_nothing_is_lost(case, K, tree, kinds, seed, growth):
    """mean + pmean(residual') == pmean(gradient + residual), to the rounding of K + 3 float32 operations."""
    for grads, residual, out in steps_of(case, tree, K, kinds, seed, growth):
        before, after = owed(case, tree, K, residual), owed(case, tree, K, out.residual)
        sizes = cases.sizes(case, tree, grads, residual)
        if out.skipped:
            # Only where finite numbers can add up to an infinite mean.
            of_workers = sum(max(size[w].max() for size in sizes.values()) for w in range(K))
            assert of_workers > 0.9999 * FLOAT32_MAX or any(
                gradient.dtype != np.float32 and sizes[name].mean(0).max() > 0.99 * largest(gradient.dtype)
                for name, gradient in grads.items()
            )
            np.testing.assert_equal(after, before)
            assert all(not mean.any() for mean in out.means.values())
            continue
        for name, gradient in grads.items():
            mean = out.means[name]
            assert mean.dtype == gradient.dtype
            assert mean.shape == gradient.shape[1:]
            left = mean.astype(np.float64) + after[name].mean(0)
            right = (gradient.astype(np.float64) + before[name]).mean(0)
            tolerance = (K + 3) * EPS * sizes[name].mean(0)
            if gradient.dtype != np.float32:  # means come back in the gradient's type
                info = cases.finfo(gradient.dtype)
                tolerance += float(info.eps) * np.abs(mean.astype(np.float64)) + float(info.smallest_subnormal)
            assert np.all(np.abs(left - right) <= tolerance), name


def largest(dtype):
    return float(cases.finfo(dtype).max)


@cases.over(CASES, [(K, tree) for K, tree in SETTINGS if K != 3], [(2, "odd")])
@hypothesis.given(seed=seeds, growth=st.sampled_from([1, 3]))
def test_nothing_is_lost_to_the_bit_where_numbers_are_dyadic(case, K, tree, seed, growth):
    for grads, residual, out in steps_of(case, tree, K, ["dyadic"] * 4, seed, growth):
        before, after = owed(case, tree, K, residual), owed(case, tree, K, out.residual)
        assert not out.skipped
        for name, gradient in grads.items():
            np.testing.assert_array_equal(out.means[name] + after[name].mean(0), (gradient + before[name]).mean(0))


@pytest.mark.parametrize("case", [case for case in CASES if "slack" in case.options], ids=str)
def test_a_gradient_that_grows_overflows_and_is_counted(case):
    """The law above would hold without overflow as well; here is the proof that it saw some."""
    if case.options["life_span"] == 1:
        pytest.skip("an exact threshold in every step cannot overflow")
    outs = [out for _, _, out in steps_of(case, "odd", 2, ["normal"] * 4, 0, 3.0)]
    assert any(out.metrics.overflow > 0 for out in outs)
    assert all(out.metrics.sent > 0 for out in outs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@cases.over(CASES, SETTINGS, FEW)
def test_a_gradient_that_is_not_finite_changes_nothing_and_the_next_step_proceeds(case, K, tree, bad):
    workers = simulated(case, tree, K)
    first = workers.step(gradients("normal", 0, tree, K), workers.first)
    for name in cases.TREES[tree]:  # dense and compressed tensors alike
        grads = gradients("normal", 1, tree, K)
        grads[name].reshape(K, -1)[K - 1, -1] = bad
        skipped = workers.step(grads, first.state)
        assert (skipped.metrics.sent, skipped.metrics.overflow, skipped.metrics.skipped) == (0, 0, 1)
        assert all(not mean.any() for mean in skipped.means.values())
        kept = per_worker(first.state), per_worker(skipped.state)
        jax.tree.map(np.testing.assert_array_equal, *kept)
        after = workers.step(gradients("normal", 2, tree, K), skipped.state)
        assert after.metrics.skipped == 0
        assert all(np.isfinite(mean.astype(np.float32)).all() for mean in after.means.values())
        assert any(mean.any() for mean in after.means.values())


def per_worker(state):
    leaves = jax.tree.leaves(state, is_leaf=cases.is_per_worker)
    return [leaf for leaf in leaves if cases.is_per_worker(leaf)]


@cases.over(CASES, [(2, "odd"), (4, "pair"), (8, "odd")], [(2, "odd")])
def test_finite_gradients_with_an_infinite_sum_change_nothing_either(case, K, tree):
    workers = simulated(case, tree, K)
    first = workers.step(gradients("normal", 0, tree, K), workers.first)
    for name in cases.TREES[tree]:  # dense and compressed tensors alike
        grads = gradients("zeros", 1, tree, K)
        grads[name].reshape(K, -1)[:2, 0] = 3e38
        out = workers.step(grads, first.state)
        assert (out.metrics.sent, out.metrics.overflow, out.metrics.skipped) == (0, 0, 1)
        assert all(not mean.any() for mean in out.means.values())
        jax.tree.map(np.testing.assert_array_equal, per_worker(first.state), per_worker(out.state))


@pytest.mark.parametrize(
    "tx",
    [jc.plump_dp(), jc.topk(0.0), jc.dct_dp(0.0), jc.dct_dp(0.5, drain_every=1)],
    ids=["plump", "topk", "dct", "drain"],
)
def test_a_mean_that_its_own_type_cannot_hold_changes_nothing(tx):
    """Finite float16 gradients on top of a residual, or rounded up to bfloat16: 65,504 is the largest float16."""
    x = np.full((2, 600), 65504, np.float16)
    state = tx.init(jnp.zeros(600, jnp.float16))
    rows = getattr(state, "residual", None)
    if rows is not None:
        state = state._replace(residual=jc.PerWorker(jnp.full((1, 1024), 1000.0).at[:, 600:].set(0)))
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


@cases.over(CASES, [(4, "pair")], [(2, "odd")])
def test_the_mean_is_the_mean(case, K, tree):
    """Of what all workers sent, whatever the method: a coordinate far above all others is sent by everyone at once."""
    workers = simulated(case, tree, K)
    grads = gradients("zeros", 0, tree, K)
    wide = max(grads, key=lambda name: grads[name].size)
    grads[wide].reshape(K, -1)[:2, 77] = [1, 10]
    grads["b"][:2, 3] = [4, -8]
    out = workers.step(grads, workers.first)
    assert np.flatnonzero(out.means[wide]).tolist() == [77]
    assert out.means[wide].reshape(-1)[77] == 11 / K
    assert out.means["b"].tolist() == [0, 0, 0, -4 / K, 0, 0, 0]


SPARSE = [case for case in CASES if case.is_sparse]


@cases.over(SPARSE, [(1, "single"), (2, "odd"), (3, "pair")], [(2, "odd")])
def test_keeping_everything_equals_plump_dp(case, K, tree):
    """To the bit for small integers, and for one or two workers, whose sum has one order; else to rounding."""
    everything = Simulated(case.make(sparsity=0.0, value_dtype="float32"), tree, K)
    dense = simulated(cases.CASES[0], tree, K)
    state, dense_state = everything.first, dense.first
    for i, kind in enumerate(["normal", "ties", "heavy", "largest", "zeros", "single", "normal"]):
        grads = gradients(kind, i, tree, K)
        out, expected = everything.step(grads, state), dense.step(grads, dense_state)
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
