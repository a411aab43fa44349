"""The sum of vectors that are coded in a few bits a value.

By a gather; in two shots, of which the second codes the sum again; or, for small integers, by an all-reduce of them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.codecs.quantize import PartCodec
from jaxcomm.collectives.axis import axis_size
from jaxcomm.collectives.checksum import agreed, gather_checked
from jaxcomm.collectives.messages import sum_of
from jaxcomm.collectives.reduced import Reduced
from jaxcomm.collectives.two_shot import two_shot
from jaxcomm.layout import BLOCK
from jaxcomm.numerics import is_finite
from jaxcomm.scopes import DECODE, ENCODE, EXCHANGE
from jaxcomm.vectors import computed_end_to_end, in_memory

COLLECTIVES = ("gather", "two_shot")


def check_collective(name: str, collectives: Sequence[str] = COLLECTIVES) -> None:
    """Raises a ValueError unless the name is one of `collectives`, or "auto"."""
    if name not in (*collectives, "auto"):
        raise ValueError(f"collective must be one of {', '.join(collectives)}, got {name!r}: or pass 'auto'.")


def integer_sum(codes: jax.Array, flag: jax.Array, axis_name: str) -> Reduced:
    """Sums each worker's small integers over the workers, exactly. Each receives 2 (K-1)/K of their bytes.

    Args:
      codes: (n,) int8 or int16, whose sum over the workers fits the same type.
      flag: () bool, whether this worker's step is ok.
      axis_name: the axis of workers.
    """
    with jax.named_scope(ENCODE):
        own = jnp.append(codes, (~flag).astype(codes.dtype))
    with jax.named_scope(EXCHANGE):
        total = sum_of(own, axis_name)
    with jax.named_scope(DECODE):
        ok, total = total[-1] == 0, total[:-1].astype(jnp.float32)
    return Reduced(lambda ok: jnp.where(ok, total, 0.0), lambda: jnp.zeros(codes.shape, jnp.float32), ok)


def coded_sum(
    vector: jax.Array,
    flag: jax.Array,
    first: PartCodec,
    second: PartCodec,
    collective: str,
    axis_name: str,
    checksum: bool = False,
    keeps_residual: bool = True,
) -> Reduced:
    """Sums each worker's vector over the workers: total + psum(residual) == psum(vector).

    By a gather, each worker receives (K-1) vectors in the first code, and nothing is coded twice. In two shots it
    receives (K-1)/K of one vector in each code.

    Args:
      vector: (n,) float32, whole blocks.
      flag: () bool, whether this worker's step is ok.
      first: the codec of each worker's vector.
      second: the codec of their sum.
      collective: "gather", "two_shot", or "auto" for the one that receives fewer bytes (gather if both are equal).
      axis_name: the axis of workers.
      checksum: see `jaxcomm.collectives.checksum`.
      keeps_residual: whether the workers keep the residual; then `ok` says that it is finite as well.
    """
    k, n = axis_size(axis_name), vector.size
    size = -(-n // (k * BLOCK)) * BLOCK
    if collective == "auto":
        header = 1 + checksum
        two_shots = first.n_words(size) + second.n_words(size) + 2 * header
        collective = "two_shot" if two_shots < first.n_words(n) + header else "gather"
    if collective == "gather":
        reduced = _gather(vector, flag, first, axis_name, checksum)
    else:
        reduced = _two_shot(vector, flag, first, second, size, axis_name, checksum, keeps_residual)
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


def _gather(vector: jax.Array, flag: jax.Array, codec: PartCodec, axis_name: str, checksum: bool) -> Reduced:
    with jax.named_scope(ENCODE):
        words = codec.encode(vector, 0)
    own = _with_flag(words, flag)
    rows, is_intact = gather_checked(own, axis_name, checksum)  # (K, words + 1)
    total = _add_up(rows, codec, vector.size, 0)
    ok = jnp.all(rows[:, -1] == 1) & is_intact & is_finite(total)
    return Reduced(lambda ok: jnp.where(ok, total, 0.0), lambda: vector - codec.decode(words, vector.size, 0), ok)


def _two_shot(
    vector: jax.Array,
    flag: jax.Array,
    first: PartCodec,
    second: PartCodec,
    size: int,
    axis_name: str,
    checksum: bool,
    keeps_residual: bool,
) -> Reduced:
    k, n, me = axis_size(axis_name), vector.size, lax.axis_index(axis_name)
    starts = jnp.arange(k) * size
    parts = in_memory(jnp.pad(vector, (0, k * size - n))).reshape(k, size)
    with jax.named_scope(ENCODE):
        words = jax.vmap(first.encode)(parts, starts)

    def at_owner(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = _add_up(rows, first, size, me * size)
        with jax.named_scope(ENCODE):
            code = second.encode(total, me * size)
        dropped = in_memory(total - second.decode(code, size, me * size))
        kept = dropped
        if keeps_residual:  # it must be finite, or it could never be sent
            kept += parts[me] - first.decode(words[me], size, me * size)
        sound = jnp.all(rows[:, -1] == 1) & is_finite(total) & is_finite(kept)
        return _with_flag(code, sound), dropped

    rows = jax.vmap(lambda row: _with_flag(row, flag))(words)
    code, dropped, is_intact = two_shot(rows, at_owner, axis_name, checksum)
    with jax.named_scope(DECODE):
        total = jax.vmap(lambda row, start: second.decode(row[:-1], size, start))(code, starts)

    def residual() -> jax.Array:
        kept = parts - jax.vmap(lambda row, start: first.decode(row, size, start))(words, starts)
        is_mine = (jnp.arange(k) == me)[:, None]
        return (kept + jnp.where(is_mine, dropped, 0.0)).reshape(-1)[:n]

    ok = jnp.all(code[:, -1] == 1) & is_intact
    return Reduced(lambda ok: jnp.where(ok, total.reshape(-1)[:n], 0.0), residual, ok)
