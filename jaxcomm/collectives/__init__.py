"""How payloads travel. Collectives move what they are given and never choose."""

from jaxcomm.collectives.axis import axis_size, check_per_worker
from jaxcomm.collectives.dense import dense_mean
from jaxcomm.collectives.gather import fuse, gather_words, split_words

__all__ = ["axis_size", "check_per_worker", "dense_mean", "fuse", "gather_words", "split_words"]
