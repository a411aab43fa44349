"""A model in stages is the model: against one device, against DCT-MP in NumPy, and what crosses the boundaries."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from jaxcomm.accounting.jaxpr import jaxpr_program
from tests.jaxcomm.steps.pipeline.stages import (
    CUTS,
    ROWS,
    WIDTHS,
    Run,
    batches,
    cut,
    layer,
    loss_fn,
    make_pipeline,
    means_of,
    params_of,
    stage_fn,
    stages_of,
)
from tests.marks import slow_except
from tests.reference.dct_mp import DctMpReference

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
DECAYED = optax.chain(optax.add_decayed_weights(0.05), jc.plump_dp(), OPTIMIZER)

# Stages, micro-batches, the schedule, workers, whether there are running means. There are more
# micro-batches than stages, as many, and fewer; with 1F1B also fewer than its ticks of warm-up.
SETTINGS = [
    (1, 1, "gpipe", 1, False),
    (1, 2, "gpipe", 2, True),
    (2, 1, "gpipe", 2, False),
    (2, 4, "gpipe", 2, True),
    (3, 4, "gpipe", 1, True),
    (3, 2, "gpipe", 2, False),
    (4, 4, "gpipe", 2, False),
    (1, 2, "1f1b", 1, True),
    (2, 4, "1f1b", 2, True),
    (3, 8, "1f1b", 1, True),
    (3, 2, "1f1b", 2, False),
    (4, 4, "1f1b", 1, False),
]
NAMES = ("size", "count", "schedule", "data", "has_state")


@functools.cache
def run_of(size, count, schedule, data, has_state):
    return cut(size, DECAYED, data=data, has_state=has_state, micro_batches=count, schedule=schedule)


@functools.cache
def on_one_device(has_state, steps=10):
    """(parameters, means, metrics) of every step with the whole batch."""
    tx = optax.chain(optax.add_decayed_weights(0.05), OPTIMIZER)

    def loss(params, means, batch):
        x, new = None, []
        for index, stage_params in enumerate(params):
            x, mean = layer(index, stage_params, means[index] if has_state else None, x, batch)
            new.append(mean)
        value, scalars = loss_fn(x, batch)
        return value, (scalars, new)

    @jax.jit
    def step(params, means, opt_state, batch):
        (value, (scalars, new)), gradients = jax.value_and_grad(loss, has_aux=True)(params, means, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), new, opt_state, {"loss": value, **scalars}

    params, means, trace = params_of(), means_of(), []
    opt_state = tx.init(params)
    for batch in batches(steps):
        params, means, opt_state, metrics = step(params, means, opt_state, batch)
        trace.append((params, means, metrics))
    return jax.tree.map(np.asarray, trace)


def assert_close(one, two, rtol=2e-5, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), one, two)


@pytest.mark.parametrize(NAMES, slow_except(SETTINGS, (2, 1, "gpipe", 2, False), (3, 8, "1f1b", 1, True)))
def test_one_device(size, count, schedule, data, has_state):
    """Ten steps with momentum and weight decay: losses, scalars, parameters, and the running means after each."""
    run, state = run_of(size, count, schedule, data, has_state), None
    for batch, (params, means, expected) in zip(batches(10), on_one_device(has_state), strict=True):
        state, (metrics,) = run([batch], state)
        host = jax.tree.map(np.asarray, state)
        assert_close(run.step.params(host), stages_of(params, CUTS[size]))
        if has_state:
            assert_close(run.step.model_state(host), stages_of(means, CUTS[size]))
        assert_close(*([numbers[name] for name in ("loss", "error", "bias")] for numbers in (metrics, expected)))
        assert int(metrics["skipped"]) == 0
    assert sorted(metrics) == sorted(["bias", "error", "loss", *jc.types.ExchangeMetrics._fields])
    assert int(state.step) == 10
    assert all(np.abs(new["w"] - old["w"]).max() > 0.05 for new, old in zip(params, params_of(), strict=True))


@pytest.mark.parametrize(NAMES, slow_except(SETTINGS, *SETTINGS[::2]))
def test_each_boundary_is_crossed_once(size, count, schedule, data, has_state):
    """In the trace and in compiled text, although activations are recomputed in the backward pass."""
    run = run_of(size, count, schedule, data, has_state)
    traced, compiled = jaxpr_program(run.traced.jaxpr), read_program(run.compiled.as_text())
    expected, times = {}, {}
    for stage, end in enumerate(CUTS[size][:-1]):
        for pair in ((stage, stage + 1), (stage + 1, stage)):
            expected[pair] = count * (ROWS // data // count) * WIDTHS[end] * 4
            times[pair] = count
    assert traced.links() == expected
    places = {
        (worker * size + a, worker * size + b): change for (a, b), change in expected.items() for worker in range(data)
    }
    assert compiled.links() == places
    crossings = {}
    for when, traffic in traced.operations():
        if traffic.op == "permute":
            assert when == "always"
            for pair in traffic.pairs:
                crossings[pair] = crossings.get(pair, 0) + traffic.times
    assert crossings == times
    assert compiled.received == traced.received


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_messages_travel_together(schedule):
    """8 numbers in float32 and 16 in bfloat16 are as many words, and 5 are fewer: 9 permutations instead of 12."""
    widths, rng = (3, 8, 16, 5, 2), np.random.default_rng(0)
    pairs = itertools.pairwise(widths)
    params = [rng.normal(size=pair).astype(np.float32) / np.sqrt(pair[0]) for pair in pairs]
    values = ("float32", "bfloat16", "float32")
    boundaries = [jc.dct_mp(0.0, value_dtype=value) for value in values]

    def stage(params, x, batch):
        return jnp.tanh((batch["x"] if x is None else x) @ params)

    def loss(x, batch):
        return jnp.mean((x - batch["y"]) ** 2), {}

    def whole(params, batch):
        x = None
        for matrix, value in zip(params, (*values, "float32"), strict=True):
            x = stage(matrix, x, batch).astype(value).astype(jnp.float32)  # and so is its gradient
        return loss(x, batch)[0]

    pipeline = jc.Pipeline([stage] * 4, loss, params, boundaries=boundaries, micro_batches=4, schedule=schedule)
    batch = {"x": rng.normal(size=(16, 3)).astype(np.float32), "y": rng.normal(size=(16, 2)).astype(np.float32)}
    run = Run(pipeline, params, optax.chain(jc.plump_dp(), optax.sgd(0.5)), None, batch, data=1, stage=4)
    for program in (jaxpr_program(run.traced.jaxpr), read_program(run.compiled.as_text())):
        together = [
            (len(traffic.pairs), traffic.times) for _, traffic in program.operations() if traffic.op == "permute"
        ]
        assert sum(times for _, times in together) == 2 * 9
        assert sum(count * times for count, times in together) == 2 * 12
        assert program.links() == {
            pair: 16 * words * 4 for cut, words in enumerate((8, 8, 5)) for pair in ((cut, cut + 1), (cut + 1, cut))
        }
    state = None
    for _ in range(3):
        expected, gradients = jax.value_and_grad(whole)(params, batch)
        state, (metrics,) = run([batch], state)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)
        assert_close(metrics["loss"], expected)
        assert_close(
            run.step.params(state), params, rtol=1e-2, atol=1e-3
        )  # a micro-batch's gradients are rounded alone


def test_a_device_holds_one_stage():
    run = run_of(2, 4, "gpipe", 2, True)
    for leaf in jax.tree.leaves((run.start.params, run.start.opt_state, run.start.model_state["stages"])):
        assert leaf.shape[0] == 2
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {1}
        for shard in leaf.addressable_shards:
            place = np.argwhere(run.mesh.devices == shard.device)[0]
            assert shard.index[0].start == place[1]


MASKED = [jc.dct_mp(0.5), jc.dct_mp(0.6, value_dtype="bfloat16")]
ENDS = CUTS[3]


@functools.cache
def masked_run():
    tx = optax.chain(jc.plump_dp(), optax.sgd(0.1))
    return cut(3, tx, data=2, boundaries=MASKED, micro_batches=2)


loss_and_gradient = jax.jit(jax.value_and_grad(lambda x, batch: loss_fn(x, batch)[0]))


class MaskedReference:
    """Three stages with two boundaries of DCT-MP, by hand, per worker and micro-batch."""

    def __init__(self, workers, count):
        self.params, self.parts = stages_of(params_of(), ENDS), workers * count
        self.stages = [jax.jit(stage_fn(first, last, False)) for first, last in zip((0, *ENDS), ENDS, strict=False)]

    def step(self, batch):
        """The mean loss."""
        losses, total = [], None
        for part in range(self.parts):
            micro = {name: np.split(rows, self.parts)[part] for name, rows in batch.items()}
            loss, gradients = self._part(micro, [DctMpReference(0.5), DctMpReference(0.6, "bfloat16")])
            losses.append(loss)
            total = gradients if total is None else jax.tree.map(np.add, total, gradients)
        self.params = jax.tree.map(lambda p, g: p - 0.1 * g / self.parts, self.params, total)
        return np.mean(losses)

    def _part(self, micro, boundaries):
        x, pulls = None, []
        for stage, function in enumerate(self.stages):
            x, pull = jax.vjp(functools.partial(function, batch=micro), self.params[stage], x)
            pulls.append(pull)
            if stage < 2:
                x = jnp.asarray(boundaries[stage].forward(x))
        loss, gradient = loss_and_gradient(x, micro)
        third, gradient = pulls[2](gradient)
        # Of the gradient of a mean over the parts of one worker, its share crosses.
        second, gradient = pulls[1](2 * boundaries[1].backward(gradient / 2))
        first, _ = pulls[0](boundaries[0].backward(gradient))
        return float(loss), jax.tree.map(np.asarray, [first, second, third])


@pytest.mark.slow
def test_boundaries_of_dct_mp():
    run, reference, state = masked_run(), MaskedReference(workers=2, count=2), None
    for batch in batches(3):
        expected = reference.step(batch)
        state, (metrics,) = run([batch], state)
        assert_close(metrics["loss"], expected, rtol=1e-4)
        assert_close(run.step.params(state), reference.params, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "count", "boundaries"),
    [
        pytest.param(2, 8, [jc.dct_mp(0.0)], marks=pytest.mark.slow),
        pytest.param(2, 4, [jc.dct_mp(0.5)], marks=pytest.mark.slow),
        (3, 4, MASKED),
        (3, 8, [jc.dct_mp(0.0, value_dtype="int4"), jc.dct_mp(0.4, value_dtype="int4")]),
    ],
    ids=["dense", "dct_mp", "three stages", "4 bits"],
)
def test_schedules_agree(size, count, boundaries):
    """Parameters, running means and metrics of three steps, with dropout; a bad step is skipped by both."""
    tx = optax.chain(jc.plump_dp(), OPTIMIZER)

    def dropped(stage):
        def run(params, means, x, batch):
            x, means = stage(params, means, x, batch)
            masks = jax.vmap(lambda seed, row: jax.random.bernoulli(jax.random.key(seed), 0.8, row.shape))
            return jnp.where(masks(batch["seed"], x), x / 0.8, 0.0), means

        return run

    def run_of(schedule):
        pipeline = make_pipeline(size, has_state=True, boundaries=boundaries, micro_batches=count, schedule=schedule)
        pipeline = dataclasses.replace(pipeline, stages=[dropped(stage) for stage in pipeline.stages])
        parts = [stages_of(make(), CUTS[size]) for make in (params_of, means_of)]
        return Run(pipeline, parts[0], tx, parts[1], with_seeds(0, batches(1)[0]), data=1, stage=size)

    data = [with_seeds(step, batch) for step, batch in enumerate(batches(4))]
    data[2]["trap"][3] = np.nan
    (one, expected), (two, metrics) = (run_of(schedule)(data) for schedule in ("gpipe", "1f1b"))
    assert_close(two, one, rtol=1e-4, atol=1e-5)
    assert_close(metrics, expected, rtol=1e-4)
    assert [int(step["skipped"]) for step in metrics] == [0, 0, 1, 0]


def with_seeds(step, batch):
    return {**batch, "seed": np.arange(ROWS, dtype=np.uint32) + ROWS * step}


def test_memory_of_1f1b():
    """What crosses is 1 MB per micro-batch: with 16, 15 fewer are kept, and with twice as many, no more."""

    def memory(schedule, count):
        stages = [lambda params, x, batch: batch["x"] @ params, lambda params, x, batch: jnp.tanh(x) @ params]
        params = [np.ones((1, 2**11), np.float32), np.ones((2**11, 1), np.float32)]
        pipeline = jc.Pipeline(stages, wide_loss, params, micro_batches=count, schedule=schedule)
        step = jc.make_train_step(pipeline, optax.chain(jc.plump_dp(), OPTIMIZER), jc.make_mesh(data=1, stage=2))
        batch = {"x": jax.ShapeDtypeStruct((128 * count, 1), np.float32)}
        state = jax.eval_shape(lambda: step.init(params))
        return step.compile(state, batch).memory_analysis().temp_size_in_bytes / 2**20

    assert memory("1f1b", 16) < memory("gpipe", 16) - 12
    assert memory("1f1b", 32) < memory("1f1b", 16) + 1


def wide_loss(x, batch):
    return jnp.mean(x**2), {}


def test_a_mask_as_an_alternative_gradient():
    """In the scan over micro-batches; if many of 2048 positions are sent, each takes a bit."""
    width, rows = 128, 64

    def first(params, x, batch):
        return batch["x"] @ params

    def second(params, x, batch):
        return x @ params

    def loss(x, batch):
        return jnp.mean(x**2), {}

    params = [np.eye(4, width, dtype=np.float32), np.ones((width, 2), np.float32)]
    options = {"boundaries": [jc.dct_mp(0.3)], "micro_batches": 4}
    pipeline = jc.Pipeline([first, second], loss, params, **options)
    mesh, tx = jc.make_mesh(data=1, stage=2), optax.chain(jc.plump_dp(), optax.sgd(0.1))
    step = jc.make_train_step(pipeline, tx, mesh)
    shapes = jax.eval_shape(lambda: jc.make_train_step(pipeline, tx, mesh).init(params))
    program = jaxpr_program(step.trace(shapes, {"x": jax.ShapeDtypeStruct((rows, 4), np.float32)}).jaxpr)
    values = 4 * 16 * 90 * 4  # of four micro-batches
    assert program.links() == {(0, 1): values + 4 * 2048 // 8, (1, 0): values}


def test_bad_pipelines():
    stages, params = [stage_fn(0, 4, False)], [params_of()]
    for arguments, message in (
        (([], loss_fn, []), r"at least one stage; got none. Pass a function for each"),
        (
            (stages, loss_fn, params * 2),
            r"params must have a tree for every stage; got 2 for 1 stages. Pass \(\) for a st",
        ),
        ((stages, loss_fn, params, []), r"model_state must have a tree for every stage; got 0 for 1 stages. Pass"),
        ((stages, loss_fn, params, None, None, 0), r"micro_batches must be at least 1; got 0. 1 is the whole"),
        ((stages, loss_fn, params, None, None, 1, "zb"), r"schedule must be gpipe or 1f1b; got 'zb'"),
        (
            (stages, loss_fn, params, None, MASKED),
            r"one for every stage but the last; got 2 for 1 stages. Pass 0, dct_mp\(0.0\) where",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            jc.Pipeline(*arguments)


def test_bad_plans():
    (batch,) = batches(1)
    with pytest.raises(ValueError, match=r"multiple of micro_batches; got 16 rows for 3 micro-batches. Use an"):
        make_pipeline(2, micro_batches=3).plan(batch)
    with pytest.raises(ValueError, match=r"got 0 rows for 1 micro-batches"):
        make_pipeline(2).plan({**batch, "y": np.float32(0)})
    stages = [lambda params, x, batch: batch["x"].astype(jnp.int32), lambda params, x, batch: x]
    integers = jc.Pipeline(stages, loss_fn, [(), ()])
    with pytest.raises(
        ValueError, match=r"real floating activations .*; got int32\[16, 5\]. Let the next stage take integers"
    ):
        integers.plan(batch)


@pytest.mark.parametrize("axis", ["data", "stage"])
def test_a_collective_in_a_stage(axis):
    """It would be in a branch that some devices do not run; also if it is inside a loop of a stage."""

    def stage(params, x, batch):
        rows, _ = lax.scan(lambda rows, _: (rows + lax.pmean(rows, axis), None), batch["x"] @ params, None, length=2)
        return rows

    params = [np.ones((5, 3), np.float32)]
    pipeline, (batch,) = jc.Pipeline([stage], loss_fn, params), batches(1)
    message = r"another branch and would never answer; got one in stage 0. Leave it out: the step averages"
    with pytest.raises(ValueError, match=message):
        pipeline.plan(batch)
    mesh, tx = jc.make_mesh(data=2, stage=1), optax.chain(jc.plump_dp(), optax.sgd(0.1))
    state = jc.make_train_step(pipeline, tx, mesh).init(params)
    with pytest.raises(ValueError, match=message):
        jc.make_train_step(pipeline, tx, mesh).trace(state, batch)


@pytest.mark.parametrize(
    "change",
    [lambda new: new[:1], lambda new: [new[0], new[1][:3]], lambda new: [new[0], new[1].astype(jnp.bfloat16)]],
    ids=["structure", "shape", "type"],
)
def test_another_kind_of_model_state(change):
    """The stacked model state would be too small for it."""

    def changed(params, means, x, batch):
        x, new = stage_fn(2, 4, True)(params, means, x, batch)
        return x, change(new)

    params, means = stages_of(params_of(), CUTS[2]), stages_of(means_of(), CUTS[2])
    pipeline = jc.Pipeline([stage_fn(0, 2, True), changed], loss_fn, params, model_state=means)
    with pytest.raises(
        ValueError, match=r"shapes and types of the old one; got .* from stage 1. Return what it was given"
    ):
        pipeline.plan(batches(1)[0])


@pytest.mark.parametrize("has_state", [False, True])
def test_shapes_of_a_state(has_state):
    run = run_of(2, 4, "gpipe", 2, True) if has_state else run_of(2, 1, "gpipe", 2, False)
    params, means = stages_of(params_of(), CUTS[2]), stages_of(means_of(), CUTS[2])
    shapes = run.step.shapes(params, means) if has_state else run.step.shapes(params)
    assert jax.tree.structure(shapes) == jax.tree.structure(run.start)
    for expected, shape in zip(jax.tree.leaves(run.start), jax.tree.leaves(shapes), strict=True):
        assert (shape.shape, shape.dtype, shape.sharding) == (expected.shape, expected.dtype, expected.sharding)
