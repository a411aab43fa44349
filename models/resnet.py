"""ResNet with bottlenecks: ResNet-50 and ResNet-101."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.blocks import Batch, Model

RESNET50, RESNET101 = (3, 4, 6, 3), (3, 4, 23, 3)

# Variance 2 / fan-out, as in torchvision.
_kernel_init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class ResNet(Model):
    """A stem, stages of bottlenecks with shortcuts, the mean over the image, and one dense layer.

    For images of (224, 224, 3) and 1000 classes, parameters without the running statistics: ResNet-50 25,557,032,
    ResNet-101 44,549,160. With the stem for CIFAR and 10 classes, ResNet-101: 42,512,970. He et al., "Deep Residual
    Learning for Image Recognition", CVPR 2016; a stage's stride is in the 3x3 convolution, as in torchvision.

    The stem, every bottleneck and the dense layer are blocks. The output of each but the last is one array (B, height,
    width, channels); the last block takes the mean over the image. In training, batch normalisation uses the statistics
    of the rows of a call (see `models/functional.py`); its running statistics have momentum 0.9.

    A small twin for images of (8, 8, C): layers=(1, 1), width=4, stem="cifar".
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        *,
        layers: Sequence[int] = RESNET50,
        width: int = 64,
        stem: Literal["imagenet", "cifar"] = "imagenet",
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layers. The model returns the logits, (B, classes) float32.

        Args:
          image_shape: height, width, channels.
          num_classes: number of classes.
          layers: number of bottlenecks of every stage; all stages but the first halve the image.
          width: channels inside the bottlenecks of the first stage, doubled by every stage; the output of a bottleneck
            has four times as many.
          stem: "imagenet" for 7x7 with stride 2 and a pooling, "cifar" for 3x3 alone, which keeps the image's size.
          dtype: the type to compute in; the parameters and statistics are float32.
          rngs: the source of the initial parameters.

        Raises:
          ValueError: for another stem.
        """
        if stem not in ("imagenet", "cifar"):
            raise ValueError(
                f"stem must be 'imagenet' or 'cifar'; got {stem!r}. Take 'cifar' for images below 64 pixels."
            )
        blocks: list[nnx.Module] = [Stem(image_shape[-1], width, large=stem == "imagenet", dtype=dtype, rngs=rngs)]
        inputs = width
        for stage, count in enumerate(layers):
            inside = width * 2**stage
            for place in range(count):
                stride = 2 if stage and not place else 1
                blocks.append(Bottleneck(inputs, inside, stride, dtype=dtype, rngs=rngs))
                inputs = 4 * inside
        self.blocks = nnx.List([*blocks, Head(inputs, num_classes, dtype=dtype, rngs=rngs)])


class Normalized(nnx.Module):
    """A convolution without a bias, and batch normalisation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.convolution = nnx.Conv(
            inputs,
            outputs,
            (kernel, kernel),
            stride,
            padding=kernel // 2,
            use_bias=False,  # the normalisation would subtract it
            kernel_init=_kernel_init,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, epsilon=1e-5, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns (B, height / stride, width / stride, outputs)."""
        return self.norm(self.convolution(x))


class Stem(nnx.Module):
    """The first convolution; the large one is followed by a pooling."""

    def __init__(self, inputs: int, outputs: int, *, large: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        kernel, stride = (7, 2) if large else (3, 1)
        self.first = Normalized(inputs, outputs, kernel, stride, dtype=dtype, rngs=rngs)
        self.large = large

    def __call__(self, x: None, batch: Batch) -> jax.Array:
        """Returns (B, height / 4, width / 4, outputs), or (B, height, width, outputs) with the small stem."""
        y = nnx.relu(self.first(batch["image"]))
        if not self.large:
            return y
        # Padding with zeros is right for a maximum of rectified numbers.
        return nnx.max_pool(jnp.pad(y, ((0, 0), (1, 1), (1, 1), (0, 0))), (3, 3), strides=(2, 2))


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut, which is a 1x1 convolution where the size changes."""

    def __init__(self, inputs: int, inside: int, stride: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        outputs = 4 * inside
        self.reduce = Normalized(inputs, inside, 1, 1, dtype=dtype, rngs=rngs)
        self.middle = Normalized(inside, inside, 3, stride, dtype=dtype, rngs=rngs)
        self.expand = Normalized(inside, outputs, 1, 1, dtype=dtype, rngs=rngs)
        changes = stride > 1 or inputs != outputs
        self.shortcut = Normalized(inputs, outputs, 1, stride, dtype=dtype, rngs=rngs) if changes else None

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns (B, height / stride, width / stride, 4 inside)."""
        y = nnx.relu(self.reduce(x))
        y = nnx.relu(self.middle(y))
        return nnx.relu(self.expand(y) + (x if self.shortcut is None else self.shortcut(x)))


class Head(nnx.Module):
    """The mean over the image, and the dense layer."""

    def __init__(self, inputs: int, outputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.dense = nnx.Linear(inputs, outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns the logits (B, classes)."""
        return self.dense(x.mean(axis=(1, 2))).astype(jnp.float32)
