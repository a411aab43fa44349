"""One file per method, named as in its paper: a frozen dataclass, and the factory of its Optax transformation.

`__all__` is the list of methods: what `jaxcomm` exports, and what the site's tables and the tests of all laws follow.
"""

from jaxcomm.methods.dct_dp import DctDp as DctDp, dct_dp
from jaxcomm.methods.demo import Demo as Demo, demo
from jaxcomm.methods.dgc import Dgc as Dgc, dgc
from jaxcomm.methods.ef21 import Ef21 as Ef21, ef21
from jaxcomm.methods.hierarchical import Hierarchical as Hierarchical, hierarchical
from jaxcomm.methods.iwp import Iwp as Iwp, iwp
from jaxcomm.methods.local_sgd import LocalSgd as LocalSgd, local_sgd
from jaxcomm.methods.plump_dp import PlumpDp as PlumpDp, plump_dp
from jaxcomm.methods.powersgd import PowerSgd as PowerSgd, powersgd
from jaxcomm.methods.pulse import Pulse as Pulse, pulse
from jaxcomm.methods.quant_dp import QuantDp as QuantDp, quant_dp
from jaxcomm.methods.random_k import RandomK as RandomK, random_k
from jaxcomm.methods.sign import Sign as Sign, sign
from jaxcomm.methods.slim_dp import SlimDp as SlimDp, slim_dp
from jaxcomm.methods.sparse_loco import sparse_loco
from jaxcomm.methods.terngrad import TernGrad as TernGrad, terngrad
from jaxcomm.methods.topk import TopK as TopK, topk

__all__ = [
    "plump_dp",
    "topk",
    "ef21",
    "dct_dp",
    "dgc",
    "demo",
    "pulse",
    "random_k",
    "iwp",
    "sign",
    "quant_dp",
    "terngrad",
    "powersgd",
    "hierarchical",
    "local_sgd",
    "sparse_loco",
    "slim_dp",
]
METHODS = {name: globals()[name] for name in __all__}
