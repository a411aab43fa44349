"""Messages from every worker to every other, or to the next one, and payloads as one message.

Between two CPU hosts, a large message goes by an all-reduce of integers: the sum of both workers' words, minus a
worker's own words, is exactly the other's words. This moves the same bytes, in both directions at once. In Gloo's other
collectives, the host that arrives second may send everything before it signals that it can receive, so that they take
up to twice as long.

Between TPUs, a message is padded to whole tiles: XLA turns other gathers and scatters into all-reduces, which move
twice the bytes.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxcomm.collectives.axis import AxisName, axis_names, axis_size, is_tracked
from jaxcomm.kernels.bits import LANES
from jaxcomm.kernels.platforms import traced_platform
from jaxcomm.kernels.scopes import EXCHANGE
from jaxcomm.kernels.vectors import computed_end_to_end
from jaxcomm.traffic import SPLIT_FROM, TILE_BYTES
from jaxcomm.types import Payload

LARGE = 1 << 18  # bytes of a message from which both directions at once are worth a second network round trip
SAME = "same_on_all_workers"  # the name, in traced programs, of the primitive that promises it

# JAX cannot know that two workers have joined the same rows. The primitive returns its first operand with the type of
# the second.
_same = Primitive(SAME)
_same.def_impl(lambda value, like: value)
_same.def_abstract_eval(lambda value, like: like)
mlir.register_lowering(_same, lambda ctx, value, like: [value])


def all_gather_same(value: jax.Array, axis_name: AxisName, is_read_once: bool = False) -> jax.Array:
    """Gathers every worker's value: (K, *shape), the same on every worker, and marked so where JAX tracks it.

    Each worker receives K - 1 values. What is read once need not be written to memory first, between two CPU hosts.
    """
    with jax.named_scope(EXCHANGE):
        if _is_by_pair(value, axis_name):
            rows = _in_order(value, swapped(value, axis_name), axis_name, is_read_once)
            return _same.bind(rows, jnp.zeros(rows.shape, rows.dtype))
        # XLA turns other gathers into all-reduces with zeros, of twice the bytes.
        message = _in_tiles(value) if traced_platform() == "tpu" else value
        if all(is_tracked(name) for name in axis_names(axis_name)):
            rows = lax.all_gather(message, axis_name, to="invarying")
        else:
            rows = lax.all_gather(message, axis_name)
        return rows if message is value else rows[:, : value.size].reshape(-1, *value.shape)


def all_gather_rows(value: jax.Array, axis_name: AxisName, axis: int = 0) -> jax.Array:
    """Concatenates the workers' arrays along a dimension, in the workers' order. Differentiable.

    Each worker receives K - 1 arrays.
    """
    if traced_platform() == "tpu":  # so that the gradient is scattered in tiles, too
        tiles = lax.all_gather(_in_tiles(value).reshape(-1, LANES), axis_name)
        rows = tiles.reshape(len(tiles), -1)[:, : value.size].reshape(-1, *value.shape)
        return jnp.concatenate([*rows], axis=axis)
    if not _is_by_pair(value, axis_name):
        return lax.all_gather(value, axis_name, axis=axis, tiled=True)
    rows = _in_order(value, swapped(value, axis_name), axis_name)
    return jnp.concatenate([rows[0], rows[1]], axis=axis)


def all_to_all(rows: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sends row j of (K, ...) to worker j; row i of the result is from worker i. Differentiable.

    Each worker receives (K-1)/K of its rows' bytes.
    """
    if not _is_by_pair(rows[0], axis_name):
        return lax.all_to_all(rows, axis_name, 0, 0)
    me = lax.axis_index(axis_name)
    rows = lax.optimization_barrier(rows)
    local_row, message = (lax.dynamic_index_in_dim(rows, row, keepdims=False) for row in (me, 1 - me))
    return _in_order(local_row, swapped(message, axis_name), axis_name)


def sum_of(vector: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sums the workers' vectors (n,); the sum is the same on every worker. Each receives 2 (K-1)/K of its bytes."""
    count = axis_size(axis_name)
    if traced_platform() != "tpu" or vector.nbytes < SPLIT_FROM * count * TILE_BYTES:
        return lax.psum(vector, axis_name)
    # Between slices, each device of a slice sends its part in whole tiles; for other sums, XLA sends more inside them.
    return lax.psum(_in_tiles(vector, count), axis_name)[: vector.size]


def sum_of_few(numbers: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sums a few numbers (m,), or one, of every worker; the sum is the same on every worker. Each receives (K-1) m.

    They go to all others at once: over Gloo in one network round trip, where an all-reduce takes 2 (K - 1).
    """
    if traced_platform() == "tpu":
        return lax.psum(numbers, axis_name)
    rows = jnp.broadcast_to(numbers, (axis_size(axis_name), *numbers.shape))
    total = lax.all_to_all(rows, axis_name, 0, 0).sum(0, numbers.dtype)
    return _same.bind(total, jnp.zeros(total.shape, total.dtype))


def sum_scatter(rows: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sums rows (K, ...) over the workers; worker i receives the sum of row i. Differentiable.

    Each worker receives (K-1)/K of its rows' bytes.
    """
    if traced_platform() == "tpu":  # otherwise XLA sums all rows, and keeps a part
        tiles = jax.vmap(_in_tiles)(rows).reshape(len(rows), -1, LANES)
        local_row = lax.psum_scatter(tiles, axis_name, scatter_dimension=0)
        return local_row.reshape(-1)[: rows[0].size].reshape(rows.shape[1:])
    if not _is_by_pair(rows[0], axis_name):
        return lax.psum_scatter(rows, axis_name, scatter_dimension=0)
    me = lax.axis_index(axis_name)
    rows = lax.optimization_barrier(rows)
    local_row, message = (lax.dynamic_index_in_dim(rows, row, keepdims=False) for row in (me, 1 - me))
    return local_row + swapped(message, axis_name)


def to_next(value: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sends a value to the next worker, the last one's to the first. Each worker receives one value."""
    if _is_by_pair(value, axis_name):
        return swapped(value, axis_name)
    workers = axis_size(axis_name)
    return lax.ppermute(value, axis_name, [(worker, (worker + 1) % workers) for worker in range(workers)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def swapped(value: jax.Array, axis_name: AxisName) -> jax.Array:
    """Returns the other one of two workers' value, bit for bit; 4 bytes a number."""
    # Without a barrier XLA would compute the words again for the difference.
    words = lax.optimization_barrier(lax.bitcast_convert_type(value, jnp.uint32))
    return lax.bitcast_convert_type(lax.psum(words, axis_name) - words, value.dtype)


swapped.defvjp(
    lambda value, axis_name: (swapped(value, axis_name), None),
    lambda axis_name, _, error: (swapped(error, axis_name),),
)


def _is_by_pair(message: Any, axis_name: AxisName) -> bool:
    """Returns whether messages, one from every worker, go by an all-reduce; only on a mesh."""
    is_large = message.dtype.itemsize == 4 and message.size * 4 >= LARGE
    on_mesh = set(axis_names(axis_name)) <= set(jax.sharding.get_abstract_mesh().manual_axes)
    return is_large and on_mesh and axis_size(axis_name) == 2 and traced_platform() in (None, "cpu")


def _in_tiles(value: jax.Array, count: int = 1) -> jax.Array:
    """Returns a message as a vector, padded to a multiple of `count` tiles."""
    return jnp.pad(value.reshape(-1), (0, -value.size % (count * TILE_BYTES // value.dtype.itemsize)))


def _in_order(local: jax.Array, peer: jax.Array, axis_name: AxisName, is_read_once: bool = False) -> jax.Array:
    """Returns the rows of both workers, (2, ...)."""
    is_first = lax.axis_index(axis_name) == 0
    rows = jnp.stack([jnp.where(is_first, local, peer), jnp.where(is_first, peer, local)])
    return rows if is_read_once else lax.optimization_barrier(rows)  # else XLA would compute them again for each use


def fuse(payload: Payload) -> jax.Array:
    """Puts the arrays of a payload, all (m,) uint32, end to end in the order of their names."""
    return computed_end_to_end([payload[name] for name in sorted(payload)])


def split_words(words: jax.Array, like: dict[str, Any]) -> Payload:
    """Cuts a fused payload apart again; `like` gives the shapes that `fuse` was given."""
    names = sorted(like)
    ends = itertools.accumulate(like[name].size for name in names)
    return {name: words[end - like[name].size : end] for name, end in zip(names, ends, strict=True)}
