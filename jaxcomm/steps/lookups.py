"""Sharded tables whose rows the train step looks up, and updates in place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcomm.exchange import leaf_name
from jaxcomm.layers.sharded_lookup import add_to_rows, gather_ids, send_rows
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.sharding import ShardedExchange, spec_axes
from jaxcomm.types import Params, PyTree

Lookups = Mapping[str, Callable[[Any], jax.Array]]
_STEPS = 3  # for which an optimizer is tried; a learning rate may start at 0


@dataclass(frozen=True)
class Tables:
    """The tables among the parameters.

    Attributes:
      exchange: the exchange of the parameters, with looked-up vectors in place of the tables.
      by: for every parameter, in tree order: "rows" or "columns", the way a table is sharded; None if it is no table.
      ids: for every table, (batch) -> its ids.
    """

    exchange: ShardedExchange
    by: tuple[str | None, ...]
    ids: tuple[Callable[[Any], jax.Array], ...]

    def look_up(self, params: Params, batch: Batch) -> tuple[Any, list[jax.Array]]:
        """Returns the parameters with vectors in place of the tables, and every table's ids of all workers."""
        axis, by_rows = self.exchange.axis_name, P(self.exchange.names)

        def worker(tables: list[jax.Array], batch: Batch) -> tuple[list[jax.Array], list[jax.Array]]:
            everyones = [gather_ids(_checked(ids(batch.tree())), axis) for ids in self.ids]
            rows = zip(tables, everyones, self._ways, strict=True)
            return [send_rows(table, ids, way, axis) for table, ids, way in rows], everyones

        in_specs = (self._specs, batch.like(by_rows, P()))
        run = jax.shard_map(worker, mesh=self.exchange.mesh, in_specs=in_specs, out_specs=(by_rows, by_rows))
        vectors, everyones = run(self.of(params), batch)
        return self._replaced(params, vectors), everyones

    def add(self, params: Params, other_params: Any, updates: PyTree, everyones: list[jax.Array]) -> Any:
        """Adds the updates of the vectors to the rows of the tables; takes the other parameters from `other_params`."""
        axis, by_rows = self.exchange.axis_name, P(self.exchange.names)

        def worker(tables: list[jax.Array], changes: list[jax.Array], everyones: list[jax.Array]) -> list[jax.Array]:
            rows = zip(tables, everyones, changes, self._ways, strict=True)
            return [add_to_rows(table, ids, change, way, axis) for table, ids, change, way in rows]

        run = jax.shard_map(
            worker, mesh=self.exchange.mesh, in_specs=(self._specs, by_rows, by_rows), out_specs=self._specs
        )
        return self._replaced(other_params, run(self.of(params), self.of(updates), everyones))

    def of(self, params: Params) -> list[Any]:
        """Returns the tables among the parameters, or what a tree like theirs has in their places."""
        return [leaf for leaf, way in zip(jax.tree.leaves(params), self.by, strict=True) if way is not None]

    def _replaced(self, params: Params, tables: list[Any]) -> Any:
        """Returns the parameters with others in the places of the tables; the inverse of `of`."""
        leaves, treedef = jax.tree.flatten(params)
        queue, pairs = iter(tables), zip(leaves, self.by, strict=True)
        return treedef.unflatten([leaf if way is None else next(queue) for leaf, way in pairs])

    @property
    def _ways(self) -> list[str]:
        return [way for way in self.by if way is not None]

    @property
    def _specs(self) -> list[P]:
        names = self.exchange.names
        return [P(names) if way == "rows" else P(None, names) for way in self._ways]


def tables_of(lookups: Lookups, params: Params, exchange: ShardedExchange) -> Tables:
    """Finds the tables among the parameters.

    Raises:
      ValueError: for a path that no parameter has, or a parameter that is not a float32 matrix sharded over the
        workers along one dimension.
    """
    paths = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    gaps = [path for path in lookups if path not in paths]
    if gaps:
        raise ValueError(f"lookups must be of parameters, by their paths; got {gaps[0]!r}. There are {paths}.")
    ways: list[str | None] = []
    for path, leaf, spec in zip(paths, jax.tree.leaves(params), exchange.specs, strict=True):
        place = [place for place, entry in enumerate(spec) if spec_axes(P(entry))]
        if path in lookups and (
            leaf.ndim != 2 or len(place) != 1 or spec_axes(spec) != exchange.names or leaf.dtype != jnp.float32
        ):
            raise ValueError(
                f"lookups must be of float32 matrices that are sharded over the workers, by rows or by columns; got "
                f"{path!r} {leaf.shape} with the spec {tuple(spec)}. Leave it out, or give it a spec over "
                f"{exchange.names}."
            )
        ways.append(("rows", "columns")[place[0]] if path in lookups else None)
    specs = tuple(spec if way is None else P(exchange.names) for spec, way in zip(exchange.specs, ways, strict=True))
    ids = tuple(lookups[path] for path, way in zip(paths, ways, strict=True) if way is not None)
    return Tables(replace(exchange, specs=specs), tuple(ways), ids)


def check_additive(exchange: ShardedExchange, params: Params, tables: Tables) -> None:
    """Refuses an optimizer whose update of a row is not the sum of the updates of the row's lookups.

    The optimizer is tried on a few numbers: its state must not grow with the table, and the updates of two gradients
    must sum to the update of their sum.

    Raises:
      ValueError: for momentum, Adam, decay, clipping, and anything else that is not a learning rate.
    """
    before, after = exchange.chain.before, exchange.chain.after
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)

    def small(rows: int) -> Any:
        shapes = [(1,) * leaf.ndim if way is None else (rows, 2) for leaf, way in zip(leaves, tables.by, strict=True)]
        return treedef.unflatten([jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes])

    def sizes(rows: int) -> list[int]:
        state = jax.eval_shape(lambda tree: (before.init(tree), after.init(tree)), small(rows))
        return [leaf.size for leaf in jax.tree.leaves(state)]

    def update(gradients: PyTree, states: Any) -> tuple[list[Any], Any]:
        changed, first = before.update(gradients, states[0], sample)
        changed, second = after.update(changed, states[1], sample)
        return tables.of(changed), (first, second)

    sample, is_additive = small(3), sizes(3) == sizes(5)
    states = (before.init(sample), after.init(sample))
    for _ in range(_STEPS if is_additive else 0):
        left, right = small(3), small(3)
        joint = jax.tree.map(jnp.add, left, right)
        parts, (sums, new) = [update(side, states)[0] for side in (left, right)], update(joint, states)
        pairs = zip(*parts, sums, strict=True)
        is_additive &= all(np.allclose(a + b, total, rtol=1e-4, atol=1e-6) for a, b, total in pairs)
        states = new
    if not is_additive:
        raise ValueError(
            "lookups must be with an optimizer whose update of a row is the sum of those of its lookups; got one that "
            "has a state for every row, or changes rows that no lookup touched. Use optax.sgd(learning_rate) without "
            "momentum and decay, or leave lookups out."
        )


def _checked(ids: jax.Array) -> jax.Array:
    if ids.dtype != jnp.int32:
        raise ValueError(f"ids of lookups must be of int32; got {ids.dtype}. Cast them.")
    return ids
