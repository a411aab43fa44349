"""Communication-efficient distributed training for JAX: compressed gradients as Optax transformations."""

from jaxcomm.parallel import (
    TrainState,
    init_state,
    make_mesh,
    make_train_step,
    resize_workers,
    simulate,
    state_shardings,
    state_specs,
)
from jaxcomm.transforms import dct_dp, plump_dp, topk
from jaxcomm.types import ExchangeMetrics, PerWorker, exchange_metrics
from jaxcomm.wire import Traffic, WireReport, step_report, verify, wire_report

__all__ = [
    "ExchangeMetrics",
    "PerWorker",
    "Traffic",
    "TrainState",
    "WireReport",
    "dct_dp",
    "exchange_metrics",
    "init_state",
    "make_mesh",
    "make_train_step",
    "plump_dp",
    "resize_workers",
    "simulate",
    "state_shardings",
    "state_specs",
    "step_report",
    "topk",
    "verify",
    "wire_report",
]
