"""Sharded weights in a few bits: gathered as differences, and their gradients scattered with a residual."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.checks import check_range
from jaxcomm.codecs.quantize import Nearest, encode
from jaxcomm.collectives.axis import AxisName, axis_size, to_varying
from jaxcomm.collectives.messages import all_gather_same, all_to_all
from jaxcomm.kernels.numerics import is_accumulable, once_differentiable
from jaxcomm.kernels.scopes import DECODE, ENCODE
from jaxcomm.types import PyTree

BUCKET = 128  # values that share a scale: a quarter of a bit each
_NAN = np.uint32(0x7FC00000)


def quantized_gather(
    shards: PyTree, held: Any, residual: PyTree, *, axis_name: AxisName = "data", bits: int = 4
) -> tuple[Any, Any]:
    """Gathers sharded weights in 4 or 8 bits, and scatters their gradients in as many.

    For a function that is manual over the axis. On each of K workers, with a shard s of weights of which all hold a
    copy h:

      1. d = s - h, for the worker's own shard, is rounded to the nearest level of its bucket and gathered
      2. h = h + the d of all workers, the same on every worker; the rounding error is part of the next d
      3. backward: x = gradient of h + residual, rounded in the same way; row j of K goes to worker j
      4. the residual is x minus what was sent; the gradient of s is the sum of the K rows that arrived

    So the sum of the gradients and the new residuals equals the sum of the workers' own gradients and the residuals, to
    float rounding. The "gradient" with respect to the residual is the new residual; that of `held` is zero. If x is not
    finite on some worker, or its gradient has a number of 2^100 or more, the gradients of all workers are NaN, and all
    residuals stay: leave the shards unchanged in that step.

        def loss(shards, residual, held, batch):
            weights, held = quantized_gather(shards, held, residual)
            return loss_fn(weights, batch), held

        (gradients, residual), held = jax.grad(loss, argnums=(0, 1), has_aux=True)(shards, residual, held, batch)

    Each worker receives, for n weights, (K-1)/K * 4.25 n bits forward and as many backward, 8.5 in all; with 8 bits
    16.5. A shard of a tensor is padded to whole buckets of 128. Memory: 4 n bytes for the copy, 4 n for the residual.

    Source: "SDP4Bit", 2024, https://arxiv.org/abs/2410.15526 (differences of weights in 4 bits), and "LoCo", 2024,
    https://arxiv.org/abs/2407.04480 (gradients in 4 bits with an error memory), after summaries of both. The residual
    here is the whole error, in float32; LoCo's memory is a moving average in 8 bits. There is no Hadamard transform.

    Args:
      shards: a pytree of each worker's rows of the weights, (m, ...) float32; they differ between workers.
      held: the weights that all workers hold, (K m, ...) float32, replicated; initially equal to the shards.
      residual: a tree like `held`, each worker's own; initially zeros.
      axis_name: the axis of workers.
      bits: bits a value, 4 or 8.

    Returns:
      (weights, held): the same numbers twice, trees like `held`. Use the first in the loss: it is marked as differing
      between workers, so that its gradient is each worker's own. Pass the second to the next step.

    Raises:
      ValueError: for another number of bits, trees, shapes or types that do not belong together, and outside the axis.
    """
    check_range("bits", bits, "4 or 8", bits in (4, 8) and not isinstance(bits, bool), "4 is that of the papers")
    workers, tree = axis_size(axis_name), jax.tree.structure(shards)
    trees = [jax.tree.leaves(argument) for argument in (shards, held, residual)]
    holds = tree == jax.tree.structure(held) == jax.tree.structure(residual) and bool(trees[0])
    check_range("held and residual", tree, "trees like shards, of at least one array", holds, "Shard the same weights")
    for shard, copy, error in zip(*trees, strict=True):
        kinds = [f"{array.dtype}{list(array.shape)}" for array in (shard, copy, error)]
        is_float = all(array.dtype == jnp.float32 for array in (shard, copy, error))
        fits = shard.ndim > 0 and copy.shape == error.shape == (workers * shard.shape[0], *shard.shape[1:])
        rule = f"float32, with {workers} times the rows of a shard in held and residual"
        check_range("A shard, held and residual", kinds, rule, is_float and fits, "Cut the first dimension evenly")
    return _gather((axis_name, bits), shards, held, to_varying(residual, axis_name))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(settings, shards, copies, residual):
    del residual
    axis_name, width = settings
    workers, codec = axis_size(axis_name), _codec(width)
    rows, shard_vector = _rows(copies, workers), _rows(shards, 1)[0]  # (K, m) and (m,)
    with jax.named_scope(ENCODE):
        words = encode(codec, shard_vector - rows[lax.axis_index(axis_name)], 0)
    messages = all_gather_same(words, axis_name)
    with jax.named_scope(DECODE):
        rows = rows + jax.vmap(lambda row: codec.decode(row, shard_vector.size, 0))(messages)
    copies = _unrows(rows, copies)
    return to_varying(copies, axis_name), copies


def _gather_forward(settings, shards, copies, residual):
    return _gather(settings, shards, copies, residual), residual


def _gather_backward(settings, residual, gradients):
    axis_name, width = settings
    workers, codec = axis_size(axis_name), _codec(width)
    gradients = once_differentiable(gradients, "quantized_gather", "Gather the weights by jax.lax.all_gather")
    gradient, old = _rows(gradients[0], workers), _rows(residual, workers)  # (K, m)
    x, m = gradient + old, gradient.shape[1]
    ok = is_accumulable(x.reshape(-1), gradient.reshape(-1))
    with jax.named_scope(ENCODE):
        words = jax.vmap(lambda row: encode(codec, row, 0))(x)
        coded = jnp.where(ok | (np.arange(words.shape[1]) >= m // BUCKET), words, _NAN)  # NaN scales tell all workers
    arrived = all_to_all(coded, axis_name)
    with jax.named_scope(DECODE):
        first = codec.decode(arrived[0], m, 0)
        total, _ = lax.scan(lambda total, row: (total + codec.decode(row, m, 0), None), first, arrived[1:])
        error = x - jax.vmap(lambda row: codec.decode(row, m, 0))(words)
    error = jnp.where(jnp.isfinite(total).all(), error, old)
    shard_like = jax.tree.map(lambda leaf: leaf[: leaf.shape[0] // workers], residual)
    return _unrows(total[None], shard_like), None, _unrows(error, residual)


_gather.defvjp(_gather_forward, _gather_backward)


def _codec(width: int) -> Nearest:
    return Nearest(width, BUCKET, "max", None)


def _rows(tree: PyTree, count: int) -> jax.Array:
    """Puts tensors (count * r, ...) side by side, each padded to whole buckets: (count, m)."""
    rows = [leaf.reshape(count, -1) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate([jnp.pad(row, ((0, 0), (0, -row.shape[1] % BUCKET))) for row in rows], axis=1)


def _unrows(rows: jax.Array, like: PyTree) -> Any:
    """Cuts (count, m) into tensors again, in the shapes of `like`; the inverse of `_rows`."""
    leaves, tree = jax.tree.flatten(like)
    arrays, start = [], 0
    for leaf in leaves:
        size = leaf.size // rows.shape[0]
        arrays.append(rows[:, start : start + size].reshape(leaf.shape))
        start += -(-size // BUCKET) * BUCKET
    return tree.unflatten(arrays)
