"""What crosses a bottleneck, where it begins, and that a pipeline sends it and trains as the model in one piece."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxcomm as jc
from models.bottleneck import add_bottlenecks, decoders
from models.functional import apply, cut, split
from tests.models.twins import close, make, make_batch
from tests.refusals import refusals, refused

TOKENS = (lambda batch: batch["text"][:, :-1].astype(jnp.int32), 256)
CUTS = (1, 2)  # of the GPT's embedding, two layers and logits


def bottled(rank, tokens=TOKENS, cuts=CUTS, name="gpt"):
    model = make(name)
    of_cut = tokens and (lambda _: [tokens])
    return model, add_bottlenecks(model, cuts, rank, make_batch(name), tokens=of_cut, rngs=nnx.Rngs(0))


def outputs(model, batch):
    graph, params, stats = split(model)
    return apply(graph, params, stats, batch, training=False)[0]


@pytest.mark.parametrize("tokens", [TOKENS, None], ids=["anchors", "no anchors"])
def test_all_features_cross_unchanged_at_first(tokens):
    batch, (model, cuts) = make_batch("gpt"), bottled(8, tokens)
    assert cuts == decoders(CUTS) == (2, 5)
    assert [type(model.blocks[at]).__name__ for at in (1, 2, 4, 5)] == ["Encoder", "Decoder"] * 2
    close(outputs(model, batch), outputs(make("gpt"), batch))


def test_a_path_of_low_rank_from_the_first_step():
    """At first the layers project: the nearest that r directions allow, and what they let through is unchanged."""
    model, _ = bottled(3)
    batch, x = make_batch("gpt"), np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)
    encoder, decoder = model.blocks[1], model.blocks[2]
    once = decoder(encoder(x, batch), batch)
    assert encoder(x, batch).shape == (4, 8, 3)
    assert np.linalg.matrix_rank(np.asarray(once).reshape(-1, 8), tol=1e-4) == 3
    close(decoder(encoder(once, batch), batch), once)
    assert np.linalg.norm(x - once) ** 2 == pytest.approx(np.linalg.norm(x) ** 2 - np.linalg.norm(once) ** 2, rel=1e-4)


def test_adam_changes_matrices_by_a_tenth_of_the_rate():
    """What crosses changes by 0.1 of what it would if the matrices were the parameters."""
    model, _ = bottled(3)
    batch, x = make_batch("gpt"), jnp.ones((4, 8, 8))
    encoder = model.blocks[1]
    before = encoder(x, batch)
    encoder.encoder[...] += 0.01  # Adam's first update at a rate of 0.01, if all gradients are negative
    close(encoder(x, batch) - before, np.full((4, 8, 3), 8 * 0.001))


def test_anchors_are_of_the_token():
    model, _ = bottled(3)
    batch, decoder = make_batch("gpt"), model.blocks[2]
    decoder.anchors[...] = jnp.arange(256.0)[:, None] * jnp.ones(8)
    added = decoder(jnp.zeros((4, 8, 3)), batch)
    close(added, np.asarray(batch["text"][:, :-1], np.float32)[..., None] * np.ones(8))


def test_all_layers_learn():
    model, _ = bottled(3)
    graph, params, stats = split(model)
    batch = make_batch("gpt")

    def loss(params):
        return jnp.mean(apply(graph, params, stats, batch, training=True)[0] ** 2)

    gradients = jax.grad(loss)(params)
    for encoder in (1, 4):
        assert np.abs(gradients[encoder]["encoder"]).min() > 0
        assert np.abs(gradients[encoder + 1]["decoder"]).min() > 0
        read = np.unique(batch["text"][:, :-1])
        assert (np.abs(gradients[encoder + 1]["anchors"]).max(axis=1) > 0).nonzero()[0].tolist() == read.tolist()


@pytest.mark.parametrize(("value_dtype", "tolerance"), [(None, 1e-5), ("bfloat16", 0.02), ("int4", 0.2)])
def test_a_pipeline_trains_as_one_piece(value_dtype, tolerance):
    """Losses of three steps; r numbers of a token cross each way, as predicted, compiled and worked out by hand."""
    model, cuts = bottled(4)
    whole, stages, batch = split(model), cut(model, cuts), make_batch("gpt", 8)
    tx = jc.chain(jc.plump_dp(), optax.adam(1e-2))

    def error(output, batch):
        labels = batch["text"][:, 1:].astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(output, labels).mean(), {}

    def run(graph, params, x, batch):
        return apply(graph, params, {}, batch, x, training=True)[0]

    pipeline = jc.Pipeline(
        [lambda params, x, batch, graph=stage.graph: run(graph, params, x, batch) for stage in stages],
        error,
        [stage.params for stage in stages],
        boundaries=[jc.dct_mp(0.0, value_dtype=value_dtype)] * 2,
        micro_batches=2,
    )
    reference = jc.make_train_step(
        lambda params, batch: error(run(whole.graph, params, None, batch), batch)[0], tx, jc.make_mesh(data=1)
    )
    step = jc.make_train_step(pipeline, tx, jc.make_mesh(data=1, stage=3))
    states = step.init([stage.params for stage in stages]), reference.init(whole.params)
    step.verify(states[0], batch)
    for boundary in pipeline.report(tx, batch, workers=1).boundaries:
        if value_dtype != "int4":
            assert boundary.forward == boundary.backward == 8 * 8 * 4 * (4 if value_dtype is None else 2)
    losses = []
    for _ in range(3):
        results = [one(state, batch) for one, state in zip((step, reference), states, strict=True)]
        states, metrics = zip(*results, strict=True)
        losses.append([float(metric["loss"]) for metric in metrics])
    assert len({round(one, 6) for one, _ in losses}) == 3
    np.testing.assert_allclose(*np.transpose(losses), rtol=tolerance)


def test_image_models():
    """The channels of every place become fewer."""
    model, cuts = bottled(2, None, (1,), "resnet")
    first, _ = cut(model, cuts)
    batch = make_batch("resnet")
    x, _ = apply(first.graph, first.params, first.stats, batch, training=False)
    assert (x.ndim, x.shape[-1]) == (4, 2)


def test_several_arrays():
    """In the decoder memory and target cross: each has layers of its own, and the anchors that are named for it."""
    batch, model, whole = make_batch("transformer"), make("transformer"), make("transformer")
    asked, source = [], (lambda batch: batch["source"], 11)

    def tokens(cut):
        asked.append(cut)
        return [source]

    assert add_bottlenecks(model, (3, 6), 8, batch, tokens=tokens, rngs=nnx.Rngs(0)) == (4, 9)
    assert asked == [3, 6]
    close(outputs(model, batch), outputs(whole, batch))  # all eight features cross
    add_bottlenecks(whole, (6,), 3, batch, tokens=tokens, rngs=nnx.Rngs(0))
    first, last = cut(whole, (7,))
    crossed, _ = apply(first.graph, first.params, first.stats, batch, training=False)
    assert [x.shape[-1] for x in jax.tree.leaves(crossed)] == [3, 3]
    memory, target = last.params[7]["layers"].values()
    assert memory["anchors"].shape == (11, 8)
    assert list(target) == ["decoder"]


@refusals(
    (lambda: bottled(9), "rank=9", "(4, 8, 8)", "the block 1"),
    (lambda: bottled(0), "rank=0"),
    (lambda: bottled(9, None, (2,), "transformer"), "rank=9", "8), (", "12))", "the block 2"),
)
def test_refusals(call, said):
    """Ranks that are none, of one of several arrays too."""
    refused(call, *said)
