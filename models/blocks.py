"""Models as sequences of blocks, and the blocks that several models share.

A block is a module that is called as `x = block(x, batch)`. The batch is a dictionary of arrays, rows first. x is the
output of the block before (None for the first), an array or a tuple of arrays, rows first. Nothing but x passes from
one block to the next, so a pipeline may cut the sequence anywhere and send x; every stage has the batch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from models.dropout import Dropout

Batch = Mapping[str, jax.Array]

# Variance 2 / inputs keeps the size of activations through ReLUs (He et al., "Delving Deep into Rectifiers", ICCV
# 2015).
he_normal = nnx.initializers.variance_scaling(2.0, "fan_in", "normal")


class Model(nnx.Module):
    """A sequence of blocks.

    Attributes:
      blocks: the blocks, in order; set by the model. They share no parameters.
    """

    blocks: nnx.List

    def __call__(self, batch: Batch) -> Any:
        """Returns the output of the last block for a batch."""
        x = None
        for block in self.blocks:
            x = block(x, batch)
        return x


class Dense(nnx.Module):
    """Dropout, a dense layer, and ReLU; the first block of a model reads the images."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        relu: bool = True,
        dropout: Dropout | None = None,
        dense: Callable[..., Any] = nnx.Linear,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
          inputs: the number of elements of a row of x, which may have any shape.
          outputs: the number of outputs.
          relu: False for the last layer of a model, whose outputs are float32 for any `dtype`.
          dropout: dropout of the inputs, or None.
          dense: a function (inputs, outputs, dtype=, rngs=) that makes the layer, such as `nnx.Linear`.
          dtype: the type to compute in; the parameters are float32.
          rngs: the source of the initial parameters.
        """
        self.dropout = dropout
        self.layer = dense(inputs, outputs, dtype=dtype, rngs=rngs)
        self.relu = relu

    def __call__(self, x: jax.Array | None, batch: Batch) -> jax.Array:
        """Returns (B, outputs)."""
        x = batch["image"] if x is None else x
        x = x.reshape(x.shape[0], -1)  # (B, inputs)
        if self.dropout is not None:
            x = self.dropout(x, batch)
        y = self.layer(x)  # (B, outputs)
        return nnx.relu(y) if self.relu else y.astype(jnp.float32)


def dense_layers(sizes: Sequence[int], dropped: Collection[int], rate: float, **options: Any) -> list[Dense]:
    """Makes the layers from each size to the next, with ReLUs after all but the last.

    Args:
      sizes: the inputs of the first layer, then the outputs of each.
      dropped: the layers whose inputs are dropped.
      rate: their rate of dropout.
      **options: of `Dense`, the same for all.
    """
    last = len(sizes) - 2
    return [
        Dense(sizes[i], sizes[i + 1], relu=i < last, dropout=Dropout(rate, i) if i in dropped else None, **options)
        for i in range(last + 1)
    ]


class Convolution(nnx.Module):
    """A convolution with a bias, ReLU, and pooling; the first block of a model reads the images."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 1,
        pool: int | None = None,
        grid: int | None = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
          inputs: input channels.
          outputs: output channels.
          kernel: height and width of the kernel.
          stride: stride of the convolution.
          padding: zeros on every side.
          pool: window of a max-pooling with stride 2, without padding; None for no pooling.
          grid: height and width to average to at the end (`adaptive_average`); None for no averaging.
          dtype: the type to compute in; the parameters are float32.
          rngs: the source of the initial parameters.
        """
        self.convolution = nnx.Conv(
            inputs, outputs, (kernel, kernel), stride, padding=padding, kernel_init=he_normal, dtype=dtype, rngs=rngs
        )
        self.pool, self.grid = pool, grid

    def __call__(self, x: jax.Array | None, batch: Batch) -> jax.Array:
        """Returns (B, height, width, outputs)."""
        y = nnx.relu(self.convolution(batch["image"] if x is None else x))
        if self.pool is not None:
            y = nnx.max_pool(y, (self.pool, self.pool), strides=(2, 2))
        return y if self.grid is None else adaptive_average(y, self.grid)


def adaptive_average(x: jax.Array, grid: int) -> jax.Array:
    """Averages images over a grid of windows that cover them evenly, as torch's `AdaptiveAvgPool2d` does.

    Window i of n over `size` pixels is from floor(i * size / n) to ceil((i + 1) * size / n). An image of n x n pixels
    is returned unchanged.

    Args:
      x: (B, height, width, C).
      grid: n, for height and width.

    Returns:
      (B, n, n, C).
    """

    def weights(size: int) -> np.ndarray:
        w = np.zeros((grid, size), np.float32)
        for i in range(grid):
            start, stop = i * size // grid, -(-(i + 1) * size // grid)
            w[i, start:stop] = 1 / (stop - start)
        return w

    _, height, width, _ = x.shape
    if (height, width) == (grid, grid):
        return x
    rows, columns = (jnp.asarray(weights(size), x.dtype) for size in (height, width))
    return jnp.einsum("ih,jw,bhwc->bijc", rows, columns, x, precision=jax.lax.Precision.HIGHEST)


def pooled(size: int, window: int, stride: int = 2, padding: int = 0) -> int:
    """Returns the length of an image's side after a pooling or a convolution.

    Raises:
      ValueError: if it is below 1.
    """
    length = (size + 2 * padding - window) // stride + 1
    if length < 1:
        raise ValueError(
            f"An image must be at least as large as a window; got a side of {size} pixels with {padding} of padding "
            f"for one of {window}. Give larger images, or use smaller windows or fewer poolings."
        )
    return length


def take_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Looks rows up. An index outside of the table gives NaN instead of another row, so that the loss shows it.

    Args:
      table: (rows, features).
      indices: (...) int32.

    Returns:
      (..., features).
    """
    is_row = (indices >= 0) & (indices < table.shape[0])
    return jnp.where(is_row[..., None], table[jnp.where(is_row, indices, 0)], jnp.nan)
