"""Carrying per-worker state over to another number of workers."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxcomm.exchange import ExchangeState
from jaxcomm.types import is_per_worker, join_parts


def resize_workers(state: Any, workers: int) -> Any:
    """Folds or spreads every row-per-worker array to another number of rows, and keeps the mean over the rows.

    A residual is a gradient that was not applied yet, and reaches the parameters divided by the number of workers. So
    what must survive is the mean of the rows (the update that is still owed), not their sum. The rows are spread over
    the new workers in order: a new worker's row is the average of the old rows it covers. Thresholds are averaged
    too, and a method may mark a refresh as due (`Exchange.resized`). A vector that the workers hold together
    (`resizing="parts"`) is put together and dealt out again, and the parameters of a local method's workers are
    averaged.

    Args:
      state: an optimizer's state or a `TrainState`, on one host (NumPy or addressable arrays).
      workers: the new K.

    Returns:
      The state with (K, ...) NumPy rows.

    Raises:
      ValueError: for fewer than one worker, or a state of `hierarchical` or of shards along other axes.
    """
    if workers < 1:
        raise ValueError(f"A run has at least one worker, got {workers}: pass a positive integer.")

    def fold(rows: Any) -> np.ndarray:
        rows = np.asarray(rows)
        weights = _overlap(rows.shape[0], workers)
        flat = weights @ rows.reshape(rows.shape[0], -1).astype(np.float64)
        flat = flat if np.issubdtype(rows.dtype, np.inexact) else np.rint(flat)  # counts, the same in every row
        return flat.astype(rows.dtype).reshape(workers, *rows.shape[1:])

    def resize(node: Any) -> Any:
        if isinstance(node, ExchangeState):
            parts = ("residual", "memory", "others")
            worker = node.worker and replace(node.worker, rows=np.full((workers, 1), -1, np.int32))
            resized = {name: walk(getattr(node, name)) for name in parts}
            return node.method.resized(node.replace(worker=worker, **resized))
        if not is_per_worker(node):
            return node
        if node.shards:
            raise ValueError(
                f"Rows must belong to whole workers to be resized; got rows of shards, along {node.axes} "
                "(hierarchical, or sharded parameters). Continue with the mesh that the run began with."
            )
        if node.resizing == "parts":  # every part has its owner: put together, and dealt out again
            return replace(node, rows=np.repeat(np.asarray(join_parts(node.rows))[None], workers, axis=0))
        return jax.tree.map(fold, node)

    def walk(tree: Any) -> Any:
        return jax.tree.map(resize, tree, is_leaf=lambda node: is_per_worker(node) or isinstance(node, ExchangeState))

    return walk(state)


def _overlap(old: int, new: int) -> np.ndarray:
    """Returns the share of each old worker's row in each new one's: (new, old), rows sum to 1, columns to new/old."""
    edge_old, edge_new = np.arange(old + 1) / old, np.arange(new + 1) / new
    low = np.maximum(edge_new[:-1, None], edge_old[None, :-1])
    high = np.minimum(edge_new[1:, None], edge_old[None, 1:])
    return np.maximum(high - low, 0) * new
