"""From a method's fields to the chain of transformations that trains with it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomm as jc
from configs.experiment import BoundaryFields, Experiment
from configs.methods import (
    DctDp,
    Dgc,
    Ef21,
    Iwp,
    LocalSgd,
    Method,
    PlumpDp,
    PowerSgd,
    QuantDp,
    RandomK,
    Sign,
    SlimDp,
    TernGrad,
    TopK,
)
from train.schedules import make_schedule

Where = str | Callable[[str, Any], bool]  # of a parameter's path and the parameter

FACTORIES: dict[type[Method], Callable[..., optax.GradientTransformation]] = {
    PlumpDp: jc.plump_dp,
    TopK: jc.topk,
    Ef21: jc.ef21,
    DctDp: jc.dct_dp,
    RandomK: jc.random_k,
    Dgc: jc.dgc,
    Iwp: jc.iwp,
    QuantDp: jc.quant_dp,
    TernGrad: jc.terngrad,
    Sign: jc.sign,
    PowerSgd: jc.powersgd,
    SlimDp: jc.slim_dp,
    LocalSgd: jc.local_sgd,
}


def method_name(method: Method) -> str:
    """Returns the name that tables use, which is that of the transformation."""
    return FACTORIES[type(method)].__name__


def run_name(method: Method, boundary: BoundaryFields | None = None, dense_layers: str = "exchange") -> str:
    """Returns the name of a run's folder and curve: the method's, of averaged models how often, and the boundary's.

    So a pipeline with a boundary has another folder than its baseline, which sends whole activations; and dense layers
    that are trained in their own way have another than with the method alone.
    """
    name = method_name(method)
    if isinstance(method, PlumpDp) and method.p > 1:
        name += f"-p{method.p}"
    if dense_layers != "exchange":
        name += f"-{dense_layers}"
    if boundary is None or boundary == BoundaryFields():
        return name
    name += f"-masked-{boundary.sparsity:g}"
    return name if boundary.value_dtype is None else f"{name}-{boundary.value_dtype}"


def is_local(method: Method) -> bool:
    """Returns whether workers train on their own parameters, and the exchange comes after the local optimizer."""
    return isinstance(method, SlimDp | LocalSgd) or (isinstance(method, PlumpDp) and method.p > 1)


def make_exchange(
    method: Method,
    *,
    momentum: float,
    where: Where | None = None,
    others: optax.GradientTransformation | None = None,
    axis_name: str = "data",
) -> optax.GradientTransformation:
    """Makes a method's transformation; its fields are the arguments.

    Args:
      method: the fields.
      momentum: of the methods that have it inside, `dgc` and `iwp`.
      where: chooses the parameters that are exchanged; the gradients of the others are already reduced, or go to
        `others`.
      others: a second exchange.
      axis_name: the axis of workers that it goes over.

    Raises:
      ValueError: for a field out of range.
    """
    chosen = {"where": where, "others": others, "axis_name": axis_name}
    match method:
        case LocalSgd():
            sparsity = method.exchange_sparsity
            inner = jc.plump_dp(axis_name=axis_name) if sparsity is None else jc.topk(sparsity, axis_name=axis_name)
            outer = optax.sgd(method.outer_learning_rate, momentum=method.outer_momentum, nesterov=True)
            return jc.local_sgd(method.steps, exchange=inner, outer=outer, **chosen)
        case Iwp():
            fields = dataclasses.asdict(method)
            del fields["change_at"]
            fields |= {"alpha": _by_step(method, "alpha"), "beta": _by_step(method, "beta")}
            return jc.iwp(**fields, momentum=momentum, **chosen)
        case Dgc():
            return jc.dgc(**dataclasses.asdict(method), momentum=momentum, **chosen)
    return FACTORIES[type(method)](**dataclasses.asdict(method), **chosen)


def _by_step(method: Iwp, name: str) -> float | Callable[[jax.Array], jax.Array]:
    """Returns alpha or beta, as a number or, of several values, as a function of the step."""
    given = getattr(method, name)
    values = given if isinstance(given, tuple) else (given,)
    places = (0, *method.change_at)
    if len(values) not in (1, len(places)) or sorted(set(places)) != list(places):
        raise ValueError(
            f"{name} is one number, or one more than the rising steps of change_at, got {given} with change_at="
            f"{method.change_at}: give --method.{name} 0.005 0.01 --method.change-at 1000, say."
        )
    if len(values) == 1:
        return values[0]
    above = name == "alpha"
    if not all((value > 0 if above else value >= 0) and value < math.inf for value in values):
        raise ValueError(f"{name} is {'above' if above else 'at least'} 0 at all times, got {given}: see jaxcomm.iwp.")
    return lambda step: jnp.asarray(values)[jnp.searchsorted(jnp.asarray(method.change_at), step, side="right")]


def make_chain(experiment: Experiment, method: Method, where: Where | None = None) -> optax.GradientTransformation:
    """Makes the whole optimizer, the exchange in its place: SGD with momentum or Adam, weight decay and a schedule.

    - Gradients are exchanged first: L2, exchange, momentum, decoupled decay, learning rate.
    - `dgc` and `iwp` have heavy-ball momentum inside: L2, exchange, decoupled decay, learning rate.
    - Local methods come last: L2, momentum, decoupled decay, learning rate, exchange.
    - With slices, gradients are averaged densely inside each, and exchanged between them.

    Of L2 and decoupled decay there is one, by `experiment.decay`. Parameters are replicated, so that the mean of L2 in
    each worker's gradient is L2 in the mean, also of gradients that are already reduced.

    Args:
      experiment: the fields; `experiment.method` is not looked at.
      method: how the workers exchange.
      where: chooses the parameters that are exchanged; the gradients of the others are already reduced.

    Raises:
      ValueError: for a field out of range, or a method that does not go with the others.
    """
    has_momentum = isinstance(method, Dgc | Iwp)
    if experiment.slices > 1 and is_local(method):
        raise ValueError(
            f"Slices exchange gradients, got {run_name(method)}, after whose steps the workers' parameters differ: "
            "leave out --slices, or take a method before the optimizer."
        )
    if experiment.slices > 1 and isinstance(method, PowerSgd):
        raise ValueError(
            f"Between slices go shares of tensors, which are vectors, got {run_name(method)}, made for matrices, which "
            "would send all of them dense: leave out --slices, or take another method."
        )
    if experiment.dense_layers != "exchange" and (has_momentum or is_local(method)):
        raise ValueError(
            f"Gradients of dense layers pass the exchange by with --dense-layers {experiment.dense_layers}, got "
            f"{run_name(method)}, {'whose momentum' if has_momentum else 'whose averaging of models'} they would miss: "
            "take another method."
        )
    if experiment.optimizer == "adam" and has_momentum:
        raise ValueError(
            f"{run_name(method)} has momentum inside and goes with plain SGD, got --optimizer adam: take another "
            "method, or sgd."
        )
    across = "slice" if experiment.slices > 1 else "data"
    inner, others = (where if experiment.slices == 1 else None), None
    if experiment.compress:
        inner, others = experiment.compress, jc.plump_dp(axis_name=across)
    exchange = make_exchange(method, momentum=experiment.momentum, where=inner, others=others, axis_name=across)
    if experiment.slices > 1:
        exchange = jc.hierarchical(exchange, where=where, inside="data", across="slice")
    l2, decay = [], []
    if experiment.weight_decay and experiment.decay == "l2":
        l2 = [optax.add_decayed_weights(experiment.weight_decay)]
    elif experiment.weight_decay:
        decay = [optax.add_decayed_weights(experiment.weight_decay)]
    if experiment.optimizer == "adam":
        momentum = optax.scale_by_adam(b1=experiment.momentum, b2=0.98, eps=1e-8)
    else:
        momentum = optax.trace(decay=experiment.momentum, nesterov=experiment.nesterov)
    rate = optax.scale_by_learning_rate(make_schedule(experiment))
    if is_local(method):
        return jc.chain(*l2, momentum, *decay, rate, exchange)
    if has_momentum:
        return jc.chain(*l2, exchange, *decay, rate)
    return jc.chain(*l2, exchange, momentum, *decay, rate)


def is_rare(method: Method, step: int) -> bool:
    """Returns whether a step, counted from 1, is known to cost the most: a new core, or a dense warm-up."""
    match method:
        case SlimDp():
            return step % (method.p * method.q) == 0
        case Dgc() | Iwp():
            return step <= method.warmup_steps
    return False
