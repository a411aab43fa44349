"""GoogLeNet (Inception v1), as it was published."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from models.blocks import Batch, Model, adaptive_average
from models.dropout import Dropout

# Channels of: the 1x1; the 1x1 before the 3x3, and the 3x3; the 1x1 before the 5x5, and the 5x5; the 1x1 after the
# pooling.
Widths = tuple[int, int, int, int, int, int]
STAGES: tuple[tuple[Widths, ...], ...] = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),  # 3a, 3b
    (
        (192, 96, 208, 16, 48, 64),  # 4a
        (160, 112, 224, 24, 64, 64),  # 4b
        (128, 128, 256, 24, 64, 64),  # 4c
        (112, 144, 288, 32, 64, 64),  # 4d
        (256, 160, 320, 32, 128, 128),  # 4e
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),  # 5a, 5b
)


class GoogLeNet(Model):
    """A stem, nine inception modules in three stages, the mean over the image, dropout, and one dense layer.

    For images of (224, 224, 3) and 1000 classes: 6,998,552 parameters, and 13,378,280 with both auxiliary heads.
    Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, with its response normalisation in the stem and without
    batch normalisation; Xavier's initial values, as in Caffe's model zoo. Auxiliary heads average over 4x4 windows that
    cover the image evenly, which differ by a pixel from the paper's 5x5 windows of stride 3.

    The stem, every module and the last layer are blocks. A block's output is one array (B, height, width, channels). In
    training, from the first module with an auxiliary head on, it is a tuple of that array and the logits (B, classes)
    of all heads so far. In training the model returns (logits, logits of head 1, logits of head 2), for `mean_loss`. In
    evaluation the heads are not computed, and it returns the logits.

    A small twin for images of (8, 8, C): stem=(4, 4, 6), stem_strides=(1, 1), hidden=16, auxiliary_grid=1,
    stages=(((2, 3, 4, 2, 2, 2),), ((2, 3, 4, 2, 2, 2), (2, 3, 4, 2, 2, 2))), auxiliary=(1, 2).
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        *,
        stem: tuple[int, int, int] = (64, 64, 192),
        stem_strides: tuple[int, int] = (2, 2),
        stages: Sequence[Sequence[Widths]] = STAGES,
        auxiliary: Sequence[int] = (2, 5),
        auxiliary_channels: int = 128,
        auxiliary_grid: int = 4,
        hidden: int = 1024,
        dropout: float = 0.4,
        auxiliary_dropout: float = 0.7,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layers.

        Args:
          image_shape: height, width, channels.
          num_classes: number of classes.
          stem: output channels of the stem's convolutions, 7x7, 1x1 and 3x3.
          stem_strides: strides of the stem's first convolution, and of its two poolings.
          stages: widths of the inception modules of every stage; a pooling of stride 2 is between two stages.
          auxiliary: the modules with an auxiliary head, counted from 0 through all stages; () for none. In the paper
            they are 4a and 4d.
          auxiliary_channels: channels of a head's 1x1 convolution.
          auxiliary_grid: height and width to which a head averages.
          hidden: outputs of a head's first dense layer.
          dropout: rate before the last layer.
          auxiliary_dropout: rate before a head's last layer.
          dtype: the type to compute in; the parameters are float32.
          rngs: the source of the initial parameters.

        Raises:
          ValueError: for auxiliary heads on modules that do not exist, or several on one module.
        """
        count = sum(len(stage) for stage in stages)
        if not set(auxiliary) <= set(range(count)) or len(set(auxiliary)) < len(auxiliary):
            raise ValueError(
                f"auxiliary must name different modules, from 0 to {count - 1}; got {tuple(auxiliary)}. Name others."
            )
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        blocks: list[nnx.Module] = [Stem(image_shape[-1], stem, stem_strides, options)]
        inputs = stem[-1]
        for number, stage in enumerate(stages):
            for place, widths in enumerate(stage):
                module = Inception(inputs, widths, pools_first=bool(number) and not place, options=options)
                inputs = module.outputs
                index, head = len(blocks) - 1, None
                if index in auxiliary:
                    sizes = (inputs, auxiliary_channels, auxiliary_grid, hidden, num_classes)
                    head = Auxiliary(sizes, Dropout(auxiliary_dropout, 1 + index), options)
                blocks.append(Module(module, head))
        self.blocks = nnx.List([*blocks, Head(inputs, num_classes, Dropout(dropout, 0), options)])


def mean_loss(outputs: jax.Array | tuple[jax.Array, ...], labels: jax.Array, weight: float = 0.3) -> jax.Array:
    """Returns the mean cross entropy over the rows, plus `weight` times that of every auxiliary head: () float32.

    Args:
      outputs: the outputs of the model, in training or evaluation mode.
      labels: (B,) int32.
      weight: the weight of an auxiliary head.
    """
    logits, *heads = outputs if isinstance(outputs, tuple) else (outputs,)
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(logits, labels).mean() + weight * sum(entropy(head, labels).mean() for head in heads)


def normalize_response(x: jax.Array, *, size: int = 5, alpha: float = 1e-4, beta: float = 0.75) -> jax.Array:
    """Divides by (1 + alpha / size * the sum of squares of the `size` nearest channels)^beta, as Caffe does."""
    squares = jnp.square(x.astype(jnp.float32))
    sums = jax.lax.reduce_window(
        squares, 0.0, jax.lax.add, (1,) * (x.ndim - 1) + (size,), (1,) * x.ndim, padding="SAME"
    )
    return (x * (1 + alpha / size * sums) ** -beta).astype(x.dtype)


def _convolution(inputs: int, outputs: int, kernel: int, options: dict[str, Any], stride: int = 1) -> nnx.Conv:
    init = nnx.initializers.glorot_uniform()
    return nnx.Conv(inputs, outputs, (kernel, kernel), stride, padding=kernel // 2, kernel_init=init, **options)


def _pool(x: jax.Array, stride: int) -> jax.Array:
    return nnx.max_pool(x, (3, 3), strides=(stride, stride), padding="SAME")


class Stem(nnx.Module):
    """The convolutions before the first inception module."""

    def __init__(self, inputs: int, outputs: tuple[int, int, int], strides: tuple[int, int], options: dict[str, Any]):
        self.first = _convolution(inputs, outputs[0], 7, options, strides[0])
        self.reduce = _convolution(outputs[0], outputs[1], 1, options)
        self.second = _convolution(outputs[1], outputs[2], 3, options)
        self.stride = strides[1]

    def __call__(self, x: None, batch: Batch) -> jax.Array:
        """Returns (B, height / 8, width / 8, 192) for the images."""
        y = nnx.relu(self.first(batch["image"]))  # (B, H/2, W/2, 64)
        y = normalize_response(_pool(y, self.stride))  # (B, H/4, W/4, 64)
        y = nnx.relu(self.second(nnx.relu(self.reduce(y))))  # (B, H/4, W/4, 192)
        return _pool(normalize_response(y), self.stride)


class Inception(nnx.Module):
    """Four parallel branches: 1x1; 3x3; 5x5; a pooling."""

    def __init__(self, inputs: int, widths: Widths, *, pools_first: bool, options: dict[str, Any]):
        one, reduce_three, three, reduce_five, five, pooling = widths
        self.one = _convolution(inputs, one, 1, options)
        self.reduce_three = _convolution(inputs, reduce_three, 1, options)
        self.three = _convolution(reduce_three, three, 3, options)
        self.reduce_five = _convolution(inputs, reduce_five, 1, options)
        self.five = _convolution(reduce_five, five, 5, options)
        self.pooling = _convolution(inputs, pooling, 1, options)
        self.pools_first = pools_first
        self.outputs = one + three + five + pooling

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns (B, height, width, outputs); height and width are halved if it pools first."""
        x = _pool(x, 2) if self.pools_first else x
        branches = (
            self.one(x),
            self.three(nnx.relu(self.reduce_three(x))),
            self.five(nnx.relu(self.reduce_five(x))),
            self.pooling(_pool(x, 1)),
        )
        return nnx.relu(jnp.concatenate(branches, axis=-1))


class Auxiliary(nnx.Module):
    """An auxiliary classifier in the middle of the model, for training only."""

    def __init__(self, sizes: tuple[int, int, int, int, int], dropout: Dropout, options: dict[str, Any]):
        inputs, channels, grid, hidden, num_classes = sizes
        self.reduce = _convolution(inputs, channels, 1, options)
        self.dense = nnx.Linear(grid * grid * channels, hidden, **options)
        self.logits = nnx.Linear(hidden, num_classes, **options)
        self.dropout = dropout
        self.grid = grid

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns the head's logits (B, classes)."""
        x = nnx.relu(self.reduce(adaptive_average(x, self.grid)))  # (B, 4, 4, 128)
        x = nnx.relu(self.dense(x.reshape(x.shape[0], -1)))  # (B, 1024)
        return self.logits(self.dropout(x, batch)).astype(jnp.float32)


class Module(nnx.Module):
    """A block: an inception module, with an optional auxiliary head that is left out in evaluation mode."""

    def __init__(self, inception: Inception, head: Auxiliary | None):
        self.inception, self.head = inception, head
        self.deterministic = False  # set by `model.eval()`

    def __call__(self, x: jax.Array | tuple[jax.Array, ...], batch: Batch) -> jax.Array | tuple[jax.Array, ...]:
        """Returns the features, with the logits of the heads so far if there are any."""
        x, *heads = x if isinstance(x, tuple) else (x,)
        x = self.inception(x)
        if self.head is not None and not self.deterministic:
            heads.append(self.head(x, batch))
        return (x, *heads) if heads else x


class Head(nnx.Module):
    """The mean over the image, dropout, and the dense layer."""

    def __init__(self, inputs: int, outputs: int, dropout: Dropout, options: dict[str, Any]):
        self.dropout = dropout
        self.dense = nnx.Linear(inputs, outputs, **options)

    def __call__(self, x: jax.Array | tuple[jax.Array, ...], batch: Batch) -> jax.Array | tuple[jax.Array, ...]:
        """Returns the logits (B, classes), with those of the heads if there are any."""
        x, *heads = x if isinstance(x, tuple) else (x,)
        logits = self.dense(self.dropout(x.mean(axis=(1, 2)), batch)).astype(jnp.float32)
        return (logits, *heads) if heads else logits
