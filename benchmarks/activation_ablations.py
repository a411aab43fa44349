"""Two boundaries of a pipeline that lose accuracy according to the paper of DCT-MP; to show that they do.

They are made of the hooks of `jaxcomm.layers.Boundary` and of its formats. `benchmarks.dct` trains them.

Source: Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism", KDD
2021, appendix A, "Schemes That Do Not Work".
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.codecs import ValueCodec
from jaxcomm.layers import Boundary, Encoded, Rows, Whole


class SketchBoundary(Boundary):
    """A random projection of every sample to (1 - sparsity) d numbers forward, and the whole gradient backward."""

    def format(self, shape: tuple[int, ...], dtype: Any, values_as: Any, k: int) -> Whole:
        """Returns a `Sketch`."""
        return Sketch(shape, dtype, values_as, k)


class TopKGradientBoundary(Boundary):
    """Whole activations forward; the largest gradients of every sample and their positions backward, with a residual.

    The residual is added to the gradient of whichever sample has the same row in the next step.
    """

    @property
    def keeps_residual(self) -> bool:
        """Whether there is one: not if everything is sent."""
        return self.sparsity > 0

    def format(self, shape: tuple[int, ...], dtype: Any, values_as: Any, k: int) -> Whole:
        """Returns a `LargestGradient`.

        Raises:
          ValueError: for values of a few bits, whose rounding errors the residual would miss.
        """
        if not isinstance(values_as, ValueCodec):
            raise ValueError(
                f"value_dtype must be float32 or bfloat16 where a residual is kept; got {self.value_dtype!r}. Use "
                "dct_mp, which keeps none."
            )
        return LargestGradient(shape, dtype, values_as, k)


@dataclass(frozen=True)
class Sketch(Whole):
    """A random projection of every sample to k numbers forward; the whole gradient backward.

    The receiver works with x S S^T, which is x on average: the entries of S (d, k) are normal with variance 1/k. The
    gradient goes back as if nothing had been lost.

    Attributes:
      k: numbers per sample.
    """

    k: int

    def _matrix(self, key: jax.Array) -> jax.Array:
        draw = jax.random.normal(jax.random.key(key), (self.features, self.k), jnp.float32)
        return draw / math.sqrt(self.k)

    def forward(self, values: jax.Array, key: jax.Array) -> jax.Array:
        """Returns x S, (B k,)."""
        return (values.reshape(-1, self.features) @ self._matrix(key)).reshape(-1).astype(values.dtype)

    def forwarded(self, values: jax.Array, key: jax.Array) -> jax.Array:
        """Returns x S S^T, (B d,)."""
        return (values.reshape(-1, self.k) @ self._matrix(key).T).reshape(-1).astype(values.dtype)


@dataclass(frozen=True)
class LargestGradient(Whole):
    """Whole activations forward; the k largest magnitudes of every sample's gradient backward, with error feedback.

    Attributes:
      k: values of a sample's gradient that are sent.
    """

    k: int

    @property
    def has_residual(self) -> bool:
        """Always."""
        return True

    @cached_property
    def _rows(self) -> Rows:
        return Rows(self.shape[0], self.features, self.k)

    def backward(self, gradient: jax.Array, residual: Any) -> tuple[Encoded, Any]:
        """Selects from gradient + residual; the rest is the new residual, rounding included."""
        total = gradient + residual.reshape(-1).astype(gradient.dtype)
        encoded = self._rows.encode(total)
        encoded = encoded._replace(values=_rounded(encoded.values, self.values_as))
        unsent = total - self._rows.decode(encoded)
        return encoded, unsent.reshape(residual.shape).astype(residual.dtype)

    def returned(self, encoded: Encoded) -> jax.Array:
        """Returns the gradient, zero where nothing was sent."""
        return self._rows.decode(encoded)


def _rounded(values: jax.Array, codec: ValueCodec) -> jax.Array:
    """Returns the values that the receiver will see, in their own dtype."""
    info = jnp.finfo(codec.dtype)
    if info.bits >= jnp.finfo(values.dtype).bits:
        return values
    return lax.reduce_precision(values, exponent_bits=info.nexp, mantissa_bits=info.nmant)
