"""What Elias-Fano and Rice share: a rising sequence in unary, and low bits in planes.

Both split a number at bit l. The low l bits travel as they are, plane by plane, so that packing them is packing masks;
the rising upper parts u_0 <= u_1 <= ... become the set bits u_i + i of a bitmap.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import bits


def plane_words(n: int, low_bits: int) -> int:
    """Returns the words that the low bits of n numbers take."""
    return low_bits * -(-n // bits.WORD)


def pack_planes(numbers: jax.Array, low_bits: int) -> jax.Array:
    """Packs the low bits of numbers (C,) int32 as (plane_words(C, low_bits),) uint32."""
    padded = jnp.pad(numbers, (0, -numbers.size % bits.WORD))
    planes = (padded[None, :] >> np.arange(low_bits, dtype=np.int32)[:, None]) & 1  # (l, C')
    return bits.pack(planes.reshape(-1).astype(bool))


def unpack_planes(words: jax.Array, n: int, low_bits: int) -> jax.Array:
    """Returns the low bits of the n numbers, (n,) int32; the inverse of `pack_planes`."""
    planes = bits.unpack(words).reshape(low_bits, -(-n // bits.WORD) * bits.WORD)[:, :n].astype(jnp.int32)
    return jnp.sum(planes << np.arange(low_bits, dtype=np.int32)[:, None], axis=0)


def write_unary(upper: jax.Array, n_words: int) -> jax.Array:
    """Sets bit upper[i] + i for every i; bits beyond the words are left out.

    Args:
      upper: (C,) int32, never descending.
      n_words: words of the bitmap.
    """
    bit = upper + jnp.arange(upper.size, dtype=jnp.int32)
    value = jnp.left_shift(np.uint32(1), (bit % bits.WORD).astype(jnp.uint32))
    return jnp.zeros(n_words, jnp.uint32).at[bit // bits.WORD].add(value, mode="drop")


def read_unary(words: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Reads the first n numbers of a bitmap that `write_unary` wrote.

    Returns:
      (upper, present): (n,) int32, and (n,) bool, False where the bit was left out.
    """
    slots = bits.positions(words, bits.rank_of_words(words), n)
    return slots.position - jnp.arange(n, dtype=jnp.int32), slots.filled
