"""Coordinates whose change is visible in their parameter, rounded to bfloat16."""

import jax
from jax import lax

from jaxcomm.kernels import bits
from jaxcomm.kernels.scopes import SELECT


@jax.named_scope(SELECT)
def select_visible(change: jax.Array, weights: jax.Array) -> jax.Array:
    """Marks bfloat16(w + change) != bfloat16(w), but never a change of 0.

    Args:
      change: (n,) float32, what would be added to the weights.
      weights: (n,) float32.

    Returns:
      (n/32,) uint32, the bit-packed mask.
    """

    def seen(x: jax.Array) -> jax.Array:  # not a cast there and back, which XLA may take for the identity
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    return bits.pack((seen(weights + change) != seen(weights)) & (change != 0))
