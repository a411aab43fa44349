"""The sum of compact buffers: values at coordinates that all workers agree on, so that no index travels.

Two of the three ways can send values of 16 bits, which XLA's own all-reduce would widen to 32 on a CPU.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.codecs.values import ValueCodec
from jaxcomm.collectives.axis import AxisName, axis_size, zeros_varying_as
from jaxcomm.collectives.checksum import agreed, gather_checked, move, two_shot
from jaxcomm.collectives.messages import all_gather_same, sum_of, to_next
from jaxcomm.collectives.reduced import Reduced
from jaxcomm.kernels import bits
from jaxcomm.kernels.numerics import is_finite
from jaxcomm.kernels.platforms import in_memory
from jaxcomm.kernels.scopes import DECODE, ENCODE, EXCHANGE
from jaxcomm.kernels.vectors import computed_end_to_end

SUMS = ("psum", "two_shot", "ring")


def choose_sum(name: str, values: ValueCodec) -> str:
    """Chooses how compact buffers are summed.

    Args:
      name: one of `SUMS`, or "auto": psum for float32 values, two_shot for 16 bits. (Two shots move the bytes of the
        ring, in 2 messages per neighbour instead of K, and round each value twice instead of K times.)
      values: the type of a value on the wire.

    Raises:
      ValueError: for another name, or psum of values of 16 bits.
    """
    if name == "auto":
        return "psum" if values.bits == 32 else "two_shot"
    if name not in SUMS:
        raise ValueError(f"collective must be one of {', '.join(SUMS)}; got {name!r}. Pass one, or 'auto'.")
    if name == "psum" and values.bits != 32:
        raise ValueError(
            f"collective='psum' must have values of 32 bits, since XLA's all-reduce sends narrower ones as 32; got "
            f"{values.bits}. Pass value_dtype='float32', or collective='two_shot' or 'ring'."
        )
    return name


def compact_sum(
    values: jax.Array, flag: jax.Array, name: str, codec: ValueCodec, axis_name: AxisName, checksum: bool = False
) -> Reduced:
    """Sums each worker's values over the workers.

    Equals `lax.psum`, up to the codec's rounding. Every rounding error stays with the worker that rounded: total +
    psum(residual) == psum(values). Each worker receives 2 (K-1)/K * C * codec.bits/8 bytes, and 4 bytes per message to
    say whether the step is ok. Two workers send each other all values instead of taking two shots: the same bytes, in
    one message, and each value is rounded once.

    Args:
      values: (C,) float32.
      flag: () bool, whether this worker's step is ok.
      name: one of `SUMS`.
      codec: the type of a value on the wire.
      axis_name: the axis of workers.
      checksum: see `jaxcomm.collectives.checksum`; not with psum, where no worker sees what was sent.
    """
    if name == "psum":
        with jax.named_scope(EXCHANGE):
            sums = sum_of(jnp.append(values, jnp.where(flag, 0.0, jnp.nan)), axis_name)  # (C + 1,)
        ok = is_finite(sums)
        return Reduced(lambda ok: jnp.where(ok, sums[:-1], 0.0), lambda: jnp.zeros_like(values), ok)
    k, n = axis_size(axis_name), values.size
    if k == 2 and name == "two_shot":
        return agreed(_by_gather(values, flag, codec, axis_name, checksum), axis_name, checksum)
    width = -(-n // (k * bits.WORD)) * bits.WORD
    parts = jnp.pad(values, (0, k * width - n)).reshape(k, width)
    exchange = _two_shot if name == "two_shot" else _ring
    code, error, is_intact = exchange(parts, flag, codec, axis_name, checksum)  # (K, words + 1), (K, width)
    with jax.named_scope(DECODE):
        total = in_memory(jax.vmap(lambda row: codec.decode(row, width))(code[:, :-1]).reshape(-1))
    ok = jnp.all(code[:, -1] == 1) & is_intact
    reduced = Reduced(lambda ok: jnp.where(ok, total[:n], 0.0), lambda: error.reshape(-1)[:n], ok)
    return agreed(reduced, axis_name, checksum)


@jax.named_scope(ENCODE)
def _code(values: jax.Array, flag: jax.Array, codec: ValueCodec) -> jax.Array:
    """Writes rounded values, and whether the step is ok, as words."""
    return computed_end_to_end([codec.encode(values), flag.astype(jnp.uint32)[None]])


def _by_gather(values: jax.Array, flag: jax.Array, codec: ValueCodec, axis_name: AxisName, checksum: bool) -> Reduced:
    """Sends all values to the only other worker: the bytes of two shots, in one, and rounded once."""
    rounded, n = codec.rounded(values), values.size
    rows, is_intact = move(  # (2, words + 1)
        _code(rounded, flag, codec), lambda code: all_gather_same(code, axis_name, is_read_once=True), checksum
    )
    with jax.named_scope(DECODE):
        total = in_memory(codec.decode(rows[0, :-1], n) + codec.decode(rows[1, :-1], n))
    ok = jnp.all(rows[:, -1] == 1) & is_intact & is_finite(total)
    return Reduced(lambda ok: jnp.where(ok, total, 0.0), lambda: values - rounded, ok)


def _two_shot(
    parts: jax.Array, flag: jax.Array, codec: ValueCodec, axis_name: AxisName, checksum: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rounded, width = codec.rounded(parts), parts.shape[1]

    def at_owner(messages: jax.Array) -> tuple[jax.Array, jax.Array]:
        def add(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return total + codec.decode(row[:-1], width), None

        # In the order of the workers, and so the same bits wherever it is compiled.
        with jax.named_scope(DECODE):
            total, _ = lax.scan(add, codec.decode(messages[0, :-1], width), messages[1:])  # (width,)
        sound = jnp.all(messages[:, -1] == 1) & is_finite(total)
        result = codec.rounded(total)
        return _code(result, sound, codec), total - result

    rows = jax.vmap(lambda row: _code(row, flag, codec))(rounded)
    code, owner_error, is_intact = two_shot(rows, at_owner, axis_name, checksum)
    return code, (parts - rounded).at[lax.axis_index(axis_name)].add(owner_error), is_intact


def _ring(
    parts: jax.Array, flag: jax.Array, codec: ValueCodec, axis_name: AxisName, checksum: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Passes partial sums from neighbour to neighbour; part j starts at worker j+1 and ends at its owner j."""
    k, width = parts.shape
    me = lax.axis_index(axis_name)

    def add_own(arrived: jax.Array, sound: jax.Array, hop: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        part = (me - 1 - hop) % k
        total = arrived + parts[part]
        sound = sound & flag & is_finite(total)
        result = codec.rounded(total)
        return _code(result, sound, codec), total - result, part

    def pass_on(carry: tuple[jax.Array, jax.Array], hop: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        code, error = carry
        code, is_intact = move(code, lambda code: to_next(code, axis_name), checksum)
        code, rounding, part = add_own(codec.decode(code[:-1], width), (code[-1] == 1) & is_intact, hop)
        return (code, error.at[part].set(rounding)), None

    code, rounding, part = add_own(jnp.zeros(width, jnp.float32), jnp.asarray(True), 0)
    error = zeros_varying_as(parts.shape, parts.dtype, parts).at[part].set(rounding)
    (code, error), _ = lax.scan(pass_on, (code, error), jnp.arange(1, k))
    codes, are_intact = gather_checked(code, axis_name, checksum)
    return codes, error, are_intact
