"""Trees of a step's arguments and results as lists of arrays: what of them is traced, and where it is placed."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcomm.exchange import exchange_states, is_exchange_state
from jaxcomm.foreign.keys import is_key
from jaxcomm.types import AccumulatedState, DelayedState, PyTree, is_per_worker, map_rows


def kind_of(node: PyTree) -> Any:
    """Returns the structure and the shapes of a tree, None for a bare scalar."""
    if not is_array(node):
        shapes = tuple(jnp.shape(leaf) if is_array(leaf) else None for leaf in jax.tree.leaves(node))
        return jax.tree.structure(node), shapes
    return (jnp.shape(node), jnp.result_type(node)) if jnp.ndim(node) or is_key(node) else None


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """An argument that is static, though it could be traced."""

    value: Any
    type: type  # True is equal to 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A tree as the list of its arrays. Its other leaves, such as the functions in a model, are static."""

    arrays: list[Any]
    treedef: Any = field(metadata={"static": True})
    others: tuple[Any, ...] = field(metadata={"static": True})  # None in place of an array
    sharing: Any = field(default=None, metadata={"static": True})  # see `nnx.sharing`

    @classmethod
    def of(cls, tree: PyTree, sharing: Any = None) -> "Packed":
        """Packs a tree."""
        leaves, treedef = jax.tree.flatten(tree)
        statics = tuple(None if is_traced else leaf for leaf, is_traced in zip(leaves, _traced(tree), strict=True))
        arrays = [leaf for leaf, static in zip(leaves, statics, strict=True) if static is None]
        return cls(arrays, treedef, statics, sharing)

    def replace(self, arrays: list[Any]) -> "Packed":
        """Returns this tree with other arrays, still packed."""
        return replace(self, arrays=arrays)

    def tree(self, arrays: Iterable[Any] | None = None) -> PyTree:
        """Returns the tree, with other arrays if they are given."""
        dynamic = iter(self.arrays if arrays is None else arrays)
        return self.treedef.unflatten([next(dynamic) if static is None else static for static in self.others])

    def pick(self, of_leaves: list[Any]) -> list[Any]:
        """Returns, of a list with an item for each leaf, the items of the arrays."""
        return [leaf for leaf, static in zip(of_leaves, self.others, strict=True) if static is None]


def is_array(leaf: PyTree) -> bool:
    """Returns whether a leaf is an array or a number of Python's."""
    return isinstance(leaf, bool | int | float | complex) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _traced(tree: PyTree) -> list[bool]:
    """Returns, for every leaf of a tree, whether it is traced. A Python number in an Equinox module is static."""
    equinox = sys.modules.get("equinox")

    def is_module(node: PyTree) -> bool:
        return equinox is not None and isinstance(node, equinox.Module)

    flags: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=is_module):
        flags += [hasattr(leaf, "dtype") for leaf in jax.tree.leaves(node)] if is_module(node) else [is_array(node)]
    return flags


def _is_owner(node: PyTree) -> bool:
    """Returns whether a node is a `PerWorker`, or the state of an exchange or of a chain around it, which has some."""
    return is_per_worker(node) or is_exchange_state(node) or isinstance(node, AccumulatedState | DelayedState)


def _members(node: PyTree) -> int:
    """Returns the axes of `jax.vmap` in front of the rows of a node: of models with a state each, as in an ensemble."""
    exchange = next(exchange_states(node), None)
    return 0 if exchange is None else jnp.ndim(jax.tree.leaves(exchange.step)[0])


def leaf_specs(tree: PyTree) -> list[P]:
    """Returns the PartitionSpec of every leaf: `state_specs` as a list, since not every tree can hold them."""
    specs: list[P] = []
    for owner in jax.tree.leaves(tree, is_leaf=_is_owner):
        for node in jax.tree.leaves(owner, is_leaf=is_per_worker):
            spec = P(*[None] * _members(owner), node.axes) if is_per_worker(node) else P()
            specs += [spec] * len(jax.tree.leaves(node))
    return specs


def spread(state: PyTree, workers: int) -> PyTree:
    """Gives a state that is fresh from `tx.init` a row for each worker."""

    def rows(leaf: PyTree, axis: int) -> Any:
        count = leaf.shape[axis]
        if count == workers or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if count != 1:
            raise ValueError(
                f"A state must have a row for each worker; got {count} rows for {workers} workers. Use "
                "jaxcomm.resize_workers to continue with another number of them; an array with several rows for each "
                "worker is no PerWorker: name it by rows=."
            )
        return jnp.repeat(jnp.asarray(leaf), workers, axis=axis)

    def spread(owner: Any) -> PyTree:
        of_rows = partial(rows, axis=_members(owner))
        return map_rows(lambda node: jax.tree.map(of_rows, node), owner)

    return jax.tree.map(spread, state, is_leaf=_is_owner)


def buffer_of(array: Any) -> Any:
    """Returns something that is equal for two arrays in the same memory."""
    if not isinstance(array, jax.Array) or not array.size or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return id(array)
    return array.addressable_shards[0].data.unsafe_buffer_pointer() if array.addressable_shards else id(array)


def copy_repeats(arrays: list[Any], batch: PyTree, key: Callable[[Any], Any]) -> list[Any]:
    """Copies the arrays that are there twice, or in the batch, too: one buffer cannot be donated twice."""
    keys = {key(leaf) for leaf in jax.tree.leaves(batch)}
    distinct = []
    for array in arrays:
        is_new = key(array) not in keys
        keys.add(key(array))
        distinct.append(array if is_new or not isinstance(array, jax.Array) else jnp.copy(array))
    return distinct


def has_scalars_alone(arg: Any) -> bool:
    """Returns whether an argument is a tree of scalars."""
    leaves = jax.tree.leaves(arg)
    return bool(leaves) and not is_array(arg) and all(is_array(x) and not jnp.ndim(x) and not is_key(x) for x in leaves)


def in_exchange(tree: PyTree) -> list[bool]:
    """Returns, for every leaf of a tree, whether it is in the state of an exchange."""
    flags: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=is_exchange_state):
        flags += [is_exchange_state(node)] * len(jax.tree.leaves(node))
    return flags
