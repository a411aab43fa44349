"""How the activations of a batch, and their gradients, are written where a model is cut.

A format is planned from the shape of one array of activations (B, ...), samples first. The sender encodes and the
receiver decodes. Formats also define the backward pass, since gradients may be written differently.

Source: Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism", KDD
2021: `Largest` is its DCT-MP.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.codecs.indices import IndexCodec, choose_index_codec
from jaxcomm.codecs.tiles import GradientLevels, Tiles
from jaxcomm.codecs.values import ValueCodec
from jaxcomm.collectives.axis import zeros_varying_as
from jaxcomm.collectives.boundary import Encoded
from jaxcomm.collectives.messages import fuse, split_words
from jaxcomm.kernels import bits
from jaxcomm.kernels.scopes import DECODE, ENCODE
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.selectors.selection import compact
from jaxcomm.selectors.topk import select_rows
from jaxcomm.types import Payload


@dataclass(frozen=True)
class Whole:
    """Every value, without an index. The sender runs `encode`, the receiver `decode`.

    Attributes:
      shape: of the activations, samples first.
      dtype: of the activations.
      values_as: the type of a value on its way forward.
    """

    shape: tuple[int, ...]
    dtype: Any
    values_as: ValueCodec | Tiles

    def gradients_as(self, key: jax.Array) -> ValueCodec | GradientLevels:
        """Returns the type of a gradient: that of a value, but at least 6 bits, of which `key` draws the rounding."""
        if isinstance(self.values_as, ValueCodec):
            return self.values_as
        return GradientLevels(max(self.values_as.width, 6), key)

    @property
    def features(self) -> int:
        """Values of one sample, d."""
        return math.prod(self.shape[1:])

    def encode(self, x: jax.Array) -> Encoded:
        """Writes activations; runs on the sender."""
        return Encoded(x.reshape(-1), zeros_varying_as((0,), jnp.uint32, x))

    def decode(self, encoded: Encoded) -> jax.Array:
        """Reads activations; runs on the receiver."""
        return encoded.values.reshape(self.shape)


@dataclass(frozen=True)
class Rows:
    """The k largest magnitudes of every row of a (B, d) array, and their positions as one coded sequence."""

    rows: int
    features: int
    k: int

    @cached_property
    def layout(self) -> Layout:
        """All rows as one segment with B k slots, all of them always in use."""
        flat = jax.ShapeDtypeStruct((self.rows * self.features,), jnp.float32)
        return plan_layout(flat, dense_below=0, capacity=lambda _: self.slots)

    @cached_property
    def codec(self) -> IndexCodec:
        """The codec of the positions."""
        return choose_index_codec(self.layout)

    @property
    def slots(self) -> int:
        """Values that travel."""
        return self.rows * self.k

    @jax.named_scope(ENCODE)
    def encode(self, x: jax.Array) -> Encoded:
        """Selects from (B, d) and writes; differentiable with respect to the selected values."""
        magnitudes = lax.stop_gradient(x).reshape(self.rows, self.features).astype(jnp.float32)
        mask = jnp.pad(select_rows(magnitudes, self.k).reshape(-1), (0, self.layout.n - x.size))
        selection = compact(bits.pack(mask), self.layout)
        values = x.reshape(-1).at[selection.slots.position].get(mode="promise_in_bounds")
        return Encoded(values, fuse(self.codec.encode(selection)))

    @jax.named_scope(DECODE)
    def decode(self, encoded: Encoded) -> jax.Array:
        """Returns the (B d,) array that is zero where nothing was sent."""
        # No gradient flows through the words. JAX knows so of a bitcast, but not of all that codecs do with integers.
        words = lax.bitcast_convert_type(lax.bitcast_convert_type(encoded.words, jnp.int32), jnp.uint32)
        position = self.codec.decode(split_words(words, self._payload))  # (B k,)
        flat = zeros_varying_as((self.rows * self.features,), encoded.values.dtype, encoded.values)
        return flat.at[position].set(
            encoded.values, mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True
        )

    @cached_property
    def _payload(self) -> Payload:
        def write(words: jax.Array) -> Payload:
            return self.codec.encode(compact(words, self.layout))

        return jax.eval_shape(write, jax.ShapeDtypeStruct((self.layout.n_words,), jnp.uint32))


@dataclass(frozen=True)
class Largest(Whole):
    """The k largest magnitudes of every sample forward; the gradient of exactly these values backward (DCT-MP).

    Attributes:
      k: values of a sample that travel.
    """

    k: int

    @cached_property
    def _rows(self) -> Rows:
        return Rows(self.shape[0], self.features, self.k)

    def encode(self, x: jax.Array) -> Encoded:
        """Selects and writes activations; gradients come back for the selected values."""
        return self._rows.encode(x)

    def decode(self, encoded: Encoded) -> jax.Array:
        """Reads activations, zero where nothing was sent."""
        return self._rows.decode(encoded).reshape(self.shape)
