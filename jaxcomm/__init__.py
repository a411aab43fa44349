"""Communication-efficient distributed training for JAX: compressed gradients as Optax transformations.

Less common names are one level down: `jaxcomm.methods` (the dataclasses), `jaxcomm.layers`, `jaxcomm.accounting`,
`jaxcomm.planner`, `jaxcomm.placement`, `jaxcomm.steps`, `jaxcomm.state`, and `jaxcomm.exchange` to write your own
method.
"""

from jaxcomm import accounting as accounting, layers as layers, methods as methods, placement as placement
from jaxcomm import planner as planner, state as state, steps as steps, types as types
from jaxcomm.accounting import verify, wire_report
from jaxcomm.chain import chain
from jaxcomm.foreign import data_parallel
from jaxcomm.layers import dct_mp, late_multiply
from jaxcomm.methods import *
from jaxcomm.planner import advise
from jaxcomm.rounds import rounds
from jaxcomm.state import exchange_metrics, resize_workers, state_specs
from jaxcomm.steps import Pipeline, make_mesh, make_train_step, simulate
from jaxcomm.types import PerWorker as PerWorker  # by its old name; see jaxcomm.types

__all__ = [
    "Pipeline",
    "advise",
    "chain",
    "data_parallel",
    "dct_mp",
    "exchange_metrics",
    "late_multiply",
    "make_mesh",
    "make_train_step",
    "resize_workers",
    "rounds",
    "simulate",
    "state_specs",
    "verify",
    "wire_report",
]
__all__ += methods.__all__
