"""Late lookup: the rows of an embedding table that a batch touched cross the network, not the table's gradient.

A lookup is the product of one-hot inputs and the table. Its gradient has as many rows as the table, but all are zero
except those that some input touched. The ids and gradients of those rows travel, and every worker sums them late.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.collectives.axis import OTHER_USES, AxisName, axis_names, axis_size, is_in_scope, to_varying, varies
from jaxcomm.collectives.messages import all_gather_same, fuse, split_words
from jaxcomm.kernels.numerics import once_differentiable
from jaxcomm.layers.late_multiply import check_same
from jaxcomm.layers.sharded_lookup import from_start, in_table
from jaxcomm.traffic import Traffic

_REMEDY = (
    "Give the exchange a where= that leaves the table out (in your own jax.shard_map, take it out of jax.lax.pcast), "
    "or look it up by table[ids]"
)
_ONCE = "Look it up by table[ids], and exchange the gradient"


def late_lookup(table: jax.Array, ids: jax.Array, *, axis_name: AxisName = "data") -> jax.Array:
    """Looks up rows of a replicated table; its gradient is the workers' mean without an all-reduce.

    The backward pass, on every worker,

      1. sums the errors of each row that its own ids touched
      2. gathers the ids and the sums of all workers
      3. adds them to a table of zeros, one worker after the other: (1/K) sum_k G_k is the mean over the workers of the
         gradients of their own (mean) losses, as from an exchange

    Every worker adds the same numbers in the same order, so that the replicas stay equal bit for bit. The gradient is
    already reduced, and must bypass the exchange: its `where=` must leave the table out. `make_train_step` and
    `simulate` raise an error at trace time if it does not.

    Each worker receives (K-1) n (1 + D) words of 4 bytes, where n is the number of its own ids. Equal ids count too,
    since shapes are static (see `late_lookup_traffic`). A dense exchange is 2 (K-1)/K * 4 R D bytes. The gradient is a
    dense array, of 4 R D bytes, on every worker.

    Args:
      table: (R, D) float32, replicated.
      ids: (...) int32, each worker's own.
      axis_name: the axis of workers, or the axes. If none is in scope, as in evaluation, there is one worker, and this
        is the plain lookup with its plain gradient.

    Returns:
      (..., D) float32, each worker's own. An id that is not in the table is taken as by plain indexing: one below 0
      counts from the end; another is that of the nearest row, and has no gradient.

    Raises:
      ValueError: for a table or ids of another shape or type, if the table differs between workers, and for the
        gradient of its gradient.
    """
    if table.ndim != 2 or table.dtype != jnp.float32 or ids.dtype != jnp.int32:
        raise ValueError(
            "A table must be (R, D) of float32, and ids of int32; got "
            f"{table.shape} of {table.dtype} and ids of {ids.dtype}. Cast them."
        )
    if not is_in_scope(axis_name):
        return table[ids]
    if varies(table, OTHER_USES):
        return jnp.zeros(table.shape, table.dtype)[ids]  # the train step is looking for other uses only
    check_same("late_lookup", {"table": table}, _REMEDY, axis_name)
    rows: jax.Array = _late(axis_name, table, ids.reshape(-1))
    return rows.reshape(*ids.shape, -1)


def late_lookup_traffic(ids: int, dim: int, workers: int, *, axis_name: AxisName = "data") -> Traffic:
    """Returns what the gradient of a late lookup moves: a gather.

    Args:
      ids: n, the ids that one worker looks up in a step.
      dim: D, columns of the table.
      workers: K.
      axis_name: the axis of workers, or the axes.
    """
    return Traffic("all_gather", 4 * ids * (1 + dim), workers, axes=axis_names(axis_name))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _late(axis_name: AxisName, table: jax.Array, ids: jax.Array) -> jax.Array:
    del axis_name
    return table[ids]


def _late_forward(
    axis_name: AxisName, table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    del axis_name
    table = once_differentiable(table, "late_lookup", _ONCE)
    return table[ids], (table, ids)


def _late_backward(
    axis_name: AxisName, saved: tuple[jax.Array, jax.Array], errors: jax.Array
) -> tuple[jax.Array, None]:
    table, ids = saved
    errors = once_differentiable(errors, "late_lookup", _ONCE)
    ids = from_start(ids, len(table))
    ids = jnp.where(in_table(ids, len(table)), ids, len(table))
    touched, slot = jnp.unique(ids, return_inverse=True, size=ids.size, fill_value=table.shape[0])  # (n,), empty last
    sums = jnp.zeros_like(errors).at[slot].add(errors / axis_size(axis_name))  # (n, D)
    payload = {"ids": touched.astype(jnp.uint32), "rows": lax.bitcast_convert_type(sums, jnp.uint32).reshape(-1)}
    gathered = all_gather_same(to_varying(fuse(payload), axis_name), axis_name)  # (K, n (1 + D))

    def add(total: jax.Array, words: jax.Array) -> tuple[jax.Array, None]:
        part = split_words(words, payload)
        rows = lax.bitcast_convert_type(part["rows"], jnp.float32).reshape(errors.shape)
        return total.at[part["ids"]].add(rows, mode="drop"), None

    mean, _ = lax.scan(add, jnp.zeros(table.shape, table.dtype), gathered)
    return mean, None


_late.defvjp(_late_forward, _late_backward)
