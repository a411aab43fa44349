"""Codecs of the values in a payload's slots, by name: floats of 32 or 16 bits, or bins of 4 or 2 bits."""

from typing import Literal, get_args

from jaxcomm.codecs.bins import BinCodec
from jaxcomm.codecs.values import VALUE_DTYPES, ValueCodec, value_codec

SlotDtype = Literal["float32", "bfloat16", "4bit", "2bit"]
SlotCodec = ValueCodec | BinCodec  # a payload's values, segment by segment


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
