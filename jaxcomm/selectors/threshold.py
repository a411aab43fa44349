"""Coordinates whose magnitude reaches a threshold of their tensor."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels import bits
from jaxcomm.kernels.numerics import magnitude_bits
from jaxcomm.kernels.scopes import SELECT
from jaxcomm.kernels.vectors import Vector
from jaxcomm.layout import Layout, in_blocks
from jaxcomm.selectors.selection import Selected


@jax.named_scope(SELECT)
def select_threshold(vector: Vector, threshold: jax.Array, layout: Layout) -> Selected:
    """Marks |x| >= threshold, but never zeros.

    Args:
      vector: the flat vector.
      threshold: (S,) float32, one per segment, not negative.
      layout: the segments.
    """
    least = jnp.maximum(magnitude_bits(threshold), np.uint32(1))
    reaches = in_blocks(magnitude_bits(vector.sum())) >= layout.per_block(least)[:, None, None]
    words, broken = bits.pack_each(reaches.reshape(-1), vector.broken())
    return Selected(words, ~jnp.any(broken != 0))
