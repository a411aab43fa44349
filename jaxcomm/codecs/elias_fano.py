"""Indices by Elias-Fano: within half a bit of entropy, whatever is selected.

Source: Elias, "Efficient storage and retrieval by content and address of static files", JACM 21(2), 1974.
"""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp

from jaxcomm.codecs import unary
from jaxcomm.kernels import bits
from jaxcomm.kernels.platforms import in_memory
from jaxcomm.layout import Layout
from jaxcomm.selectors.selection import Selection
from jaxcomm.types import Payload


@dataclass(frozen=True)
class EliasFano:
    """Sorted positions, split at bit l: about 2 + log2(n/C) bits an index, at most.

    The bound holds for every selection, so that nothing ever overflows.
    """

    layout: Layout
    name = "elias_fano"

    def _upper_words(self, low_bits: int) -> int:
        top = max(self.layout.n - 1, 0) >> low_bits
        return -(-(top + self.layout.n_slots) // bits.WORD)

    @cached_property
    def low_bits(self) -> int:
        """The bit l that takes the fewest words."""
        return min(range(31), key=self._words)

    def _words(self, low_bits: int) -> int:
        return self._upper_words(low_bits) + bits.packed_words(self.layout.n_slots, low_bits)

    @property
    def n_words(self) -> int:
        """Words of 32 bits that the indices take."""
        return self._words(self.low_bits)

    def encode(self, selection: Selection, among: jax.Array | None = None) -> tuple[Payload, Selection]:
        """Writes the positions; all fit.

        With `among`, (C,) bool, it writes only the positions of those slots. Words in which others wrote the other
        slots can be added to them, if all positions together ascend.
        """
        position = selection.slots.position
        low = position if among is None else jnp.where(among, position, 0)
        payload = {
            "indices_upper": unary.write_unary(position >> self.low_bits, self._upper_words(self.low_bits), among),
            "indices_low": bits.pack_numbers(low, self.low_bits),
        }
        return payload, selection

    def decode(self, payload: Payload) -> jax.Array:
        """Reads the positions, (C,) int32; from damaged words they are meaningless, but in range."""
        n_slots, last = self.layout.n_slots, self.layout.n - 1
        upper, _ = unary.read_unary(payload["indices_upper"], n_slots)
        upper = jnp.clip(upper, 0, last >> self.low_bits)  # before the shift, which may overflow
        low = in_memory(bits.unpack_numbers(payload["indices_low"], n_slots, self.low_bits))
        return jnp.minimum((upper << self.low_bits) | low, last)
