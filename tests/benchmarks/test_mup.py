"""Initial values and rates against the rule, worked out by hand; and what the rule promises, at two widths."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from benchmarks import gpt, mup
from benchmarks.mup import BASE, Text, Trainer, body_size, make_chain, model_of, rate_factors
from configs.methods import LocalSgd, PlumpDp, TopK
from models.bottleneck import MULTIPLIER, decoders
from models.functional import apply, cut
from train.tasks import make_task

TEXT = Text("stdlib", None, 4)


def by_name(tree, names=("table", "expand/kernel", "query/kernel", "dense/kernel", "bias")):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return {name.partition("/")[0]: next(leaf for path, leaf in paths.items() if name in path) for name in names}


@pytest.fixture(scope="module")
def wide():
    """Twice as wide as the base."""
    return model_of(TEXT, 2, 96, near=False).params


def test_rates_of_twice_the_width(wide):
    adam = {"table": 1, "expand": 0.5, "query": 0.353553, "dense": 0.5, "bias": 1}
    assert by_name(rate_factors(wide, 96, "adam")) == pytest.approx(adam, rel=1e-5)
    assert by_name(rate_factors(wide, 96, "sign")) == pytest.approx(adam, rel=1e-5)
    muon = adam | {"expand": 0.707107, "query": 0.5}
    assert by_name(rate_factors(wide, 96, "muon")) == pytest.approx(muon, rel=1e-5)
    base = model_of(TEXT, 2, 48, near=False).params
    assert all(factor == 1 for factor in jax.tree.leaves(rate_factors(base, 48, "muon")))


def test_first_values_of_twice_the_width(wide):
    deviations = {name: float(leaf.std()) for name, leaf in by_name(wide).items()}
    expected = {"table": 0.5, "expand": 0.10206, "query": 0.07217, "dense": 0.07217, "bias": 0}
    assert deviations == pytest.approx(expected, rel=0.03)
    (contract,) = by_name(wide, ["contract/kernel"]).values()
    assert float(contract.std()) == pytest.approx(0.5 / np.sqrt(96 * 4), rel=0.03)  # 4 terms: 2 of each layer
    places = np.asarray(by_name(wide, ["places"])["places"])
    np.testing.assert_allclose(places[:, 0] ** 2 + places[:, 48] ** 2, 0.5, rtol=1e-5)  # a sine and its cosine
    np.testing.assert_allclose(places[:, 0], np.sqrt(0.5) * np.sin(np.arange(len(places))), atol=1e-4)


def test_parameters_are_counted():
    for layers, width, near in ((2, 96, False), (1, 8, True)):
        leaves = jax.tree_util.tree_leaves_with_path(model_of(TEXT, layers, width, near=near).params)
        assert any(mup.kind(path) == "places" for path, _ in leaves) != near
        others = sum(leaf.size for path, leaf in leaves if mup.kind(path) in ("table", "places", "logits"))
        assert body_size(layers, width, near) == sum(leaf.size for _, leaf in leaves) - others


def test_rates_of_bottlenecks():
    """At first they project, whatever the width; encoders sum over features, so that their rate falls with width."""
    model = model_of(TEXT, 2, 96, cuts=(1, 3), rank=12)
    encoder, decoder = (MULTIPLIER * model.params[block][name] for block, name in ((1, "encoder"), (2, "decoder")))
    np.testing.assert_allclose(encoder.T @ encoder, np.eye(12), atol=1e-5)
    np.testing.assert_array_equal(decoder, encoder.T)
    names = ("encoder", "decoder", "anchors")
    assert by_name(rate_factors(model.params, 96, "adam"), names) == {"encoder": 0.5, "decoder": 1, "anchors": 1}
    muon = {"encoder": 0.5**0.5, "decoder": 0.5**0.5, "anchors": 1}  # as of other matrices; anchors have Adam
    assert by_name(rate_factors(model.params, 96, "muon"), names) == muon


@pytest.mark.parametrize("name", ["dct_mp(0.9)", "d/8"])
def test_stages_in_one_piece_train_as_a_pipeline(name):
    """Losses of three steps are those of the pipeline that sends."""
    boundary = gpt.boundaries(BASE)[name]
    trainer = Trainer(TEXT, 1, BASE, PlumpDp(), "adam", workers=1, steps=9, warm_up=1, boundary=boundary, stages=3)
    cuts = (1, 2)
    model = model_of(TEXT, 1, BASE, cuts=cuts, rank=boundary.rank)
    parts, task = cut(model, decoders(cuts) if boundary.rank else cuts), make_task(TEXT.info, 0.0)

    def run(graph, params, x, batch):
        return apply(graph, params, {}, batch, x, training=True)[0]

    pipeline = jc.Pipeline(
        [partial(run, part.graph) for part in parts],
        lambda x, batch: (task.loss(x, batch)[0], {}),
        [part.params for part in parts],
        boundaries=[jc.dct_mp(boundary.sparsity)] * 2,
    )
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.002, 1, 9)
    chain = jc.chain(jc.plump_dp(), optax.adam(schedule, b2=0.98))
    step = jc.make_train_step(pipeline, chain, jc.make_mesh(data=1, stage=3))
    states, losses = (step.init([part.params for part in parts]), trainer._start(0)), []
    for batch in itertools.islice(TEXT.rows(0), 3):
        sent, metrics = step(states[0], batch)
        one, other = trainer._step(states[1], batch, jnp.float32(0.002))
        states = sent, one
        losses.append((float(metrics["loss"]), float(other["loss"])))
    assert losses[2][0] < losses[0][0]
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-5)
    boundaries = pipeline.report(chain, batch, 1).boundaries
    assert trainer.received == sum(cut.forward + cut.backward for cut in boundaries) / 3


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_updates_change_wide_models_no_more(optimizer):
    """With the same rate for all parameters, logits of 8 times the width would change 1.7 times as much by Adam."""
    text = {"text": jnp.asarray(np.resize(np.arange(7) * 11, (2, 33)), jnp.uint8)}

    def change(width):
        model = model_of(TEXT, 1, width)
        chain = make_chain(PlumpDp(), optimizer, optax.constant_schedule(0.01), width)

        def logits(params):
            return apply(model.graph, params, model.stats, text, training=True)[0]

        def loss(params):
            labels = text["text"][:, 1:].astype(jnp.int32)
            return optax.softmax_cross_entropy_with_integer_labels(logits(params), labels).mean()

        def steps(params):
            state, new = chain.init(params), params
            for _ in range(3):
                updates, state = chain.update(jax.grad(loss)(new), state, new)
                new = optax.apply_updates(new, updates)
            return jnp.abs(logits(new) - logits(params)).mean()

        rows = jax.tree.map(lambda leaf: leaf[None], model.params)  # one worker
        return float(jax.jit(jax.vmap(steps, axis_name="data"))(rows)[0])

    assert 0.33 < change(192) / change(24) < 1.2


def test_runs_share_a_program_and_repeat():
    options = {"workers": 2, "steps": 4, "warm_up": 1}
    trainer = Trainer(TEXT, 1, 8, PlumpDp(), "adam", **options)
    first, faster, again = (trainer.run(rate, 0, 2) for rate in (1e-3, 1e-1, 1e-3))
    assert first["losses"] == again["losses"] != faster["losses"]
    assert (first["steps"], first["loss"]) == ([2, 4], first["losses"][-1])
    assert first["received"] == [2 * first["bytes_per_step"], 4 * first["bytes_per_step"]]
    assert trainer._step._cache_size() == 1
    together = Trainer(TEXT, 1, 8, PlumpDp(), "adam", **options | {"workers": 1}).run(1e-3, 0, 2)
    assert together["losses"] == pytest.approx(first["losses"], rel=1e-5)


def test_a_dense_start():
    """Two of four steps exchange as dense does, and receive as many bytes."""
    options = {"workers": 2, "steps": 4, "warm_up": 1}
    dense = Trainer(TEXT, 1, 8, PlumpDp(), "adam", **options).run(0.1, 0, 4)
    method = TopK(sparsity=0.9)
    whole = Trainer(TEXT, 1, 8, method, "adam", **options).run(0.1, 0, 4)
    run = Trainer(TEXT, 1, 8, method, "adam", start=2, **options).run(0.1, 0, 4)
    assert run["losses"][:2] == pytest.approx(dense["losses"][:2], rel=1e-6)
    assert run["losses"][2] != pytest.approx(dense["losses"][2], rel=1e-6)
    assert run["losses"][1] != pytest.approx(whole["losses"][1], rel=1e-6)
    bytes_of = dense["bytes_per_step"], whole["bytes_per_step"]
    assert run["received"] == np.cumsum(np.repeat(bytes_of, 2)).tolist()
    assert run["bytes_per_step"] == sum(bytes_of) / 2


def test_local_methods_scale_before_the_exchange():
    chain = make_chain(LocalSgd(steps=2), "adam", optax.constant_schedule(1.0), 48)
    states = chain.init(model_of(TEXT, 1, 8).params)
    assert [type(state).__name__ for state in states][::3] == ["ScaleByAdamState", "ExchangeState"]
