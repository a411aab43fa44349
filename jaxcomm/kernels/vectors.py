"""Vectors that are laid end to end, that are written to memory, or that are never written, as is fastest on CPUs."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.kernels.bits import LANES, WORD
from jaxcomm.kernels.platforms import by_platform, in_memory

_FUSED = 8  # the most arrays whose concatenation XLA for CPUs makes one loop


class Vector(Protocol):
    """A vector (n,) float32, n a multiple of 32, that may be the sum of several: to store it would cost a pass."""

    def sum(self) -> jax.Array:
        """Returns the vector, to be computed wherever it is read."""
        ...

    def at(self, position: jax.Array) -> jax.Array:
        """Returns the numbers at some positions."""
        ...

    def broken(self) -> jax.Array:
        """Marks the numbers for which a step must be skipped, such as NaN: (n,) bool."""
        ...


class Stored(NamedTuple):
    """A vector (n,) float32 that is in memory."""

    values: jax.Array

    def sum(self) -> jax.Array:
        """Returns the vector itself."""
        return self.values

    def at(self, position: jax.Array) -> jax.Array:
        """Returns its numbers at some positions."""
        return self.values[position]

    def broken(self) -> jax.Array:
        """Marks the numbers that are not finite."""
        return ~jnp.isfinite(self.values)


def end_to_end(parts: Sequence[jax.Array]) -> jax.Array:
    """Concatenates vectors of one type that are in memory, such as gradients: (n,).

    On CPUs, a few vectors are written one after the other. XLA's loop would read each vector beyond its ends, under a
    mask. Where a vector happens to border on unmapped memory, that takes a processor 20 times as long.
    """
    if not 1 < len(parts) <= _FUSED:
        return jnp.concatenate(parts)
    return by_platform(*parts, cpu=_write_parts, default=lambda *parts: jnp.concatenate(parts))


def _write_parts(first: jax.Array, *more_parts: jax.Array) -> jax.Array:
    total, end = jnp.pad(first, (0, sum(part.size for part in more_parts))), first.size
    for part in more_parts:
        total, end = lax.dynamic_update_slice(total, part, (end,)), end + part.size
    return total


def split_vector(
    vector: jax.Array, shapes: Sequence[tuple[int, ...]], starts: Sequence[int] | None = None
) -> list[jax.Array]:
    """Cuts arrays out of a vector (n,), each from its start on, or one after the other; inverts `end_to_end`.

    On CPUs, XLA compiles a loop for every array that it reads from another place, but only one for all arrays of a
    shape if the place is an operand. So where there are many arrays, the program does not know where they start.
    """
    sizes = [math.prod(shape) for shape in shapes]
    starts = list(itertools.accumulate(sizes, initial=0))[:-1] if starts is None else starts
    # A start has 31 bits: in a longer vector, it counts rows.
    columns = 1 if vector.size < 2**31 else math.gcd(vector.size, *sizes, *starts)

    def row_slices(vector: jax.Array) -> list[jax.Array]:
        rows, at = vector.reshape(-1, columns), _opaque_numbers([start // columns for start in starts], vector)
        parts = [
            lax.dynamic_slice(rows, (start, 0), (size // columns, columns), allow_negative_indices=False)
            for start, size in zip(at, sizes, strict=True)
        ]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def static_slices(vector: jax.Array) -> list[jax.Array]:
        parts = [vector[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    if len(shapes) <= _FUSED or not vector.size or vector.size // columns >= 2**31:
        return static_slices(vector)
    return by_platform(vector, cpu=row_slices, default=static_slices)


def _opaque_numbers(numbers: Sequence[int], vector: jax.Array) -> list[jax.Array]:
    """Returns numbers as () int32 that XLA does not know: it does not know how often the loop sets them."""
    times = 1 + (vector[0] == 0).astype(jnp.int32)
    zero = jnp.zeros_like(times)  # differs between workers where the vector does
    return lax.while_loop(
        lambda carry: carry[0] < times,
        lambda carry: (carry[0] + 1, [jnp.full_like(zero, number) for number in numbers]),
        (zero, [zero] * len(numbers)),
    )[1]


def add_at(vector: jax.Array, position: jax.Array, values: jax.Array) -> jax.Array:
    """Adds values (C,) to a vector (n,), or to the only row of (1, n), at positions (C,) int32 in range.

    No two values other than 0 have the same position. On GPUs, the zeros of empty slots are not added at all: with
    different positions, an addition takes no atomic operation, which JAX 0.10 compiles to a loop for each number.
    """
    n, leading = vector.shape[-1], (0,) * (vector.ndim - 1)

    def in_order(vector: jax.Array, position: jax.Array, values: jax.Array) -> jax.Array:
        return vector.at[(*leading, position)].add(values, mode="promise_in_bounds")

    def at_once(vector: jax.Array, position: jax.Array, values: jax.Array) -> jax.Array:
        beyond = n + lax.iota(jnp.int32, values.size)
        place = jnp.where(values != 0, position, beyond)
        return vector.at[(*leading, place)].add(values, mode="drop", unique_indices=True)

    if n + values.size >= 2**31:
        return in_order(vector, position, values)
    return by_platform(vector, position, values, cpu=in_order, tpu=in_order, default=at_once)


def computed_once(vector: jax.Array) -> jax.Array:
    """Keeps XLA for GPUs from computing a vector again, from arrays that must then outlive it, wherever it is read."""
    return by_platform(vector, cpu=lambda x: x, tpu=lambda x: x, default=lax.optimization_barrier)


def computed_end_to_end(parts: Sequence[jax.Array]) -> jax.Array:
    """Concatenates vectors of one type that are results of computing, such as codes: (n,).

    On CPUs, each is computed before it is copied. XLA would compute them in the loop of the concatenation, which
    chooses the vector of each number by a branch, and computes one number at a time.
    """
    # Not by `end_to_end`: with it, a step of `sign` between 4 hosts takes 375 ms instead of 277.
    return jnp.concatenate([in_memory(part) for part in parts])


def largest_of_each(numbers: jax.Array, size: int) -> jax.Array:
    """Returns the largest of every `size` consecutive numbers (n,), a multiple of 32: (n / size,).

    XLA for CPUs computes numbers in the loop that reduces them if it reduces 32 at a time, and stores them for more.
    """
    return by_platform(numbers, cpu=functools.partial(_in_two_steps, size=size), default=lambda x: _in_rows(x, size))


def _in_two_steps(numbers: jax.Array, size: int) -> jax.Array:
    return jnp.max(jnp.max(numbers.reshape(-1, WORD), axis=1).reshape(-1, size // WORD), axis=1)


def _in_rows(numbers: jax.Array, size: int) -> jax.Array:
    columns = LANES if size % LANES == 0 else size  # a TPU's rows
    return jnp.max(numbers.reshape(-1, size // columns, columns), axis=(1, 2))
