"""AlexNet, in one tower."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.blocks import Convolution, Model, dense_layers, pooled


class AlexNet(Model):
    """Five convolutions and three dense layers, with dropout before the first two dense layers.

    For images of (224, 224, 3) and 1000 classes: 61,100,840 parameters, 58.6M of them in the dense layers. Krizhevsky,
    "One weird trick for parallelizing convolutional neural networks", 2014, as in torchvision: one tower with fewer
    channels replaces the two of Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks",
    NeurIPS 2012, and there is no response normalisation.

    Blocks 0 to 4 are the convolutions with their poolings, 5 to 7 the dense layers. The output of block 4 is (B, 6, 6,
    256), 9216 features a row; those of blocks 5 and 6 are (B, 4096).

    A small twin for images of (8, 8, C): kernel=3, stride=1, padding=1, channels=(4, 4, 6, 6, 4), pool=2, grid=1,
    hidden=(16, 16).
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        *,
        kernel: int = 11,
        stride: int = 4,
        padding: int = 2,
        channels: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256),
        pool: int = 3,
        grid: int = 6,
        hidden: tuple[int, int] = (4096, 4096),
        dropout: float = 0.5,
        dense: Callable[..., Any] = nnx.Linear,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layers. The model returns the logits, (B, classes) float32.

        Args:
          image_shape: height, width, channels.
          num_classes: number of classes.
          kernel: kernel size of the first convolution; the others have 5, 3, 3 and 3.
          stride: stride of the first convolution.
          padding: padding of the first convolution; the others keep the image's size.
          channels: output channels of the convolutions.
          pool: window of the three poolings, of stride 2, after the first, the second and the last convolution.
          grid: height and width to which the last feature maps are averaged; no change for images of (224, 224).
          hidden: outputs of the first two dense layers.
          dropout: rate for the inputs of the first two dense layers.
          dense: a function (inputs, outputs, dtype=, rngs=) that makes a dense layer.
          dtype: the type to compute in; the parameters are float32.
          rngs: the source of the initial parameters.

        Raises:
          ValueError: if the image is too small for the convolutions and poolings.
        """
        kernels, strides, pools = (kernel, 5, 3, 3, 3), (stride, 1, 1, 1, 1), (pool, pool, None, None, pool)
        paddings = (padding, 2, 1, 1, 1)
        *sides, inputs = image_shape
        for side in sides:
            for size, step, zeros, window in zip(kernels, strides, paddings, pools, strict=True):
                side = pooled(side, size, step, zeros)
                side = side if window is None else pooled(side, window)
        ends = (None, None, None, None, grid)
        widths = (inputs, *channels)
        sizes = (grid * grid * channels[-1], *hidden, num_classes)
        self.blocks = nnx.List(
            [
                Convolution(
                    widths[i],
                    widths[i + 1],
                    kernels[i],
                    stride=strides[i],
                    padding=paddings[i],
                    pool=pools[i],
                    grid=ends[i],
                    dtype=dtype,
                    rngs=rngs,
                )
                for i in range(5)
            ]
            + dense_layers(sizes, (0, 1), dropout, dense=dense, dtype=dtype, rngs=rngs)
        )
