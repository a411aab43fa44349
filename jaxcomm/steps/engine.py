"""One worker's step: gradient, exchange, update, and the means of the reported scalars; and all workers' steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.jaxpr import traced_program
from jaxcomm.accounting.report import verify
from jaxcomm.collectives import dense_mean
from jaxcomm.collectives.axis import AxisName, axis_names, to_varying
from jaxcomm.exchange import get_exchange, keep_unless, on_all_stages, without_frozen
from jaxcomm.kernels.numerics import is_applicable_tree, is_finite_tree, widened
from jaxcomm.order import check_descent
from jaxcomm.state import (
    TrainState,
    applies_step,
    bypassing,
    check_axes,
    check_model_state,
    communication_period,
    exchange_interval,
    has_delay,
    is_averaged,
    keep_states_unless,
    make_local,
    state_specs,
    trained,
    update_with,
    vary_exchanged,
    with_untrained,
    without_rows,
    works_alone,
)
from jaxcomm.steps.agreement import check_agreement
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.loss import GradientsFn, LossFn, Scalars
from jaxcomm.steps.replication import over_workers
from jaxcomm.steps.step import Report, Update, params_like
from jaxcomm.steps.workers import WorkerPlacement
from jaxcomm.traffic import Program, Traffic
from jaxcomm.types import Params, PerWorker, PyTree


@dataclass(frozen=True)
class WorkerUpdate(Update):
    """The update of workers that each take a whole step by themselves.

    Attributes:
      placement: where the workers are.
      gradients_fn: a worker's gradients.
      loss: the loss of these gradients, from `loss_of`; None for one in stages.
      kinds: how its scalars become one.
      overlap: see `Update`.
    """

    placement: WorkerPlacement
    gradients_fn: GradientsFn
    loss: LossFn | None = None
    kinds: Scalars | None = None
    overlap: Any = None

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Runs `worker_step` on all workers."""
        axis_name = self.placement.axis_name
        check_axes(get_exchange(state.opt_state), axis_name)
        check_descent(self.placement.tx, state.opt_state, trained(state.params))
        if self.loss is not None:
            check_agreement(self.loss, state, batch, self.placement.row_sizes, axis_name)
        worker = partial(worker_step, self.gradients_fn, self.placement.worker_tx, axis_name, kinds=self.kinds)
        state, (scalars, exchanged) = self.placement.run(worker, state, batch)
        return state, {**scalars, **exchanged}

    def verify(self, step: Any, state: PyTree, batch: PyTree, other_bytes: int, beside: Sequence[Traffic]) -> Report:
        """Proves what the step sends; see `TrainStep.verify`."""
        return verify(
            step,
            state,
            batch,
            tx=self.placement.tx,
            params=params_like(state),
            workers=self.placement.sizes,
            other_bytes=other_bytes,
            beside=beside,
            axis_name=self.placement.axis_name,
            text=step.compile(state, batch).as_text(),
        )

    def loss_program(self, state: PyTree, batch: Batch) -> Program:
        """Returns the collectives of the loss; see `TrainStep.loss_program`."""
        axis_name = self.placement.axis_name
        if self.placement.mesh is None or self.loss is None or bypassing(state.opt_state, trained(params_like(state))):
            return Program()  # nothing is sent; stages have no collectives; `beside` has them

        def gradients(state: TrainState, batch: Batch) -> PyTree:
            old = without_rows(state)
            params = vary_exchanged(old.params, old.opt_state, axis_name)
            local_gradients = self.gradients_fn(params, old.model_state, batch)
            return jax.tree.map(lambda x: x[None], to_varying(local_gradients, axis_name))

        specs = state_specs(state), batch.like(P(axis_name), P())
        return traced_program(over_workers(gradients, self.placement.mesh, specs, P(axis_name)), state, batch)


def worker_step(
    gradients_fn: GradientsFn,
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    state: TrainState,
    batch: PyTree,
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
    own_ok = on_all_stages(is_applicable_tree(gradients)) if is_local else jnp.asarray(True)  # each worker decides
    own_state = keep_unless(own_ok, model_state, old.model_state) if is_local else model_state
    is_delayed, reported = has_delay(old.opt_state), ({"loss": loss, **scalars}, own_state)
    averaged, mean_state = reported if is_delayed or is_alone else mean_over_workers(*reported, axis_name, kinds)

    def loss_at(trained_params: Params) -> jax.Array:
        params = vary_exchanged(with_untrained(trained_params, old.params), old.opt_state, axis_name)
        return gradients_fn(params, old.model_state, batch)[0][0]

    own_loss = loss if is_local else averaged["loss"]
    if is_local:  # of an update of NaN, a local method applies nothing but what it merges in this step
        gradients = keep_unless(own_ok, gradients, jax.tree.map(lambda _: jnp.nan, gradients))
    updates, opt_state = update_with(tx, gradients, old.opt_state, trained(old.params), own_loss, loss_at)
    exchange = get_exchange(opt_state)
    state_ok, exchanged = applies_step(exchange.metrics, exchange.method.reverts_on_skip), exchange.metrics
    updates = without_frozen(updates, exchange)
    params, opt_state = settle(state_ok, updates, opt_state, old.params, old.opt_state, own_ok)
    if is_delayed:
        # XLA would merge the two all-reduces, and that of the gradients would wait for the loss. So make the loss wait
        # for the gradients: `skipped` is 0 or 1, but XLA does not know. (An optimization_barrier is removed too early.)
        reported[0]["loss"] = jnp.where(exchanged.skipped < 2, loss, jnp.nan)
        averaged, mean_state = mean_over_workers(*reported, axis_name, kinds)
        state_ok = is_finite_tree(mean_state)  # a skip of the exchange says nothing about this step
    elif exchange_interval(state.opt_state) > 1 and not is_local:  # nor does a call without one
        state_ok = state_ok & is_finite_tree(mean_state)
    model_state = keep_unless(state_ok, mean_state, old.model_state)
    new = TrainState(params, opt_state, state.step + 1, model_state)
    scalars = rows_of(averaged, axis_name) if is_alone else averaged
    return make_local(new, axis_name), (scalars, exchanged._asdict())


def rows_of(scalars: dict[str, Any], axis_name: AxisName) -> dict[str, PerWorker]:
    """Returns a worker's own scalars as its rows (1,)."""
    rows = {name: widened(jnp.asarray(value))[None] for name, value in scalars.items()}
    return {name: PerWorker(row, axis_names(axis_name), is_local=True) for name, row in rows.items()}


def settle(
    ok: jax.Array,
    updates: PyTree,
    opt_state: PyTree,
    old_params: Params,
    old_opt_state: Any,
    own_ok: bool | jax.Array = True,
) -> tuple[Any, Any]:
    """Applies updates of what is trained, or skips the step: returns parameters and optimizer's state after it.

    The step is applied if `ok`, which is the same on all workers; see `applies_step`. Where the updates have nothing of
    this worker's gradient, `own_ok` is False, and its optimizer's state stays.
    """
    new_opt_state = keep_states_unless(ok if own_ok is True else ok & own_ok, opt_state, old_opt_state)
    params = with_untrained(optax.apply_updates(trained(old_params), updates), old_params)
    return keep_unless(ok, params, old_params), new_opt_state


def check_new_state(new: PyTree, old: PyTree, *, takes_counts: bool = True) -> None:
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
    scalars: dict[str, jax.Array], tree: PyTree, axis_name: AxisName, kinds: Scalars | None = None
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
