"""What Elias-Fano and Rice share: a rising sequence in unary.

Both split a number at bit l. The low l bits travel as they are (`bits.pack_numbers`); the rising upper parts
u_0 <= u_1 <= ... become the set bits u_i + i of a bitmap.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels import bits


def write_unary(upper: jax.Array, n_words: int, among: jax.Array | None = None) -> jax.Array:
    """Sets bit upper[i] + i for every i; bits beyond the words are left out.

    Args:
      upper: (C,) int32, never descending.
      n_words: words of the bitmap.
      among: (C,) bool, the numbers whose bits are set; all by default.
    """
    bit = upper + jnp.arange(upper.size, dtype=jnp.int32)
    value = jnp.left_shift(np.uint32(1), (bit % bits.WORD).astype(jnp.uint32))
    value = value if among is None else jnp.where(among, value, np.uint32(0))
    return jnp.zeros(n_words, jnp.uint32).at[bit // bits.WORD].add(value, mode="drop")


def read_unary(words: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Reads the first n numbers of a bitmap that `write_unary` wrote.

    Returns:
      (upper, present): (n,) int32, and (n,) bool, False where the bit was left out.
    """
    slots = bits.positions(words, bits.rank_of_words(words), n)
    return slots.position - jnp.arange(n, dtype=jnp.int32), slots.filled
