"""Shared types: state that differs between workers, payloads, metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# A payload is what one worker puts on the wire: named arrays, later fused into one buffer of 32-bit words. Its size in
# bytes follows from its arrays' types; nothing states it separately.
Payload = dict[str, jax.Array]

# Trees of arrays, or of their shapes: any, and a model's parameters.
PyTree = Any
Params = PyTree


_NOT_A_MODEL = "A PerWorker must be asked for its rows, one for each worker"
_MODEL = (
    "The model of a local method is step.params(state), or jaxcomm.state.global_params(state), and its running "
    "statistics step.model_state(state)."
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerWorker:
    """State that differs between workers, one row each. All other state is replicated.

    Attributes:
      rows: an array or a pytree of arrays, of shape (K, ...) outside and (1, ...) inside a worker. K is the product of
        the sizes of the axes.
      axes: the mesh axes along which rows differ, outermost first. Static.
      resizing: how `resize_workers` carries rows over to another number of workers. Static. "mean": the mean over the
        rows is kept. "parts": rows (K, n) form one vector, of which worker k holds the k-th of K consecutive parts; the
        rest of its row is not valid.
      is_local: whether rows are the parameters, the optimizer's or the model's state, or the scalars, of workers that
        train on their own between two exchanges. Static.
      shards: how many of the last axes divide state into shards: the inside axis of `hierarchical`, and the axes along
        which parameters are sharded. The number of workers may change along the other axes only. Static.
    """

    rows: Any
    axes: tuple[str, ...] = field(default=("data",), metadata={"static": True})
    resizing: str = field(default="mean", metadata={"static": True})
    is_local: bool = field(default=False, metadata={"static": True})
    shards: int = field(default=0, metadata={"static": True})

    def __getitem__(self, key: Any) -> Any:
        """Refuses: parameters of workers that train on their own are not one model."""
        raise TypeError(f"{_NOT_A_MODEL}; got [{key!r}]. {_MODEL}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_NOT_A_MODEL}; got .{name}. {_MODEL}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AccumulatedState:
    """State of a chain that exchanges once in several calls: fields of `optax.MultiStepsState`, and `every`.

    Attributes:
      mini_step: () int32, gradients since the last exchange.
      gradient_step: () int32, exchanges so far.
      inner_opt_state: the state of the chain.
      acc_grads: the mean of a worker's own gradients since the last exchange, float32, or float64 for
        parameters of float64.
      every: calls from one exchange to the next. Static.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: Any
    acc_grads: PerWorker
    every: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DelayedState:
    """State of a chain that exchanges the previous step's gradient.

    Attributes:
      inner: the state of the chain.
      gradients: each worker's own last gradient, which the next step exchanges; zeros before the first step.
    """

    inner: Any
    gradients: PerWorker


def is_per_worker(node: Any) -> bool:
    """Returns whether a node of a state is a `PerWorker`; the `is_leaf` of every map over states."""
    return isinstance(node, PerWorker)


def nodes_of(tree: PyTree, *kinds: type) -> list[Any]:
    """Returns the nodes of a tree that are of some types, but not those inside them."""

    def is_one(node: PyTree) -> bool:
        return isinstance(node, kinds)

    return [node for node in jax.tree.leaves(tree, is_leaf=is_one) if is_one(node)]


def map_rows(function: Callable[[PerWorker], Any], tree: PyTree) -> Any:
    """Applies a function to every `PerWorker` in a tree; leaves all else as it is."""
    return jax.tree.map(lambda node: function(node) if is_per_worker(node) else node, tree, is_leaf=is_per_worker)


def in_shards(state: PyTree, axes: tuple[str, ...]) -> Any:
    """Gives the state of an exchange a row for each shard, in addition to the rows of workers."""
    if not axes:
        return state

    def row(node: PyTree) -> PerWorker:
        if is_per_worker(node):
            return replace(node, axes=(*node.axes, *axes), shards=node.shards + len(axes))
        return PerWorker(node[None], axes, shards=len(axes))

    return jax.tree.map(row, state, is_leaf=is_per_worker)


def from_shards(state: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the state that a device's exchange takes; the inverse of `in_shards`."""

    def unpack_node(node: PerWorker) -> PyTree:
        workers = node.axes[: len(node.axes) - len(axes)]
        return replace(node, axes=workers, shards=node.shards - len(axes)) if workers else node.rows[0]

    return map_rows(unpack_node, state) if axes else state


def part_of(n: int, workers: Any, worker: Any) -> tuple[Any, Any]:
    """Returns the start and the size of a worker's part, of n elements that are cut into K consecutive parts."""
    size, longer = n // workers, n % workers
    if isinstance(worker, int):
        return worker * size + min(worker, longer), size + (worker < longer)
    return worker * size + jnp.minimum(worker, longer), size + (worker < longer).astype(jnp.int32)


def join_parts(rows: jax.Array) -> jax.Array:
    """Returns the vector (n,) of which each row (K, n) holds a part."""
    workers, n = rows.shape
    parts = [part_of(n, workers, worker) for worker in range(workers)]
    return jnp.concatenate([rows[j, start : start + size] for j, (start, size) in enumerate(parts)])


class ExchangeMetrics(NamedTuple):
    """Counts of the last exchange, the same on every worker.

    Attributes:
      sent: () float32, coordinates sent by all workers together, without dense tensors. Exact up to 2^24.
      overflow: () float32, coordinates that were selected but did not fit the payload, all workers together. They stay
        in the residual.
      skipped: () int32, 1 if the exchange was skipped because a gradient or a mean was not finite, else 0.
      drained: () int32, 1 if everything was sent densely to empty the residual, else 0.
    """

    sent: jax.Array
    overflow: jax.Array
    skipped: jax.Array
    drained: jax.Array

    @classmethod
    def zeros(cls) -> "ExchangeMetrics":
        """Returns the metrics of an exchange that has not happened yet."""
        # A buffer each, not one for all: a state is donated whole, and a buffer can be donated only once.
        types = (jnp.float32, jnp.float32, jnp.int32, jnp.int32)
        return cls(*(jnp.zeros((), dtype) for dtype in types))

    @classmethod
    def of(
        cls, ok: jax.Array, sent: jax.Array | int, overflow: jax.Array | int = 0, *, drained: bool | jax.Array = False
    ) -> "ExchangeMetrics":
        """Returns the metrics of an exchange, from counts over all workers.

        A skipped exchange counts nothing as sent; a skipped drain still counts as drained, since it cost its bytes.
        """
        return cls(
            sent=jnp.where(ok, jnp.asarray(sent, jnp.float32), 0),
            overflow=jnp.where(ok, jnp.asarray(overflow, jnp.float32), 0),
            skipped=1 - ok.astype(jnp.int32),
            drained=jnp.asarray(drained, jnp.int32),
        )
