"""The exchange of a pipeline's gradients, by stages; skipped steps, residuals, saved states, and what is refused."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from tests.jaxcomm.steps.pipeline.stages import (
    CUTS,
    Run,
    batches,
    cut,
    layer,
    loss_fn,
    make_pipeline,
    means_of,
    params_of,
    stages_of,
)
from tests.marks import slow_except
from tests.refusals import refused

K, WIDTH = 2, 24
SGD = optax.sgd(0.1)

# Whether a method treats each tensor by itself, whatever the others; otherwise it treats a stage as a model.
BY_TENSOR = {
    "topk": jc.topk(0.9, value_dtype="float32"),
    "dct_dp": jc.dct_dp(0.9, life_span=2, value_dtype="float32"),
    "dgc": jc.dgc(0.9, momentum=0.5, clip=None, value_dtype="float32"),
    "sign": jc.sign(),
}
BY_STAGE = {
    "random_k": jc.random_k(0.5, seed=3),
    "iwp": jc.iwp(5.0, density=0.1, momentum=0.5),
    "quant_dp": jc.quant_dp(8),
    "terngrad": jc.terngrad(),
    "powersgd": jc.powersgd(rank=2),
}
LOCAL = {
    "slim_dp": jc.slim_dp(0.3, 0.15),
    "local_sgd": jc.local_sgd(2, exchange=jc.topk(0.5, value_dtype="float32")),
    "streaming": jc.local_sgd(2, exchange=jc.plump_dp(), fragments=2, overlap=1, mix=0.5),
}
METHODS = {name: optax.chain(method, SGD) for name, method in (BY_TENSOR | BY_STAGE).items()} | {
    name: optax.chain(optax.sgd(0.1, momentum=0.9), method) for name, method in LOCAL.items()
}


def loss_of(x, batch):
    """A loss to which every output contributes."""
    return jnp.mean((x - jnp.roll(batch["x"], 1, axis=1)) ** 2), {}


def alike():
    """Two layers of equal shapes, each of which is a stage."""
    return params_of([WIDTH, WIDTH, WIDTH])


def square(x, batch):
    """A loss for outputs of any width."""
    return jnp.mean((x - 0.1) ** 2), {}


@functools.cache
def run_of(name, **axes):
    return make_run(METHODS.get(name, name), alike(), loss_of, **axes)


def make_run(tx, params, loss_fn, **axes):
    stages = [lambda params, x, batch, at=at: layer(at, params, None, x, batch)[0] for at in (0, 1)]
    pipeline = jc.Pipeline(stages, loss_fn, params)
    batch, axes = batches(1, len(params[0]["w"]))[0], axes or {"data": K, "stage": 2}
    return Run(pipeline, params, tx, batch=batch, **axes)


@functools.partial(jax.jit, static_argnames="loss_fn")
def gradients_of(rows, batch, loss_fn=loss_of):
    """Each worker's own gradients of the whole model, at its own parameters."""

    def loss(params, batch):
        return loss_fn(layer(1, params[1], None, layer(0, params[0], None, None, batch)[0], batch)[0], batch)[0]

    parts = jax.tree.map(lambda leaf: leaf.reshape(K, -1, *leaf.shape[1:]), batch)
    return jax.vmap(jax.grad(loss))(rows, parts)


class DataParallel:
    """K workers that exchange the gradients of a tree by a chain; every worker has its own parameters."""

    def __init__(self, tx, params):
        self.init = jax.jit(jax.vmap(tx.init, axis_name="data"))
        self.rows = jax.tree.map(lambda leaf: np.stack([leaf] * K), params)
        self.state = self.init(self.rows)

        def update(gradients, state, params):
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        example = (self.rows, self.state, self.rows)
        self.update = jax.jit(jax.vmap(update, axis_name="data")).lower(*example).compile()

    def step(self, gradients):
        self.rows, self.state = self.update(gradients, self.state, self.rows)


class StageByStage(DataParallel):
    """Two trees of equal shapes, each exchanged as if it were a model: as a list of tensors, the largest first."""

    def __init__(self, tx, params):
        super().__init__(tx, by_size(params[0]))
        self.rows = [jax.tree.map(lambda leaf: np.stack([leaf] * K), tree) for tree in params]
        self.state = [self.init(by_size(rows)) for rows in self.rows]

    def step(self, gradients):
        for stage in (0, 1):
            local = by_size(gradients[stage]), self.state[stage], by_size(self.rows[stage])
            (w, b), self.state[stage] = self.update(*local)
            self.rows[stage] = {"b": b, "w": w}


def by_size(layer):
    return [layer["w"], layer["b"]]


def rows_of(run, state):
    """Each worker's parameters, (K, ...), of every stage."""
    if isinstance(state.params, jc.PerWorker):
        slots = [np.asarray(slot) for slot in state.params.rows]
    else:
        slots = [np.stack([slot] * K, 1) for slot in state.params]
    workers = [run.pipeline.param_slots.unstack([slot[:, w] for slot in slots]) for w in range(K)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *workers)


def assert_close(one, two, rtol=1e-4, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), one, two)


@pytest.mark.parametrize("name", slow_except(METHODS, "quant_dp"))
def test_stages_are_exchanged_as_models(name):
    """By tensors: as for the whole model. By stages: as for that stage alone, with gradients of the whole model."""
    run, state = run_of(name), None
    reference = (DataParallel if name in BY_TENSOR else StageByStage)(METHODS[name], alike())
    for batch in batches(4, WIDTH):
        reference.step(gradients_of(reference.rows, batch))
        state, (metrics,) = run([batch], state)
        assert_close(rows_of(run, state), list(reference.rows))
    counts = jc.exchange_metrics(reference.state)
    assert int(metrics["skipped"]) == 0
    if name in BY_TENSOR:
        assert float(metrics["sent"]) == float(counts.sent[0])
        assert float(metrics["overflow"]) == float(counts.overflow[0])
    distances = [np.abs(new["w"] - old["w"]).max() for new, old in zip(reference.rows, alike(), strict=True)]
    assert min(distances) > 1e-3


UNLIKE = {
    "dct_dp": lambda **options: jc.dct_dp(0.9, life_span=3, slack=1.0, value_dtype="float32", **options),
    "topk": lambda **options: jc.topk(0.9, value_dtype="float32", **options),
    "dgc": lambda **options: jc.dgc(0.9, momentum=0.5, clip=None, value_dtype="float32", **options),
    "ef21": lambda **options: jc.ef21(0.9, value_dtype="float32", **options),
    "sign": lambda **options: jc.sign(**options),
}


@pytest.mark.parametrize(
    ("name", "dense_below"),
    [
        ("dct_dp", 100),
        ("topk", 200),  # the 160 weights of the first stage are sent whole
        *(pytest.param(name, 100, marks=pytest.mark.slow) for name in UNLIKE if name != "dct_dp"),
        pytest.param("dct_dp", 200, marks=pytest.mark.slow),
    ],
)
def test_stages_count_their_elements(name, dense_below):
    """Layers of 20 x 8 and 8 x 60 share a slot of 480, and are exchanged as data-parallel workers exchange them."""
    params, tx = params_of([20, 8, 60]), jc.chain(UNLIKE[name](dense_below=dense_below), SGD)
    run, state, reference = make_run(tx, params, square), None, DataParallel(tx, params)
    for step, batch in enumerate(batches(6, 20)):
        reference.step(gradients_of(reference.rows, batch, square))
        state, (metrics,) = run([batch], state)
        if step == 0 and name in ("dct_dp", "topk") and dense_below < 160:
            distances = [
                np.count_nonzero(new["w"] - old["w"]) for new, old in zip(run.step.params(state), params, strict=True)
            ]
            assert distances[0] <= K * (160 - 144 + 1)
            assert distances[1] <= K * (480 - 432 + 1)
    assert_close(run.step.params(state), jax.tree.map(lambda leaf: leaf[0], reference.rows))
    assert int(metrics["skipped"]) == 0
    run.step.verify(state, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        jc.random_k(0.5, dense_below=100),
        jc.iwp(0.01, beta=0.1, density=0.1, momentum=0.5, warmup_steps=1, life_span=2, dense_below=100),
        jc.terngrad(dense_below=100),
        jc.demo(chunk=1024, dense_below=100),
        jc.pulse(0.5, dense_below=100),
        jc.topk(0.9, collective="balanced", dense_below=100),
        jc.dgc(0.9, momentum=0.5, warmup_steps=1, dense_below=100),
    ],
    ids=lambda tx: tx.method.name,
)
def test_bytes_where_stages_differ(method):
    params, tx = params_of([20, 8, 60]), jc.chain(method, SGD)
    run, state = make_run(tx, params, square), None
    for batch in batches(3, 20):
        state, (metrics,) = run([batch], state)
    assert int(metrics["skipped"]) == 0
    assert 0 < int(metrics["sent"]) <= K * (160 + 480)
    assert all(np.any(new["w"] != old["w"]) for new, old in zip(run.step.params(state), params, strict=True))
    run.step.verify(state, batch)


@pytest.mark.slow
def test_fragments_are_proved():
    run, (batch,) = run_of("streaming"), batches(1, WIDTH)
    exchange = run.step.verify(run([batch])[0], batch).exchange
    weights, bias = (2 * (K - 1) / K * 4 * n for n in (WIDTH * WIDTH, WIDTH))
    assert [float(report.received) for report in exchange.exchanges()] == [weights, bias]
    assert (exchange.received_in_exchange, exchange.received) == (weights, (weights + bias) / 2)


def test_workers_along_two_axes():
    tx = optax.chain(jc.hierarchical(jc.plump_dp(axis_name="slice")), SGD)
    run, state = run_of(tx, slice=2, data=2, stage=2), None
    reference = DataParallel(optax.chain(jc.plump_dp(), SGD), alike())
    for batch in batches(2, WIDTH):
        reference.step(gradients_of(reference.rows, batch))
        state, _ = run([batch], state)
    assert_close(run.step.params(state), jax.tree.map(lambda leaf: leaf[0], list(reference.rows)))


def test_the_model_of_a_local_method():
    run, state = run_of("local_sgd"), None
    for step, batch in enumerate(batches(2, WIDTH)):
        state, _ = run([batch], state)
        model, rows = run.step.params(state), rows_of(run, state)
        if step == 0:
            jax.tree.map(np.testing.assert_array_equal, model, alike())
        else:
            assert_close(rows, jax.tree.map(lambda leaf: np.stack([leaf] * K), model))


def poison(batch, at, worker, bad=np.nan):
    """Makes one gradient of one layer of one worker not finite, but no loss."""
    trap = batch["trap"].copy()
    trap[worker * len(trap) // K, at] = bad
    return {**batch, "trap": trap}


@functools.cache
def local_run():
    """Workers that train on their own for two steps, with running means and a boundary."""
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), jc.local_sgd(2, exchange=jc.plump_dp()))
    boundaries = [jc.dct_mp(0.5)]
    return cut(2, tx, data=K, has_state=True, boundaries=boundaries, micro_batches=2)


@pytest.mark.parametrize("at", slow_except([0, 3], 0))
def test_nan_with_a_local_method(at):
    """Between two exchanges; the other worker goes on, and so does this one with the next batch."""
    run, (first, second, third) = local_run(), batches(3)
    before, _ = run([first, second])
    good, _ = run([third], before)
    state, (metrics,) = run([poison(third, at, worker=1)], before)
    assert np.isfinite(metrics["loss"])
    rows = [own_rows(state) for state in (before, state, good)]
    for old, new, two in zip(*rows, strict=True):
        np.testing.assert_array_equal(new[:, 1], old[:, 1])
        np.testing.assert_array_equal(new[:, 0], two[:, 0])
        assert not np.array_equal(new[:, 0], old[:, 0])
    # To the mean, the bad worker contributes its old running means.
    contrary, _ = run([poison(third, at, worker=0)], before)
    means = [jax.tree.leaves(run.step.model_state(state)) for state in (before, state, contrary, good)]
    for old, one, two, mean in zip(*as_numpy(means), strict=True):
        np.testing.assert_allclose(one + two - old, mean, rtol=1e-5, atol=1e-6)
        assert np.abs(one - mean).max() > 1e-3
    state, (metrics,) = run([first], state)
    assert int(metrics["skipped"]) == 0
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


def own_rows(state):
    """Every worker's own state, (2, K, ...): parameters and momentum."""
    return jax.tree.leaves(as_numpy((state.params, state.opt_state[0])))


@functools.cache
def whole_run():
    """Everything that a step carries: momentum, an exchange's residual, running means."""
    tx = optax.chain(jc.topk(0.5, dense_below=0), optax.sgd(0.1, momentum=0.9))
    boundaries = [jc.dct_mp(0.5)]
    return cut(2, tx, data=K, has_state=True, boundaries=boundaries, micro_batches=2)


def as_numpy(state):
    return jax.tree.map(np.array, state)


def uncounted(state):
    """The state without the number of steps, which includes skipped ones."""
    exchange, *tail = state.opt_state
    return state._replace(step=0, opt_state=(exchange.replace(step=0), *tail))


def assert_same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.slow
@pytest.mark.parametrize(("at", "worker", "bad"), [(0, 1, np.nan), (3, 0, np.inf)])
def test_one_bad_gradient_skips_all(at, worker, bad):
    """Parameters, momentum, residuals, running means stay; the next step is as if nothing had happened."""
    run, steps = whole_run(), batches(3)
    before, _ = run(steps[:2])
    after, (metrics,) = run([poison(steps[2], at, worker, bad)], before)
    assert int(metrics["skipped"]) == 1
    assert np.isfinite(metrics["loss"])
    assert int(after.step) == int(before.step) + 1
    exchange, old_exchange = after.opt_state[0], before.opt_state[0]
    parts = [(state.params, state.opt_state[1:], state.model_state) for state in (after, before)]
    assert_same(*map(as_numpy, parts))
    assert_same(exchange.residual.rows, old_exchange.residual.rows)
    for name in ("params", "opt_state", "model_state"):
        assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(as_numpy(getattr(before, name))))
    good, _ = run([steps[2]], after)
    expected, (metrics,) = run([steps[2]], before)
    assert int(metrics["skipped"]) == 0
    assert_same(as_numpy(uncounted(good)), as_numpy(uncounted(expected)))
    for leaf, old in zip(jax.tree.leaves(expected.params), jax.tree.leaves(before.params), strict=True):
        assert np.all(np.any(np.asarray(leaf) != np.asarray(old), axis=tuple(range(1, leaf.ndim))))


# What one stage alone refuses of finite gradients, and the size of its gradients.
TOO_LARGE = {
    "the sum over the workers": (jc.chain(jc.plump_dp(), SGD), 2.0**126),
    "a residual": (jc.chain(jc.topk(0.5, dense_below=0), SGD), 2.0**110),
    "a matrix": (jc.chain(jc.powersgd(1, dense_below=0), SGD), 2.0**126),
    "an accumulated one": (jc.chain(jc.topk(0.5, dense_below=0), SGD, accumulate=2), 2.0**110),
    "a local one": (jc.chain(SGD, jc.local_sgd(1, exchange=jc.plump_dp())), 2.0**97),
    "a local update": (jc.chain(optax.sgd(2.0**20), jc.local_sgd(2, exchange=jc.plump_dp())), 2.0**80),
    "a fragment": (jc.chain(SGD, jc.local_sgd(2, exchange=jc.plump_dp(), fragments=2, mix=0.5)), 2.0**97),
    "a set": (jc.chain(SGD, jc.slim_dp(p=1, q=2)), 2.0**126),
}


@pytest.mark.parametrize("name", slow_except(list(TOO_LARGE), "a residual", "a local one"))
def test_gradients_too_large_in_one_stage(name):
    """All stages stay as they were. The inputs are as large as the first stage's gradients, its outputs about one."""
    tx, size = TOO_LARGE[name]
    stages = [lambda params, x, batch: batch["x"] * params["w"] + params["v"], lambda params, x, batch: x * params["w"]]
    params = [{key: np.full((4, 4), value, np.float32) for key in "wv"} for value in (1 / size, 1.0)]
    pipeline = jc.Pipeline(stages, lambda x, batch: (2 * jnp.mean(jnp.sum(x, (1, 2))), {}), params)
    step = jc.make_train_step(pipeline, tx, jc.make_mesh(data=2, stage=2))
    state = step.init(params)
    for _ in range(2):
        state, metrics = step(state, {"x": np.full((2, 4, 4), size, np.float32)})
    assert float(metrics["loss"]) == 32
    jax.tree.map(np.testing.assert_array_equal, step.params(state), params)
    rows = [leaf for leaf in jax.tree.leaves(as_numpy(state.params)) if leaf.ndim == 4]  # of local workers
    for leaf in rows:
        np.testing.assert_array_equal(leaf[:, 0], leaf[:, 1])


def test_a_bad_loss_skips_all():
    run, (batch,) = whole_run(), batches(1)
    y = batch["y"].copy()
    y[-1] = np.nan
    after, (metrics,) = run([{**batch, "y": y}])
    assert int(metrics["skipped"]) == 1
    assert np.isnan(metrics["loss"])
    assert_same(as_numpy(after.params), as_numpy(run.start.params))


def test_a_saved_state():
    run, steps = whole_run(), batches(4)
    state, _ = run(steps[:2])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    restored = jax.device_put(as_numpy(state), shardings)
    expected, metrics = run(steps[2:], state)
    rerun, rerun_metrics = run(steps[2:], restored)
    assert_same(as_numpy(rerun), as_numpy(expected))
    assert_same(rerun_metrics, metrics)


def test_another_number_of_workers():
    """The mean of each stage's rows."""
    run, steps = whole_run(), batches(3)
    state, _ = run(steps[:2])
    resized = state
    for workers in (4, 3, 8, 1, K):
        resized = run.step.resize(resized, workers)
        old, new = (np.asarray(state.opt_state[0].residual.rows) for state in (state, resized))
        assert new.shape == (2, workers, old.shape[2])
        assert np.abs(old.mean(1)).max() > 0
        np.testing.assert_allclose(new.mean(1), old.mean(1), atol=1e-6)
    assert_same(as_numpy(resized.params), as_numpy(state.params))
    _, (metrics,) = run([steps[2]], jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), resized, state))
    assert int(metrics["skipped"]) == 0
    with pytest.raises(ValueError, match=r"got stages first in that of topk. Call step.resize\(state, workers\)"):
        jc.resize_workers(state, 4)


def test_donation():
    pipeline, tx, mesh = make_pipeline(1), optax.chain(jc.plump_dp(), SGD), jc.make_mesh(data=1, stage=1)
    params = jax.tree.map(jnp.asarray, stages_of(params_of(), CUTS[1]))
    state = jc.make_train_step(pipeline, tx, mesh).init(params)
    jc.make_train_step(pipeline, tx, mesh)(state, batches(1)[0])
    assert all(leaf.is_deleted() for leaf in state.params)
    assert_same(params, stages_of(params_of(), CUTS[1]))


PLUMP = optax.chain(jc.plump_dp(), SGD)
PARAMS, MEANS = stages_of(params_of(), CUTS[2]), stages_of(means_of(), CUTS[2])


def mesh_of(**axes):
    return jc.make_mesh(**axes or {"data": K, "stage": 2})


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"data": 2},
            r"axes \('data', 'stage'\), and no .*; got \{'data': 2\}. Make it with make_mesh\(data=..., stage=...\)",
        ),
        (
            {"stage": 2},
            r"axes \('data', 'stage'\), and no .*; got \{'stage': 2\}. Make it with make_mesh\(data=..., stage=...\)",
        ),
        ({"data": 2, "stage": 2, "model": 2}, r"got \{'data': 2, 'stage': 2, 'model': 2\}. Make it with make_mesh"),
        (
            {"data": 2, "stage": 4},
            r"a place for each stage; got 4 for 2 stages. Make the mesh with stage=2, or cut .* in",
        ),
    ],
)
def test_bad_meshes(axes, message):
    with pytest.raises(ValueError, match=message):
        jc.make_train_step(make_pipeline(2), PLUMP, mesh_of(**axes))
    with pytest.raises(ValueError, match=message):
        jc.make_train_step(make_pipeline(2), PLUMP, mesh_of(**axes)).init(PARAMS)


def test_bad_chains():
    wrong_order = optax.chain(optax.adam(0.1), jc.topk(0.9))
    with pytest.raises(ValueError, match=r"before topk must be replicated; got ScaleByAdamState"):
        jc.make_train_step(make_pipeline(2), wrong_order, mesh_of()).init(PARAMS)
    with pytest.raises(ValueError, match=r"the transformation that averages over the workers; got a chain without. "):
        jc.make_train_step(make_pipeline(2), optax.sgd(0.1), mesh_of()).init(PARAMS)
    late = jc.topk(0.9, where=lambda path, leaf: leaf.size > 10)
    with pytest.raises(ValueError, match=r"cannot gather over the workers; got an exchange with where=. Leave it"):
        jc.make_train_step(make_pipeline(2), optax.chain(late, optax.sgd(0.1)), mesh_of()).init(PARAMS)


@pytest.mark.parametrize(
    ("options", "inputs", "message"),
    [
        (
            {},
            {"params": PARAMS[::-1]},
            r"params must have the shapes that the Pipeline was made with; got .*. Make the Pipeline with",
        ),
        (
            {},
            {"params": jax.tree.map(jnp.bfloat16, PARAMS)},
            r"params must have the shapes that the Pipeline was made with; got .*bf",
        ),
        ({}, {"params": PARAMS[:1]}, r"params must have the shapes that the Pipeline was made with"),
        (
            {},
            {"model_state": MEANS},
            r"model_state must be given to both .*; got one for a pipeline without. Pass model_state= to",
        ),
        (
            {"has_state": True},
            {},
            r"model_state must be given to both .*; got none for a pipeline with one. Pass model_state= to",
        ),
        (
            {"has_state": True},
            {"model_state": MEANS[::-1]},
            r"model_state must have the shapes that the Pipeline was made with; got",
        ),
    ],
)
def test_bad_first_states(options, inputs, message):
    inputs = {"params": PARAMS, **inputs}
    with pytest.raises(ValueError, match=message):
        jc.make_train_step(make_pipeline(2, **options), PLUMP, mesh_of()).init(inputs.pop("params"), **inputs)


def test_an_integer_in_the_model_state():
    counts = [jnp.zeros((), jnp.int32)]
    stage = [lambda params, state, x, batch: (batch["x"], state)]
    pipeline = jc.Pipeline(stage, loss_fn, [()], model_state=counts)
    with pytest.raises(ValueError, match=r"of a real floating type, since they are averaged over the workers; got "):
        jc.make_train_step(pipeline, PLUMP, mesh_of(data=K, stage=1)).init([()], model_state=counts)


@pytest.mark.parametrize("rows", [6, 0, 18])
def test_a_batch_that_does_not_divide(rows):
    pipeline = make_pipeline(2, micro_batches=2)
    state = jax.eval_shape(lambda: jc.make_train_step(pipeline, PLUMP, mesh_of()).init(PARAMS))
    batch = {name: np.zeros((rows, *leaf.shape[1:]), np.float32) for name, leaf in batches(1)[0].items()}
    with pytest.raises(
        ValueError, match=rf"rows of a batch must be a multiple of .*; got {rows} rows at .* for 2 workers of 2"
    ):
        jc.make_train_step(pipeline, PLUMP, mesh_of()).trace(state, batch)


@pytest.mark.parametrize("name", ["topk", "powersgd", "local_sgd"])
def test_a_state_of_another_step(name):
    """As a new process does that resumes a run."""

    def make():
        stages = [lambda params, x, batch, at=at: layer(at, params, None, x, batch)[0] for at in (0, 1)]
        pipeline = jc.Pipeline(stages, loss_of, alike())
        return jc.make_train_step(pipeline, METHODS[name], jc.make_mesh(data=K, stage=2), donate=False)

    batch, step = batches(1, WIDTH)[0], make()
    state, _ = step(step.init(alike()), batch)
    right, _ = step(state, batch)
    result, metrics = make()(jax.tree.map(jnp.asarray, jax.device_get(state)), batch)
    assert int(metrics["skipped"]) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), jax.device_get(right))


@pytest.mark.parametrize("name", ["plump_dp", "local_sgd"])
def test_a_report_is_of_a_stage(name):
    """A dense exchange of what a device holds is the measure of what it receives, whether its rows are workers'."""
    tx = {
        "plump_dp": jc.chain(jc.plump_dp(), optax.sgd(0.1)),
        "local_sgd": jc.chain(optax.sgd(0.1), jc.local_sgd(1, exchange=jc.plump_dp())),
    }[name]
    run = make_run(tx, alike(), loss_of, data=4, stage=2)
    report = run.step.report(run.start, run.batch)
    stage = WIDTH * WIDTH + WIDTH
    assert report.parameters == stage
    assert report.dense == 2 * 3 / 4 * 4 * stage
    assert 1 <= report.received / report.dense < 1.5  # with the boundary, and a loss


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_sums_and_counts(schedule):
    def loss(x, batch):
        value, _ = loss_fn(x, batch)
        return value, {"large": (jnp.abs(x[:, :3] - batch["y"]) > 0.5).sum()}

    (batch,), mesh, tx = batches(1), jc.make_mesh(data=2, stage=2), jc.chain(jc.plump_dp(), optax.sgd(0.1))
    pipeline = replace(make_pipeline(2, micro_batches=2, schedule=schedule), loss_fn=loss)
    params = stages_of(params_of(), CUTS[2])
    step = jc.make_train_step(pipeline, tx, mesh, sum="large")
    _, metrics = step(step.init(params), batch)
    x = None
    for index, stage_params in enumerate(params_of()):
        x, _ = layer(index, stage_params, None, x, batch)
    assert metrics["large"] == loss(x, batch)[1]["large"] > 0
    wrong = jc.make_train_step(pipeline, tx, mesh)
    state = wrong.init(params)
    with pytest.raises(ValueError, match=r"for 'large'.* Pass sum='"):
        wrong(state, batch)
    with pytest.raises(ValueError, match=r"max must be None with a Pipeline.*got 'large'\. Return a mean, or a sum"):
        jc.make_train_step(pipeline, tx, mesh, max="large")


def test_a_stage_that_mixes_rows_warns():
    pipeline = make_pipeline(2)
    first, *others = pipeline.stages

    def mixing(params, x, batch):
        out = first(params, x, batch)
        return jax.tree.map(lambda leaf: leaf - jax.nn.logsumexp(leaf, 0), out)

    step = jc.make_train_step(
        replace(pipeline, stages=[mixing, *others]),
        jc.chain(jc.plump_dp(), optax.sgd(0.1)),
        jc.make_mesh(data=2, stage=2),
    )
    state = step.init(stages_of(params_of(), CUTS[2]))
    with pytest.warns(UserWarning, match="loss.*cannot be told to be a mean"):
        step(state, batches(1)[0])


def by_rank(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def by_name(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "b" not in jax.tree_util.keystr(path), params)


def affine(params, x, batch):
    return jnp.tanh((batch["x"] if x is None else x) @ params["w"] + params["b"])


def affine_pipeline(*widths):
    stages = [
        {"w": np.ones(pair, np.float32), "b": np.zeros(pair[1], np.float32)} for pair in itertools.pairwise(widths)
    ]
    return jc.Pipeline([affine] * len(stages), lambda x, batch: (jnp.mean(x**2), {}), stages), stages


@pytest.mark.parametrize(
    ("widths", "link", "is_refused"),
    [
        ((6, 4, 3), optax.add_decayed_weights(0.1, mask=by_rank), True),  # slots of unlike stages are vectors
        ((4, 4, 4), optax.add_decayed_weights(0.1, mask=by_rank), False),
        ((4, 4, 4), optax.add_decayed_weights(0.1, mask=by_name), True),  # slots have no names
        ((6, 4, 3), optax.contrib.muon(-1.0), True),
        ((6, 4, 3), optax.add_decayed_weights(0.1), False),
        ((6, 4, 3), optax.scale_by_adam(), False),
        ((6, 4, 3), optax.scale_by_trust_ratio(), False),
    ],
)
def test_links_by_name_or_rank(widths, link, is_refused):
    """One device would decay the matrices alone."""
    pipeline, stages = affine_pipeline(*widths)
    step = jc.make_train_step(pipeline, jc.chain(jc.plump_dp(), link, optax.sgd(0.1)), jc.make_mesh(data=1, stage=2))
    if is_refused:
        refused(lambda: step.init(stages), "name or rank", "link 1", "of stage 0")
    else:
        step.init(stages)


OUTER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))


def scale(params, x, batch):
    return params["w"] * (batch["x"] if x is None else x)


@pytest.mark.parametrize(
    ("links", "name"),
    [
        ((optax.clip_by_global_norm(1.0), jc.topk(0.9), optax.sgd(0.1)), "link 0 of the chain"),
        ((jc.plump_dp(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))), "link 1 of the chain"),
        ((jc.plump_dp(), optax.contrib.dadapt_adamw(1.0)), "link 1 of the chain"),
        ((jc.dgc(0.9, momentum=0.5, clip=1.0), optax.sgd(0.1)), "dgc with clip="),
        ((optax.sgd(0.1), jc.local_sgd(2, exchange=jc.plump_dp(), outer=OUTER)), "outer"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_links_that_look_at_all_tensors_warn(links, name, size):
    """On one device a clip looks at both tensors, and with one stage it does."""
    stages = [{"w": np.full(3, 2.0, np.float32)} for _ in range(size)]
    pipeline = jc.Pipeline([scale] * size, lambda x, batch: (jnp.mean(x**2), {}), stages)
    step = jc.make_train_step(pipeline, jc.chain(*links), jc.make_mesh(data=1, stage=size))
    if size == 1:
        step.init(stages)
    else:
        with pytest.warns(UserWarning, match=f"of that stage alone; got {name}, which looks at those of all tensors"):
            step.init(stages)


@pytest.mark.parametrize("link", [optax.clip(1.0), optax.adaptive_grad_clip(0.1), optax.lamb(0.1), optax.adamw(0.1)])
def test_links_that_look_at_a_tensor_at_a_time(link):
    pipeline, stages = affine_pipeline(4, 4, 4)
    mesh = jc.make_mesh(data=1, stage=2)
    jc.make_train_step(pipeline, jc.chain(jc.plump_dp(), link, optax.sgd(0.1)), mesh).init(stages)
