"""States in the checkpoints of other libraries: Flax's serialization, and trees that were restored without types."""

import sys
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import jax


def register_with_flax(*types: type) -> None:
    """Registers how to write and read dataclasses of arrays with `flax.serialization`, if it has been imported."""
    flax = sys.modules.get("flax.serialization")
    if flax is None:
        return

    def names(node: Any) -> list[str]:
        return [attribute.name for attribute in fields(node) if not attribute.metadata.get("static")]

    def write(node: Any) -> dict[str, Any]:
        return {name: flax.to_state_dict(getattr(node, name)) for name in names(node)}

    def read(node: Any, entries: dict[str, Any]) -> Any:
        if different := set(names(node)) ^ entries.keys():
            raise ValueError(
                f"A checkpoint must have the fields of {type(node).__name__}, {names(node)}; got others: "
                f"{sorted(different)} are in one of them alone. Restore it into a state of the same method."
            )
        return replace(node, **{name: flax.from_state_dict(getattr(node, name), entries[name]) for name in names(node)})

    for kind in types:
        flax.register_serialization_state(kind, write, read, override=True)


def has_lost_types(state: Any) -> bool:
    """Returns whether a tree has workers' rows only by name: it was restored without a target, or split."""
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        keys = [getattr(key, "key", None) for key in path]
        if ("worker", "rows") in pairwise(keys):
            return True
    return False
