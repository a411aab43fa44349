"""Late-multiply: a dense layer whose inputs and errors cross the network, not its gradient.

A kernel's gradient X^T E is as large as the kernel, N x M, however few rows X (B x N) and E (B x M) have. With a small
batch, X and E are fewer bytes than their product: they travel, and every worker multiplies late.
"""

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.collectives.axis import (
    ALL_EXCHANGED,
    OTHER_USES,
    AxisName,
    axis_names,
    axis_size,
    is_in_scope,
    to_varying,
    varies,
)
from jaxcomm.collectives.messages import all_gather_same
from jaxcomm.kernels.numerics import once_differentiable
from jaxcomm.traffic import Traffic

MODES = ("auto", "late", "reduce")
_ONCE = "Pass mode='reduce', and exchange the gradient"
_REMEDY = (
    "Give the exchange where=plan.exchanges, of a plan that has this layer (in your own jax.shard_map, take the "
    "parameter out of jax.lax.pcast), or pass mode='reduce' to the layer"
)


def late_multiply(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    axis_name: AxisName = "data",
    mode: str = "auto",
) -> jax.Array:
    """Multiplies x with the kernel of a dense layer; its gradient is the workers' mean without an all-reduce.

    With "late" the backward pass, on every worker,

      1. computes the gradient of its own x, E W^T, which stays local
      2. gathers all workers' rows of X and of the errors E
      3. multiplies them: (1/K) sum_k X_k^T E_k is the mean over the workers of the gradients of their own (mean)
         losses, as from an exchange; (1/K) times the sum of all rows of E is the same for the bias

    So the gradients of kernel and bias are already reduced, and must bypass the exchange: pass it
    `where=plan.exchanges`. `make_train_step` and `simulate` raise an error at trace time if the exchange and the layers
    do not agree about a parameter.

    Each worker receives (K-1) (R N + R M) numbers of the type of x, where R is the number of its own rows (see
    `late_traffic`). A dense exchange of the kernel is 2 (K-1)/K * 4 N M bytes. Each worker computes K times the
    product.

    Args:
      x: (..., N), each worker's own rows; float32, bfloat16 or float16. The product is computed, and the errors travel,
        in this type.
      kernel: (N, M), replicated with "late"; differs between workers with "reduce".
      bias: (M,) or None; like the kernel.
      axis_name: the axis of workers, or the axes. If none is in scope, as in evaluation, there is one worker, and this
        is the plain product with its plain gradient.
      mode: "late"; "reduce", the plain product, whose gradient is to be exchanged; or "auto", which is "late" exactly
        if that moves fewer bytes than a dense exchange of the kernel. With 4 bytes a number, it does if the global
        batch, in rows, is below 2 N M / (N + M). For another exchange, ask `plan_late_multiply`, and pass its
        `plan.mode(path)`.

    Returns:
      (..., M) in the type of x, each worker's own. Gradients of kernel and bias have the types of these, and are
      summed in float32.

    Raises:
      ValueError: for shapes that do not fit, and an unknown mode; with "late", if the kernel differs between workers,
        and for the gradient of its gradient.

    References:
      Yang et al., "Practical Lessons of Distributed Deep Learning", 2017, section 2.1.
    """
    _check(x, kernel, bias, mode)
    rows = x.reshape(-1, x.shape[-1])  # (R, N)
    y: jax.Array
    if not is_in_scope(axis_name) or not is_late(mode, rows, kernel, axis_size(axis_name)):
        y = _product(rows, kernel, bias)
    elif any(varies(leaf, OTHER_USES) for leaf in (kernel, bias) if leaf is not None):
        y = _product(rows, jnp.zeros(kernel.shape, kernel.dtype), None)  # the train step is looking for other uses only
    else:
        leaves = {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}
        check_same("late_multiply", leaves, _REMEDY, axis_name)
        y = _late(axis_name, rows, kernel, bias)
    return y.reshape(*x.shape[:-1], kernel.shape[1])


def is_late(mode: str, rows: jax.Array, kernel: jax.Array, workers: int) -> bool:
    """Returns whether a layer with this mode multiplies late; `rows` (R, N) are one worker's."""
    if mode != "auto":
        return mode == "late"
    late = late_traffic(rows.shape[0] * workers, kernel.shape, workers, rows.dtype.itemsize)
    return sum(traffic.received for traffic in late) < reduce_traffic(kernel.shape, workers).received


def late_traffic(
    global_batch: int, shape: tuple[int, ...], workers: int, itemsize: int, axes: tuple[str, ...] = ()
) -> tuple[Traffic, Traffic]:
    """Returns what late-multiply moves for a kernel of a shape (N, M): the gathers of the inputs and of the errors."""
    rows = global_batch // workers
    inputs, errors = (Traffic("all_gather", 4 * -(-rows * n * itemsize // 4), workers, axes=axes) for n in shape)
    return inputs, errors


def reduce_traffic(shape: tuple[int, ...], workers: int) -> Traffic:
    """Returns what a dense exchange of a kernel's gradient moves."""
    return Traffic("all_reduce", 4 * math.prod(shape), workers)


def _check(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}. 'auto' moves the fewest bytes.")
    n, m = kernel.shape if kernel.ndim == 2 else (None, None)
    if n is None or x.ndim < 1 or x.shape[-1] != n or (bias is not None and bias.shape != (m,)):
        raise ValueError(
            f"A dense layer must have x (..., N), a kernel (N, M) and a bias (M,) or None; got {x.shape}, "
            f"{kernel.shape} and {None if bias is None else bias.shape}. Reshape them."
        )
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"x must be of float32, bfloat16 or float16; got {x.dtype}. Cast it to the type to compute in."
        )


def check_same(layer: str, leaves: Mapping[str, jax.Array], remedy: str, axis_name: AxisName) -> None:
    """Refuses a layer's parameters, by name, if their gradients are exchanged although the layer reduces them."""
    for label, leaf in leaves.items():
        if is_in_scope(ALL_EXCHANGED) or any(varies(leaf, name) for name in axis_names(axis_name)):
            raise ValueError(
                f"The {label} of {layer} must be replicated, since its gradient is already reduced; got one of shape "
                f"{leaf.shape} that differs between workers. {remedy}."
            )


def _product(rows: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    y = rows @ kernel.astype(rows.dtype)  # (R, M)
    return y if bias is None else y + bias.astype(rows.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _late(axis_name: AxisName, rows: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    del axis_name
    return _product(rows, kernel, bias)


def _late_forward(
    axis_name: AxisName, rows: jax.Array, kernel: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]:
    del axis_name
    rows, kernel, bias = once_differentiable((rows, kernel, bias), "late_multiply", _ONCE)
    return _product(rows, kernel, bias), (rows, kernel, bias)


def _late_backward(
    axis_name: AxisName, saved: tuple[jax.Array, jax.Array, jax.Array | None], errors: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    rows, kernel, bias = saved
    errors = once_differentiable(errors, "late_multiply", _ONCE)
    row_gradients = errors @ kernel.astype(errors.dtype).T  # (R, N)
    workers = axis_size(axis_name)
    X, E = gather_rows(rows, axis_name), gather_rows(errors, axis_name)  # (K R, N), (K R, M)
    mean = jnp.matmul(X.T, E, preferred_element_type=jnp.float32) / workers  # (N, M)
    of_bias = None if bias is None else (jnp.sum(E, axis=0, dtype=jnp.float32) / workers).astype(bias.dtype)
    return row_gradients, mean.astype(kernel.dtype), of_bias


_late.defvjp(_late_forward, _late_backward)


def gather_rows(rows: jax.Array, axis_name: AxisName) -> jax.Array:
    """Gathers the rows (R, n) of all workers: (K R, n), the same on every worker; 16-bit numbers stay 16 bits."""
    flat = rows.reshape(-1)
    if rows.dtype.itemsize == 2:  # as words, because XLA's collectives widen narrower types on some backends
        flat = lax.bitcast_convert_type(jnp.pad(flat, (0, flat.size % 2)).reshape(-1, 2), jnp.uint32)
    words = flat.size
    for name in reversed(axis_names(axis_name)):
        flat = all_gather_same(to_varying(flat, name), name).reshape(-1)
    if rows.dtype.itemsize == 2:
        parts = lax.bitcast_convert_type(flat, rows.dtype).reshape(-1, 2 * words)
        flat = parts[:, : rows.size]
    return flat.reshape(-1, rows.shape[1])
