"""Codecs of the values in a payload's slots, by name: floats of 32 or 16 bits, or bins of 4 or 2 bits."""

from typing import Literal, get_args

from jaxcomm.checks import check_range
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
    rule = f"one of {', '.join(get_args(SlotDtype))}"
    check_range("value_dtype", name, rule, name in get_args(SlotDtype), "Pass value_dtype='bfloat16', say")
    return BinCodec(int(name[0]))
