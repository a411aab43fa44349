"""The sum of vectors that are coded in a few bits a value.

By a gather; in two shots, of which the second codes the sum again; or, for small integers, by an all-reduce of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.codecs.quantize import PartCodec
from jaxcomm.collectives.axis import axis_size
from jaxcomm.collectives.checksum import agreed, gather_checked, two_shot
from jaxcomm.collectives.messages import sum_of
from jaxcomm.collectives.reduced import Reduced
from jaxcomm.kernels.numerics import is_finite
from jaxcomm.kernels.platforms import in_memory, traced_platform
from jaxcomm.kernels.scopes import DECODE, ENCODE, EXCHANGE
from jaxcomm.kernels.vectors import Stored, Vector, computed_end_to_end
from jaxcomm.layout import BLOCK

COLLECTIVES = ("gather", "two_shot")


def integer_sum(codes: jax.Array, flag: jax.Array, axis_name: str) -> Reduced:
    """Sums each worker's small integers over the workers, exactly. Each receives 2 (K-1)/K of their bytes.

    Args:
      codes: (n,) int8 or int16, whose sum over the workers fits the same type.
      flag: () bool, whether this worker's step is ok.
      axis_name: the axis of workers.
    """
    with jax.named_scope(ENCODE):
        message = jnp.append(codes, (~flag).astype(codes.dtype))
    # XLA widens sums of 16-bit integers for GPUs to 32 bits.
    add_up = _sum_of_halves if traced_platform() == "gpu" and codes.dtype == jnp.int16 else sum_of
    with jax.named_scope(EXCHANGE):
        total = add_up(message, axis_name)
    with jax.named_scope(DECODE):
        ok, total = total[-1] == 0, total[:-1].astype(jnp.float32)
    return Reduced(lambda ok: jnp.where(ok, total, 0.0), lambda: jnp.zeros(codes.shape, jnp.float32), ok)


def _sum_of_halves(message: jax.Array, axis_name: str) -> jax.Array:
    """Does `sum_of` for numbers (m,) int16, two in a word: neither half overflows if all sums fit int16."""
    workers, largest = axis_size(axis_name), np.iinfo(np.int16).max
    offset = largest // workers  # no number is larger, and with it none is negative
    low, high = (jnp.pad(message, (0, message.size % 2)).astype(jnp.int32) + offset).astype(jnp.uint32).reshape(2, -1)
    total = sum_of(high << 16 | low, axis_name)
    halves = jnp.concatenate([total & np.uint32(0xFFFF), total >> 16])[: message.size]
    return (halves.astype(jnp.int32) - workers * offset).astype(message.dtype)


def coded_sum(
    vector: Vector,
    flag: jax.Array,
    first: PartCodec,
    second: PartCodec,
    collective: str,
    axis_name: str,
    checksum: bool = False,
) -> Reduced:
    """Sums each worker's vector over the workers: total + psum(residual) == psum(vector).

    By a gather, each worker receives (K-1) vectors in the first code, and nothing is coded twice. In two shots it
    receives (K-1)/K of one vector in each code.

    Args:
      vector: (n,) float32, whole blocks.
      flag: () bool, whether this worker's step is ok, apart from what the codec finds broken.
      first: the codec of each worker's vector.
      second: the codec of their sum.
      collective: "gather", "two_shot", or "auto" for the one that receives fewer bytes (gather if both are equal).
      axis_name: the axis of workers.
      checksum: see `jaxcomm.collectives.checksum`.
    """
    with jax.named_scope(ENCODE):
        codes, sound = first.codes(vector, 0)
    flag = flag & sound
    k, n = axis_size(axis_name), vector.sum().size
    size = -(-n // (k * BLOCK)) * BLOCK
    if collective == "auto":
        header = 1 + checksum
        two_shots = first.n_words(size) + second.n_words(size) + 2 * header
        collective = "two_shot" if two_shots < first.n_words(n) + header else "gather"
    if collective == "gather":
        reduced = _gather(vector, codes, flag, first, axis_name, checksum)
    else:
        reduced = _two_shot(vector, codes, flag, first, second, size, axis_name, checksum)
    return agreed(reduced, axis_name, checksum)


@jax.named_scope(ENCODE)
def _with_flag(words: jax.Array, flag: jax.Array) -> jax.Array:
    return computed_end_to_end([words, flag.astype(jnp.uint32)[None]])


@jax.named_scope(DECODE)
def _add_up(rows: jax.Array, codec: PartCodec, m: int, start: jax.Array | int) -> jax.Array:
    """Sums coded vectors (K, words + 1) in the order of the workers: (m,) float32."""

    def add(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return total + codec.decode(row[:-1], m, start), None

    total, _ = lax.scan(add, codec.decode(rows[0, :-1], m, start), rows[1:], unroll=4)
    return total


def _gather(
    vector: Vector, codes: list[jax.Array], flag: jax.Array, codec: PartCodec, axis_name: str, checksum: bool
) -> Reduced:
    n = vector.sum().size
    with jax.named_scope(ENCODE):
        words = codec.words(codes)
    message = _with_flag(words, flag)
    rows, is_intact = gather_checked(message, axis_name, checksum)  # (K, words + 1)
    total = _add_up(rows, codec, n, 0)
    ok = jnp.all(rows[:, -1] == 1) & is_intact & is_finite(total)
    return Reduced(lambda ok: jnp.where(ok, total, 0.0), lambda: vector.sum() - codec.decode(words, n, 0), ok)


def _two_shot(
    vector: Vector,
    codes: list[jax.Array],
    flag: jax.Array,
    first: PartCodec,
    second: PartCodec,
    size: int,
    axis_name: str,
    checksum: bool,
) -> Reduced:
    k, n, me = axis_size(axis_name), vector.sum().size, lax.axis_index(axis_name)
    starts = jnp.arange(k) * size

    def in_parts(array: jax.Array) -> jax.Array:
        """Cuts an array of the whole vector, padded, into those of the parts: (K, ...)."""
        return jnp.pad(array, (0, array.size * (k * size - n) // n)).reshape(k, -1)

    with jax.named_scope(ENCODE):
        words = jax.vmap(first.words)([in_parts(code) for code in codes])

    def at_owner(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = _add_up(rows, first, size, me * size)
        with jax.named_scope(ENCODE):
            codes, sound = second.codes(Stored(total), me * size)
            code = second.words(codes)
        dropped = in_memory(total - second.decode(code, size, me * size))
        return _with_flag(code, sound & jnp.all(rows[:, -1] == 1)), dropped

    rows = jax.vmap(lambda row: _with_flag(row, flag))(words)
    code, dropped, is_intact = two_shot(rows, at_owner, axis_name, checksum)
    # Parts are decoded into memory as rows. By loops over the whole vector, in which the row of an element takes a
    # division, a step of `sign` between 4 CPU hosts takes twice as long.
    with jax.named_scope(DECODE):
        total = in_memory(jax.vmap(lambda row, start: second.decode(row[:-1], size, start))(code, starts))

    def residual() -> jax.Array:
        decoded = in_memory(jax.vmap(lambda row, start: first.decode(row, size, start))(words, starts))
        is_mine = (jnp.arange(k) == me)[:, None]
        reread = lax.optimization_barrier(vector)  # else XLA would store its sum for this
        return reread.sum() - decoded.reshape(-1)[:n] + jnp.where(is_mine, dropped, 0.0).reshape(-1)[:n]

    ok = jnp.all(code[:, -1] == 1) & is_intact
    return Reduced(lambda ok: jnp.where(ok, total.reshape(-1)[:n], 0.0), residual, ok)
