"""The results of sums over the workers that round or leave out something on the way."""

from collections.abc import Callable
from typing import NamedTuple

import jax


class Sent(NamedTuple):
    """Coordinates as a worker sends them.

    Attributes:
      position: (C,) int32 in the flat vector; in range for empty slots as well.
      filled: (C,) bool.
      values: (C,) float32, rounded to the wire's type; 0 in an empty slot.
    """

    position: jax.Array
    filled: jax.Array
    values: jax.Array


class Reduced(NamedTuple):
    """A sum of dense vectors: total + psum(residual) == psum(vector).

    Attributes:
      total: ok -> (n,) float32, the sum over the workers, zeros unless ok; the same on every worker.
      residual: () -> (n,) float32, this worker's rounding errors, of its own vector and of the sums that it owns.
      ok: () bool, the same on every worker: whether every worker's vector, and what arrived, is finite.
    """

    total: Callable[[jax.Array], jax.Array]
    residual: Callable[[], jax.Array]
    ok: jax.Array


class SparseReduced(NamedTuple):
    """A sum of the coordinates that workers sent: total + psum(residual) == psum(what was sent).

    Attributes:
      total: as in `Reduced`.
      residual: () -> (n,) float32, what this worker rounded off or left out of the sums that it owns; None if workers
        own no sums.
      ok: as in `Reduced`.
      sent: this worker's own coordinates.
      counts: (2,) float32, coordinates sent and overflow, all workers together.
      overfull: () bool, the same on every worker: whether some worker selected more than twice as many coordinates of
        some segment as it has slots.
    """

    total: Callable[[jax.Array], jax.Array]
    residual: Callable[[], jax.Array] | None
    ok: jax.Array
    sent: Sent
    counts: jax.Array
    overfull: jax.Array
