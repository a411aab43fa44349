"""The words that all files share: what differs between workers, what travels, what is counted."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

# A payload is what one worker puts on the wire: named arrays, later fused into one buffer of 32-bit words. Its bytes
# are those of its arrays' own types; nobody states them separately.
Payload = dict[str, jax.Array]

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerWorker:
    """State that differs between workers, one row each.

    Attributes:
      rows: an array or a pytree of arrays of shape (K, ...) seen from outside, (1, ...) inside a worker. Everything in
        a transformation's state that is *not* inside a `PerWorker` is the same on every worker.
    """

    rows: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OwnedRows(PerWorker):
    """Rows (K, n) of one vector that the workers hold together: of K parts in order, part j is valid in row j alone."""

    def whole(self) -> jax.Array:
        """Puts the vector (n,) together from all rows."""
        workers, n = self.rows.shape
        parts = [part_of(n, workers, worker) for worker in range(workers)]
        return jnp.concatenate([self.rows[j, start : start + size] for j, (start, size) in enumerate(parts)])


def part_of(n: int, workers: Any, worker: Any) -> tuple[Any, Any]:
    """Returns the start and the size of a worker's part of n elements that are cut into K consecutive parts."""
    size, longer = n // workers, n % workers
    if isinstance(worker, int):
        return worker * size + min(worker, longer), size + (worker < longer)
    return worker * size + jnp.minimum(worker, longer), size + (worker < longer)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalRows(PerWorker):
    """What a worker's own optimizer keeps, one row each: it trains on its own parameters between two exchanges."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InnerRows(PerWorker):
    """Rows of one axis alone, where workers lie along two: the same for all workers along the other.

    Attributes:
      axis: the name of the axis.
    """

    axis: str = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SliceRows(PerWorker):
    """State of the exchange of slices, a row for each place along some axes of the mesh; the same along the others.

    Attributes:
      axes: those of the workers, where it differs between them, and then those of the slices; outermost first.
    """

    axes: tuple[str, ...] = field(metadata={"static": True})


@jax.tree_util.register_static
@dataclass(frozen=True)
class Every:
    """A part of a local method's state that says how often it communicates.

    Attributes:
      steps: steps from one exchange to the next.
    """

    steps: int


@jax.tree_util.register_static
@dataclass(frozen=True)
class AlreadyMean:
    """A part of an exchange's state that says which gradients come to it as the workers' mean.

    Attributes:
      paths: of their parameters, as `jax.tree_util.keystr` writes them.
    """

    paths: tuple[str, ...]


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


def _first(state: Any, kind: type[T]) -> T | None:
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return next((leaf for leaf in leaves if isinstance(leaf, kind)), None)


def communication_period(state: Any) -> int | None:
    """Finds how many steps a local method takes between two exchanges.

    Args:
      state: the state of one transformation or of an Optax chain.

    Returns:
      The number of steps; None for methods that exchange gradients, whose parameters are the same on all workers.
    """
    every = _first(state, Every)
    return None if every is None else every.steps


def already_mean_paths(state: Any) -> frozenset[str]:
    """Finds the parameters whose gradients come to the exchange as the workers' mean (see `already_mean`).

    Args:
      state: the state of one transformation or of an Optax chain.

    Returns:
      Their paths, as `jax.tree_util.keystr` writes them; empty for most chains.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, AlreadyMean))
    return frozenset(path for node in nodes if isinstance(node, AlreadyMean) for path in node.paths)


def exchange_metrics(state: Any) -> ExchangeMetrics | None:
    """Finds the metrics of the exchange in an optimizer's state.

    Args:
      state: the state of one transformation or of an Optax chain.

    Returns:
      The first `ExchangeMetrics` in the state, or None where no transformation of this library is in it.
    """
    return _first(state, ExchangeMetrics)
