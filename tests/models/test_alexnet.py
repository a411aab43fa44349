from functools import partial

import jax
import numpy as np
import pytest

from models.alexnet import AlexNet
from models.functional import apply, split
from models.late_linear import LateLinear
from tests.models.twins import abstract, close, count, crossing, make, make_batch

PUBLISHED = partial(AlexNet, (224, 224, 3), 1000)


def test_parameters():
    # Kernels and biases of "One weird trick"'s layers.
    convolutions = [(11, 3, 64), (5, 64, 192), (3, 192, 384), (3, 384, 256), (3, 256, 256)]
    dense = [(9216, 4096), (4096, 4096), (4096, 1000)]
    in_dense = sum((i + 1) * o for i, o in dense)
    assert count(PUBLISHED) == sum((k * k * i + 1) * o for k, i, o in convolutions) + in_dense == 61_100_840
    assert round(in_dense / 1e6, 1) == 58.6


def test_dropout():
    layers = [block.dropout for block in abstract(PUBLISHED).blocks[5:]]
    assert [layer and layer.rate for layer in layers] == [0.5, 0.5, None]


def test_what_crosses():
    batch = {"image": ((2, 224, 224, 3), np.float32)}
    assert crossing(PUBLISHED, batch) == [
        (2, 27, 27, 64),
        (2, 13, 13, 192),
        (2, 13, 13, 384),
        (2, 13, 13, 256),
        (2, 6, 6, 256),
        (2, 4096),
        (2, 4096),
        (2, 1000),
    ]


def test_images_too_small():
    with pytest.raises(ValueError, match=r"An image must be at least as large as a window; got a side of \d pixels"):
        abstract(partial(AlexNet, (32, 32, 3), 10))
    # The smallest images: 63 -> 15 -> 7 -> 3 -> 1.
    abstract(partial(AlexNet, (63, 63, 3), 10))
    with pytest.raises(ValueError, match="An image must be at least as large as a window"):
        abstract(partial(AlexNet, (63, 62, 3), 10))


def test_other_dense_layers():
    usual, late = make("alexnet"), make("alexnet", dense=partial(LateLinear, mode="late"))
    assert [type(block.layer) for block in late.blocks[5:]] == [LateLinear] * 3
    (graph, params, stats), variant = split(usual), split(late)
    assert jax.tree.structure(params) == jax.tree.structure(variant.params)
    batch = make_batch("alexnet")
    run = jax.jit(lambda params: [apply(g, params, stats, batch, training=True)[0] for g in (graph, variant.graph)])
    close(*run(params))
