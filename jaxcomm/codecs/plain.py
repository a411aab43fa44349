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
    """One 32-bit word per index. The baseline, and the smallest for a handful of indices."""

    layout: Layout
    name = "plain"

    @property
    def n_words(self) -> int:
        """Words of 32 bits that the indices take."""
        return self.layout.n_slots

    def encode(self, selection: Selection, among: jax.Array | None = None) -> tuple[Payload, Selection]:
        """Writes the positions; all fit.

        With `among`, (C,) bool, it writes only the positions of those slots. Words in which others wrote the other
        slots can be added to them.
        """
        words = lax.bitcast_convert_type(selection.slots.position, jnp.uint32)
        return {"indices": words if among is None else jnp.where(among, words, 0)}, selection

    def decode(self, payload: Payload) -> jax.Array:
        """Reads the positions, (C,) int32; from damaged words they are meaningless, but in range."""
        return jnp.clip(lax.bitcast_convert_type(payload["indices"], jnp.int32), 0, self.layout.n - 1)
