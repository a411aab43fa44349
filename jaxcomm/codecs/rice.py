"""Indices by the Rice code of their gaps: closer to entropy than Elias-Fano where coordinates are dense.

Source: Rice, "Some practical universal noiseless coding techniques", JPL 79-22, 1979.
"""

import math
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
class Rice:
    """Gaps between sorted positions, split at bit l; the quotients in unary, the remainders as planes.

    Evenly spread positions take about log2(n/C) + 1.5 bits an index. The words are fixed by `budget`; positions that
    cluster need more (never more than Elias-Fano), and then the last ones do not fit and count as overflow.

    Attributes:
      layout: the segments.
      budget: bits an index that the words may take; infinite to have room for every selection.
    """

    layout: Layout
    budget: float
    name = "rice"

    @property
    def _density(self) -> float:
        return self.layout.n_slots / max(self.layout.n, 1)

    def _survival(self, low_bits: int) -> float:
        return (1 - self._density) ** (1 << low_bits)

    def _quotient(self, low_bits: int) -> float:
        """The expected quotient of a gap, for evenly spread positions (geometric gaps from 1)."""
        survival = self._survival(low_bits)
        if survival == 1.0:
            return math.inf
        return survival / (1 - self._density) / (1 - survival)

    @cached_property
    def low_bits(self) -> int:
        """The bit l that is expected to take the fewest bits."""
        if self._density >= 1:
            return 0
        return min(range(31), key=lambda low_bits: low_bits + self._quotient(low_bits))

    @property
    def _upper_words(self) -> int:
        n_slots = self.layout.n_slots
        most = n_slots + (max(self.layout.n - 1, 0) >> self.low_bits)
        if math.isfinite(self.budget):
            most = min(most, max(math.floor((self.budget - self.low_bits) * n_slots), n_slots))
        return -(-most // bits.WORD)

    @property
    def n_words(self) -> int:
        """Words of 32 bits that the indices take."""
        return self._upper_words + bits.packed_words(self.layout.n_slots, self.low_bits)

    @property
    def is_roomy(self) -> bool:
        """Whether evenly spread positions fit with four standard deviations to spare."""
        if self._density >= 1:
            return False
        n_slots, survival = self.layout.n_slots, self._survival(self.low_bits)
        spread = math.sqrt(n_slots * survival) / (1 - survival) if survival < 1 else math.inf
        need = n_slots * (1 + self._quotient(self.low_bits)) + 4 * spread
        return need <= self._upper_words * bits.WORD

    def encode(self, selection: Selection) -> tuple[Payload, Selection]:
        """Writes the gaps; positions that do not fit become overflow."""
        position, filled = selection.slots
        gap = jnp.diff(position, prepend=0)
        upper = bits.running_sum(gap >> self.low_bits)
        payload = {
            "indices_upper": unary.write_unary(upper, self._upper_words),
            "indices_low": bits.pack_numbers(gap, self.low_bits),
        }
        slot = jnp.arange(position.size, dtype=jnp.int32)
        fits = upper + slot < self._upper_words * bits.WORD
        lost = jnp.sum(filled & ~fits, dtype=jnp.int32)
        kept = selection.slots._replace(filled=filled & fits)
        return payload, selection._replace(slots=kept, overflow=selection.overflow + lost)

    def decode(self, payload: Payload) -> jax.Array:
        """Reads the positions, (C,) int32; those that did not fit are meaningless, but in range."""
        n_slots = self.layout.n_slots
        upper, _ = unary.read_unary(payload["indices_upper"], n_slots)
        low = in_memory(bits.unpack_numbers(payload["indices_low"], n_slots, self.low_bits))
        last = self.layout.n - 1
        upper = jnp.clip(upper, 0, last >> self.low_bits)  # before the shift, which may overflow
        position = (upper << self.low_bits).astype(jnp.uint32) + bits.running_sum(low.astype(jnp.uint32))  # below 2 n
        return jnp.minimum(position, jnp.uint32(last)).astype(jnp.int32)
