"""One Optax transformation per method, named as in its paper."""

from jaxcomm.transforms.dct_dp import DctDpState, dct_dp
from jaxcomm.transforms.plump_dp import PlumpDpState, plump_dp
from jaxcomm.transforms.topk import TopKState, topk

__all__ = ["DctDpState", "PlumpDpState", "TopKState", "dct_dp", "plump_dp", "topk"]
