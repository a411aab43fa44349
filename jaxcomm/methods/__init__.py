"""One file per method, named as in its paper: a frozen dataclass, and the factory of its Optax transformation."""

from jaxcomm.methods.dct_dp import DctDp, dct_dp
from jaxcomm.methods.demo import Demo, demo
from jaxcomm.methods.dgc import Dgc, dgc
from jaxcomm.methods.ef21 import Ef21, ef21
from jaxcomm.methods.hierarchical import Hierarchical, hierarchical
from jaxcomm.methods.iwp import Iwp, iwp
from jaxcomm.methods.local_sgd import LocalSgd, local_sgd
from jaxcomm.methods.plump_dp import PlumpDp, plump_dp
from jaxcomm.methods.powersgd import PowerSgd, powersgd
from jaxcomm.methods.pulse import Pulse, pulse
from jaxcomm.methods.quant_dp import QuantDp, quant_dp
from jaxcomm.methods.random_k import RandomK, random_k
from jaxcomm.methods.sign import Sign, sign
from jaxcomm.methods.slim_dp import SlimDp, slim_dp
from jaxcomm.methods.sparse_loco import sparse_loco
from jaxcomm.methods.terngrad import TernGrad, terngrad
from jaxcomm.methods.topk import TopK, topk

__all__ = [
    "DctDp",
    "Demo",
    "Dgc",
    "Ef21",
    "Hierarchical",
    "Iwp",
    "LocalSgd",
    "PlumpDp",
    "PowerSgd",
    "Pulse",
    "QuantDp",
    "RandomK",
    "Sign",
    "SlimDp",
    "TernGrad",
    "TopK",
    "dct_dp",
    "demo",
    "dgc",
    "ef21",
    "hierarchical",
    "iwp",
    "local_sgd",
    "plump_dp",
    "powersgd",
    "pulse",
    "quant_dp",
    "random_k",
    "sign",
    "slim_dp",
    "sparse_loco",
    "terngrad",
    "topk",
]
