"""What the rest of the library asks of the states of exchanges: their rows, period, metrics, and what bypasses them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcomm.collectives.axis import AxisName, to_varying
from jaxcomm.exchange import ExchangeState, bypasses, exchange_states
from jaxcomm.types import ExchangeMetrics, is_per_worker


def check_rows(state: Any, workers: int) -> None:
    """Refuses a state whose rows are not those of their workers, as far as its numbers are at hand.

    Args:
      state: any tree with an optimizer's state in it.
      workers: K.

    Raises:
      ValueError: naming the exchange and the workers.
    """
    for found in exchange_states(state):
        check_rows((found.memory, found.others), workers)
        rows = None if found.worker is None or found.worker.shards else found.worker.rows
        if isinstance(rows, Tracer) or not isinstance(rows, jax.Array | np.ndarray):
            continue
        for shard in jnp.asarray(rows).addressable_shards:
            got = np.asarray(shard.data)[:, 0]
            wanted = np.arange(len(got)) + (shard.index[0].start or 0)
            if ((got >= 0) & (got != wanted)).any() or (len(rows) == 1 < workers and got[0] >= 0):
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


def exchange_metrics(state: Any) -> ExchangeMetrics | None:
    """Finds the metrics of the exchange in an optimizer's state.

    Args:
      state: the state of one transformation or of an Optax chain.

    Returns:
      The metrics of the first exchange (of sharded parameters, those of all groups together), or None where no
      transformation of this library is in it.
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
    """Makes parameters vary between workers, except those whose gradients bypass the exchange. Free: no bytes.

    Args:
      tree: the parameters, or another tree of their structure.
      state: the optimizer's state.
      axis_name: the axis of workers, or the axes.
    """
    paths = bypassing(state, tree)

    def vary(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf if jax.tree_util.keystr(path) in paths else to_varying(leaf, axis_name)

    return jax.tree_util.tree_map_with_path(vary, tree)


def vary_rows(state: Any, others: tuple[str, ...]) -> Any:
    """Marks what may differ in a state, as branches of a conditional must agree about it.

    Rows differ along their axes, and everything along `others`, axes of a model that is sharded.
    """

    def vary(node: Any) -> Any:
        return to_varying(node, (*node.axes, *others) if is_per_worker(node) else others)

    return jax.tree.map(vary, state, is_leaf=is_per_worker)
