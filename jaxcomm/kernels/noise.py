"""Cheap random numbers: a hash of a counter.

Rounding at random takes a random number for every coordinate, and threefry would cost more than the whole exchange. A
32-bit integer hash of the coordinate's position is good enough and vectorizes to a few instructions. Not for
cryptography, and not for initialising parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = 0x9E3779B9


def mix(x: jax.Array) -> jax.Array:
    """Hashes uint32 to uint32, one to one ("lowbias32", Wellons, "Prospecting for hash functions", 2018)."""
    x = x ^ (x >> 16)
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def make_key(*numbers: jax.Array | int) -> jax.Array:
    """Folds integers (a seed, a step, a worker) into a key: () uint32."""
    key = jnp.uint32(_GOLDEN)
    for number in numbers:
        word = np.uint32(number % 2**32) if isinstance(number, int) else jnp.asarray(number).astype(jnp.uint32)
        key = mix(key ^ word) + np.uint32(_GOLDEN)
    return key


def _bits(key: jax.Array, n: int, start: jax.Array | int) -> jax.Array:
    """Returns n numbers of a key's sequence of random 32-bit numbers, from the place `start` on: (n,) uint32."""
    place = jax.lax.iota(jnp.uint32, n) + jnp.asarray(start).astype(jnp.uint32)
    return mix(mix(place ^ key) + key)


def uniform(key: jax.Array, n: int, start: jax.Array | int = 0) -> jax.Array:
    """Returns n numbers of a key's sequence of random float32 numbers in [0, 1), multiples of 2^-24.

    Args:
      key: () uint32, from `make_key`.
      n: how many, fewer than 2^32.
      start: the first number's place in the sequence.
    """
    return (_bits(key, n, start) >> 8).astype(jnp.int32).astype(jnp.float32) * np.float32(2**-24)


def round_to_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds x, float32, to one of its two neighbours at random: (...) bfloat16, x on average. Zeros stay zeros.

    Args:
      x: finite, below the largest bfloat16.
      key: () uint32, from `make_key`.
    """
    low = _bits(key, x.size, 0).reshape(x.shape) >> 16
    words = jax.lax.bitcast_convert_type(x, jnp.uint32) + low
    return jax.lax.bitcast_convert_type((words >> 16).astype(jnp.uint16), jnp.bfloat16)


def integers(key: jax.Array, bounds: jax.Array, start: jax.Array | int = 0) -> jax.Array:
    """Returns random integers from 0, each below its own bound (m,) int32 of at least 1: (m,) int32.

    They are remainders of the key's 32-bit numbers, from the place `start` on, and so uniform to bound / 2^32.
    """
    return (_bits(key, bounds.size, start) % bounds.astype(jnp.uint32)).astype(jnp.int32)
