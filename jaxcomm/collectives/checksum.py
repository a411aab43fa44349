"""Messages with a checksum, by which the receiver finds damage, and the vote by which all workers skip the step.

The digest always finds damage within one word, such as a flipped bit. It finds other damage, such as two swapped words,
except for one case in 2^32.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.collectives.axis import AxisName
from jaxcomm.collectives.messages import all_gather_same, all_to_all
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
    """Gathers every worker's words (m,): (K, m), and whether they arrived as sent; see `move`."""
    return move(words, lambda words: all_gather_same(words, axis_name), checksum)


def two_shot(
    rows: jax.Array, at_owner: Callable[[jax.Array], tuple[jax.Array, Any]], axis_name: AxisName, checksum: bool = False
) -> tuple[jax.Array, Any, jax.Array]:
    """Exchanges coded parts by way of their owners: each sums its part, and codes the sum again.

    A gather of coded payloads grows with K. Here, each part goes to its owner (all-to-all), and the code of its sum to
    all workers (all-gather): twice the payload, whatever K is.

    Each worker receives (K-1)/K of its rows' bytes, and then (K-1) times the bytes that an owner returns; with a
    checksum 8 (K-1) bytes more.

    Args:
      rows: (K, m) uint32, the worker's own code of every part; row j goes to worker j.
      at_owner: from the K codes of the worker's own part (K, m), worker i's in row i, to the code of their sum (m2,)
        uint32, and anything that the owner keeps for itself.
      axis_name: the axis of workers.
      checksum: see `move`.

    Returns:
      The codes of all sums (K, m2), the same on every worker; what this worker's `at_owner` kept; and whether this
      worker received everything as it was sent, () bool.
    """
    messages, is_intact = move(rows, lambda rows: all_to_all(rows, axis_name), checksum)
    code, owner_error = at_owner(messages)
    codes, are_intact = gather_checked(code, axis_name, checksum)
    return codes, owner_error, is_intact & are_intact


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
