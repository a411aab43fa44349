import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.cnn import Cnn


def parameters(model):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    ("image_shape", "classes", "count"),
    [
        ((8, 8, 1), 10, 151_306),
        # (3*3*C + 1) * 32 + (3*3*32 + 1) * 64 + (H/2 * W/2 * 64 + 1) * 128 + (128 + 1) * classes
        ((28, 28, 1), 10, 320 + 18_496 + 1_605_760 + 1_290),
        ((32, 32, 3), 100, 896 + 18_496 + 2_097_280 + 12_900),
    ],
)
def test_parameters_and_logits(image_shape, classes, count):
    model = Cnn(image_shape, classes, rngs=nnx.Rngs(0))
    assert parameters(model) == count
    logits = model(jnp.ones((3, *image_shape)))
    assert (logits.shape, logits.dtype) == ((3, classes), jnp.float32)


def test_the_seed_decides_the_parameters():
    first, same, other = (nnx.state(Cnn((8, 8, 1), 10, rngs=nnx.Rngs(seed)), nnx.Param) for seed in (0, 0, 1))
    kernels = [state["dense1"]["kernel"][...] for state in (first, same, other)]
    assert jnp.array_equal(kernels[0], kernels[1])
    assert not jnp.array_equal(kernels[0], kernels[2])


def test_images_of_a_batch_do_not_mix():
    model = Cnn((8, 8, 1), 10, rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
    changed = images.at[0].set(0.0)
    assert jnp.allclose(model(images)[1:], model(changed)[1:], atol=1e-6)
    assert not jnp.allclose(model(images)[0], model(changed)[0])
