"""VGG, whose convolutions are all 3x3."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.blocks import Convolution, Model, dense_layers, pooled

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Vgg(Model):
    """Stages of 3x3 convolutions, each with a pooling at its end, and three dense layers.

    VGG-16 (configuration D) for images of (224, 224, 3) and 1000 classes: 138,357,544 parameters, 123.6M of them in the
    dense layers. Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR
    2015.

    Every layer is a block; a pooling belongs to the convolution before it. In VGG-16, blocks 0 to 12 are the
    convolutions and 13 to 15 the dense layers. The output of block 12 is (B, 7, 7, 512), 25,088 features a row; those
    of blocks 13 and 14 are (B, 4096).

    A small twin for images of (8, 8, C): stages=((4, 4), (6,)), grid=1, hidden=(16, 16).
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        *,
        stages: Sequence[Sequence[int]] = VGG16,
        grid: int = 7,
        hidden: tuple[int, int] = (4096, 4096),
        dropout: float = 0.5,
        dense: Callable[..., Any] = nnx.Linear,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layers. The model returns the logits, (B, classes) float32.

        Args:
          image_shape: height, width, channels; every stage halves the first two.
          num_classes: number of classes.
          stages: output channels of the convolutions of every stage.
          grid: height and width to which the last feature maps are averaged; no change for images of (224, 224).
          hidden: outputs of the first two dense layers.
          dropout: rate for the inputs of the last two dense layers.
          dense: a function (inputs, outputs, dtype=, rngs=) that makes a dense layer.
          dtype: the type to compute in; the parameters are float32.
          rngs: the source of the initial parameters.

        Raises:
          ValueError: if the image is too small for the poolings.
        """
        *sides, width = image_shape
        for side in sides:
            for _ in stages:
                side = pooled(side, 2)
        convolutions = []
        for number, stage in enumerate(stages):
            for place, outputs in enumerate(stage):
                ends_stage = place == len(stage) - 1
                convolutions.append(
                    Convolution(
                        width,
                        outputs,
                        3,
                        pool=2 if ends_stage else None,
                        grid=grid if ends_stage and number == len(stages) - 1 else None,
                        dtype=dtype,
                        rngs=rngs,
                    )
                )
                width = outputs
        sizes = (grid * grid * width, *hidden, num_classes)
        layers = dense_layers(sizes, (1, 2), dropout, dense=dense, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(convolutions + layers)
