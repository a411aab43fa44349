"""Embedding tables that are sharded over the workers: rows are looked up and changed on the worker that holds them."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.collectives.axis import AxisName, axis_size


def sharded_lookup(table: jax.Array, ids: jax.Array, *, by: str, axis_name: AxisName = "data") -> jax.Array:
    """Looks up rows of a table of which each worker holds a shard; its gradient is dense, of the shard's size.

    All ids are gathered, and vectors come back by an all-to-all. With n ids per worker, each worker receives (K-1) n
    words of ids, and (K-1) n D / K words of vectors by columns, or (K-1) n D by rows.

    Args:
      table: (R, D / K) by columns, or (R / K, D) by rows: a worker's shard.
      ids: (B / K, ...) int32, a worker's own.
      by: "columns" or "rows".
      axis_name: the axis of workers, or the axes.

    Returns:
      (B / K, ..., D), a worker's own. An id that is not in the table is taken as by plain indexing; see
      `from_start`.
    """
    return send_rows(table, gather_ids(ids, axis_name), by, axis_name)


def from_start(ids: jax.Array, rows: int) -> jax.Array:
    """Returns ids that count from the start of a table, as plain indexing does: -1 is its last row.

    One that is still outside is that of the nearest row, and has no gradient.
    """
    return jnp.where(ids < 0, ids + rows, ids)


def in_table(ids: jax.Array, rows: int) -> jax.Array:
    """Returns whether ids are in a table of R rows."""
    return (ids >= 0) & (ids < rows)


def gather_ids(ids: jax.Array, axis_name: AxisName) -> jax.Array:
    """Returns the ids of all workers, (B, ...) from (B / K, ...)."""
    return lax.all_gather(ids, axis_name, tiled=True)


def send_rows(table: jax.Array, everyones: jax.Array, way: str, axis_name: AxisName) -> jax.Array:
    """Sends every worker the vectors of its ids; see `sharded_lookup`.

    Args:
      table: a worker's shard.
      everyones: (B, ...), from `gather_ids`.
      way: "columns" or "rows".
      axis_name: the axis of workers, or the axes.
    """
    workers = axis_size(axis_name)
    rows = table.shape[0] * (workers if way == "rows" else 1)
    everyones = from_start(everyones, rows)
    nearest = _places(table, jnp.clip(everyones, 0, rows - 1), way, axis_name)
    vectors = table.at[nearest].get(mode="fill", fill_value=0)  # (B, ..., D or D / K)
    if way == "columns":
        local = lax.all_to_all(vectors, axis_name, split_axis=0, concat_axis=vectors.ndim - 1, tiled=True)
    else:
        parts = vectors.reshape(workers, -1, *vectors.shape[1:])
        local = lax.all_to_all(parts, axis_name, split_axis=0, concat_axis=0).sum(axis=0)  # one of K is not zero
    ids = lax.dynamic_slice_in_dim(everyones, lax.axis_index(axis_name) * local.shape[0], local.shape[0])
    return jnp.where(in_table(ids, rows)[..., None], local, lax.stop_gradient(local))


def add_to_rows(table: jax.Array, everyones: jax.Array, changes: jax.Array, way: str, axis_name: AxisName) -> jax.Array:
    """Adds every worker's changes to the rows of its ids, and to no other row.

    Each worker receives as many bytes as for the vectors in `sharded_lookup`.

    Args:
      table: a worker's shard.
      everyones: (B, ...), from `gather_ids`.
      changes: (B / K, ..., D), a worker's own; changes of equal ids are summed.
      way: "columns" or "rows".
      axis_name: the axis of workers, or the axes.

    Returns:
      The new shard.
    """
    if way == "columns":
        owned = lax.all_to_all(changes, axis_name, split_axis=changes.ndim - 1, concat_axis=0, tiled=True)
    else:
        owned = lax.all_gather(changes, axis_name, tiled=True)
    rows = table.shape[0] * (axis_size(axis_name) if way == "rows" else 1)
    return table.at[_places(table, from_start(everyones, rows), way, axis_name)].add(owned, mode="drop")


def _places(table: jax.Array, everyones: jax.Array, way: str, axis_name: AxisName) -> jax.Array:
    """Returns the ids' row indices in a shard; its number of rows for ids that are not in it."""
    first = lax.axis_index(axis_name) * table.shape[0] if way == "rows" else 0
    offsets = everyones - first
    return jnp.where(in_table(offsets, table.shape[0]), offsets, table.shape[0])
