"""Multi-head attention, and the positional encoding of a sequence."""

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

Initializer = Callable[..., jax.Array]

_xavier = nnx.initializers.glorot_uniform()
_smaller = nnx.initializers.variance_scaling(0.5, "fan_avg", "uniform")


class Attention(nnx.Module):
    """Scaled dot-product attention with several heads.

    Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        kernel_init: Initializer = _smaller,
        out_init: Initializer = _xavier,
    ):
        """Makes the layers.

        Args:
          width: features of the inputs, and of all heads together.
          heads: number of heads.
          kernel_init: initial values for queries, keys and values; Xavier's with half the variance if not given, as in
            fairseq.
          out_init: initial values of the last layer; Xavier's if not given.
          dtype: the type to compute in; the parameters are float32.
          rngs: the source of the initial parameters.

        Raises:
          ValueError: if the width is not a multiple of the heads.
        """
        if width % heads:
            raise ValueError(
                f"width must be a multiple of heads; got {width} features for {heads} heads. Give a multiple of "
                f"{heads}."
            )
        self.heads = heads
        self.query, self.key, self.value = (linear(width, width, dtype, rngs, kernel_init) for _ in range(3))
        self.out = linear(width, width, dtype, rngs, out_init)

    def keys_values(self, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values (B, S, heads, width / heads) of a memory (B, S, width)."""
        return self._heads(self.key(memory)), self._heads(self.value(memory))

    def __call__(
        self,
        x: jax.Array,
        keys_values: tuple[jax.Array, jax.Array],
        mask: jax.Array,
        bias: jax.typing.ArrayLike | None = None,
    ) -> jax.Array:
        """Attends from x to a memory.

        Args:
          x: the positions that attend, (B, T, width).
          keys_values: keys and values of a memory of S positions.
          mask: True where x may attend, broadcast to (B, heads, T, S).
          bias: added to the products of queries and keys, of the same shape.

        Returns:
          (B, T, width).
        """
        keys, values = keys_values
        y = jax.nn.dot_product_attention(self._heads(self.query(x)), keys, values, bias, mask)
        return self.out(y.reshape(x.shape))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.heads, -1)


def linear(
    inputs: int,
    outputs: int,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
    kernel_init: Initializer = _xavier,
) -> nnx.Linear:
    """Makes a dense layer, with Xavier's initial values if none are given."""
    return nnx.Linear(inputs, outputs, kernel_init=kernel_init, dtype=dtype, rngs=rngs)


def distance_bias(length: int, heads: int) -> np.ndarray:
    """Returns the linear biases of attention by distance (ALiBi), (heads, length, length) float32.

    Source: Press et al., "Train Short, Test Long", ICLR 2022, whose slopes are 2^(-8 i / heads), i = 1, 2, ... Here
    they fall from 1 to 2^-8: with two heads the paper's begin at 2^-4, at which a head averages over some 16 places at
    first.
    """
    distance = np.arange(length)[:, None] - np.arange(length)
    return (-np.geomspace(1, 2**-8, heads)[:, None, None] * distance).astype(np.float32)


def positions(length: int, width: int) -> np.ndarray:
    """Returns the positional encoding of a sequence, (length, width) float32.

    The first half of the features are sines, the second half cosines, of wavelengths from 2 pi to 20,000 pi (Vaswani et
    al., 2017, with the columns in another order).

    Raises:
      ValueError: for an odd width.
    """
    if width % 2:
        raise ValueError(f"width must be even, half sines and half cosines; got {width}. Give an even width.")
    half = width // 2
    angles = np.arange(length)[:, None] * 10_000.0 ** -(np.arange(half) / half)  # (length, half)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
