"""Codecs of the values in a payload's slots, by name: floats of 32 or 16 bits, or bins of 4 or 2 bits."""

from typing import Literal, Protocol, get_args

import jax

from jaxcomm.codecs.bins import BinCodec
from jaxcomm.codecs.values import VALUE_DTYPES, value_codec
from jaxcomm.layout import Layout

SlotDtype = Literal["float32", "bfloat16", "4bit", "2bit"]


class SlotCodec(Protocol):
    """Writes and reads the values of a payload's slots, segment by segment."""

    def n_words(self, layout: Layout) -> int:
        """Returns the words of 32 bits that the values of all slots take."""
        ...

    def write(self, values: jax.Array, filled: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
        """Writes values (C,) float32, 0 where `filled` (C,) is False; returns the words, and the values as read."""
        ...

    def read(self, words: jax.Array, layout: Layout) -> jax.Array:
        """Reads the values of all slots: (C,) float32, 0 in empty ones."""
        ...


def slot_codec(name: str) -> SlotCodec:
    """Makes the codec of a name.

    Raises:
      ValueError: for another name.
    """
    if name in VALUE_DTYPES:
        return value_codec(name)
    if name not in get_args(SlotDtype):
        raise ValueError(
            f"value_dtype must be one of {', '.join(get_args(SlotDtype))}; got {name!r}. Pass value_dtype='bfloat16', "
            "say."
        )
    return BinCodec(int(name[0]))
