"""Dense layers over the devices of data-parallel convolutions: each holds a shard of the features."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName, axis_size, to_varying
from jaxcomm.collectives.messages import all_gather_rows, all_to_all, sum_scatter

Place = Literal["rows", "features"]
_PLACES: tuple[Place, Place] = ("rows", "features")


def split_dense(
    x: jax.Array,
    kernel_shard: jax.Array,
    bias_shard: jax.Array | None = None,
    *,
    axis_name: str = "data",
    inputs: Place = "rows",
    outputs: Place = "rows",
) -> jax.Array:
    """Multiplies the rows of all workers by a kernel of which each worker holds a shard.

    Between layers an array is either in rows, (B/K, N): each worker has all features of its own rows, as
    convolutions leave them; or in features, (B, N/K): each worker has some features of all rows. A kernel (N, M) is
    split by its outputs, (N, M/K), or by its inputs, (N/K, M), as the shape of the shard tells. Each worker receives
    (K-1)/K of these elements, and as many again in the backward pass, which sends errors the other way:

    | kernel     | inputs   | outputs  | moves                                             | elements    |
    | ---------- | -------- | -------- | ------------------------------------------------- | ----------- |
    | by outputs | either   | features | all-gather of x                                   | B N         |
    | by outputs | either   | rows     | the same, then all-to-all of y                    | B (N + M/K) |
    | by inputs  | features | either   | reduce-scatter of partial sums of y               | B M         |
    | by inputs  | rows     | either   | all-to-all of x, then the same                    | B (M + N/K) |

    So a layer that narrows is split by its inputs, and one that widens by its outputs. An all-reduce of the kernel's
    gradient would be 2 N M elements, whatever B is.

    The gradient of a shard is already reduced: it sums over the rows of all workers. Under `jax.grad` of each worker's
    own mean loss it is K times the gradient of the mean over all workers; `make_train_step(specs=)` divides by K.

    Args:
      x: (B/K, ..., N), each worker's own rows; or (B, ..., N/K), each worker's own features.
      kernel_shard: (N, M/K) or (N/K, M), each worker's own: from a kernel (N, M) with spec P(None, "data") or
        P("data").
      bias_shard: (M/K,), each worker's own; or, for outputs in rows, (M,), replicated.
      axis_name: the axis of workers.
      inputs: whether x is in "rows" or in "features".
      outputs: whether y is to be in "rows" or in "features".

    Returns:
      (B/K, ..., M), this worker's own rows; or (B, ..., M/K), this worker's own features, of all rows.

    Raises:
      ValueError: at trace time, if the shards do not fit x, or a dimension that is cut is not a multiple of K.

    References:
      Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
      https://arxiv.org/abs/1404.5997.
    """
    workers = axis_size(axis_name)
    m, by_outputs = _widths(x, kernel_shard, workers, inputs, outputs)
    is_whole_bias = _check_bias(bias_shard, m, workers, outputs)
    if by_outputs:
        axis = 0 if inputs == "rows" else x.ndim - 1
        y = all_gather_rows(x, axis_name, axis) @ kernel_shard  # (B, ..., M/K)
        if bias_shard is not None and not is_whole_bias:
            y = y + bias_shard
        y = features_to_rows(y, axis_name=axis_name) if outputs == "rows" else y
    else:
        x = rows_to_features(x, axis_name=axis_name) if inputs == "rows" else x  # (B, ..., N/K)
        y = x @ kernel_shard  # (B, ..., M), to be summed over the workers
        if bias_shard is not None and not is_whole_bias and outputs == "rows":  # each bias shard is in one worker's sum
            zeros = to_varying(jnp.zeros(m, bias_shard.dtype), axis_name)
            start = lax.axis_index(axis_name) * bias_shard.size
            y = y + lax.dynamic_update_slice(zeros, bias_shard, (start,))
        y = sum_scatter(_cut(y, 0 if outputs == "rows" else y.ndim - 1, workers), axis_name)
        if bias_shard is not None and outputs == "features":
            y = y + bias_shard
    return y + bias_shard if bias_shard is not None and is_whole_bias else y


def narrowing_spec(shape: tuple[int, int], axis_name: AxisName = "data") -> P:
    """Returns the spec of a kernel (N, M), from rows to rows: split by inputs if it narrows, else by outputs.

    This moves fewer bytes, see `split_dense`.
    """
    return P(axis_name) if shape[0] > shape[1] else P(None, axis_name)


def rows_to_features(x: jax.Array, *, axis_name: str = "data") -> jax.Array:
    """Turns each worker's own rows (B/K, ..., N) into its own features of all rows (B, ..., N/K).

    An all-to-all: each worker receives (K-1)/K of what it holds.

    Raises:
      ValueError: at trace time, if N is not a multiple of K.
    """
    _check_multiple("features", x.shape[-1], axis_size(axis_name))
    arrived = all_to_all(_cut(x, x.ndim - 1, axis_size(axis_name)), axis_name)  # (K, B/K, ..., N/K)
    return arrived.reshape(-1, *arrived.shape[2:])


def features_to_rows(x: jax.Array, *, axis_name: str = "data") -> jax.Array:
    """Turns each worker's own features of all rows (B, ..., N/K) into its own rows (B/K, ..., N).

    An all-to-all: each worker receives (K-1)/K of what it holds.

    Raises:
      ValueError: at trace time, if B is not a multiple of K.
    """
    _check_multiple("rows", x.shape[0], axis_size(axis_name))
    arrived = jnp.moveaxis(all_to_all(_cut(x, 0, axis_size(axis_name)), axis_name), 0, -2)  # (B/K, ..., K, N/K)
    return arrived.reshape(*arrived.shape[:-2], -1)


def _cut(x: jax.Array, axis: int, workers: int) -> jax.Array:
    """Cuts a dimension into K parts: (K, ...)."""
    return jnp.stack(jnp.split(x, workers, axis))


def _widths(x: jax.Array, kernel: jax.Array, workers: int, inputs: Place, outputs: Place) -> tuple[int, bool]:
    """Returns M, and whether the kernel is split by its outputs."""
    if inputs not in _PLACES or outputs not in _PLACES:
        raise ValueError(
            f"Activations must be in 'rows' or in 'features'; got inputs={inputs!r} and outputs={outputs!r}. Pass one."
        )
    if x.ndim < 2 or kernel.ndim != 2:
        raise ValueError(
            f"A dense layer must have rows of features and a matrix; got {x.shape} and a kernel {kernel.shape}. "
            "Flatten what comes from convolutions to (rows, features)."
        )
    n = x.shape[-1] * (workers if inputs == "features" else 1)
    by_outputs = kernel.shape[0] == n
    if not by_outputs and kernel.shape[0] * workers != n:
        raise ValueError(
            f"A shard of a kernel must have all {n} inputs or 1/{workers} of them; got {kernel.shape} for inputs "
            f"{x.shape} in {inputs}. Give the kernel the spec P(None, axis) or P(axis), and say where x is (inputs=)."
        )
    m = kernel.shape[1] * (workers if by_outputs else 1)
    if outputs == "rows":
        _check_multiple("rows", x.shape[0] * (workers if inputs == "rows" else 1), workers)
    else:
        _check_multiple("outputs", m, workers)
    return m, by_outputs


def _check_bias(bias: jax.Array | None, m: int, workers: int, outputs: Place) -> bool:
    """Returns whether a bias is replicated, (M,), rather than a shard."""
    if bias is None or (bias.shape == (m // workers,) and m % workers == 0):
        return False
    if bias.shape == (m,) and outputs == "rows":
        return True
    raise ValueError(
        f"A bias must be a shard ({m}/{workers},), or, for outputs in rows, may be whole, ({m},); got {bias.shape} for "
        f"outputs in {outputs}. Give it the spec P(axis), or P() for outputs in rows."
    )


def _check_multiple(noun: str, number: int, workers: int) -> None:
    if number % workers:
        raise ValueError(
            f"What is split over {workers} workers must be a multiple of their number; got {number} {noun}. Pad them, "
            "or use another number of workers."
        )
