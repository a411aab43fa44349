"""Activations from one stage of a model to the next, and their gradients back: one permutation of words each way."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.codecs.values import ValueCodec
from jaxcomm.collectives.axis import AxisName
from jaxcomm.scopes import DECODE, ENCODE, EXCHANGE


class Encoded(NamedTuple):
    """One array of activations, written.

    Attributes:
      values: (m,) of the activations' dtype. Gradients come back through them.
      words: (w,) uint32, where the values belong.
    """

    values: jax.Array
    words: jax.Array


class Format(Protocol):
    """How the values of one array of activations travel, and their gradient back; see `jaxcomm.layers.activations`."""

    @property
    def values_as(self) -> ValueCodec:
        """The type of a value on the wire."""
        ...

    def forward(self, values: jax.Array, key: jax.Array) -> jax.Array:
        """Returns what travels forward for the values."""
        ...

    def forwarded(self, values: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the values, from what has travelled forward."""
        ...

    def backward(self, gradient: jax.Array, residual: Any) -> tuple[Encoded, Any]:
        """Returns what travels backward for the gradient of the values, and the new residual."""
        ...

    def returned(self, encoded: Encoded) -> jax.Array:
        """Returns the gradient of the values, from what has travelled backward."""
        ...


def send(
    formats: Sequence[Format],
    encoded: list[Encoded],
    axis_name: AxisName,
    source: int,
    key: jax.Array,
    residuals: list[Any],
    target: int | None = None,
) -> list[Encoded]:
    """Moves arrays from one position of an axis to another, in one permutation; everybody else receives zeros.

    Gradients of the values travel back the same way when the result is differentiated. The "gradient" with respect to
    a residual is the new residual.

    Args:
      formats: of the arrays.
      encoded: the arrays; those of the sender are read.
      axis_name: the axis of stages.
      source: the sender's position.
      key: () uint32, the seed of random formats, the same on both sides.
      residuals: for every format with a residual an array of its shape, None for the others.
      target: the receiver's position, the one after the sender's if not given.

    Returns:
      The arrays, on the receiver. It receives 4 bytes a word of the values and the indices, and the sender as many for
      the gradient's.
    """
    route = (axis_name, source, source + 1 if target is None else target)
    values, words = [each.values for each in encoded], [each.words for each in encoded]
    return [Encoded(*pair) for pair in zip(*_send(tuple(formats), route, values, words, key, residuals), strict=True)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(formats, route, values, words, key, residuals):
    del residuals
    travelling = [f.forward(v, key) for f, v in zip(formats, values, strict=True)]
    sent = [Encoded(*pair) for pair in zip(travelling, words, strict=True)]
    arrived = _permute(formats, route, sent)
    received = [f.forwarded(a.values, key) for f, a in zip(formats, arrived, strict=True)]
    return received, [a.words for a in arrived]


def _send_forward(formats, route, values, words, key, residuals):
    return _send(formats, route, values, words, key, residuals), residuals


def _send_backward(formats, route, residuals, gradients):
    pairs = [f.backward(g, r) for f, g, r in zip(formats, gradients[0], residuals, strict=True)]
    axis_name, source, target = route
    arrived = _permute(formats, (axis_name, target, source), [encoded for encoded, _ in pairs])
    returned = [f.returned(a) for f, a in zip(formats, arrived, strict=True)]
    return returned, None, None, [residual for _, residual in pairs]


_send.defvjp(_send_forward, _send_backward)


def _permute(formats: tuple[Format, ...], route: tuple[AxisName, int, int], sent: list[Encoded]) -> list[Encoded]:
    """Moves values and indices of all arrays as one buffer of 32-bit words."""
    axis_name, source, target = route
    with jax.named_scope(ENCODE):
        pairs = [(f.values_as.encode(each.values), each.words) for f, each in zip(formats, sent, strict=True)]
        parts = [part for pair in pairs for part in pair]
        buffer = jnp.concatenate(parts)
    with jax.named_scope(EXCHANGE):
        buffer = lax.ppermute(buffer, axis_name, [(source, target)])
    arrived, start = [], 0
    for f, each, values, words in zip(formats, sent, parts[::2], parts[1::2], strict=True):
        middle, end = start + values.size, start + values.size + words.size
        with jax.named_scope(DECODE):
            decoded = f.values_as.decode(buffer[start:middle], each.values.size).astype(each.values.dtype)
        arrived.append(Encoded(decoded, buffer[middle:end]))
        start = end
    return arrived
