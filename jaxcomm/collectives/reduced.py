"""The results of sums over the workers that round or leave out something on the way, and the word that skips them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels.vectors import add_at

# One word by which a worker tells the others whether its step is ok. Only words that are written here are read as ok:
# with any other, such as a damaged word, all workers skip the exchange. 0: the worker's step is not ok.
_SOUND, _OVERFULL = np.uint32(1), np.uint32(2)


class Sent(NamedTuple):
    """Coordinates that left a worker: those that it sent, and that are part of the sum.

    Attributes:
      position: (C,) int32 in the flat vector; in range for empty slots as well.
      filled: (C,) bool.
      values: (C,) float32, rounded to the wire's type; 0 in an empty slot.
    """

    position: jax.Array
    filled: jax.Array
    values: jax.Array

    def taken_from(self, row: jax.Array, ok: jax.Array, decay: float = 1.0) -> jax.Array:
        """Turns a worker's vector (1, n), already multiplied by `decay`, into its residual, in place, if `ok`."""
        return _changed(row, self.position, -self.values, ok, decay)


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
    """A sum of the coordinates that workers sent: total + psum(errors) == psum(sent).

    Attributes:
      total: as in `Reduced`.
      errors: (positions, values), (R,) int32 in range and (R,) float32: what this worker rounded off sums of others'
        coordinates too; None if workers round only their own.
      ok: as in `Reduced`.
      sent: this worker's own coordinates.
      counts: (2,) float32, coordinates sent and overflow, all workers together.
      overfull: () bool, the same on every worker: whether some worker selected more than twice as many coordinates of
        some segment as it has slots.
    """

    total: Callable[[jax.Array], jax.Array]
    errors: tuple[jax.Array, jax.Array] | None
    ok: jax.Array
    sent: Sent
    counts: jax.Array
    overfull: jax.Array

    def kept(self, row: jax.Array, ok: jax.Array, decay: float = 1.0) -> jax.Array:
        """Turns a worker's vector (1, n) into its residual, in place, if `ok`: without what was sent, with its errors.

        The row is already multiplied by `decay`.
        """
        row = self.sent.taken_from(row, ok, decay)
        if self.errors is not None:
            row = _changed(row, *self.errors, ok, decay)
        return row


def _changed(row: jax.Array, position: jax.Array, values: jax.Array, ok: jax.Array, factor: float) -> jax.Array:
    change = jnp.where(ok, np.float32(factor) * values, 0.0)
    return add_at(row, position, change)


def write_status(sound: jax.Array, overfull: jax.Array | bool = False) -> jax.Array:
    """Writes whether the step is finite, and whether far more is selected than fits, () bool each: () uint32."""
    return jnp.where(sound, jnp.where(overfull, _OVERFULL, _SOUND), np.uint32(0))


def read_status(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads the words (K,) of all workers: whether all are ok, and whether any is overfull, () bool each."""
    overfull = words == _OVERFULL
    return jnp.all(overfull | (words == _SOUND)), jnp.any(overfull)
