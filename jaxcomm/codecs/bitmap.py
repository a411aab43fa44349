"""Indices as a mask: one bit a coordinate, whatever is selected."""

from dataclasses import dataclass

import jax

from jaxcomm.layout import Layout
from jaxcomm.selectors.selection import Selection, rank_in_segment, slots_of
from jaxcomm.types import Payload


@dataclass(frozen=True)
class Bitmap:
    """The bit-packed mask itself: n bits. The smallest codec above about 40% density."""

    layout: Layout
    name = "bitmap"

    @property
    def n_words(self) -> int:
        """Words of 32 bits that the indices take."""
        return self.layout.n_words

    def encode(self, selection: Selection) -> tuple[Payload, Selection]:
        """Writes the mask of the coordinates that have a slot; all fit."""
        return {"indices": selection.words}, selection

    def decode(self, payload: Payload) -> jax.Array:
        """Gives the mask's bits the same slots as the sender did: positions (C,) int32."""
        words = payload["indices"]
        rank, _ = rank_in_segment(words, self.layout)
        return slots_of(words, rank, self.layout).position
