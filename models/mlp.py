"""Dense layers and ReLUs, for small images."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.blocks import Model, dense_layers


class Mlp(Model):
    """A multilayer perceptron. Every layer is a block, and its output is the hidden features (B, hidden).

    With 300 and 100 hidden features, for images of (28, 28, 1) and 10 classes: 266,610 parameters. This is the network
    784-300-100-10 of LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proceedings of the IEEE
    1998, with ReLUs in place of its sigmoids.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        *,
        hidden: Sequence[int] = (300, 100),
        dropout: float = 0.0,
        dense: Callable[..., Any] = nnx.Linear,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layers. The model returns the logits, (B, classes) float32.

        Args:
          image_shape: height, width, channels.
          num_classes: number of classes.
          hidden: outputs of all layers but the last.
          dropout: rate for the inputs of all layers but the first.
          dense: a function (inputs, outputs, dtype=, rngs=) that makes a layer.
          dtype: the type to compute in; the parameters are float32.
          rngs: the source of the initial parameters.
        """
        sizes = [math.prod(image_shape), *hidden, num_classes]
        dropped = range(1, len(hidden) + 1)
        self.blocks = nnx.List(dense_layers(sizes, dropped, dropout, dense=dense, dtype=dtype, rngs=rngs))
