import itertools
from functools import partial

import numpy as np

from models.vgg import Vgg
from tests.models.twins import abstract, count, crossing
from tests.refusals import refused

VGG16 = partial(Vgg, (224, 224, 3), 1000)


def test_parameters():
    # Configuration D of the paper's table 1.
    widths = [3, 64, 64, 128, 128, *[256] * 3, *[512] * 6]
    dense = [(7 * 7 * 512, 4096), (4096, 4096), (4096, 1000)]
    in_dense = sum((i + 1) * o for i, o in dense)
    in_convolutions = sum((9 * i + 1) * o for i, o in itertools.pairwise(widths))
    assert count(VGG16) == in_convolutions + in_dense == 138_357_544
    assert round(in_dense / 1e6, 1) == 123.6


def test_dropout():
    layers = [block.dropout for block in abstract(VGG16).blocks[13:]]
    assert [layer and layer.rate for layer in layers] == [None, 0.5, 0.5]


def test_what_crosses():
    shapes = crossing(VGG16, {"image": ((2, 224, 224, 3), np.float32)})
    assert [shape[1:] for shape in shapes] == [
        (224, 224, 64),
        (112, 112, 64),
        (112, 112, 128),
        (56, 56, 128),
        *[(56, 56, 256)] * 2,
        (28, 28, 256),
        *[(28, 28, 512)] * 2,
        (14, 14, 512),
        *[(14, 14, 512)] * 2,
        (7, 7, 512),
        (4096,),
        (4096,),
        (1000,),
    ]


def test_images_too_small():
    abstract(partial(Vgg, (32, 32, 3), 10))
    refused(lambda: abstract(partial(Vgg, (32, 31, 3), 10)), "An image", "got a side of 1 pixels")
