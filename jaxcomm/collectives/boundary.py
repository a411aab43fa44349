"""Activations from one stage of a model to the next, and their gradients back: permutations of words."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.codecs.tiles import GradientLevels, Tiles
from jaxcomm.codecs.values import ValueCodec
from jaxcomm.collectives.axis import AxisName, at_positions, zeros_varying_as
from jaxcomm.kernels import noise
from jaxcomm.kernels.numerics import once_differentiable
from jaxcomm.kernels.scopes import DECODE, ENCODE, EXCHANGE


class Encoded(NamedTuple):
    """One array of activations, written.

    Attributes:
      values: (m,) of the activations' dtype. Gradients come back through them.
      words: (w,) uint32, the coded positions of the values.
    """

    values: jax.Array
    words: jax.Array


class Format(Protocol):
    """How the values of one array of activations travel, and their gradient back; see `jaxcomm.layers.activations`."""

    @property
    def values_as(self) -> ValueCodec | Tiles:
        """The codec of a value on its way forward."""
        ...

    def gradients_as(self, key: jax.Array) -> ValueCodec | GradientLevels:
        """Returns the codec of a gradient; `key` () uint32 is that of random rounding."""
        ...


class Route(NamedTuple):
    """Arrays that cross from one position of an axis to another.

    Attributes:
      formats: the format of each array.
      source: the sender's position.
      target: the receiver's.
    """

    formats: tuple[Format, ...]
    source: int
    target: int


def send(
    routes: Sequence[Route], encoded: list[list[Encoded]], axis_name: AxisName, keys: list[jax.Array]
) -> list[list[Encoded]]:
    """Moves arrays over routes of different senders and receivers; everyone else receives zeros.

    Routes with equally many words share one permutation, so that they are on their way at the same time. Gradients of
    the values travel back the same way when the result is differentiated.

    Args:
      routes: what crosses, with no two senders or receivers alike.
      encoded: the arrays of each route; only its sender's are read.
      axis_name: the axis of stages.
      keys: () uint32 for each route, the seed of random rounding, the same on both sides.

    Returns:
      The arrays of each route, on its receiver. It receives 4 bytes a word, for values and positions; in the backward
      pass, so does the sender.
    """
    arrived: Any = _send(tuple(routes), axis_name, encoded, keys)
    return arrived


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(routes, axis_name, encoded, keys):
    del keys
    return send_forward(routes, encoded, axis_name)


def _send_forward(routes, axis_name, encoded, keys):
    return _send(routes, axis_name, encoded, keys), keys


def _send_backward(routes, axis_name, keys, gradients):
    values = [[item.values for item in items] for items in gradients]
    values = once_differentiable(values, "send", "Send the activations by jax.lax.ppermute")
    nothing: Any = None  # words are integers, and keys too
    sent = send_backward(routes, values, axis_name, keys)
    return [[Encoded(gradient, nothing) for gradient in items] for items in sent], nothing


_send.defvjp(_send_forward, _send_backward)


def send_forward(routes: Sequence[Route], encoded: Sequence[list[Encoded]], axis_name: AxisName) -> list[list[Encoded]]:
    """Moves arrays as `send` does, without a gradient."""
    return _permute(
        [
            _Message([item.values_as for item in formats], items, source, target)
            for (formats, source, target), items in zip(routes, encoded, strict=True)
        ],
        axis_name,
    )


def send_backward(
    routes: Sequence[Route], gradients: Sequence[list[jax.Array]], axis_name: AxisName, keys: Sequence[jax.Array]
) -> list[list[jax.Array]]:
    """Moves the gradients of what was received back over each route; returns zeros except on its sender."""
    messages = []
    for (formats, source, target), items, route_key in zip(routes, gradients, keys, strict=True):
        key = noise.make_key(route_key, 1)
        codecs = [item.gradients_as(noise.make_key(key, number)) for number, item in enumerate(formats)]
        encoded = [Encoded(gradient, zeros_varying_as((0,), jnp.uint32, gradient)) for gradient in items]
        messages.append(_Message(codecs, encoded, target, source))
    return [[item.values for item in items] for items in _permute(messages, axis_name)]


class _Message(NamedTuple):
    """The arrays of a route, in one direction, as one buffer of 32-bit words; each has its codec of values."""

    codecs: Sequence[ValueCodec | Tiles | GradientLevels]
    encoded: list[Encoded]
    source: int
    target: int

    @jax.named_scope(ENCODE)
    def write(self) -> jax.Array:
        parts = []
        for codec, item in zip(self.codecs, self.encoded, strict=True):
            parts += [codec.encode(item.values), item.words]
        return jnp.concatenate(parts)

    @jax.named_scope(DECODE)
    def read(self, buffer: jax.Array) -> list[Encoded]:
        arrived, start = [], 0
        for codec, item in zip(self.codecs, self.encoded, strict=True):
            middle = start + jax.eval_shape(codec.encode, item.values).size
            values = codec.decode(buffer[start:middle], item.values.size).astype(item.values.dtype)
            start = middle + item.words.size
            arrived.append(Encoded(values, buffer[middle:start]))
        return arrived


def _permute(messages: list[_Message], axis_name: AxisName) -> list[list[Encoded]]:
    """Moves messages, those of one size in one permutation.

    Returns:
      The arrays of each message on its receiver; zeros elsewhere.
    """
    sizes = [jax.eval_shape(message.write).size for message in messages]
    buffers = {}
    for size in dict.fromkeys(sizes):
        together = [message for message, own_size in zip(messages, sizes, strict=True) if own_size == size]
        buffer = at_positions({message.source: message.write for message in together}, axis_name)
        with jax.named_scope(EXCHANGE):
            pairs = [(message.source, message.target) for message in together]
            buffers[size] = lax.ppermute(buffer, axis_name, pairs)
    return [
        at_positions({message.target: message.read}, axis_name, buffers[size])
        for message, size in zip(messages, sizes, strict=True)
    ]
