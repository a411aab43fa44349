"""Numbers of any size: whether they are finite, their division by their own scale; and vectors laid end to end.

Nothing here tests for NaN by a maximum: one that is compiled by XLA for a CPU may lose it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import bits, noise

_SHRINK = np.float32(2**-4)
_INFINITY = np.uint32(0x7F800000)
_LIMIT = np.float32(2.0**100).view(np.uint32)
_FUSED = 8  # arrays up to which XLA for CPUs makes one loop of their concatenation


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of |x|, float32: they are ordered as the magnitudes are, NaN above all."""
    return lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7FFFFFFF)


def is_finite(vector: jax.Array) -> jax.Array:
    """Returns whether every number of a vector (n,), n a multiple of 32, is finite: () bool.

    Computed from a packed mask, which XLA fuses with the sum that made the vector; it does not fuse
    `isfinite().all()`.
    """
    return ~jnp.any(bits.pack(magnitude_bits(vector) >= _INFINITY) != 0)


def digest(array: jax.Array) -> jax.Array:
    """Returns a sum of an array's words, each hashed with its place: () uint32.

    Another value of one word gives another digest; of other changes, such as two words in each other's places, all but
    one in 2^32 do. A sharded array stays where it is.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    if array.dtype != jnp.bool_:
        array = lax.bitcast_convert_type(array, {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32))
    place, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(array.ndim)):
        place = place + lax.broadcasted_iota(jnp.uint32, array.shape, axis) * np.uint32(stride % 2**32)
        stride *= array.shape[axis]
    return jnp.sum(noise.mix(array.astype(jnp.uint32) + place * np.uint32(0x9E3779B1)), dtype=jnp.uint32)


def is_accumulable(total: jax.Array, added: jax.Array) -> jax.Array:
    """Returns whether a total (n,), n a multiple of 32, is finite and what was added to it last below 2^100: () bool.

    A larger number may be finite, but its sums are not: in a residual it would make the workers skip every later step.
    """
    broken = (magnitude_bits(total) >= _INFINITY) | (magnitude_bits(added) >= _LIMIT)
    return ~jnp.any(bits.pack(broken) != 0)


def is_finite_tree(tree: Any) -> jax.Array:
    """Returns whether every number of a tree is finite: () bool."""
    return jnp.stack([jnp.asarray(True), *(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))]).all()


def is_applicable_tree(tree: Any) -> jax.Array:
    """Returns whether a worker can train on with these numbers by itself: all finite and below 2^90, () bool.

    A thousand updates of that size are below the 2^100 that a residual takes.
    """

    def is_applicable(x: jax.Array) -> jax.Array:
        limit = 2.0**90 if float(jnp.finfo(x.dtype).max) > 2.0**90 else jnp.inf  # float16 ends at 65,504
        return (jnp.abs(x) < limit).all()

    return jnp.stack([jnp.asarray(True), *map(is_applicable, jax.tree.leaves(tree))]).all()


def is_finite_narrow(tensors: Sequence[jax.Array]) -> jax.Array:
    """Returns whether the tensors of 16 bits are finite: () bool. A finite float32 may be out of their range."""
    finite = jnp.asarray(True)
    for tensor in tensors:
        if tensor.dtype.itemsize < 4:
            finite = finite & jnp.isfinite(tensor).all()
    return finite


def shrinkage(scale: jax.Array) -> jax.Array:
    """Returns a power of two by which large scales are to be multiplied, so that their inverse is a normal number.

    XLA divides by a number that many share by multiplying with its inverse. That of a number above 2^126 is subnormal,
    and processors that flush those to zero would make the quotient zero.
    """
    return jnp.where(scale > 1, _SHRINK, np.float32(1))


def divide(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x / scale, float32, also where the scale is one of the largest numbers; shapes are broadcast."""
    shrink = shrinkage(scale)
    return (x * shrink) / (scale * shrink)


def end_to_end(parts: Sequence[jax.Array]) -> jax.Array:
    """Lays vectors of one type end to end: (n,).

    On CPUs a few are written one after the other: XLA's loop over them reads each part beyond its ends, under a mask.
    Where no memory is there, a processor takes 20 times as long for it, which depends on where the parts happen to lie.
    """
    if not 1 < len(parts) <= _FUSED:
        return jnp.concatenate(parts)
    return lax.platform_dependent(*parts, cpu=_written, default=lambda *parts: jnp.concatenate(parts))


def _written(first: jax.Array, *others: jax.Array) -> jax.Array:
    total, end = jnp.pad(first, (0, sum(part.size for part in others))), first.size
    for part in others:
        total, end = lax.dynamic_update_slice(total, part, (end,)), end + part.size
    return total
