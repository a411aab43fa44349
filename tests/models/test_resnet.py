from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.shapes import resnet50
from models.functional import cut
from models.resnet import RESNET50, RESNET101, ResNet
from tests.models.twins import abstract, count, crossing
from tests.refusals import refused

IMAGENET = ((224, 224, 3), 1000)


@pytest.mark.parametrize(("layers", "parameters"), [(RESNET50, 25_557_032), (RESNET101, 44_549_160)])
def test_parameters(layers, parameters):
    assert count(partial(ResNet, *IMAGENET, layers=layers)) == parameters


def test_tensors_of_the_benchmarks():
    model = abstract(partial(ResNet, *IMAGENET))
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sorted(shapes) == sorted(resnet50())
    statistics = [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.BatchStat))]
    assert sorted(statistics) == sorted(shape for shape in resnet50()[:-1] if len(shape) == 1)


@pytest.mark.slow
def test_the_stem_for_cifar():
    make = partial(ResNet, (32, 32, 3), 10, layers=RESNET101, stem="cifar")
    # A 3x3 kernel in the place of a 7x7 one, and 10 classes in the place of 1000.
    assert count(make) == 44_549_160 - (49 - 9) * 3 * 64 - 990 * 2049 == 42_512_970
    refused(lambda: ResNet((28, 28, 1), 10, stem="mnist", rngs=nnx.Rngs(0)), "stem", "got 'mnist'")


@pytest.mark.parametrize(("stem", "side", "first"), [("imagenet", 224, 56), ("cifar", 32, 32)])
def test_what_crosses(stem, side, first):
    make = partial(ResNet, (side, side, 3), 10, stem=stem)
    shapes = crossing(make, {"image": ((2, side, side, 3), np.float32)})
    assert shapes[0] == (2, first, first, 64)
    stages = [[(2, first >> i, first >> i, 256 << i)] * count for i, count in enumerate(RESNET50)]
    assert shapes[1:-1] == [shape for stage in stages for shape in stage]
    assert shapes[-1] == (2, 10)


def test_abstract_models():
    first, second = cut(abstract(partial(ResNet, *IMAGENET)), (8,))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(stage.params)) for stage in (first, second)]
    assert sum(sizes) == 25_557_032
    assert max(second.params) == 17
