"""The words that all files share: what differs between workers, what travels, what is counted."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# A payload is what one worker puts on the wire: named arrays, later fused into one buffer of 32-bit words. Its bytes
# are those of its arrays' own types; nobody states them separately.
Payload = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerWorker:
    """State that differs between workers, one row each.

    Attributes:
      rows: an array or a pytree of arrays of shape (K, ...) seen from outside, (1, ...) inside a worker. Everything in
        a transformation's state that is *not* inside a `PerWorker` is the same on every worker.
    """

    rows: Any


class ExchangeMetrics(NamedTuple):
    """Counts of the last exchange, the same on every worker.

    Attributes:
      sent: () float32, coordinates sent by all workers together, dense tensors not included. Exact up to 2^24.
      overflow: () float32, coordinates that were selected but did not fit the payload, all workers together. They stay
        in the residual.
      skipped: () int32, 1 if the exchange was skipped, because a gradient or a mean was not finite, else 0.
      drained: () int32, 1 if everything was sent densely to empty the residual, else 0.
    """

    sent: jax.Array
    overflow: jax.Array
    skipped: jax.Array
    drained: jax.Array

    @classmethod
    def zeros(cls) -> "ExchangeMetrics":
        """Returns the metrics of an exchange that has not happened yet."""
        # A buffer each, not one for all: a state is donated whole, and a buffer only once.
        types = (jnp.float32, jnp.float32, jnp.int32, jnp.int32)
        return cls(*(jnp.zeros((), dtype) for dtype in types))


def exchange_metrics(state: Any) -> ExchangeMetrics | None:
    """Finds the metrics of the exchange in an optimizer's state.

    Args:
      state: the state of one transformation or of an Optax chain.

    Returns:
      The first `ExchangeMetrics` in the state, or None where no transformation of this library is in it.
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, ExchangeMetrics))
    return next((leaf for leaf in leaves if isinstance(leaf, ExchangeMetrics)), None)
