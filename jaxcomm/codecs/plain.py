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

    def encode(self, selection: Selection) -> tuple[Payload, Selection]:
        """Writes the positions; all fit."""
        words = lax.bitcast_convert_type(selection.slots.position, jnp.uint32)
        return {"indices": words}, selection

    def decode(self, payload: Payload) -> jax.Array:
        """Reads the positions, (C,) int32."""
        return lax.bitcast_convert_type(payload["indices"], jnp.int32)
