"""Arguments that are objects of Flax NNX, which a step changes in place. Flax is used if loaded, never imported.

To JAX these objects are pytrees, in which the optimizer's state keeps its types. JAX does not know that a step changes
them, or that two of them may share a variable.
"""

import sys
from dataclasses import dataclass
from typing import Any

import jax

from jaxcomm.exchange import leaf_name
from jaxcomm.types import PyTree, nodes_of


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def is_object(node: PyTree) -> bool:
    """Returns whether a node of a tree is a module, an optimizer or a metric of NNX."""
    nnx = _nnx()
    return nnx is not None and isinstance(node, nnx.Pytree)


def names(tree: PyTree) -> list[str]:
    """Returns the paths of all leaves; that of a variable ends in its type: "model/bn/mean:BatchStat"."""
    nnx = _nnx()

    def is_variable(node: PyTree) -> bool:
        return nnx is not None and isinstance(node, nnx.Variable)

    leaf_names: list[str] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable):
        kind = f":{type(leaf).__name__}" if is_variable(leaf) else ""
        leaf_names += [leaf_name(path) + kind] * len(jax.tree.leaves(leaf))
    return leaf_names


def is_spread(name: str) -> bool:
    """Returns whether a name of `names` is that of the squares in an `nnx.metrics.Welford`, which have no mean."""
    return name.rpartition("/")[2] == "m2:MetricState"


def update(old: PyTree, new: PyTree) -> None:
    """Copies the values of new objects into old ones of the same structure."""
    nnx = _nnx()
    for ours, theirs in zip(
        jax.tree.leaves(old, is_leaf=is_object), jax.tree.leaves(new, is_leaf=is_object), strict=True
    ):
        if is_object(ours):
            nnx.update(ours, nnx.state(theirs))


def sharing(tree: PyTree) -> Any:
    """Finds which variables the objects of a tree share, for `shared`; None if they share none, as in most models.

    Raises:
      ValueError: if an `nnx.State` shares variables.
    """
    nnx = _nnx()
    if nnx is None or not nodes_of(tree, nnx.Pytree) or not nnx.find_duplicates(tree):
        return None
    if nodes_of(tree, Merged):
        raise ValueError(
            "Variables must not be shared in a state of nnx.split; got "
            f"{nnx.find_duplicates(tree)[0]}, which are one. Pass the model and the optimizer themselves."
        )
    graph, state = nnx.split(tree)
    return graph, tuple(path for path, _ in nnx.to_flat_state(state))


def shared(tree: PyTree, shared_variables: Any) -> PyTree:
    """Makes the objects of an unflattened tree share the variables that `sharing` found."""
    if shared_variables is None:
        return tree
    nnx, (graph, paths) = _nnx(), shared_variables
    flat = dict(nnx.to_flat_state(nnx.state(tree)))
    return nnx.merge(graph, nnx.from_flat_state({path: flat[path] for path in paths}))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Merged:
    """An `nnx.State` merged into its objects, so that its rows keep their types."""

    objects: Any

    def state(self) -> Any:
        """Returns the `nnx.State`."""
        return _nnx().split(self.objects)[1]


def merge_states(tree: PyTree, graph: Any) -> Any:
    """Replaces every `nnx.State` of a graph in a tree by its objects; without a graph, changes nothing."""
    nnx = _nnx()

    def merge(node: PyTree) -> PyTree:
        if not isinstance(node, nnx.State):
            return node
        try:
            return Merged(nnx.merge(graph, node))
        except (ValueError, KeyError):  # the state of another graph
            return node

    return tree if graph is None else jax.tree.map(merge, tree, is_leaf=lambda node: isinstance(node, nnx.State))


def is_changed(arg: Any) -> bool:
    """Returns whether an argument has objects that a step may change in place."""
    return any(map(is_object, jax.tree.leaves(arg, is_leaf=_is_whole)))


def split_states(tree: PyTree) -> Any:
    """Inverts `merge_states`; leaves objects as they are."""
    if _nnx() is None:
        return tree
    return jax.tree.map(lambda node: node.state() if isinstance(node, Merged) else node, tree, is_leaf=_is_whole)


def _is_whole(node: PyTree) -> bool:
    return isinstance(node, Merged) or is_object(node)


def graph_in(tree: PyTree) -> Any:
    """Returns the first `nnx.GraphDef` in a tree, or None."""
    nnx = _nnx()
    return None if nnx is None else next(iter(nodes_of(tree, nnx.GraphDef)), None)
