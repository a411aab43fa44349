"""How payloads travel. Collectives move what they are given and never choose."""

from jaxcomm.collectives.axis import axis_size, check_per_worker
from jaxcomm.collectives.dense import dense_mean
from jaxcomm.collectives.messages import all_gather_same, fuse, split_words

__all__ = ["all_gather_same", "axis_size", "check_per_worker", "dense_mean", "fuse", "split_words"]
