"""How the activations of a batch, and their gradients, are written where a model is cut.

A format is planned from the shape of one array of activations (B, ...), samples first. The sender encodes and the
receiver decodes. Formats also define the backward pass, since gradients may be written differently. `Largest` is the
DCT-MP of the paper that `boundary.py` names.
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
class Largest(Whole):
    """The k largest magnitudes of every sample forward, with their positions; their gradients backward (DCT-MP).

    Attributes:
      k: values of a sample that travel.
    """

    k: int

    @cached_property
    def layout(self) -> Layout:
        """All samples as one segment with B k slots, all of them always in use."""
        flat = jax.ShapeDtypeStruct((math.prod(self.shape),), jnp.float32)
        return plan_layout(flat, dense_below=0, capacity=lambda _: self.shape[0] * self.k)

    @cached_property
    def codec(self) -> IndexCodec:
        """The codec of the positions."""
        return choose_index_codec(self.layout)

    @jax.named_scope(ENCODE)
    def encode(self, x: jax.Array) -> Encoded:
        """Selects and writes activations; gradients come back for the selected values."""
        magnitudes = lax.stop_gradient(x).reshape(-1, self.features).astype(jnp.float32)
        mask = jnp.pad(select_rows(magnitudes, self.k).reshape(-1), (0, self.layout.n - x.size))
        selection = compact(bits.pack(mask), self.layout)
        values = x.reshape(-1).at[selection.slots.position].get(mode="promise_in_bounds")
        return Encoded(values, fuse(self.codec.encode(selection)))

    @jax.named_scope(DECODE)
    def decode(self, encoded: Encoded) -> jax.Array:
        """Reads activations, zero where nothing was sent."""
        # No gradient flows through the words. JAX knows so of a bitcast, but not of all that codecs do with integers.
        words = lax.bitcast_convert_type(lax.bitcast_convert_type(encoded.words, jnp.int32), jnp.uint32)
        mask = jax.ShapeDtypeStruct((self.layout.n_words,), jnp.uint32)
        like = jax.eval_shape(lambda mask: self.codec.encode(compact(mask, self.layout)), mask)
        position = self.codec.decode(split_words(words, like))  # (B k,)
        flat = zeros_varying_as((math.prod(self.shape),), encoded.values.dtype, encoded.values)
        flat = flat.at[position].set(
            encoded.values, mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True
        )
        return flat.reshape(self.shape)
