"""How coordinates and values are written. Codecs turn one worker's selection into a payload and never communicate."""

from jaxcomm.codecs.indices import IndexCodec, choose_index_codec, entropy_bits
from jaxcomm.codecs.values import ValueCodec, ValueDtype, value_codec

__all__ = ["IndexCodec", "ValueCodec", "ValueDtype", "choose_index_codec", "entropy_bits", "value_codec"]
