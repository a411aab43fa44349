"""One Optax transformation per method, named as in its paper."""

from jaxcomm.transforms.already_mean import AlreadyMeanState, already_mean
from jaxcomm.transforms.dct_dp import DctDpState, dct_dp
from jaxcomm.transforms.dgc import DgcState, dgc
from jaxcomm.transforms.hierarchical import HierarchicalState, hierarchical
from jaxcomm.transforms.iwp import IwpState, iwp
from jaxcomm.transforms.local_sgd import LocalSgdState, local_sgd
from jaxcomm.transforms.plump_dp import PlumpDpState, plump_dp
from jaxcomm.transforms.powersgd import PowerSgdState, powersgd
from jaxcomm.transforms.quant_dp import QuantDpState, quant_dp
from jaxcomm.transforms.random_k import RandomKState, random_k
from jaxcomm.transforms.sign import SignState, sign
from jaxcomm.transforms.slim_dp import SlimDpState, slim_dp
from jaxcomm.transforms.terngrad import TernGradState, terngrad
from jaxcomm.transforms.topk import TopKState, topk

__all__ = [
    "AlreadyMeanState",
    "DctDpState",
    "DgcState",
    "HierarchicalState",
    "IwpState",
    "LocalSgdState",
    "PlumpDpState",
    "PowerSgdState",
    "QuantDpState",
    "RandomKState",
    "SignState",
    "SlimDpState",
    "TernGradState",
    "TopKState",
    "already_mean",
    "dct_dp",
    "dgc",
    "hierarchical",
    "iwp",
    "local_sgd",
    "plump_dp",
    "powersgd",
    "quant_dp",
    "random_k",
    "sign",
    "slim_dp",
    "terngrad",
    "topk",
]
