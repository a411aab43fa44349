"""PowerSGD: its laws, its bytes, and what float32 does to its matrices."""

import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from tests.jaxcomm import trees
from tests.jaxcomm.train_steps import init_state
from tests.jaxcomm.trees import EPS, gradients
from tests.jaxcomm.workers import OnMesh, Simulated
from tests.marks import slow_except
from tests.reference.powersgd import PowerSgdReference
from tests.refusals import refused

RANK, DENSE_BELOW = 2, 512
FLOAT32_MAX = float(np.finfo(np.float32).max)

# Three matrices of 40 x 30 in tensors of two shapes, among others; "i" has enough elements, but too few rows.
trees.TREES["matrices"] = {
    "a": (40, 30),
    "b": (7,),
    "c": (24, 40),
    "d": (5, 8, 30),
    "e": (600,),
    "f": (40, 30),
    "g": (3, 3, 8, 16),
    "i": (2, 300),
    "s": (),
}
# Of 1,024 elements or a multiple: "a" and "b" are next to each other in the vector and in their stack, "e" and "g" too.
trees.TREES["neighbours"] = {
    "a": (32, 32),
    "b": (32, 32),
    "c": (16, 64),
    "d": (32, 64),
    "e": (32, 32),
    "f": (3,),
    "g": (8, 4, 32),
}
trees.TREES["halves"] = {"a": (40, 30), "b": (40, 30), "c": (9,)}
trees.TREES["vectors"] = {"b": (700,), "s": (), "w": (2, 300)}
trees.TREES["matrix"] = {"w": (64, 48)}
trees.DTYPES |= {("halves", "a"): np.float16, ("halves", "b"): ml_dtypes.bfloat16, ("halves", "c"): np.float16}

COMPRESSED = {"matrices": ["a", "c", "d", "f", "g"], "halves": ["a", "b"], "vectors": [], "matrix": ["w"]}
COMPRESSED["neighbours"] = ["a", "b", "c", "d", "e", "g"]
GROUPS = {"matrices": [["a", "d", "f"], ["c"], ["g"]], "halves": [["a", "b"]], "vectors": [], "matrix": [["w"]]}
GROUPS["neighbours"] = [["a", "b", "e", "g"], ["c"], ["d"]]


def make(rank=RANK, **options):
    return jc.powersgd(rank, dense_below=DENSE_BELOW, **options)


def first_q(tree, seed=0):
    """The first Q of every compressed tensor, (m, r): one draw, divided in tree order."""
    columns = [trees.TREES[tree][name][-1] for name in COMPRESSED[tree]]
    numbers = jax.random.normal(jax.random.key(seed), (RANK * sum(columns),))
    parts = np.split(np.asarray(numbers), RANK * np.cumsum(columns)[:-1])
    return {name: part.reshape(-1, RANK) for name, part in zip(COMPRESSED[tree], parts, strict=True)}


@functools.cache
def simulated(tree, K, rank=RANK):
    return Simulated(make(rank), tree, K)


@functools.cache
def on_mesh(tree, K):
    return OnMesh(make(), tree, K)


def matrix_shape(shape):
    return int(np.prod(shape[:-1])), shape[-1]


def residuals(tree, residual):
    """Cuts the rows (K, n) into tensors (K, *shape), by name."""
    return trees.cut(residual, {name: trees.TREES[tree][name] for name in COMPRESSED[tree]})


def same(state, two):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(two), strict=True))


def check_skipped(out, before):
    assert out.metrics == (0, 0, 1, 0)
    assert not any(mean.any() for mean in out.means.values())
    assert same(
        out.state.replace(metrics=None, step=None, worker=None), before.replace(metrics=None, step=None, worker=None)
    )


def with_mean(singular_values, scale=1.0):
    """Two workers' gradients for tree "matrix": different, of full rank, and with a mean of given singular values."""
    rng = np.random.default_rng(0)
    u, _, v = np.linalg.svd(rng.normal(size=(64, 48)), full_matrices=False)
    r = len(singular_values)
    mean, deviation = u[:, :r] * singular_values @ v[:r], rng.normal(size=(64, 48)) / 8
    return {"w": (np.stack([mean + deviation, mean - deviation]) * scale).astype(np.float32)}


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e25])
@pytest.mark.parametrize("singular_values", [[1], [3, 2], [4, 3, 2, 1], [1, 1e-2, 1e-3, 1e-4]], ids=str)
def test_exact_ranks(singular_values, scale):
    """Of any scale, also if columns of P are rounding errors or nearly linearly dependent."""
    workers, grads = simulated("matrix", 2, 4), with_mean(singular_values, scale)
    state, exact = workers.first, grads["w"].astype(np.float64)
    for _ in range(12):
        out = workers.step(grads, state)
        state = out.state
        assert not out.skipped
        assert np.linalg.norm(out.means["w"] - exact.mean(0)) <= 2e-6 * np.linalg.norm(exact[0])


def test_warm_starts():
    values = [10.0, 8.0, 1.0, 0.9, 0.8, 0.7] + [0.5] * 42
    workers, gradient, best = simulated("matrix", 1), with_mean(values)["w"].mean(0), np.linalg.norm(values[RANK:])
    state, errors = workers.first, []
    for _ in range(6):
        out = workers.step({"w": gradient[None]}, state)
        errors.append(np.linalg.norm(out.means["w"] - gradient))
        state = out.state.replace(residual=workers.first.residual)  # every step approximates the same matrix
    assert errors[0] > 1.1 * best
    assert errors[-1] < 1.001 * best


def test_the_residual_is_sent_later():
    """One gradient, then zeros: two directions are sent per step, until no residual is left. The matrix has rank 48."""
    workers, grads = simulated("matrix", 2), with_mean(np.linspace(2, 1, 48))
    zero = {"w": np.zeros_like(grads["w"])}
    out = workers.step(grads, workers.first)
    total = out.means["w"].astype(np.float64)
    for _ in range(48):
        out = workers.step(zero, out.state)
        total += out.means["w"]
    np.testing.assert_allclose(total, grads["w"].mean(0), atol=1e-4)


def test_zeros():
    """Such as that of a layer after one that starts from zero."""
    workers, grads = simulated("matrix", 2, 4), with_mean([3, 2, 1])
    zero = {"w": np.zeros_like(grads["w"])}
    zeros = workers.step(zero, workers.first)
    assert zeros.metrics.skipped == zeros.means["w"].any() == 0
    assert same(zeros.state.memory, workers.first.memory)
    update = workers.step(with_mean([1]), zeros.state)
    assert same(update.state.memory[0][..., 1:], zeros.state.memory[0][..., 1:])  # there is only one direction
    out = workers.step(grads, update.state.replace(residual=zeros.state.residual))
    np.testing.assert_allclose(out.means["w"], grads["w"].mean(0), atol=1e-4)


@pytest.mark.parametrize(("K", "tree"), slow_except([(3, "matrices"), (2, "halves"), (2, "vectors")], (2, "vectors")))
def test_nothing_is_lost(K, tree):
    """mean + pmean(residual') == pmean(gradient + residual), to rounding."""
    workers = simulated(tree, K)
    state, before = workers.first, residuals(tree, np.zeros((K, workers.first.residual.rows.shape[-1])))
    for i, kind in enumerate(["normal", "heavy", "zeros", "ties", "single", "huge", "normal"]):
        grads = gradients("normal" if (kind, tree) == ("huge", "halves") else kind, i, tree, K, scale=2.0**i)
        out = workers.step(grads, state)
        assert not out.skipped
        after = residuals(tree, out.residual)
        for name, gradient in grads.items():
            accumulated = gradient.astype(np.float64) + before.get(name, 0)
            mean = out.means[name].astype(np.float64)
            assert out.means[name].dtype == gradient.dtype
            size = np.abs(accumulated).mean(0) + np.abs(gradient.astype(np.float64)).mean(0) + np.abs(mean)
            tolerance = (K + 3) * EPS * size
            if gradient.dtype != np.float32:
                info = trees.finfo(gradient.dtype)
                tolerance += float(info.eps) * np.abs(mean) + float(info.smallest_subnormal)
            left = mean + (after[name].mean(0) if name in after else 0)
            assert np.all(np.abs(left - accumulated.mean(0)) <= tolerance), (name, kind)
        volume = sum(RANK * sum(matrix_shape(trees.TREES[tree][name])) for name in COMPRESSED[tree])
        assert out.metrics == (K * volume, 0, 0, 0)
        state, before = out.state, after


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", trees.TREES["matrices"])
def test_bad_gradients(name, bad):
    """The last of the four is finite, but its sum over the workers is not."""
    workers = simulated("matrices", 3)
    first = workers.step(gradients("normal", 0, "matrices", 3), workers.first)
    for where in (0, -1):
        grads = gradients("normal", 1, "matrices", 3)
        grads[name].reshape(3, -1)[1:, where] = bad
        out = workers.step(grads, first.state)
        check_skipped(out, first.state)
        after = workers.step(gradients("normal", 2, "matrices", 3), out.state)
        assert not after.skipped
        assert all(np.isfinite(mean).all() for mean in after.means.values())


@pytest.mark.parametrize("bad", [np.nan, np.inf, FLOAT32_MAX])
@pytest.mark.parametrize("name", COMPRESSED["matrices"])
def test_nan_times_zero(name, bad):
    """Zeros in Q hide a column of M from P. Only on one worker."""
    workers = simulated("matrices", 3)
    grads = gradients("normal", 0, "matrices", 3)
    grads[name].reshape(3, -1)[2, 5] = bad
    state = workers.first.replace(memory=tuple(q.at[:, 5].set(0.0) for q in workers.first.memory))
    check_skipped(workers.step(grads, state), state)


def test_end_of_the_range():
    workers, rng = simulated("matrix", 2), np.random.default_rng(0)
    skipped = []
    for size in (1e36, 0.24 * FLOAT32_MAX, 0.26 * FLOAT32_MAX, 0.9 * FLOAT32_MAX):
        signs = rng.integers(0, 2, size=(2, 64, 48)) * 2.0 - 1
        out = workers.step({"w": (signs * size).astype(np.float32)}, workers.first)
        assert np.isfinite(out.residual).all()
        assert all(np.isfinite(q).all() for q in out.state.memory)
        skipped.append(out.skipped)
    assert not skipped[0]
    assert skipped[2:] == [True, True]


@pytest.mark.parametrize(
    ("K", "tree"), slow_except([(8, "matrices"), (2, "halves"), (2, "vectors")], (2, "halves"), (2, "vectors"))
)
def test_mesh_and_simulation(K, tree):
    mesh, simulation = on_mesh(tree, K), simulated(tree, K)
    state, simulated_state = mesh.first, simulation.first
    # Two programs with the same draws round differently.
    for result, want in zip(state.memory, simulated_state.memory, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-6)
    for i, kind in enumerate(["normal", "heavy", "nan", "normal", "single", "zeros", "normal"]):
        grads = gradients("normal" if kind == "nan" else kind, i, tree, K)
        if kind == "nan":
            grads["b"].reshape(K, -1)[K - 1, 3] = np.nan
        out, expected = mesh.step(grads, state), simulation.step(grads, simulated_state)
        assert out.metrics == expected.metrics
        assert out.skipped == (kind == "nan")
        for name in grads:
            close(out.means[name], expected.means[name], grads[name])
        for result, want in zip(
            (out.residual, *out.state.memory), (expected.residual, *expected.state.memory), strict=True
        ):
            close(result, want, *grads.values())
        means, state = mesh.last
        for array in [*means.values(), *state.memory, *state.metrics]:
            copies = [np.asarray(shard.data) for shard in array.addressable_shards]
            assert [copy.tobytes() for copy in copies] == [copies[0].tobytes()] * K
        simulated_state = expected.state


def close(result, want, *gradients_, tolerance=1e-4):
    """Up to rounding errors, which an iteration amplifies; 16-bit means up to those of their type."""
    result, want = np.asarray(result, np.float64), np.asarray(want, np.float64)
    largest = max((np.nanmax(np.abs(g.astype(np.float64)), initial=0) for g in gradients_), default=0)
    if any(g.dtype != np.float32 for g in gradients_):
        tolerance = 1e-2
    assert np.abs(result - want).max(initial=0) <= tolerance * max(largest, np.abs(want).max(initial=0))


@pytest.mark.parametrize(("K", "tree"), slow_except([(8, "matrices"), (2, "halves"), (2, "vectors")], (2, "vectors")))
def test_bytes(K, tree):
    shapes = trees.shapes_of(tree)
    volume = sum(RANK * sum(matrix_shape(shapes[name].shape)) for name in COMPRESSED[tree])
    dense = sum(s.size for name, s in shapes.items() if name not in COMPRESSED[tree])
    for workers in (K, 96):
        report = jc.wire_report(make(), shapes, workers)
        expected = Fraction(2 * (workers - 1), workers) * 4 * (volume + dense)
        assert report.program.received == report.program.received_at_most == expected
        assert [op.op for _, op in report.program.operations()] == ["all_reduce"] * (2 if volume else 1)
    compiled = read_program(on_mesh(tree, K).compiled.as_text())
    assert compiled.received == compiled.received_at_most == jc.wire_report(make(), shapes, K).received
    assert sum(1 for _ in compiled.operations()) == (2 if volume else 1)


def test_one_product_a_shape():
    def products(tensors):
        tree = {f"{i:02}": np.zeros((40, 30), np.float32) for i in range(tensors)}
        state = make().init(tree)
        update = jax.vmap(lambda g: make().update(g, state), axis_name="data", axis_size=2, in_axes=None)
        return str(jax.make_jaxpr(update)(tree)).count("dot_general[")

    assert products(1) == products(20) == 3


def test_thin_matrices_are_dense():
    tree = [np.zeros(shape, np.float32) for shape in [(3, 300), (2, 300), (300, 3), (4, 4), (3, 1, 7), (900,), (0, 9)]]
    assert [q.shape for q in jc.powersgd(2, dense_below=0).init(tree).memory] == [(1, m, 2) for m in (300, 3, 7)]


def test_vectors_alone():
    workers, dense = simulated("vectors", 3), Simulated(jc.plump_dp(), "vectors", 3)
    assert workers.first.memory == ()
    assert workers.first.residual.rows.shape == (3, 1, 0)
    grads = gradients("normal", 0, "vectors", 3)
    out, expected = workers.step(grads, workers.first), dense.step(grads, dense.first)
    assert out.metrics == expected.metrics == (0, 0, 0, 0)
    assert same(out.means, expected.means)
    grads["w"][1, 0, 0] = np.inf
    check_skipped(workers.step(grads, workers.first), workers.first)


def test_a_mean_beyond_float16():
    """Finite gradients, on top of a residual."""
    tx = make()
    first = tx.init(jnp.zeros((40, 30), jnp.float16))
    update = jax.jit(jax.vmap(tx.update, in_axes=(0, None), axis_name="data"))
    for owed, skipped in ((1e3, 1), (0.0, 0)):
        state = first.replace(residual=jc.PerWorker(first.residual.rows.at[:, :1200].set(owed)))
        mean, new = update(np.full((2, 40, 30), 65472, np.float16), state)
        assert mean.dtype == np.float16
        assert new.metrics.skipped.tolist() == [skipped] * 2
        np.testing.assert_allclose(mean, 0 if skipped else 65472, rtol=1e-3)
        np.testing.assert_allclose(new.residual.rows[:, 0, :1200], owed, atol=1)


@pytest.mark.parametrize("seed", [0, 1])
def test_first_factors(seed):
    qs = first_q("matrices", seed)
    stacks = make(seed=seed).init(trees.zeros_of("matrices")).memory
    for stack, names in zip(stacks, GROUPS["matrices"], strict=True):
        np.testing.assert_array_equal(stack, np.stack([qs[name] for name in names]))
    values = np.concatenate([q.reshape(-1) for q in qs.values()])
    assert len(np.unique(values)) == values.size
    second = first_q("matrices", 1 - seed)
    assert not any(np.any(qs[name] == second[name]) for name in qs)


@pytest.mark.parametrize(("K", "tree"), [(1, "matrices"), (3, "matrices"), (2, "halves"), (2, "neighbours")])
def test_the_oracle(K, tree):
    """A dozen steps with skips; gradients of full rank and usual scale, for which the paper's lines suffice."""
    names = sorted(trees.TREES[tree])
    workers = simulated(tree, K)
    first = first_q(tree)
    oracle = PowerSgdReference(rank=RANK, dense_below=DENSE_BELOW, initial_q=lambda name, m, r: first[name])
    events = ["nan", "normal", "heavy", "inf", "ties", "normal", "sum", "normal", "nan", "inf", "grow", "normal"]
    state, skips = workers.first, 0
    for i, event in enumerate(events):
        kind = event if event in ("heavy", "ties") else "normal"
        grads = gradients(kind, i, tree, K, scale=10.0 if event == "grow" else 1.0)
        if event in ("nan", "inf"):
            grads[names[i % len(names)]].reshape(K, -1)[i % K, -1] = float(event)
        elif event == "sum":
            grads["b"].reshape(K, -1)[:, 0] = 3e38 if K > 1 else np.inf
        local = [{name: np.asarray(gradient[w], np.float32) for name, gradient in grads.items()} for w in range(K)]
        out, expected = workers.step(grads, state), oracle.step(local)
        skips += out.skipped
        assert out.skipped == expected.skipped, i
        assert out.metrics.sent == sum(expected.sent)
        for name, mean in expected.mean.items():
            close(out.means[name], mean, grads[name])
        rows = residuals(tree, out.residual)
        for w, name in itertools.product(range(K), COMPRESSED[tree]):
            close(rows[name][w], oracle.residuals[w][name])
        for stack, group in zip(out.state.memory, GROUPS[tree], strict=True):
            for q, name in zip(stack, group, strict=True):
                close(q, oracle.Q[name])
        state = out.state
    assert skips == 5


@pytest.mark.parametrize("how", slow_except(["mesh", "simulation"], "mesh"))
def test_a_network_trains(how):
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(20, 30))
    x = rng.normal(size=(256, 20)).astype(np.float32)
    batch = {"x": x, "y": (x @ truth + 1).astype(np.float32)}
    params = {"b": jnp.zeros(30), "w": jnp.zeros((20, 30))}
    tx = optax.chain(make(), optax.sgd(0.3))

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    if how == "mesh":
        mesh = jc.make_mesh(data=4)
        state, step = init_state(params, tx, mesh), jc.make_train_step(loss_fn, tx, mesh)
        jc.verify(step, state, batch, tx=tx, params=params, workers=4)
    else:
        state, step = init_state(params, tx, 4), jc.simulate(loss_fn, tx, 4)
    losses = []
    for _ in range(300):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 1e-2 * losses[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("rank", item) for item in (0, -1, 2.0, True, None, "4")), ("dense_below", -1), ("dense_below", 1.5)],
)
def test_numbers(name, value):
    refused(lambda: jc.powersgd(**{name: value}), f"{name} must be ", f"got {value!r}")


def test_other_trees_and_states():
    grads = jnp.zeros((2, 40, 30))
    with pytest.raises(ValueError, match="got an empty tree"):
        make().init({})
    with pytest.raises(ValueError, match="real floating type; got int32"):
        make().init(grads[0].astype(jnp.int32))

    def update(state):
        return jax.vmap(lambda g: make().update(g, state), axis_name="data")(grads)

    with pytest.raises(ValueError, match=r"\[\(1, 30, 2\)\] for this gradient and rank; got \[\(1, 30, 3\)\]. Initial"):
        update(make(3).init(grads[0]))
    with pytest.raises(ValueError, match="one row of state"):
        update(make().init(jnp.zeros((400, 30))))
    with pytest.raises(ValueError, match="no axis 'data'"):
        make().update(grads[0], make().init(grads[0]))
