"""How positions are written: as they are, as a mask, or by Elias-Fano, whichever is smallest at a density.

The number of words is fixed by the layout: it does not depend on what was selected. From damaged words, positions are
meaningless, but in range.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.kernels import bits
from jaxcomm.kernels.platforms import in_memory
from jaxcomm.layout import Layout
from jaxcomm.selectors.selection import Selection, rank_in_segment, slots_of
from jaxcomm.types import Payload


@dataclass(frozen=True)
class Plain:
    """One 32-bit word per index. The baseline, and the smallest for a handful of indices."""

    layout: Layout

    @property
    def n_words(self) -> int:
        """Words of 32 bits that the indices take."""
        return self.layout.n_slots

    def encode(self, selection: Selection, subset: jax.Array | None = None) -> Payload:
        """Writes the positions; with `subset`, (C,) bool, only those of these slots.

        Words in which others wrote the other slots can be added to them.
        """
        words = lax.bitcast_convert_type(selection.slots.position, jnp.uint32)
        return {"indices": words if subset is None else jnp.where(subset, words, 0)}

    def decode(self, payload: Payload) -> jax.Array:
        """Reads the positions, (C,) int32."""
        return jnp.clip(lax.bitcast_convert_type(payload["indices"], jnp.int32), 0, self.layout.n - 1)


@dataclass(frozen=True)
class Bitmap:
    """The bit-packed mask itself: n bits. The smallest codec above about 30% density."""

    layout: Layout

    @property
    def n_words(self) -> int:
        """Words of 32 bits that the indices take."""
        return self.layout.n_words

    def encode(self, selection: Selection) -> Payload:
        """Writes the mask of the coordinates that have a slot."""
        return {"indices": selection.words}

    def decode(self, payload: Payload) -> jax.Array:
        """Gives the mask's bits the same slots as the sender did: positions (C,) int32."""
        words = payload["indices"]
        rank, _ = rank_in_segment(words, self.layout)
        return slots_of(words, rank, self.layout).position


@dataclass(frozen=True)
class EliasFano:
    """Sorted positions, split at bit l: about 2 + log2(n/C) bits an index, at most.

    The lower l bits travel as planes; the rising upper parts u_0 <= u_1 <= ... become the set bits u_i + i of a bitmap.

    Source: Elias, "Efficient storage and retrieval by content and address of static files", JACM 21(2), 1974.
    """

    layout: Layout

    @property
    def low_bits(self) -> int:
        """The bit l that takes the fewest words: one more saves n / 2^(l+1) bits, and costs a plane of C bits."""
        plane = bits.WORD * bits.packed_words(self.layout.n_slots, 1)
        return max((self.layout.n // max(plane, 1)).bit_length() - 1, 0)

    @property
    def _upper_words(self) -> int:
        return -(-((max(self.layout.n - 1, 0) >> self.low_bits) + self.layout.n_slots) // bits.WORD)

    @property
    def n_words(self) -> int:
        """Words of 32 bits that the indices take."""
        return self._upper_words + bits.packed_words(self.layout.n_slots, self.low_bits)

    def encode(self, selection: Selection, subset: jax.Array | None = None) -> Payload:
        """Writes the positions; with `subset`, (C,) bool, only those of these slots.

        Words in which others wrote the other slots can be added to them, if all positions together ascend.
        """
        position = selection.slots.position
        bit = (position >> self.low_bits) + jnp.arange(position.size, dtype=jnp.int32)
        upper = jnp.left_shift(np.uint32(1), (bit % bits.WORD).astype(jnp.uint32))
        if subset is not None:
            position, upper = jnp.where(subset, position, 0), jnp.where(subset, upper, np.uint32(0))
        return {
            "indices_upper": jnp.zeros(self._upper_words, jnp.uint32).at[bit // bits.WORD].add(upper, mode="drop"),
            "indices_low": bits.pack_numbers(position, self.low_bits),
        }

    def decode(self, payload: Payload) -> jax.Array:
        """Reads the positions, (C,) int32."""
        n_slots, last, words = self.layout.n_slots, self.layout.n - 1, payload["indices_upper"]
        upper = bits.positions(words, bits.rank_of_words(words), n_slots).position
        upper = upper - jnp.arange(n_slots, dtype=jnp.int32)
        upper = jnp.clip(upper, 0, last >> self.low_bits)  # before the shift, which may overflow
        low = in_memory(bits.unpack_numbers(payload["indices_low"], n_slots, self.low_bits))
        return jnp.minimum((upper << self.low_bits) | low, last)


IndexCodec = Plain | Bitmap | EliasFano
INDEX_CODECS: dict[str, type[IndexCodec]] = {"plain": Plain, "bitmap": Bitmap, "elias_fano": EliasFano}


def choose_index_codec(layout: Layout) -> IndexCodec:
    """Makes the codec that takes the fewest words for the layout's capacity; its density is slots over elements."""
    return min((codec(layout) for codec in INDEX_CODECS.values()), key=lambda codec: codec.n_words)


def entropy_bits(n: int, k: int) -> float:
    """Returns the entropy of the choice of k out of n coordinates, in bits an index: n H(k/n) / k."""
    if not 0 < k < n:
        return 0.0
    density = k / n
    return -math.log2(density) - (1 - density) / density * math.log2(1 - density)
