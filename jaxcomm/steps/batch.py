"""The batch of a step: what is cut into workers' rows, what is replicated, and what is refused."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcomm.types import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """A batch as a step takes it apart: what is cut into workers' rows, and what is replicated.

    Attributes:
      rows: the arrays that have rows, rows first: (B, ...).
      replicated: the other leaves: scalars, keys, and arrays that `batch_axis` says have no rows.
      key: the random key of the step, replicated; None without one.
      treedef: the structure of the user's batch. Static.
      axes: for every leaf the axis of its rows; None for what is replicated. Static.
    """

    rows: list[Any]
    replicated: list[Any]
    key: Any
    treedef: Any = field(metadata={"static": True})
    axes: tuple[int | None, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, batch: PyTree, batch_axis: PyTree = 0, key: Any = None) -> "Batch":
        """Takes a batch apart; see `row_axes`."""
        leaves, treedef = jax.tree.flatten(batch)
        axes = row_axes(batch, batch_axis)
        pairs = list(zip(leaves, axes, strict=True))
        rows = [leaf if axis == 0 else jnp.moveaxis(leaf, axis, 0) for leaf, axis in pairs if axis is not None]
        return cls(rows, [leaf for leaf, axis in pairs if axis is None], key, treedef, tuple(axes))

    def tree(self) -> PyTree:
        """Returns the user's batch, with the rows that this one has."""
        rows, replicated = iter(self.rows), iter(self.replicated)
        leaves = [
            next(replicated) if axis is None else next(rows) if axis == 0 else jnp.moveaxis(next(rows), 0, axis)
            for axis in self.axes
        ]
        return self.treedef.unflatten(leaves)

    def like(self, of_rows: Any, of_others: Any) -> Any:
        """Returns a tree of this structure, with one item for everything that has rows, and one for the rest."""
        items = [of_rows] * len(self.rows), [of_others] * len(self.replicated)
        return replace(self, rows=items[0], replicated=items[1], key=None if self.key is None else of_others)


def row_axes(batch: PyTree, batch_axis: PyTree = 0) -> list[int | None]:
    """Returns, for every leaf of a batch, the axis of its rows; None for what is replicated, as scalars are.

    Args:
      batch: any tree.
      batch_axis: an axis for all arrays, or a tree of axes that is a prefix of the batch, None for what is replicated.

    Raises:
      ValueError: for a tree that is no prefix of the batch, or an axis that an array does not have.
    """
    pairs = jax.tree_util.tree_leaves_with_path(batch)
    leaf_axes: list[Any] = []
    try:
        jax.tree.map(
            lambda axis, part: leaf_axes.extend([axis] * len(jax.tree.leaves(part))),
            batch_axis,
            batch,
            is_leaf=lambda node: node is None,
        )
    except ValueError as error:
        raise ValueError(
            f"batch_axis must be an axis, or a tree of axes like the batch; got {batch_axis!r} for a batch of "
            f"{jax.tree.structure(batch)}. Name every array: {{'x': 0, 'weights': None}}, None for what is replicated."
        ) from error
    axes: list[int | None] = []
    for (path, leaf), axis in zip(pairs, leaf_axes, strict=True):
        ndim = jnp.ndim(leaf)
        if axis is not None and ndim and not (isinstance(axis, int | np.integer) and -ndim <= axis < ndim):
            raise ValueError(
                f"batch_axis must be an axis of each array; got {axis!r} for the shape {jnp.shape(leaf)} at "
                f"{jax.tree_util.keystr(path)!r}. Give arrays different axes by a tree like the batch."
            )
        axes.append(None if axis is None or not ndim else int(axis) % ndim)
    return axes


def _listing(counts: Iterable[tuple[str, int]]) -> str:
    """Returns a text on the numbers of rows, each with the first array that has it."""
    paths: dict[int, list[str]] = {}
    for path, rows in counts:
        paths.setdefault(rows, []).append(path)
    more = {rows: f" and {len(own) - 1} more" if len(own) > 1 else "" for rows, own in paths.items()}
    return ", ".join(f"{rows} at {own[0]!r}{more[rows]}" for rows, own in paths.items())


def check_batch(
    batch: PyTree, workers: int, micro_batches: int = 1, batch_axis: PyTree = 0, *, takes_scalars: bool = True
) -> None:
    """Refuses a batch that does not divide evenly, or whose arrays have different numbers of rows.

    Scalars, including a typed random key, have no rows.

    Args:
      batch: the global batch, or its shapes.
      workers: K.
      micro_batches: micro-batches of a worker.
      batch_axis: see `row_axes`.
      takes_scalars: whether a batch may have scalars; in a pipeline each array is cut into micro-batches.

    Raises:
      ValueError: for a scalar that is not taken; if the rows of an array are not a multiple of K times the
        micro-batches; if arrays have different numbers of rows; for the two words of an untyped random key among arrays
        of other sizes.
    """
    parts = workers * micro_batches
    cut = f"{workers} workers" + (f" of {micro_batches} micro-batches each" if micro_batches > 1 else "")
    axes, leaves = row_axes(batch, batch_axis), jax.tree_util.tree_leaves_with_path(batch)
    pairs = [(jax.tree_util.keystr(path), leaf, axis) for (path, leaf), axis in zip(leaves, axes, strict=True)]
    arrays = [(path, leaf, jnp.shape(leaf)[axis]) for path, leaf, axis in pairs if axis is not None]
    counts = [rows for *_, rows in arrays]
    if scalars := [path for path, leaf, _ in pairs if not jnp.ndim(leaf) and not takes_scalars]:
        raise ValueError(
            f"Each array in the batch of a pipeline must have rows; got a scalar at {scalars[0]!r}. Repeat it."
        )
    for path, leaf, _ in arrays:
        if jnp.shape(leaf) == (2,) and jnp.result_type(leaf) == jnp.uint32 and any(count != 2 for count in counts):
            raise ValueError(
                f"A random key in a batch must be a typed one; got two words at {path!r}, which are no rows. Make it "
                "with jax.random.key, or wrap it: jax.random.wrap_key_data."
            )
    if len(set(counts)) > 1:
        usual = max(counts, key=lambda rows: (counts.count(rows), rows % parts == 0, rows))
        listing = _listing((path, rows) for path, _, rows in arrays)
        example = [None if axis is None or jnp.shape(leaf)[axis] != usual else axis for _, leaf, axis in pairs]
        raise ValueError(
            f"The arrays of a batch must have the same number of rows, which are divided among {cut}; got {listing}. "
            "Say by batch_axis= which axis of each array has the rows, with None for what every worker needs whole, as "
            f"class weights and masks: batch_axis={jax.tree.unflatten(jax.tree.structure(batch), example)}. Pad what "
            "has several items for a row, as labels of sequences and edges of graphs, to an array of rows."
        )
    for path, leaf, rows in arrays:
        if rows == 0 or rows % parts:
            raise ValueError(
                f"The rows of a batch must be a multiple of the number of workers; got {rows} rows at {path!r} for "
                f"{cut}. Use a batch size of {max(rows // parts, 1) * parts}, or another number of workers."
                f"{' If the rows are along another axis (time first), pass batch_axis=.' * (jnp.ndim(leaf) > 1)}"
            )


def check_global(batch: PyTree, batch_axis: PyTree = 0) -> None:
    """Refuses a process's own arrays where there are several processes: each would be taken as the whole batch.

    What `batch_axis` says is replicated may be a process's own.
    """
    if jax.process_count() == 1:
        return
    pairs = zip(jax.tree_util.tree_leaves_with_path(batch), row_axes(batch, batch_axis), strict=True)
    for (path, leaf), axis in pairs:
        is_shape = isinstance(leaf, Tracer | jax.ShapeDtypeStruct)
        if axis is not None and not is_shape and (not isinstance(leaf, jax.Array) or leaf.is_fully_addressable):
            raise ValueError(
                f"A batch must be of global arrays where there are several processes; got one of this process alone, "
                f"of {jax.process_count()}, at {jax.tree_util.keystr(path)!r}. Make it by "
                'jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), own_rows).'
            )
