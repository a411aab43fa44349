"""Numbers of any magnitude and type: tests for finite numbers, division by their own scale, and types of sums.

Nothing here tests for NaN by a maximum: compiled by XLA for CPUs, a maximum may lose it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.kernels import bits, noise
from jaxcomm.kernels.platforms import by_platform

P = ParamSpec("P")
R = TypeVar("R")

_SHRINK = np.float32(2**-4)
_INFINITY = np.uint32(0x7F800000)
_LIMIT = np.float32(2.0**100).view(np.uint32)


def promotes(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function of this library run under JAX's default promotion of types and ranks.

    A user's jax_numpy_dtype_promotion="strict" and jax_numpy_rank_promotion="raise" are about the user's own code.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return run


def wide_type(*dtypes: Any) -> Any:
    """Returns the type in which numbers of some types are summed: float64 if one of them is, else float32."""
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in map(jnp.dtype, dtypes) else jnp.float32)


def widened(tree: Any) -> Any:
    """Converts the numbers of a tree to the type in which they are summed: float64 stays, others become float32."""
    return jax.tree.map(lambda number: jnp.asarray(number, wide_type(jnp.result_type(number))), tree)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of |x|, float32: they order like the magnitudes, with NaN above all."""
    return lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7FFFFFFF)


def largest_by(reduce: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns the largest number of any real type, NaN if there is one, by a maximum `reduce` of integers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x).astype(x.dtype)
    wide = widened(x)
    integer = jnp.dtype(f"int{8 * wide.dtype.itemsize}")

    def in_order(words: jax.Array) -> jax.Array:
        """Returns integers in the order of the numbers that have these bits, or the bits of such integers."""
        return jnp.where(words < 0, words ^ jnp.iinfo(integer).max, words)

    words = lax.bitcast_convert_type(jnp.where(jnp.isnan(wide), jnp.nan, wide), integer)  # a NaN above all
    return lax.bitcast_convert_type(in_order(reduce(in_order(words))), wide.dtype).astype(x.dtype)


def is_finite(vector: jax.Array) -> jax.Array:
    """Returns whether every number of a vector (n,) of any floating type is finite: () bool."""
    if vector.dtype.itemsize != 4:
        return jnp.isfinite(vector).all()
    return by_platform(vector, cpu=_is_finite_packed, default=lambda vector: jnp.isfinite(vector).all())


def _is_finite_packed(vector: jax.Array) -> jax.Array:
    # From a packed mask, which XLA for CPUs fuses with the sum that made the vector. It would store `isfinite()`.
    packed_size = vector.size // bits.WORD * bits.WORD
    broken = bits.pack(magnitude_bits(vector[:packed_size]) >= _INFINITY)
    return ~jnp.any(broken != 0) & jnp.isfinite(vector[packed_size:]).all()


def digest(array: jax.Array) -> jax.Array:
    """Returns the sum of an array's words, each hashed with its place: () uint32.

    A change of one word always changes the digest; other changes, such as two swapped words, do except for one in 2^32.
    A sharded array stays where it is.
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


def not_accumulable(total: jax.Array, increment: jax.Array) -> jax.Array:
    """Marks where a total is not finite, or what was last added is 2^100 or more.

    The sums of such numbers may overflow: in a residual they would make the workers skip every later step.
    """
    return (magnitude_bits(total) >= _INFINITY) | (magnitude_bits(increment) >= _LIMIT)


def is_accumulable(total: jax.Array, increment: jax.Array) -> jax.Array:
    """Returns whether nothing of a total (n,), n a multiple of 32, is `not_accumulable`: () bool."""
    return ~jnp.any(bits.pack(not_accumulable(total, increment)) != 0)


def is_finite_tree(tree: Any) -> jax.Array:
    """Returns whether every number of a tree is finite: () bool."""
    return jnp.stack([jnp.asarray(True), *(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))]).all()


def is_applicable_tree(tree: Any) -> jax.Array:
    """Returns whether a worker can apply an update by itself: all numbers finite and below 2^90, () bool.

    The sum of a thousand such updates is below the residual's limit of 2^100.
    """

    def is_applicable(x: jax.Array) -> jax.Array:
        limit = 2.0**90 if float(jnp.finfo(x.dtype).max) > 2.0**90 else jnp.inf  # float16 ends at 65,504
        return (jnp.abs(x) < limit).all()

    return jnp.stack([jnp.asarray(True), *map(is_applicable, jax.tree.leaves(tree))]).all()


def is_finite_narrow(tensors: Sequence[jax.Array]) -> jax.Array:
    """Returns whether all 16-bit tensors are finite: () bool. A finite float32 may be out of their range."""
    finite = jnp.asarray(True)
    for tensor in tensors:
        if tensor.dtype.itemsize < 4:
            finite = finite & jnp.isfinite(tensor).all()
    return finite


def shrinkage(scale: jax.Array) -> jax.Array:
    """Returns a power of two by which to multiply a scale, so that the inverse of a large one is a normal number.

    XLA divides many numbers by the same scale by multiplying with its inverse. The inverse of a scale above 2^126 is
    subnormal, and processors that flush subnormal numbers to zero would make the quotients zero.
    """
    return jnp.where(scale > 1, _SHRINK, np.float32(1))


def divide(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x / scale, float32, correct even for the largest scales; shapes are broadcast."""
    shrink = shrinkage(scale)
    return (x * shrink) / (scale * shrink)


def once_differentiable(tree: Any, name: str, remedy: str) -> Any:
    """Returns what a rule for a gradient reads; it refuses to be differentiated itself.

    A gradient's gradient would go through the rule as through any function: through codecs that round, and collectives
    that reduce what is replicated.
    """

    @jax.custom_jvp
    def same(x: jax.Array) -> jax.Array:
        return x

    @same.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise ValueError(
            f"{name} must be differentiated once; got the gradient of its gradient (a gradient penalty, a "
            f"meta-gradient, a Hessian). {remedy}."
        )

    return jax.tree.map(lambda x: same(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x, tree)
