"""A small convolutional network for small images."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.blocks import Batch, Model


class Cnn(Model):
    """Two 3x3 convolutions, one pooling, two dense layers.

    For images of (8, 8, 1) and 10 classes: 151,306 parameters. The blocks are the convolutions, the first dense layer,
    and the second. The outputs of the first two are (B, height/2, width/2, 64) and (B, 128).
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        *,
        channels: tuple[int, int] = (32, 64),
        hidden: int = 128,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layers. The model returns the logits, (B, classes) float32.

        Args:
          image_shape: height, width, channels; height and width are even.
          num_classes: number of classes.
          channels: output channels of the convolutions.
          hidden: outputs of the first dense layer.
          dtype: the type to compute in; the parameters are float32.
          rngs: the source of the initial parameters.
        """
        height, width, channels_in = image_shape
        features = height // 2 * (width // 2) * channels[1]
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.blocks = nnx.List(
            [
                Convolutions(channels_in, channels, options),
                Hidden(features, hidden, options),
                Logits(hidden, num_classes, options),
            ]
        )


class Convolutions(nnx.Module):
    """The convolutions and the pooling."""

    def __init__(self, inputs: int, channels: tuple[int, int], options: dict[str, Any]):
        first, second = channels
        self.conv1 = nnx.Conv(inputs, first, (3, 3), **options)
        self.conv2 = nnx.Conv(first, second, (3, 3), **options)

    def __call__(self, x: None, batch: Batch) -> jax.Array:
        """Returns features (B, H/2, W/2, 64) for images (B, H, W, C)."""
        y = nnx.relu(self.conv1(batch["image"]))  # (B, H, W, 32)
        y = nnx.relu(self.conv2(y))  # (B, H, W, 64)
        return nnx.max_pool(y, (2, 2), strides=(2, 2))


class Hidden(nnx.Module):
    """The first dense layer."""

    def __init__(self, inputs: int, outputs: int, options: dict[str, Any]):
        self.dense1 = nnx.Linear(inputs, outputs, **options)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns hidden features (B, 128)."""
        return nnx.relu(self.dense1(x.reshape(x.shape[0], -1)))


class Logits(nnx.Module):
    """The last dense layer."""

    def __init__(self, inputs: int, outputs: int, options: dict[str, Any]):
        self.dense2 = nnx.Linear(inputs, outputs, **options)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns the logits (B, classes)."""
        return self.dense2(x).astype(jnp.float32)
