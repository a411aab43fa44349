"""One word by which a worker tells the others how its step is.

Only the words written here are read as sound: anything else, such as a damaged word, stops the exchange.
"""

import jax
import jax.numpy as jnp
import numpy as np

_SOUND, _OVERFULL = np.uint32(1), np.uint32(2)  # 0 is a worker whose step is not sound


def write_status(sound: jax.Array, overfull: jax.Array | bool = False) -> jax.Array:
    """Writes () bool, whether the step is finite, and () bool, whether far more is selected than fits: () uint32."""
    return jnp.where(sound, jnp.where(overfull, _OVERFULL, _SOUND), np.uint32(0))


def read_status(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads the words (K,) of all workers: () bool, whether all are sound, and () bool, whether any is overfull."""
    overfull = words == _OVERFULL
    return jnp.all(overfull | (words == _SOUND)), jnp.any(overfull)
