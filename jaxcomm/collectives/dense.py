"""The dense all-reduce, with which everything else is compared."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.collectives.axis import AxisName, axis_size


def dense_mean(tensors: Sequence[jax.Array], axis_name: AxisName) -> tuple[list[jax.Array], jax.Array]:
    """Averages tensors over the workers in one all-reduce of float32.

    Equals `jax.lax.pmean` of every tensor. The same on every worker. Each worker receives 2 (K-1)/K * 4 bytes an
    element (ring all-reduce).

    Args:
      tensors: each worker's own, of any floating dtype and shape; may be empty.
      axis_name: the axis of workers, or the axes.

    Returns:
      The means, in the tensors' shapes and dtypes, and whether every number of them is finite: () bool. If a tensor of
      some worker is not finite, neither is the mean.
    """
    if not tensors:
        return [], jnp.asarray(True)
    vector = jnp.concatenate([tensor.reshape(-1).astype(jnp.float32) for tensor in tensors])
    mean = lax.psum(vector, axis_name) / axis_size(axis_name)  # (n,)
    means, start = [], 0
    for tensor in tensors:
        part = mean[start : start + tensor.size]
        means.append(part.reshape(tensor.shape).astype(tensor.dtype))
        start += tensor.size
    finite = jnp.isfinite(mean).all()
    for part in means:
        if part.dtype.itemsize < 4:  # a mean may be finite, and out of the range of its tensor's own type
            finite = finite & jnp.isfinite(part).all()
    return means, finite
