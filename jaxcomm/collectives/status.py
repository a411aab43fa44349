"""One word by which a worker tells the others whether its step is ok.

Only words that were written here are read as ok: with any other, such as a damaged word, all workers skip the exchange.
"""

import jax
import jax.numpy as jnp
import numpy as np

_SOUND, _OVERFULL = np.uint32(1), np.uint32(2)  # 0: the worker's step is not ok


def write_status(sound: jax.Array, overfull: jax.Array | bool = False) -> jax.Array:
    """Writes whether the step is finite, and whether far more is selected than fits, () bool each: () uint32."""
    return jnp.where(sound, jnp.where(overfull, _OVERFULL, _SOUND), np.uint32(0))


def read_status(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads the words (K,) of all workers: whether all are ok, and whether any is overfull, () bool each."""
    overfull = words == _OVERFULL
    return jnp.all(overfull | (words == _SOUND)), jnp.any(overfull)
