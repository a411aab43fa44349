from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.attention import positions
from models.functional import apply, cut, split
from models.transformer import Transformer, smoothed_losses
from tests.marks import slow_except
from tests.models.twins import abstract, close, count, crossing, filled, make_batch, small_transformer
from tests.refusals import refused

IWSLT = partial(Transformer, 8848, 6632)  # the vocabularies of fairseq's IWSLT'14 German-English
BATCH = {"source": ((2, 7), np.int32), "target": ((2, 6), np.int32)}


def test_parameters():
    attention, norm, expansion = 4 * (512 + 1) * 512, 2 * 512, (512 + 1) * 1024 + (1024 + 1) * 512
    layers = 6 * (attention + expansion + 2 * norm) + 6 * (2 * attention + expansion + 3 * norm)
    tables = (8848 + 6632) * 512
    assert count(IWSLT) == tables + layers == 39_469_056
    assert count(partial(IWSLT, tied=False)) == tables + layers + 6632 * 512 == 42_864_640


@pytest.mark.slow
def test_what_crosses():
    x, y, inside = (2, 7, 512), (2, 5, 512), (1024,)
    encoder = [x] + [(x, (2, 7, *inside)), x] * 6
    assert crossing(IWSLT, BATCH) == [*encoder, (2, 5, 6632)]
    decoder = [(x, y)] + [(x, y, (2, 5, *inside)), (x, y)] * 6
    assert crossing(partial(IWSLT, tied=False), BATCH) == [*encoder, *decoder, (2, 5, 6632)]


@pytest.mark.slow
def test_cuts_after_the_relu():
    untied = partial(small_transformer, layers=6, tied=False)
    model, shapes = abstract(untied), crossing(untied, BATCH)
    for stages, layers in (
        (2, {"encoder": (5,)}),
        (3, {"encoder": (5,), "decoder": (5,)}),
        (5, {"encoder": (3, 5), "decoder": (5, 3)}),
    ):
        cuts = model.cuts_after_relu(**layers)
        assert len(cut(model, cuts)) == stages
        assert all(shapes[at - 1][-1][-1] == 12 for at in cuts)
        # Whole layers before the cut: those of its own half of the model, and all of the encoder's for a decoder's.
        before = [(at - 1) // 2 if at < 14 else (at - 2) // 2 for at in cuts]
        assert before == [layer - 1 for layer in sorted(layers["encoder"])] + [
            6 + layer - 1 for layer in sorted(layers.get("decoder", ()))
        ]
    tied = abstract(partial(small_transformer, layers=6))
    assert tied.cuts_after_relu(encoder=(5,)) == (10,)
    refused(lambda: tied.cuts_after_relu(decoder=(5,)), "decoder", "got cuts in decoder layers (5,).")
    for wrong in (0, 7):
        with pytest.raises(ValueError, match=f"Layers must be numbered from 1 to 6; got {wrong}"):
            model.cuts_after_relu(encoder=(wrong,))


def test_activations_of_the_relu():
    model = filled(partial(small_transformer, layers=2, tied=False))
    batch = make_batch("transformer")
    for at in model.cuts_after_relu(encoder=(2,), decoder=(1,)):
        first = cut(model, (at,))[0]
        x, _ = jax.jit(partial(apply, first.graph, training=False))(first.params, first.stats, batch)
        assert x[-1].shape[-1] == 12
        assert 0.2 < np.mean(np.asarray(x[-1]) == 0) < 0.8
        assert np.all(np.asarray(x[-1]) >= 0)


def test_scales_and_normalisation():
    model, batch = filled(partial(small_transformer, tied=False, dropout=0.0)), make_batch("transformer")
    embedded = model.blocks[0](None, batch)
    table = np.asarray(model.blocks[0].embedding.table[...])
    np.testing.assert_allclose(embedded, table[batch["source"]] * 8**0.5 + positions(6, 8), rtol=1e-5, atol=1e-6)
    for norm in (model.blocks[2].norm, model.blocks[5].norm):
        norm.scale[...], norm.bias[...] = jnp.ones(8), jnp.zeros(8)
    first = cut(model, (6,))[0]
    memory, y = jax.jit(partial(apply, first.graph, training=False))(first.params, first.stats, batch)[0]
    for x in (memory, y):
        close(x.mean(axis=-1), jnp.zeros(x.shape[:2]))
        close(x.std(axis=-1), jnp.ones(x.shape[:2]), 1e-3)


@pytest.mark.parametrize("tied", slow_except([True, False], True))
def test_causality_and_padding(tied):
    graph, params, stats = split(filled(partial(small_transformer, layers=2, tied=tied)))
    run = jax.jit(lambda batch: apply(graph, params, stats, batch, training=False)[0])
    batch = make_batch("transformer")
    logits = run(batch)
    later = run(batch | {"target": batch["target"].at[:, 2].add(1)})
    close(later[:, :2], logits[:, :2])
    assert np.abs(later[:, 2] - logits[:, 2]).min(axis=-1).max() > 1e-4
    longer = run(batch | {"source": jnp.pad(batch["source"], ((0, 0), (0, 3)))})
    close(longer, logits)
    reverse = run(batch | {"source": batch["source"][:, ::-1]})
    assert np.abs(reverse - logits).max() > 1e-2


def test_unknown_tokens():
    graph, params, stats = split(filled(small_transformer))
    batch = make_batch("transformer")
    run = jax.jit(partial(apply, graph, training=False))
    for name, token in (("source", 11), ("target", 13), ("target", -1)):
        wrong = batch | {name: batch[name].at[2, 1].set(token)}
        is_nan = np.isnan(run(params, stats, wrong)[0]).any(axis=(1, 2))
        assert is_nan.tolist() == [False, False, True, False]


@pytest.mark.slow
def test_smoothed_losses():
    rng = np.random.default_rng(0)
    logits, target = jnp.asarray(rng.normal(size=(3, 4, 7)), jnp.float32), rng.integers(3, 7, (3, 5))
    target[1, 3:] = 0
    losses, entropies, tokens = smoothed_losses(logits, jnp.asarray(target), 0.1)
    labels = jax.nn.one_hot(target[:, 1:], 7)
    real = target[:, 1:] != 0
    assert tokens.tolist() == [4, 2, 4]
    for loss, smoothing in ((losses, 0.1), (entropies, 0.0)):
        item = optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, smoothing))
        np.testing.assert_allclose(loss, (item * real).sum(axis=1), rtol=1e-5)
    gradient = jax.grad(lambda logits: smoothed_losses(logits, jnp.asarray(target))[0].sum())(logits)
    np.testing.assert_array_equal(np.asarray(gradient)[~real], 0)


def test_heads():
    with pytest.raises(ValueError, match=r"got 8 features for 3 heads. Give a multiple of 3"):
        abstract(partial(Transformer, 11, 13, width=8, heads=3))
    with pytest.raises(ValueError, match=r"got 9. Give an even width"):
        crossing(partial(Transformer, 11, 13, width=9, heads=3), BATCH)
