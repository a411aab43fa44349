"""Indices as they are: 32 bits each."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.layout import Layout
from jaxcomm.selectors.selection import Selection
from jaxcomm.types import Payload


@dataclass(frozen=True)
class Plain:
    """One 32-bit word an index. The baseline, and the best for a handful of indices."""

    layout: Layout
    name = "plain"

    @property
    def n_words(self) -> int:
        """Words of 32 bits that the indices take."""
        return self.layout.n_slots

    def encode(self, selection: Selection, among: jax.Array | None = None) -> tuple[Payload, Selection]:
        """Writes the positions; all fit.

        With `among` (C,) bool those of some slots alone: the words of others that wrote the other slots, at positions
        of the same order, can be added.
        """
        words = lax.bitcast_convert_type(selection.slots.position, jnp.uint32)
        return {"indices": words if among is None else jnp.where(among, words, 0)}, selection

    def decode(self, payload: Payload) -> jax.Array:
        """Reads the positions, (C,) int32; in range, and meaningless, from words that were damaged."""
        return jnp.clip(lax.bitcast_convert_type(payload["indices"], jnp.int32), 0, self.layout.n - 1)
