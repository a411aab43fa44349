"""Models for kinds of data, and where they are cut: as in the papers, otherwise into stages of equal size."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import CONFIGS
from configs.experiment import Architecture, BoundaryFields
from models.functional import cut
from tests.refusals import refused
from tests.train.runs import CLICKS, IMAGES, TEXT, TRANSLATIONS
from train.architectures import MODELS, choose_cuts, make_model, with_bottlenecks


def make(name, info, dtype="float32", seed=0, **options):
    """A model as shapes only."""
    return nnx.eval_shape(partial(make_model, Architecture(name, options), info, dtype, seed))


def transformer(layers, tied=False):
    return make("transformer", TRANSLATIONS, layers=layers, width=8, hidden=12, heads=2, tied=tied)


def mlp(blocks):
    return make("mlp", IMAGES, hidden=(4,) * (blocks - 1))


@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_data(name):
    """Models with their own kind of data are tested with the experiments, in `tests/configs`."""
    local = {"dlrm": CLICKS, "transformer": TRANSLATIONS, "gpt": TEXT}.get(name, IMAGES)
    for info in (IMAGES, CLICKS, TRANSLATIONS, TEXT):
        if info is local:
            continue
        with pytest.raises(ValueError, match=f"its kind of data; got {name!r} and {info.name!r}") as raised:
            make(name, info)
        assert "dlrm takes clicks, transformer translations, gpt text, and the others images" in str(raised.value)


def test_sizes():
    dlrm = make("dlrm", CLICKS, dim=4, bottom=(8,), top=(8,))
    assert dlrm.blocks[2].table.shape == (sum(CLICKS.table_sizes), 4)
    sentences = transformer(1)
    assert sentences.blocks[-1].dense.kernel.shape == (8, TRANSLATIONS.vocabulary_size)
    images = mlp(2)
    assert images.blocks[0].layer.kernel.shape == (8 * 8 * 1, 4)
    assert images.blocks[1].layer.kernel.shape == (4, IMAGES.num_classes)


def test_dtype_and_seed():
    # Computed in bfloat16, with parameters of float32; the same seed makes the same parameters.
    model = make("mlp", IMAGES, dtype="bfloat16", hidden=(4,))
    assert model.blocks[0].layer.dtype == jnp.bfloat16
    assert model.blocks[0].layer.kernel.dtype == jnp.float32
    first, repeat, variant = (
        jax.tree.leaves(nnx.state(make_model(Architecture("mlp", {"hidden": (4,)}), IMAGES, "float32", seed)))[1]
        for seed in (0, 0, 1)
    )
    assert jnp.array_equal(first, repeat)
    assert not jnp.array_equal(first, variant)


def test_another_name():
    refused(lambda: make("lenet", IMAGES), "A model", "got 'lenet'")


# Gupta et al., KDD 2021, by the tables of blocks in the docstrings of `Dlrm` and `Transformer`.
@pytest.mark.parametrize(("stages", "cuts"), [(1, ()), (2, (2,)), (3, (2, 7)), (4, (2, 4, 7))])
def test_cuts_of_a_dlrm(stages, cuts):
    assert choose_cuts(make("dlrm", CLICKS), stages, None) == cuts


@pytest.mark.parametrize(
    ("layers", "stages", "cuts"),
    [
        (6, 2, (10,)),  # after the ReLU of encoder layer 5
        (6, 3, (10, 23)),  # and of decoder layer 5
        (6, 5, (6, 10, 19, 23)),  # and of layer 3 of both
        (2, 2, (4,)),
        (2, 3, (4, 9)),
        (2, 5, (2, 4, 7, 9)),
        (1, 3, (2, 5)),
        (1, 5, (1, 3, 4, 6)),  # one layer cannot be cut twice: 7 blocks in equal parts
        (6, 4, (7, 14, 20)),  # 27 blocks; the paper has no four stages
    ],
)
def test_cuts_of_a_transformer(layers, stages, cuts):
    assert choose_cuts(transformer(layers), stages, None) == cuts


def test_cuts_inside_a_layer():
    model = transformer(6)
    for stages in (2, 3, 5):
        for index in choose_cuts(model, stages, None):
            assert type(model.blocks[index]).__name__ == "Contraction"


@pytest.mark.slow
def test_a_tied_decoder():
    assert choose_cuts(transformer(6, tied=True), 2, None) == (10,)
    with pytest.raises(ValueError, match=r"A tied model's decoder must not be cut.*tied=False"):
        choose_cuts(transformer(6, tied=True), 3, None)


def test_bottlenecks_of_a_transformer():
    """They are after the layer that the paper cuts, where one array crosses, and anchors are of the source."""
    experiment = dataclasses.replace(CONFIGS["transformer_catalogs"], stages=2, boundary=BoundaryFields(rank=16))
    learned = with_bottlenecks(experiment, TRANSLATIONS)
    assert (learned.architecture.cuts, learned.cuts) == ((5,), (6,))
    blocks = make_model(learned.architecture, TRANSLATIONS, "float32", 0).blocks
    assert [type(block).__name__ for block in blocks[4:8]] == ["Contraction", "Encoder", "Decoder", "TargetEmbedding"]
    assert blocks[5].encoder.shape == (64, 16)
    anchors = np.arange(TRANSLATIONS.vocabulary_size)[:, None] * np.ones(64)
    blocks[6].anchors[...] = anchors
    source = np.array([[4, 7, 0]])
    np.testing.assert_array_equal(blocks[6](np.zeros((1, 3, 16)), {"source": source}), anchors[source])
    chosen = with_bottlenecks(dataclasses.replace(experiment, cuts=(3,)), TRANSLATIONS)
    assert chosen.architecture.cuts == (3,)


def test_anchors_of_a_decoder():
    """After a layer two arrays cross, before its end three: the source's, then the target's without its last token."""
    experiment = dataclasses.replace(CONFIGS["transformer_catalogs"], stages=5, boundary=BoundaryFields(rank=16))
    batch = {"source": np.array([[4, 7, 0]]), "target": np.array([[1, 5, 2]])}
    anchors = np.arange(TRANSLATIONS.vocabulary_size)[:, None]
    learned = with_bottlenecks(experiment, TRANSLATIONS)
    assert learned.architecture.cuts == (3, 5, 8, 10)
    for cuts, wide, sides in (
        (None, (64, 64), ("source", "target")),
        ((2, 4, 7, 9), (64, 64, 128), ("source", "target", "target")),
    ):
        learned = with_bottlenecks(dataclasses.replace(experiment, cuts=cuts), TRANSLATIONS)
        assert learned.cuts is not None
        decoders = make_model(learned.architecture, TRANSLATIONS, "float32", 0).blocks[learned.cuts[2]].layers
        for decoder, width, side in zip(decoders, wide, sides, strict=True):
            decoder.anchors[...] = anchors * np.ones(width)
            tokens = batch["source"] if side == "source" else batch["target"][:, :-1]
            np.testing.assert_array_equal(
                decoder(np.zeros((*tokens.shape, 16)), batch), (anchors * np.ones(width))[tokens]
            )


def test_even_cuts_of_a_dlrm():
    assert choose_cuts(make("dlrm", CLICKS, bottom=(8,), top=(8,)), 2, None) == (2,)  # 5 blocks
    assert choose_cuts(make("dlrm", CLICKS), 5, None) == (2, 4, 5, 7)  # 9 blocks; the paper has no five stages


def test_even_cuts():
    for blocks in range(1, 10):
        model = mlp(blocks)
        for stages in range(1, blocks + 1):
            sizes = [len(stage.graph.training) for stage in cut(model, choose_cuts(model, stages, None))]
            assert len(sizes) == stages
            assert sum(sizes) == blocks
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1


def test_cuts_of_the_experiment():
    assert choose_cuts(mlp(4), 3, (1, 2)) == (1, 2)
    assert choose_cuts(make("dlrm", CLICKS), 2, (4,)) == (4,)


@pytest.mark.parametrize(
    ("stages", "cuts", "message"),
    [
        (5, None, r"Every stage must have a block; got --stages 5 for a model of 4 blocks. Use at most 4 stages"),
        (3, (1,), r"A pipeline of 3 stages must have 2 cuts; got --cuts \(1,\)"),
        (2, (), r"A pipeline of 2 stages must have 1 cuts; got --cuts \(\)"),
    ],
)
def test_bad_cuts(stages, cuts, message):
    with pytest.raises(ValueError, match=message):
        choose_cuts(mlp(4), stages, cuts)
