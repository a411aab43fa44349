"""The largest coordinates of every chunk by one kernel of a GPU, in one pass over the vector.

A chunk fits the registers of a GPU's multiprocessor: it is read once, and both bisections, by value and among ties by
place, run there. XLA would read the vector 31 times. The kernel is written in Pallas and compiled by Triton, which
serves GPUs from the A100 on; JAX has deprecated that way in favour of Mosaic, which serves the H100 and newer ones.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.kernels import bits
from jaxcomm.kernels.numerics import magnitude_bits
from jaxcomm.kernels.vectors import Vector
from jaxcomm.layout import BLOCK, Layout
from jaxcomm.selectors.bracket import largest_that, typed_as
from jaxcomm.selectors.selection import Selected

SIZES = (1024, 2048, 4096, 8192)  # elements of chunks that fit: powers of two


def select_chunks(vector: Vector, layout: Layout, k: jax.Array) -> Selected:
    """Does `select_topk` for a layout whose segments are chunks of one of `SIZES`, on a GPU.

    Reads the arrays of the vector once, and writes the mask: 8.1 bytes an element of a gradient and a residual.

    Args:
      vector: the flat vector.
      layout: the segments.
      k: (S,) int32, up to the segment's size.
    """
    leaves, kind = jax.tree.flatten(vector)
    blocks = np.asarray(layout.blocks, np.int32) * BLOCK
    table = jnp.stack(
        [jnp.asarray(np.cumsum(blocks) - blocks), jnp.asarray(blocks), typed_as(vector, k)], axis=1
    ).reshape(-1)  # (3 S,)
    words, broken = lax.platform_dependent(
        table,
        *leaves,
        cpu=functools.partial(_call, kind, layout, interpret=True),
        default=functools.partial(_call, kind, layout),
    )
    return Selected(words, ~jnp.any(broken != 0))


def _call(kind: Any, layout: Layout, table: jax.Array, *leaves: jax.Array, interpret: bool = False) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    n_chunks, size = len(layout.blocks), layout.chunk or BLOCK
    varies = jax.typeof(table).manual_axis_type

    def kernel(table: Any, *refs: Any) -> None:
        *sources, words, broken = refs
        i = pl.program_id(0)
        start, length, k = (table[3 * i + column] for column in range(3))
        place = lax.iota(jnp.int32, size)
        parts = []
        for source, leaf in zip(sources, leaves, strict=True):
            part = triton.load(source.at[pl.ds(start, size)], mask=place < length, other=0.0)
            parts.append(part.reshape(*leaf.shape[:-1], size))
        part = jax.tree.unflatten(kind, parts)
        selected = _largest(magnitude_bits(part.sum()), k, place)
        rows = selected.reshape(-1, bits.WORD).astype(jnp.uint32) << lax.broadcasted_iota(jnp.uint32, (1, bits.WORD), 1)
        word = lax.iota(jnp.int32, size // bits.WORD)
        here = words.at[pl.ds(start // bits.WORD, size // bits.WORD)]
        triton.store(here, jnp.sum(rows, axis=1, dtype=jnp.uint32), mask=word < length // bits.WORD)
        broken[i] = jnp.sum(part.broken().astype(jnp.int32))

    return pl.pallas_call(
        kernel,
        grid=(n_chunks,),
        out_shape=[
            jax.ShapeDtypeStruct((layout.n_words,), jnp.uint32, manual_axis_type=varies),
            jax.ShapeDtypeStruct((n_chunks,), jnp.int32, manual_axis_type=varies),
        ],
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="largest_of_chunks",
    )(table, *(leaf.reshape(-1) for leaf in leaves))


def _largest(magnitude: jax.Array, k: jax.Array, place: jax.Array) -> jax.Array:
    """Marks the k largest of the bits of magnitudes (m,), of equal ones the first, and never 0: (m,) bool."""

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask.astype(jnp.int32))

    number = lax.bitcast_convert_type(magnitude, jnp.int32)
    smallest = largest_that(lambda bound: count(number >= bound) >= k, jnp.int32(0))
    is_above, tied = number > smallest, (number == smallest) & (smallest > 0)
    room = k - count(is_above)
    last_bit = place.size.bit_length() - 1
    end = largest_that(lambda bound: count(tied & (place < bound)) <= room, jnp.int32(0), last_bit)
    return is_above | (tied & (place < end))
