from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.cnn import Cnn
from tests.models.twins import count, crossing


@pytest.mark.parametrize(
    ("image_shape", "classes", "parameters"),
    [
        ((8, 8, 1), 10, 151_306),
        # (3*3*C + 1) * 32 + (3*3*32 + 1) * 64 + (H/2 * W/2 * 64 + 1) * 128 + (128 + 1) * classes
        ((28, 28, 1), 10, 320 + 18_496 + 1_605_760 + 1_290),
        ((32, 32, 3), 100, 896 + 18_496 + 2_097_280 + 12_900),
    ],
)
def test_parameters_and_activations(image_shape, classes, parameters):
    make = partial(Cnn, image_shape, classes)
    assert count(make) == parameters
    height, width, _ = image_shape
    shapes = crossing(make, {"image": ((3, *image_shape), np.float32)})
    assert shapes == [(3, height // 2, width // 2, 64), (3, 128), (3, classes)]


def test_seeds():
    make = partial(Cnn, (8, 8, 1), 10, channels=(2, 3), hidden=4)
    first, repeat, variant = (nnx.state(make(rngs=nnx.Rngs(seed)), nnx.Param) for seed in (0, 0, 1))
    kernels = [state["blocks"][1]["dense1"]["kernel"][...] for state in (first, repeat, variant)]
    assert jnp.array_equal(kernels[0], kernels[1])
    assert not jnp.array_equal(kernels[0], kernels[2])
