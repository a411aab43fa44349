"""Communication-efficient distributed training for JAX: compressed gradients as Optax transformations.

Less common names are one level down: `jaxcomm.methods` (the dataclasses), `jaxcomm.layers`, `jaxcomm.accounting`,
`jaxcomm.planner`, `jaxcomm.steps`, and `jaxcomm.exchange` to write your own method.
"""

from jaxcomm.accounting import WireReport, verify, wire_report
from jaxcomm.chain import chain
from jaxcomm.foreign import data_parallel
from jaxcomm.layers import dct_mp, late_multiply, split_dense
from jaxcomm.methods import (
    dct_dp,
    demo,
    dgc,
    ef21,
    hierarchical,
    iwp,
    local_sgd,
    plump_dp,
    powersgd,
    pulse,
    quant_dp,
    random_k,
    sign,
    slim_dp,
    sparse_loco,
    terngrad,
    topk,
)
from jaxcomm.planner import advise
from jaxcomm.state import TrainState, exchange_metrics, global_params, resize_workers, state_specs
from jaxcomm.steps import Pipeline, TrainStep, make_mesh, make_train_step, simulate
from jaxcomm.types import ExchangeMetrics, PerWorker

__all__ = [
    "ExchangeMetrics",
    "PerWorker",
    "Pipeline",
    "TrainState",
    "TrainStep",
    "WireReport",
    "advise",
    "chain",
    "data_parallel",
    "dct_dp",
    "dct_mp",
    "demo",
    "dgc",
    "ef21",
    "exchange_metrics",
    "global_params",
    "hierarchical",
    "iwp",
    "late_multiply",
    "local_sgd",
    "make_mesh",
    "make_train_step",
    "plump_dp",
    "powersgd",
    "pulse",
    "quant_dp",
    "random_k",
    "resize_workers",
    "sign",
    "simulate",
    "slim_dp",
    "sparse_loco",
    "split_dense",
    "state_specs",
    "terngrad",
    "topk",
    "verify",
    "wire_report",
]
