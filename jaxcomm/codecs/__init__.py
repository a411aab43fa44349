"""How coordinates and values are written. Codecs turn one worker's selection into a payload and never communicate."""

from jaxcomm.codecs.indices import IndexCodec, choose_index_codec, entropy_bits
from jaxcomm.codecs.slots import SlotCodec, SlotDtype, slot_codec
from jaxcomm.codecs.values import ValueCodec, ValueDtype, value_codec

__all__ = [
    "IndexCodec",
    "SlotCodec",
    "SlotDtype",
    "ValueCodec",
    "ValueDtype",
    "choose_index_codec",
    "entropy_bits",
    "slot_codec",
    "value_codec",
]
