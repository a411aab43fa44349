"""Stacked stage parameters: one list of arrays for stages of different shapes.

All devices run one program, so all hold arrays of the same shapes. These arrays are called slots. The largest tensor of
every stage goes into the first slot, the second largest into the second, and so on, which needs little padding. If all
stages' tensors of a slot have one shape, so has the slot; otherwise it is a vector of the largest size.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.types import PyTree


@dataclass(frozen=True)
class StackedParams:
    """The slot of every tensor of every stage.

    Attributes:
      shapes: the shape of every slot.
      dtypes: the type of every slot.
      stages: every stage's tree, with the number of its slot in place of each tensor.
      tensors: the shapes of every stage's tensors, in tree order.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    stages: tuple[Any, ...]
    tensors: tuple[tuple[tuple[int, ...], ...], ...]

    def of_stage(self, stage: int, slots: Sequence[jax.Array]) -> Any:
        """Returns a stage's tree from its slots."""
        numbers, tree = jax.tree.flatten(self.stages[stage])
        shapes = self.tensors[stage]
        return tree.unflatten([_take(slots[n], shape) for n, shape in zip(numbers, shapes, strict=True)])

    def to_slots(self, stage: int, tree: PyTree) -> list[jax.Array]:
        """Puts a stage's tree into slots; unused slots, and the padding of a slot, are zero."""
        numbers, leaves = jax.tree.leaves(self.stages[stage]), jax.tree.leaves(tree)
        leaf_of_slot = dict(zip(numbers, leaves, strict=True))
        return [
            _put(leaf_of_slot.get(n), shape, dtype)
            for n, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True))
        ]

    def stack(self, trees: Sequence[Any]) -> list[jax.Array]:
        """Stacks all stages: (S, *shape) for every slot."""
        rows = [self.to_slots(stage, tree) for stage, tree in enumerate(trees)]
        return [jnp.stack(slot) for slot in zip(*rows, strict=True)]

    def unstack(self, slots: Sequence[Any]) -> list[Any]:
        """Returns the tree of every stage; the inverse of `stack`."""
        return [self.of_stage(stage, [slot[stage] for slot in slots]) for stage in range(len(self.stages))]

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the elements of every stage's tensor in a slot, by the slot's path in a list; 0 for no tensor."""
        rows = [[0] * len(self.stages) for _ in self.shapes]
        for stage, (tree, tensors) in enumerate(zip(self.stages, self.tensors, strict=True)):
            for n, shape in zip(jax.tree.leaves(tree), tensors, strict=True):
                rows[n][stage] = math.prod(shape)
        return {f"[{n}]": tuple(row) for n, row in enumerate(rows)}


def plan_stacked(trees: Sequence[Any]) -> StackedParams:
    """Plans the slots of stages from their trees of arrays or `jax.ShapeDtypeStruct`s."""
    stage_leaves = [[(jnp.dtype(leaf.dtype), tuple(leaf.shape)) for leaf in jax.tree.leaves(tree)] for tree in trees]
    dtypes = sorted({dtype for leaves in stage_leaves for dtype, _ in leaves}, key=str)
    shapes: list[tuple[int, ...]] = []
    slot_dtypes: list[Any] = []
    numbers = [[0] * len(leaves) for leaves in stage_leaves]
    for dtype in dtypes:
        by_size = [
            sorted((-math.prod(shape), shape, index) for index, (kind, shape) in enumerate(leaves) if kind == dtype)
            for leaves in stage_leaves
        ]
        for slot in itertools.zip_longest(*by_size):  # the largest tensors of all stages that are left, or None
            for stage, tensor in enumerate(slot):
                if tensor is not None:
                    numbers[stage][tensor[-1]] = len(shapes)
            slot_shapes = {tensor[1] for tensor in slot if tensor is not None}
            size = max(map(math.prod, slot_shapes))
            shapes.append(slot_shapes.pop() if len(slot_shapes) == 1 else (size,))
            slot_dtypes.append(dtype)
    return StackedParams(
        shapes=tuple(shapes),
        dtypes=tuple(slot_dtypes),
        stages=tuple(jax.tree.unflatten(jax.tree.structure(tree), n) for tree, n in zip(trees, numbers, strict=True)),
        tensors=tuple(tuple(shape for _, shape in leaves) for leaves in stage_leaves),
    )


def _take(slot: Any, shape: tuple[int, ...]) -> Any:
    return slot if slot.shape == shape else slot.reshape(-1)[: math.prod(shape)].reshape(shape)


def _put(leaf: PyTree, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if leaf is None:
        return jnp.zeros(shape, dtype)
    if np.shape(leaf) == shape:
        return jnp.asarray(leaf)
    return jnp.pad(jnp.reshape(leaf, -1), (0, math.prod(shape) - leaf.size)).reshape(shape)
