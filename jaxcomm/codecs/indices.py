"""Index codecs: the interface, the entropy bound, and the choice by expected density."""

import math
from collections.abc import Sequence
from typing import Protocol

import jax

from jaxcomm.codecs.bitmap import Bitmap
from jaxcomm.codecs.elias_fano import EliasFano
from jaxcomm.codecs.plain import Plain
from jaxcomm.codecs.rice import Rice
from jaxcomm.layout import Layout
from jaxcomm.selectors.selection import Selection
from jaxcomm.types import Payload

INDEX_CODECS = ("plain", "bitmap", "elias_fano", "rice")
_RICE_BUDGET = 1.09  # times the entropy


class IndexCodec(Protocol):
    """Writes the positions of a selection, and reads them on the other side.

    The number of words is fixed by the layout: it does not depend on what was selected.
    """

    @property
    def name(self) -> str:
        """The codec's name, one of `INDEX_CODECS`."""
        ...

    @property
    def n_words(self) -> int:
        """Words of 32 bits that the indices take."""
        ...

    def encode(self, selection: Selection) -> tuple[Payload, Selection]:
        """Returns the words, and the selection without what did not fit."""
        ...

    def decode(self, payload: Payload) -> jax.Array:
        """Returns the position of every slot, (C,) int32, in range for empty slots as well."""
        ...


def entropy_bits(n: int, k: int) -> float:
    """Returns the entropy of the choice of k out of n coordinates, in bits an index: n H(k/n) / k."""
    if not 0 < k < n:
        return 0.0
    density = k / n
    return -math.log2(density) - (1 - density) / density * math.log2(1 - density)


def make_index_codec(name: str, layout: Layout) -> IndexCodec:
    """Makes a codec by its name.

    Raises:
      ValueError: if the name is not one of `INDEX_CODECS`.
    """
    if name == "plain":
        return Plain(layout)
    if name == "bitmap":
        return Bitmap(layout)
    if name == "elias_fano":
        return EliasFano(layout)
    if name == "rice":
        tight = Rice(layout, budget=_RICE_BUDGET * entropy_bits(layout.n, layout.n_slots))
        return tight if tight.is_roomy else Rice(layout, budget=math.inf)
    raise ValueError(
        f"index_codec must be one of {', '.join(INDEX_CODECS)}; got {name!r}. Pass one of them, or 'auto'."
    )


def choose_index_codec(layout: Layout, name: str = "auto", among: Sequence[str] = INDEX_CODECS) -> IndexCodec:
    """Makes the codec of a name, or the one that takes the fewest words for the layout's capacity.

    Args:
      layout: the segments; the density is slots over elements.
      name: one of `INDEX_CODECS`, or "auto" for the smallest.
      among: the codecs that "auto" chooses from.
    """
    if name != "auto":
        return make_index_codec(name, layout)
    return min((make_index_codec(each, layout) for each in among), key=lambda codec: codec.n_words)
