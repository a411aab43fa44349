"""Carrying per-worker state over to another number of workers."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.exchange import ExchangeState
from jaxcomm.types import PerWorker, is_per_worker, join_parts


def resize_workers(state: Any, workers: int) -> Any:
    """Changes the number of rows of every `PerWorker` array, and keeps the mean over the rows.

    A residual is a gradient that was not applied yet, and reaches the parameters divided by the number of workers. So
    the mean of the rows (the update that is still owed) must be preserved, not their sum. The rows are spread over the
    new workers in order: a new worker's row is the average of the old rows it covers. Momenta and thresholds are
    averaged too, and so are the parameters of a local method's workers. A vector that the workers hold together
    (`resizing="parts"`) is joined and divided again. A method may mark a refresh as due (`Exchange.resized`).

    An array that is sharded over other axes of the mesh keeps its shards, each with a row for every new worker. Under
    `hierarchical`, workers are added and removed in whole groups: each share keeps the mean of the groups' rows.

    Args:
      state: an optimizer's state or a `TrainState`, on one host (NumPy or addressable arrays). For the state of a
        pipeline, whose first dimension is that of the stages, call `step.resize`.
      workers: the new K; under `hierarchical`, the workers of all groups.

    Returns:
      The state with (K, ...) NumPy rows.

    Raises:
      ValueError: for fewer than one worker, for a number of workers that is not a multiple of the group size, and for
        the state of a pipeline.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1; got {workers}. Pass a positive integer.")
    nodes = [node for node in jax.tree.leaves(state, is_leaf=is_per_worker) if is_per_worker(node)]
    # State that differs between shards alone has a row for each shard.
    shards = {(): 1} | {node.axes: len(node.rows) for node in nodes if node.shards == len(node.axes)}

    def fold(node: PerWorker, axes: tuple[str, ...]) -> PerWorker:
        own = node.axes[len(node.axes) - node.shards :]
        if own == node.axes:
            return node
        inside = shards[own] // shards[tuple(name for name in own if name not in axes)]  # workers in a group
        if workers % inside:
            raise ValueError(
                f"Workers must make whole groups of {inside}, the number along {own[0]!r}; got {workers}. Pass a "
                f"multiple of {inside}."
            )
        new = workers // inside
        return replace(node, rows=jax.tree.map(lambda rows: _FOLDS[node.resizing](rows, shards[own], new), node.rows))

    def walk(tree: Any, axes: tuple[str, ...] | None) -> Any:
        """Resizes a tree, from the state of an exchange over these axes; None for a tree outside of any exchange."""

        def resize(node: Any) -> Any:
            if is_per_worker(node):
                return fold(node, node.axes if axes is None else axes)
            if not isinstance(node, ExchangeState):
                return node
            if np.ndim(node.step):
                raise ValueError(
                    f"A state must have the workers first to be resized; got stages first in that of "
                    f"{node.method.name}. Call step.resize(state, workers) of the pipeline's step."
                )
            over = node.method.axes if axes is None else axes
            parts = {name: walk(getattr(node, name), over) for name in ("residual", "memory", "others", "worker")}
            worker = jax.tree.map(lambda rows: np.full_like(rows, -1), parts.pop("worker"))
            return node.method.resized(node.replace(worker=worker, **parts))

        return jax.tree.map(resize, tree, is_leaf=lambda node: is_per_worker(node) or isinstance(node, ExchangeState))

    return walk(state, None)


def _mean(rows: Any, shards: int, new: int) -> np.ndarray:
    """Averages rows (K * shards, ...), workers first, to (new * shards, ...): every shard keeps its mean."""
    rows = np.asarray(rows)
    old = len(rows) // shards
    flat = _overlap(old, new) @ rows.reshape(old, -1).astype(np.float64)
    flat = flat if jnp.issubdtype(rows.dtype, jnp.inexact) else np.rint(flat)  # counts, equal in every row
    return flat.astype(rows.dtype).reshape(new * shards, *rows.shape[1:])


def _parts(rows: Any, shards: int, new: int) -> np.ndarray:
    """Joins each shard's vector, of which every row holds its worker's part, and gives it to all new rows."""
    rows = np.asarray(rows).reshape(-1, shards, np.shape(rows)[-1])
    whole = [np.asarray(join_parts(rows[:, shard])) for shard in range(shards)]
    return np.concatenate([np.stack(whole)] * new)


def _batch(rows: Any, shards: int, new: int) -> np.ndarray:
    """Redistributes the rows of a batch (K, M, b, ...), scaled as each worker's loss is a mean over more or fewer."""
    del shards  # a boundary is between stages
    rows = np.asarray(rows)
    old, micro, size = rows.shape[:3]
    if old * size % new:
        raise ValueError(
            f"The number of workers must divide the {old * size} rows of a micro-batch, for which a boundary keeps "
            f"residuals; got {new}. Pass a number that does."
        )
    return (rows * (new / old)).astype(rows.dtype).reshape(new, micro, -1, *rows.shape[3:])


_FOLDS = {"mean": _mean, "parts": _parts, "batch": _batch}


def _overlap(old: int, new: int) -> np.ndarray:
    """Returns the weight of each old row in each new row: (new, old); rows sum to 1, columns to new/old."""
    edge_old, edge_new = np.arange(old + 1) / old, np.arange(new + 1) / new
    low = np.maximum(edge_new[:-1, None], edge_old[None, :-1])
    high = np.minimum(edge_new[1:, None], edge_old[None, 1:])
    return np.maximum(high - low, 0) * new
