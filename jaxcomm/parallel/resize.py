"""Carrying per-worker state over to another number of workers."""

from typing import Any

import jax
import numpy as np

from jaxcomm.parallel.state import is_per_worker
from jaxcomm.types import InnerRows, OwnedRows, PerWorker, SliceRows


def resize_workers(state: Any, workers: int) -> Any:
    """Folds or spreads every row-per-worker array to another number of rows, and keeps the mean over the rows.

    A residual is a gradient that was not applied yet, and reaches the parameters divided by the number of workers. So
    what must survive is the mean of the rows (the update that is still owed), not their sum. The rows are spread over
    the new workers in order: a new worker's row is the average of the old rows it covers. Thresholds are averaged
    alike, and a refresh is marked as due where a state has such a mark (`due`). A vector that the workers hold together
    (`OwnedRows`) is put together and dealt out again, and the parameters of a local method's workers are averaged.

    Args:
      state: an optimizer's state or a `TrainState`, on one host (NumPy or addressable arrays).
      workers: the new K.

    Returns:
      The state with (K, ...) NumPy rows.

    Raises:
      ValueError: for fewer than one worker, or a state of `hierarchical` or of slices along other axes.
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
        if isinstance(node, InnerRows):
            raise ValueError(
                "Shares of tensors lie with the workers of a group, got a state of hierarchical() to resize: go on "
                "with the mesh that the run began with."
            )
        if isinstance(node, SliceRows):
            raise ValueError(
                f"Rows of slices lie along {node.axes}, got a state of parameters in slices to resize: go on with the "
                "mesh that the run began with."
            )
        if isinstance(node, OwnedRows):  # every part has its owner: put together, and dealt out again
            return OwnedRows(np.repeat(np.asarray(node.whole())[None], workers, axis=0))
        if isinstance(node, PerWorker):
            return jax.tree.map(fold, node)
        if hasattr(node, "_replace") and "due" in getattr(node, "_fields", ()):
            children = {name: resize_workers(child, workers) for name, child in node._asdict().items()}
            return node._replace(**children)._replace(due=np.asarray(True))
        return node

    def is_leaf(node: Any) -> bool:
        return is_per_worker(node) or "due" in getattr(node, "_fields", ())

    return jax.tree.map(resize, state, is_leaf=is_leaf)


def _overlap(old: int, new: int) -> np.ndarray:
    """Returns the share of each old worker's row in each new one's: (new, old), rows sum to 1, columns to new/old."""
    edge_old, edge_new = np.arange(old + 1) / old, np.arange(new + 1) / new
    low = np.maximum(edge_new[:-1, None], edge_old[None, :-1])
    high = np.minimum(edge_new[1:, None], edge_old[None, 1:])
    return np.maximum(high - low, 0) * new
