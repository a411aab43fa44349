"""Queries on the states of exchanges: their rows, period and metrics, and which leaves bypass them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxcomm.collectives.axis import AxisName, to_varying
from jaxcomm.exchange import ExchangeState, bypasses, exchange_states, is_exchange_state, keep_unless, worker_of
from jaxcomm.types import AccumulatedState, DelayedState, ExchangeMetrics, is_per_worker


def check_rows(state: Any, workers: int) -> None:
    """Refuses a state whose rows are on other workers than their own, as far as this process can read them.

    Args:
      state: any tree with an optimizer's state in it.
      workers: K.

    Raises:
      ValueError: naming the exchange and the workers.
    """
    for found in exchange_states(state):
        check_rows((found.memory, found.others), workers)
        rows = None if found.worker is None or found.worker.shards else jax.tree.leaves(found.worker)[0]
        if isinstance(rows, Tracer) or not isinstance(rows, jax.Array | np.ndarray):
            continue
        for shard in jnp.asarray(rows).addressable_shards:  # (K, 1), of a pipeline (stages, K, 1)
            row = np.asarray(shard.data)[..., 0]
            got, of = worker_of(row)
            wanted = np.arange(got.shape[-1]) + (shard.index[-2].start or 0)
            if rows.shape[-2] == workers and ((row >= 0) & (of != 0) & (of != workers)).any():
                raise ValueError(
                    f"The rows of {found.method.name} must be those of {workers} workers; got rows of {of.max()}, some "
                    "cut off or padded with zeros (strict=False of a checkpoint's restore), and with them gradients "
                    f"that were not sent yet. Restore with the state of {of.max()} workers as the target, and convert "
                    f"it: step.resize(state, {workers}), or jaxcomm.resize_workers."
                )
            if ((row >= 0) & (got != wanted)).any() or (rows.shape[-2] == 1 < workers and (row >= 0).any()):
                raise ValueError(
                    f"The rows of {found.method.name} must be those of their {workers} workers; got those of workers "
                    f"{got.tolist()}. The state was kept as if it were replicated (pmap with out_axes=None, "
                    "shard_map with P(), nnx.split), and the other workers' residuals are gone: place PerWorker "
                    "leaves by jaxcomm.state_specs, and begin with the state of tx.init."
                )


def communication_period(state: Any) -> int | None:
    """Finds how many steps a local method takes between two exchanges.

    Args:
      state: the state of one transformation or of an Optax chain.

    Returns:
      The number of steps; None for methods that exchange gradients, whose parameters are replicated.
    """
    return next((found.method.period for found in exchange_states(state)), None)


def works_alone(state: Any) -> bool:
    """Returns whether the state is of a local method that does not exchange in every step.

    In the other steps no worker waits for another, so their scalars and model states are their own.
    """
    return (communication_period(state) or 1) > 1


def exchange_interval(state: Any) -> int:
    """Finds the steps from one exchange to the next, of a local method or of a chain that accumulates; else 1.

    Args:
      state: the state of one transformation or of a chain, or a tree that contains it.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, AccumulatedState))
    return next((node.every for node in nodes if isinstance(node, AccumulatedState)), communication_period(state) or 1)


def exchange_turns(state: Any) -> int:
    """Finds how many exchanges a local method takes to exchange all parameters once; 1 for other methods."""
    return next((found.method.turns for found in exchange_states(state)), 1)


def applies_step(metrics: ExchangeMetrics, undoes_skipped: bool) -> jax.Array:
    """Returns whether a step should change parameters and optimizer: () bool, False if a skipped exchange undoes it.

    Args:
      metrics: the exchange's.
      undoes_skipped: its method's.
    """
    ok = metrics.skipped == 0
    return ok if undoes_skipped else jnp.asarray(True)


def keep_states_unless(ok: jax.Array, new: Any, old: Any) -> Any:
    """Returns the new state if `ok`, else the old one; states of exchanges, and of chains around them, are always new.

    These have already kept what they must.
    """

    def is_kept(node: Any) -> bool:
        return is_exchange_state(node) or isinstance(node, AccumulatedState | DelayedState)

    return jax.tree.map(lambda n, o: n if is_kept(n) else keep_unless(ok, n, o), new, old, is_leaf=is_kept)


def update_with(
    tx: optax.GradientTransformation, gradients: Any, state: Any, params: Any, value: Any, value_fn: Callable[..., Any]
) -> tuple[Any, Any]:
    """Calls `tx.update` with the further arguments of a line search and of `reduce_on_plateau`.

    Args:
      tx: the chain; only a `jaxcomm.chain` gets `value_fn` and `grad`, and averages them over the workers.
      gradients: each worker's own.
      state: the chain's state.
      params: the parameters.
      value: the loss, the mean over all workers.
      value_fn: params -> each worker's own loss.
    """
    more: dict[str, Any] = {"value": value}
    if hasattr(tx, "links"):
        more |= {"grad": gradients, "value_fn": value_fn}
    try:
        return update_with_more(tx, gradients, state, params, more)
    except TypeError as error:
        if "keyword-only argument" in str(error):
            error.add_note(
                "A train step gives a jaxcomm.chain value=, grad= and value_fn=, and another transformation value= "
                "alone. Write jaxcomm.chain in the place of optax.chain. A pipeline gives none of them."
            )
        raise


def update_with_more(
    tx: optax.GradientTransformation, updates: Any, state: Any, params: Any, more: dict[str, Any]
) -> tuple[Any, Any]:
    """Calls `tx.update` with further arguments, or without them if it only says that it takes any (PSGD's Kron)."""

    def call() -> tuple[Any, Any]:
        return optax.with_extra_args_support(tx).update(updates, state, params, **more)

    try:
        # Traced by itself: of a call that fails, no collective is left in the step. A jaxcomm.chain does not fail so.
        return call() if hasattr(tx, "links") or not more else jax.jit(call, inline=True)()
    except TypeError as error:
        if not more or "unexpected keyword argument" not in str(error):
            raise
    return tx.update(updates, state, params)


def trained(params: Any) -> Any:
    """Returns the parameters that have gradients: the tree with None in place of integers, booleans and keys."""

    def is_trained(leaf: Any) -> bool:
        dtype = jnp.result_type(leaf)
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return not (is_key or dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer))

    return jax.tree.map(lambda leaf: leaf if is_trained(leaf) else None, params)


def with_untrained(own: Any, params: Any) -> Any:
    """Returns trained parameters together with the untrained ones of `params`; the inverse of `trained`."""
    return jax.tree.map(lambda new, old: old if new is None else new, own, params, is_leaf=lambda leaf: leaf is None)


def exchange_metrics(state: Any) -> ExchangeMetrics | None:
    """Finds the metrics of the exchange in an optimizer's state.

    Args:
      state: the state of one transformation or of an Optax chain.

    Returns:
      The metrics of the first exchange (with sharded parameters, of all groups together), or None if the state has no
      exchange of this library.
    """

    def is_found(node: Any) -> bool:
        return isinstance(node, ExchangeMetrics | ExchangeState)

    found = next((node for node in jax.tree.leaves(state, is_leaf=is_found) if is_found(node)), None)
    return found.metrics if isinstance(found, ExchangeState) else found


def bypassing(state: Any, tree: Any) -> frozenset[str]:
    """Returns the paths of the leaves whose gradients bypass the exchange, as `jax.tree_util.keystr` writes them.

    Args:
      state: an optimizer's state.
      tree: the parameters, or another tree of their structure.
    """
    found = list(exchange_states(state))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return frozenset(
        jax.tree_util.keystr(path) for path, leaf in leaves if any(bypasses(each, path, leaf) for each in found)
    )


def vary_exchanged(tree: Any, state: Any, axis_name: AxisName) -> Any:
    """Marks parameters as varying between workers, except those whose gradients bypass the exchange. Moves no bytes.

    Args:
      tree: the parameters, or another tree of their structure.
      state: the optimizer's state.
      axis_name: the axis of workers, or the axes.
    """
    paths = bypassing(state, trained(tree))

    def vary(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf if jax.tree_util.keystr(path) in paths else to_varying(leaf, axis_name)

    return jax.tree_util.tree_map_with_path(vary, tree)


def vary_rows(state: Any, others: tuple[str, ...]) -> Any:
    """Marks as varying what may differ in a state, since the branches of a conditional must agree on it.

    Rows differ along their axes, and everything along `others`, the axes of sharded parameters.
    """

    def vary(node: Any) -> Any:
        return to_varying(node, (*node.axes, *others) if is_per_worker(node) else others)

    return jax.tree.map(vary, state, is_leaf=is_per_worker)
