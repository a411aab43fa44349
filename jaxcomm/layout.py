"""Where a gradient's tensors are in one flat vector, and which of them are compressed.

All layouts are static: they depend on shapes alone. One flat vector with a segment per tensor keeps the compiled
program as small for 161 tensors as for one.
"""

import contextlib
import contextvars
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.kernels.bits import LANES, WORD, running_sum
from jaxcomm.kernels.platforms import by_platform
from jaxcomm.kernels.vectors import end_to_end, split_vector
from jaxcomm.types import PyTree

# Segments start at multiples of BLOCK, so that a table of one entry per block says which segment a coordinate is in.
# The padding is zeros, half a block per tensor on average.
BLOCK = 1024
BLOCK_WORDS = BLOCK // WORD  # words of a packed mask over one block
MAX_ELEMENTS = 2**31
# Of stacked stage parameters: the elements of every stage's tensor, by the path of its slot, and the axis of stages.
_STACKED: contextvars.ContextVar[tuple[Mapping[str, tuple[int, ...]], str | None]] = contextvars.ContextVar(
    "stacked", default=({}, None)
)


@contextlib.contextmanager
def stacked(sizes: Mapping[str, tuple[int, ...]], axis_name: str | None) -> Iterator[None]:
    """Makes the layouts that are planned inside count every stage's own elements of stacked stage parameters.

    Args:
      sizes: by `jax.tree_util.keystr` of a slot's path, the elements of every stage's tensor in it.
      axis_name: the axis of stages; None where it is not bound, for shapes and bytes, which are those of any stage.
    """
    token = _STACKED.set((sizes, axis_name))
    try:
        yield
    finally:
        _STACKED.reset(token)


def stage_axis() -> str | None:
    """Returns the axis of a pipeline's stages where it is bound; None outside of a pipeline's step."""
    return _STACKED.get()[1]


def in_blocks(vector: jax.Array) -> jax.Array:
    """Cuts a vector (n,) into its blocks: (n/1024, 8, 128), as a TPU stores them."""
    return vector.reshape(-1, BLOCK // LANES, LANES)


@dataclass(frozen=True)
class Stages:
    """What the segments of stacked stage parameters are to every stage.

    Attributes:
      axis_name: the axis of stages, or None if it is not bound.
      sizes: for every segment, each stage's elements of it; the rest of the segment is padding.
      capacities: for every segment, how many of its slots each stage uses. A tensor with fewer than `dense_below`
        elements has a slot for each.
      is_whole: for every segment, whether each stage's tensor has so few elements.
    """

    axis_name: str | None
    sizes: tuple[tuple[int, ...], ...]
    capacities: tuple[tuple[int, ...], ...]
    is_whole: tuple[tuple[bool, ...], ...]

    def own(self, table: Any) -> Any:
        """Returns this device's stage's column of a table (S, stages): (S,)."""
        table = np.asarray(table, np.int32)
        return table[:, 0] if self.axis_name is None else jnp.asarray(table)[:, lax.axis_index(self.axis_name)]


@dataclass(frozen=True)
class Layout:
    """The flat vector of the compressed tensors, and the list of dense ones.

    Attributes:
      shapes: the shape of every leaf, in tree order.
      dtypes: the dtype of every leaf.
      compressed: for every leaf, whether it is part of the flat vector.
      capacities: for every segment, its slots in a payload. A segment is a compressed leaf, or a chunk of one.
      chunk: elements of a chunk, whole blocks; the last chunk of a leaf may have fewer. None for whole leaves.
      stages: for stacked stage parameters, where stages differ; else None.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    compressed: tuple[bool, ...]
    capacities: tuple[int, ...]
    chunk: int | None = None
    stages: Stages | None = None

    @cached_property
    def tensor_sizes(self) -> tuple[int, ...]:
        """Elements of every compressed leaf."""
        return tuple(math.prod(shape) for shape, is_in in zip(self.shapes, self.compressed, strict=True) if is_in)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every segment."""
        return segment_sizes(self.tensor_sizes, self.chunk)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of every segment."""
        return tuple(-(-size // BLOCK) for size in self.sizes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where every compressed leaf starts in the flat vector."""
        ends = itertools.accumulate(-(-size // BLOCK) * BLOCK for size in self.tensor_sizes)
        return (0, *ends)[: len(self.tensor_sizes)]

    @property
    def n(self) -> int:
        """Elements of the flat vector, padding included."""
        return sum(self.blocks) * BLOCK

    @property
    def n_words(self) -> int:
        """Words of a bit-packed mask over the flat vector."""
        return self.n // WORD

    @property
    def n_dense(self) -> int:
        """Elements of the tensors that are not compressed."""
        return sum(math.prod(shape) for shape in self.shapes) - sum(self.tensor_sizes)

    @property
    def n_slots(self) -> int:
        """Slots of a payload, C."""
        return sum(self.capacities)

    # What is counted by segment; in a pipeline, by this device's stage: then a traced array.

    def elements(self) -> Any:
        """Returns the elements of every segment without padding: (S,) int32."""
        return np.asarray(self.sizes, np.int32) if self.stages is None else self.stages.own(self.stages.sizes)

    def n_elements(self) -> Any:
        """Returns the elements of all segments, for counts: an int, or () float32."""
        return sum(self.sizes) if self.stages is None else jnp.sum(self.elements().astype(np.float32))

    def rooms(self) -> Any:
        """Returns how many slots of every segment may be used: (S,) int32."""
        return np.asarray(self.capacities, np.int32) if self.stages is None else self.stages.own(self.stages.capacities)

    def of_stages(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the elements of every segment and the slots that may be used, (S,) each, for every stage."""
        if self.stages is None:
            return [(self.elements(), self.rooms())]
        tables = (np.asarray(table).T for table in (self.stages.sizes, self.stages.capacities))
        return list(zip(*tables, strict=True))

    def counts(self, count: Callable[[int], int]) -> Any:
        """Returns `count` of the elements of every segment: (S,) int32.

        For a stage's tensor with fewer than `dense_below` elements, the size of the segment: all of it is selected.
        """
        if self.stages is None:
            return np.asarray([count(size) for size in self.sizes], np.int32)
        rows = zip(self.sizes, self.stages.sizes, self.stages.is_whole, strict=True)
        return self.stages.own(
            [
                [size if all_ else count(n) for n, all_ in zip(stage_sizes, dense_flags, strict=True)]
                for size, stage_sizes, dense_flags in rows
            ]
        )

    def used(self, elements: Any) -> Any:
        """Returns how many elements of every block are not padding, from those of every segment: (blocks,) int32."""
        blocks = np.asarray(self.blocks, np.int32)
        before = np.arange(sum(self.blocks), dtype=np.int32) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        return (elements[self.segment_of_block()] - before.astype(np.int32) * BLOCK).clip(0, BLOCK)

    def segment_of_block(self) -> np.ndarray:
        """Returns the index of every block's segment: (blocks,) int32."""
        return np.repeat(np.arange(len(self.blocks), dtype=np.int32), self.blocks)

    def segment_of_slot(self) -> jax.Array:
        """Returns the index of every slot's segment: (C,) int32."""
        first_slot = np.cumsum((0, *self.capacities[:-1]))
        # The barrier keeps XLA from summing this constant as it compiles, which takes minutes for ten million slots.
        zeros = lax.optimization_barrier(jnp.zeros(self.n_slots, jnp.int32))
        return running_sum(zeros.at[first_slot].add(1)) - 1

    def per_block(self, per_segment: jax.Array) -> jax.Array:
        """Repeats values per segment (S,) for each of its blocks: (blocks,)."""
        return per_segment[self.segment_of_block()]

    def per_segment(self, per_block: jax.Array) -> jax.Array:
        """Sums values per block (blocks,) over the blocks of each segment: (S,)."""
        return segment_sum(per_block, self.segment_of_block(), len(self.blocks))

    def padding(self) -> Any:
        """Returns the number of padding elements of every segment: (S,) int32."""
        return np.asarray(self.blocks, np.int32) * BLOCK - self.elements()

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Parts the leaves of a tree into (compressed, dense)."""
        pairs = list(zip(leaves, self.compressed, strict=True))
        return [leaf for leaf, is_in in pairs if is_in], [leaf for leaf, is_in in pairs if not is_in]

    def join(self, compressed: Sequence[Any], dense: Sequence[Any]) -> list[Any]:
        """Puts (compressed, dense) back into tree order; the inverse of `split`."""
        inside, outside = iter(compressed), iter(dense)
        return [next(inside) if is_in else next(outside) for is_in in self.compressed]

    def flatten(self, tensors: Sequence[jax.Array]) -> jax.Array:
        """Lays the compressed tensors out as one float32 vector (n,), with zeros as padding."""
        rows = []
        for tensor in tensors:
            rows.append(tensor.reshape(-1).astype(jnp.float32))
            if gap := -tensor.size % BLOCK:
                rows.append(jnp.zeros(gap, jnp.float32))
        if not rows:
            return jnp.zeros(0, jnp.float32)
        # A barrier, since XLA for TPUs would lay the tensors out again for each shape in which the vector is read.
        return by_platform(end_to_end(rows), tpu=lax.optimization_barrier, default=lambda vector: vector)

    def unflatten(self, vector: jax.Array) -> list[jax.Array]:
        """Cuts a vector (n,) into the compressed tensors, in their shapes but in the vector's dtype."""
        shapes, _ = self.split(self.shapes)
        return split_vector(vector, shapes, self.starts)

    def as_leaves(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Casts the compressed tensors to the dtypes of their leaves."""
        dtypes, _ = self.split(self.dtypes)
        return [tensor.astype(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]


def segment_sizes(sizes: Sequence[int], chunk: int | None) -> tuple[int, ...]:
    """Returns the sizes of the chunks of tensors; the last chunk of a tensor may be shorter."""
    if chunk is None:
        return tuple(sizes)
    cut = [[chunk] * (size // chunk) + [size % chunk] * (size % chunk > 0) for size in sizes]
    return tuple(size for segments in cut for size in segments)


def segment_sum(values: jax.Array, segments: np.ndarray, count: int) -> jax.Array:
    """Sums values (m,) by their segments' indices, which never descend: (count,)."""
    if count == 1:  # XLA 0.10.2 on a CPU drops integers of m values under a vmap of as many rows
        return jnp.sum(values, axis=0, keepdims=True, dtype=values.dtype)
    return jax.ops.segment_sum(values, segments, num_segments=count, indices_are_sorted=True)


def plan_layout(
    tree: PyTree,
    *,
    dense_below: int,
    capacity: Callable[[int], int],
    compress: Callable[[tuple[int, ...]], bool] | None = None,
    chunk: int | None = None,
) -> Layout:
    """Decides which tensors of a gradient are compressed, and how many slots each has.

    Args:
      tree: a pytree of arrays or of `jax.ShapeDtypeStruct`s.
      dense_below: tensors with fewer elements travel dense.
      capacity: the slots of a segment, from its number of elements.
      compress: whether a tensor is worth compressing, from its shape; None for every tensor. Other tensors travel dense
        as well.
      chunk: elements of a segment, a multiple of `BLOCK`; None for one segment per tensor.

    Raises:
      ValueError: if the tree is empty, a leaf is not of a real floating type, a compressed one is of float64, or there
        are 2^31 elements or more to compress.
    """
    paths = jax.tree_util.tree_leaves_with_path(tree)
    if not paths:
        raise ValueError(
            "A gradient must have at least one tensor; got an empty tree. Pass the parameters that are trained."
        )
    for path, leaf in paths:
        if not jnp.issubdtype(dtype := jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"Gradients must be of a real floating type; got {dtype} at {jax.tree_util.keystr(path)!r}. Keep "
                "others out of the parameters, by eqx.filter, nnx.Param or a tree of their own. Without "
                "stages, make_train_step leaves integers, booleans and keys out by itself."
            )
    shapes = tuple(jnp.shape(leaf) for _, leaf in paths)
    sizes = [math.prod(shape) for shape in shapes]
    compressed = tuple(
        size >= max(dense_below, 1) and (compress is None or compress(shape))
        for size, shape in zip(sizes, shapes, strict=True)
    )
    dtypes = tuple(jnp.dtype(jnp.result_type(leaf)) for _, leaf in paths)
    for (path, _), dtype, is_in in zip(paths, dtypes, compressed, strict=True):
        if is_in and dtype.itemsize > 4:
            raise ValueError(
                f"Compressed gradients must have at most 32 bits; got {dtype} at {jax.tree_util.keystr(path)!r}, of "
                "which float32 payloads and residuals would lose a part. Keep these parameters in float32, or exchange "
                "them by plump_dp(), which sends float64: alone, or as others= of what where= leaves out."
            )
    inside = [(path, n) for (path, _), n, is_in in zip(paths, sizes, compressed, strict=True) if is_in]
    capacities = tuple(map(capacity, segment_sizes([n for _, n in inside], chunk)))
    stages = _plan_stages(inside, dense_below, capacity, chunk)
    if stages is not None:
        capacities = tuple(map(max, stages.capacities))
    layout = Layout(shapes, dtypes, compressed, capacities, chunk, stages)
    if layout.n >= MAX_ELEMENTS:
        raise ValueError(
            f"Positions have 31 bits, so what is compressed at once must have fewer than 2^31 elements; got "
            f"{layout.n}. Shard the parameters over a model axis, or split a tensor of that size."
        )
    return layout


def _plan_stages(
    slots: Sequence[tuple[Any, int]], dense_below: int, capacity: Callable[[int], int], chunk: int | None
) -> Stages | None:
    """Plans what the stages differ in, from the paths and sizes of the slots; None if they do not."""
    sizes_of_path, axis_name = _STACKED.get()
    candidates = [(sizes_of_path.get(jax.tree_util.keystr(path), ()), size) for path, size in slots]
    tensors = [stage_sizes if max(stage_sizes, default=None) == size else () for stage_sizes, size in candidates]
    count = max(map(len, tensors), default=0)
    tensors = [stage_sizes or (size,) * count for stage_sizes, (_, size) in zip(tensors, slots, strict=True)]
    if all(len(set(stage_sizes)) < 2 for stage_sizes in tensors):
        return None
    sizes, capacities, is_whole = [], [], []
    for stage_sizes, (_, size) in zip(tensors, slots, strict=True):
        is_dense = tuple(n < dense_below for n in stage_sizes)
        start = 0
        for length in segment_sizes([size], chunk):
            parts = tuple(min(max(n - start, 0), length) for n in stage_sizes)
            sizes.append(parts)
            capacities.append(tuple(n if all_ else capacity(n) for n, all_ in zip(parts, is_dense, strict=True)))
            is_whole.append(is_dense)
            start += length
    return Stages(axis_name, tuple(sizes), tuple(capacities), tuple(is_whole))
