"""The dense all-reduce, with which everything else is compared."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.codecs import ValueDtype, value_codec
from jaxcomm.collectives.axis import AxisName, axis_size
from jaxcomm.collectives.shared_mask import compact_sum


def dense_mean(
    tensors: Sequence[jax.Array], axis_name: AxisName, value_dtype: ValueDtype = "float32", checksum: bool = False
) -> tuple[list[jax.Array], jax.Array]:
    """Averages tensors over the workers, all of them at once.

    The same on every worker. In float32 it equals `jax.lax.pmean` of every tensor, in one all-reduce. In bfloat16,
    every worker owns a part, adds it up in float32 in the order of the workers, and rounds the sum once more. Each
    worker receives 2 (K-1)/K * 4 bytes an element, or half of that.

    Args:
      tensors: each worker's own, of any floating dtype and shape; may be empty.
      axis_name: the axis of workers, or the axes.
      value_dtype: what travels, "float32" or "bfloat16".
      checksum: see `jaxcomm.collectives.checksum`; in bfloat16 alone.

    Returns:
      The means, in the tensors' shapes and dtypes, and whether every number of them is finite: () bool. If a tensor of
      some worker is not finite, neither is the mean.
    """
    if not tensors:
        return [], jnp.asarray(True)
    vector = jnp.concatenate([tensor.reshape(-1).astype(jnp.float32) for tensor in tensors])
    if value_dtype == "float32":
        mean = lax.psum(vector, axis_name) / axis_size(axis_name)  # (n,)
    else:
        finite, values = jnp.isfinite(vector).all(), value_codec(value_dtype)
        summed = compact_sum(vector, finite, "two_shot", values, axis_name, checksum)
        mean = jnp.where(summed.ok, summed.total(summed.ok) / axis_size(axis_name), jnp.nan)
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
