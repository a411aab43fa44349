from collections import Counter
from functools import partial

import jax
import pytest
from flax import nnx

from benchmarks.shapes import MODELS, count, dlrm, resnet50, shapes_of
from models.alexnet import AlexNet
from models.dlrm import Dlrm
from models.googlenet import GoogLeNet
from models.transformer import Transformer
from models.vgg import Vgg


def test_resnet50():
    shapes = resnet50()
    assert len(shapes) == 161
    assert count(shapes) == 25_557_032
    assert sum(len(shape) == 4 for shape in shapes) == 53  # convolutions
    assert (shapes[0], shapes[-2:]) == ((7, 7, 3, 64), [(2048, 1000), (1000,)])
    assert shapes_of("resnet50") == shapes


@pytest.mark.parametrize(
    ("name", "tensors", "parameters", "model"),
    [
        ("alexnet", 16, 61_100_840, partial(AlexNet, (224, 224, 3), 1000)),
        ("vgg16", 32, 138_357_544, partial(Vgg, (224, 224, 3), 1000)),
        ("googlenet", 128, 13_378_280, partial(GoogLeNet, (224, 224, 3), 1000)),
        ("dlrm", 17, 508_753 + 16 * 26 * 10_000, partial(Dlrm, [10_000] * 26)),
        ("transformer", 255, 42_864_640, partial(Transformer, 8848, 6632, tied=False)),
    ],
)
def test_shapes_of_models(name, tensors, parameters, model):
    shapes = shapes_of(name)
    assert shapes == MODELS[name]()
    assert (len(shapes), count(shapes)) == (tensors, parameters)
    params = nnx.state(nnx.eval_shape(lambda: model(rngs=nnx.Rngs(0))), nnx.Param)
    assert Counter(shapes) == Counter(leaf.shape for leaf in jax.tree.leaves(params))


def test_rows_of_tables():
    assert count(dlrm(7)) == 508_753 + 16 * 26 * 7


@pytest.mark.parametrize(("name", "size"), [("1e6", 1_000_000), ("2e5", 200_000), ("1", 1), ("1500", 1500)])
def test_a_number(name, size):
    assert shapes_of(name) == [(size,)]


@pytest.mark.parametrize("name", ["", "resnet", "0", "0.5", "-3", "nan", "inf", "1e400"])
def test_other_shapes(name):
    with pytest.raises(ValueError, match=r"--shapes must be one of resnet50, .*, or a number .*. Try --shapes 1e6"):
        shapes_of(name)
