"""A small convolutional network for small images."""

from collections.abc import Sequence

import jax
from flax import nnx


class Cnn(nnx.Module):
    """Two 3x3 convolutions, one pooling, two dense layers.

    For images of (8, 8, 1) and 10 classes: 151,306 parameters.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        *,
        channels: tuple[int, int] = (32, 64),
        hidden: int = 128,
        rngs: nnx.Rngs,
    ):
        """Makes the layers.

        Args:
          image_shape: height, width, channels; height and width are even.
          num_classes: classes to tell apart.
          channels: outputs of the convolutions.
          hidden: outputs of the first dense layer.
          rngs: the source of the initial parameters.
        """
        height, width, channels_in = image_shape
        first, second = channels
        self.conv1 = nnx.Conv(channels_in, first, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(first, second, (3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(height // 2 * (width // 2) * second, hidden, rngs=rngs)
        self.dense2 = nnx.Linear(hidden, num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits (B, classes) of images (B, H, W, C)."""
        x = nnx.relu(self.conv1(images))  # (B, H, W, 32)
        x = nnx.relu(self.conv2(x))  # (B, H, W, 64)
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))  # (B, H/2, W/2, 64)
        x = nnx.relu(self.dense1(x.reshape(x.shape[0], -1)))  # (B, 128)
        return self.dense2(x)
