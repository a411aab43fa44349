"""One worker's step: gradient, exchange, update, and the means of the reported scalars."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomm.collectives import dense_mean
from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.exchange import get_exchange, keep_unless, without_frozen
from jaxcomm.kernels.numerics import is_applicable_tree, is_finite_tree, widened
from jaxcomm.state import (
    TrainState,
    applies_step,
    check_model_state,
    communication_period,
    is_averaged,
    keep_states_unless,
    make_local,
    trained,
    update_with,
    vary_exchanged,
    with_untrained,
    without_rows,
    works_alone,
)
from jaxcomm.steps.loss import GradientsFn, Scalars
from jaxcomm.types import DelayedState, ExchangeMetrics, PerWorker


def worker_step(
    gradients_fn: GradientsFn,
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    state: TrainState,
    batch: Any,
    kinds: Scalars | None = None,
) -> tuple[TrainState, tuple[dict[str, Any], dict[str, jax.Array]]]:
    """Takes one worker's step; runs inside the axis of workers.

    Returns:
      The new state, the loss with its scalars, and the metrics of the exchange. If it `works_alone`, its scalars and
      the model's state are the worker's own, rows of `PerWorker`s.
    """
    old = without_rows(state)
    is_local = communication_period(state.opt_state) is not None
    is_alone = works_alone(state.opt_state, state.model_state)
    params = vary_exchanged(old.params, old.opt_state, axis_name)
    (loss, (scalars, model_state)), gradients = gradients_fn(params, old.model_state, batch)
    check_new_state(model_state, old.model_state, takes_counts=not is_local)
    own_ok = is_applicable_tree(gradients) if is_local else jnp.asarray(True)  # local workers decide on their own
    own_state = keep_unless(own_ok, model_state, old.model_state) if is_local else model_state
    is_delayed, reported = isinstance(old.opt_state, DelayedState), ({"loss": loss, **scalars}, own_state)
    averaged, mean_state = reported if is_delayed or is_alone else mean_over_workers(*reported, axis_name, kinds)

    def loss_at(trained_params: Any) -> jax.Array:
        params = vary_exchanged(with_untrained(trained_params, old.params), old.opt_state, axis_name)
        return gradients_fn(params, old.model_state, batch)[0][0]

    own_loss = loss if is_local else averaged["loss"]
    if is_local:  # of an update of NaN, a local method applies nothing but what it merges in this step
        gradients = keep_unless(own_ok, gradients, jax.tree.map(lambda _: jnp.nan, gradients))
    updates, opt_state = update_with(tx, gradients, old.opt_state, trained(old.params), own_loss, loss_at)
    params, opt_state, exchanged = apply(updates, opt_state, old.params, old.opt_state, own_ok)
    state_ok = applies_step(exchanged, get_exchange(opt_state).method.reverts_on_skip)
    if is_delayed:
        # XLA would merge the two all-reduces, and that of the gradients would wait for the loss. So make the loss wait
        # for the gradients: `skipped` is 0 or 1, but XLA does not know. (An optimization_barrier is removed too early.)
        reported[0]["loss"] = jnp.where(exchanged.skipped < 2, loss, jnp.nan)
        averaged, mean_state = mean_over_workers(*reported, axis_name, kinds)
        state_ok = is_finite_tree(mean_state)  # a skip of the exchange says nothing about this step
    model_state = keep_unless(state_ok, mean_state, old.model_state)
    new = TrainState(params, opt_state, state.step + 1, model_state)
    scalars = rows_of(averaged, axis_name) if is_alone else averaged
    return make_local(new, axis_name), (scalars, exchanged._asdict())


def rows_of(scalars: dict[str, Any], axis_name: AxisName) -> dict[str, PerWorker]:
    """Returns a worker's own scalars as its rows (1,)."""
    rows = {name: widened(jnp.asarray(value))[None] for name, value in scalars.items()}
    return {name: PerWorker(row, axis_names(axis_name), is_local=True) for name, row in rows.items()}


def apply(
    updates: Any, opt_state: Any, old_params: Any, old_opt_state: Any, ok: bool | jax.Array = True
) -> tuple[Any, Any, ExchangeMetrics]:
    """Applies updates, unless the exchange was skipped; returns parameters, optimizer state, exchange metrics.

    Unless `ok`, the updates have nothing of this step's gradient, and the optimizer's state stays, too.
    """
    exchange = get_exchange(opt_state)
    applies = applies_step(exchange.metrics, exchange.method.reverts_on_skip)
    updates = without_frozen(updates, exchange)
    params = with_untrained(optax.apply_updates(trained(old_params), updates), old_params)
    new_opt_state = keep_states_unless(applies & ok, opt_state, old_opt_state)
    return keep_unless(applies, params, old_params), new_opt_state, exchange.metrics


def check_new_state(new: Any, old: Any, *, takes_counts: bool = True) -> None:
    """Refuses a new model state whose structure, shapes or types are not those of the old."""
    check_model_state(old, takes_counts=takes_counts)
    kinds = [jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree) for tree in (new, old)]
    if jax.tree.structure(new) != jax.tree.structure(old) or kinds[0] != kinds[1]:
        raise ValueError(
            "A new model state must have the structure, shapes and types of the old one; got "
            f"{jax.tree.map(jax.typeof, new)} for {jax.tree.map(jax.typeof, old)}. Return from loss_fn what it was "
            "given as model_state, with new values."
        )


def mean_over_workers(
    scalars: dict[str, jax.Array], tree: Any, axis_name: AxisName, kinds: Scalars | None = None
) -> tuple[dict[str, jax.Array], Any]:
    """Averages scalars, and the leaves of a tree, over the workers in one all-reduce of float32, float64 in its own.

    What is no float is not averaged: it must be replicated. Maxima have an all-reduce each.
    """
    scalars = scalars if kinds is None else kinds.largest(scalars, axis_name)
    nodes, treedef = jax.tree.flatten(tree)
    leaves = [node for node in nodes if is_averaged(node)]
    values = [widened(value) for value in scalars.values()]
    means, _ = dense_mean([*values, *leaves], axis_name)
    averaged = iter(means[len(values) :])
    nodes = [next(averaged) if is_averaged(node) else node for node in nodes]
    return dict(zip(scalars, means[: len(values)], strict=True)), treedef.unflatten(nodes)
