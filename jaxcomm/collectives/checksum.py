"""A checksum in every message, by which its receiver finds damage, and the vote by which all workers skip the step.

The digest always finds damage within one word, such as a flipped bit. It finds other damage, such as two swapped words,
except for one case in 2^32.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.collectives.axis import AxisName
from jaxcomm.collectives.gather import gather_words
from jaxcomm.collectives.reduced import Reduced, SparseReduced
from jaxcomm.kernels.numerics import digest
from jaxcomm.kernels.scopes import EXCHANGE

Sum = TypeVar("Sum", Reduced, SparseReduced)


def move(words: jax.Array, collective: Callable[[jax.Array], jax.Array], checksum: bool) -> tuple[jax.Array, jax.Array]:
    """Moves messages by a collective; with a checksum, each carries its digest, 4 more bytes.

    Args:
      words: (..., m) uint32, a message in each row.
      collective: from rows of any length to rows of that length.
      checksum: whether to check.

    Returns:
      What arrived, (..., m), and whether this worker received it as it was sent: () bool, which may differ between
      workers even if all were sent the same; True without a checksum.
    """
    collective = jax.named_scope(EXCHANGE)(collective)
    if not checksum:
        return collective(words), jnp.asarray(True)
    arrived = collective(jnp.concatenate([words, _digests(words)], axis=-1))
    words, digests = arrived[..., :-1], arrived[..., -1:]
    return words, jnp.all(_digests(words) == digests)


def gather_checked(words: jax.Array, axis_name: AxisName, checksum: bool) -> tuple[jax.Array, jax.Array]:
    """Gathers every worker's words (m,) by `gather_words`: (K, m), and whether they arrived as sent; see `move`."""
    return move(words, lambda own: gather_words(own, axis_name), checksum)


def agreed(reduced: Sum, axis_name: AxisName, checksum: bool) -> Sum:
    """Makes `ok` of a sum False on all workers if a checksum failed on any, by an all-reduce of 4 bytes."""
    if not checksum:
        return reduced
    # A number that differs between workers: XLA takes gathered values to be replicated, and could skip their sum.
    with jax.named_scope(EXCHANGE):
        broken = lax.psum(jnp.where(reduced.ok, 0, 1 + lax.axis_index(axis_name)), axis_name)
    return reduced._replace(ok=broken == 0)


def _digests(words: jax.Array) -> jax.Array:
    """Returns the digest of every row: (..., 1) uint32."""
    rows = jax.vmap(digest)(words.reshape(-1, words.shape[-1]))
    return rows.reshape(*words.shape[:-1], 1)
