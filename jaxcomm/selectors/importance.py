"""How important a gradient is to its weight, and statistics for layer-wise thresholds.

Source: Cheng and Xu, "Bandwidth Reduction using Importance Weighted Pruning on Ring AllReduce", equation 4.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.kernels import bits
from jaxcomm.kernels.numerics import divide, magnitude_bits
from jaxcomm.kernels.scopes import SELECT
from jaxcomm.kernels.vectors import largest_of_each
from jaxcomm.layout import BLOCK, Layout, in_blocks

_LARGEST = float(np.finfo(np.float32).max)


@jax.named_scope(SELECT)
def importance(vector: jax.Array, weights: jax.Array, eps: float) -> jax.Array:
    """Returns |vector| / (|weights| + eps), at most the largest float32: (n,) float32, zero where the vector is."""
    return jnp.minimum(jnp.abs(vector) / (jnp.abs(weights) + np.float32(eps)), _LARGEST)


def segment_max(values: jax.Array, layout: Layout) -> jax.Array:
    """Returns the largest value of every segment (n,), NaN if it has one: (S,) float32; values are not negative."""
    # A maximum of the bits as integers, of which NaN is the largest: a maximum of floats may lose it.
    largest = jax.ops.segment_max(
        largest_of_each(magnitude_bits(values), BLOCK),
        layout.segment_of_block(),
        num_segments=len(layout.sizes),
        indices_are_sorted=True,
    )
    return lax.bitcast_convert_type(largest, jnp.float32)


def moments(vector: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the mean and the variance of every segment, in units in which the squares of large numbers are finite.

    Returns:
      (unit, mean / unit, variance / unit^2), (S,) float32 each; the unit is the largest magnitude, 1 where that is 0.
    """
    largest = segment_max(jnp.abs(vector), layout)
    unit = jnp.where(largest > 0, largest, 1.0)
    # In rows, which XLA for CPUs sums in several parts at once: with blocks of 8 x 128 the last bits would be lost.
    rows = divide(vector.reshape(-1, BLOCK), layout.per_block(unit)[:, None])
    sizes = layout.elements().clip(1).astype(np.float32)
    mean = layout.per_segment(jnp.sum(rows, axis=1)) / sizes
    squares = layout.per_segment(jnp.sum(jnp.square(rows - layout.per_block(mean)[:, None]), axis=1))
    squares = squares - layout.padding().astype(np.float32) * jnp.square(mean)  # the padding's zeros
    return unit, mean, jnp.maximum(squares, 0.0) / sizes


@jax.named_scope(SELECT)
def spread(values: jax.Array, layout: Layout) -> jax.Array:
    """Returns variance / mean of every segment's values (n,), which are not negative: (S,) float32.

    It is 0 for a segment of zeros.
    """
    unit, mean, variance = moments(values, layout)
    return jnp.where(mean > 0, unit * (variance / jnp.where(mean > 0, mean, 1.0)), 0.0)


@jax.named_scope(SELECT)
def select_important(
    values: jax.Array, threshold: jax.Array, layout: Layout, uniform: jax.Array | None = None
) -> jax.Array:
    """Marks values above the threshold of their segment, but never zeros.

    Args:
      values: (n,) float32, not negative.
      threshold: (S,) float32, above 0.
      layout: the segments.
      uniform: (n,) random numbers in [0, 1), by which a value below the threshold is marked with probability
        value / threshold; None marks none of them.

    Returns:
      (n/32,) uint32, the bit-packed mask.
    """
    bound = layout.per_block(threshold)[:, None, None]
    if uniform is not None:
        bound = bound * in_blocks(uniform)
    return bits.pack((in_blocks(values) > bound).reshape(-1))
