"""Activations from one stage of a model to the next, and their gradients back: one permutation of words each way."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.codecs.tiles import GradientLevels, Tiles
from jaxcomm.codecs.values import ValueCodec
from jaxcomm.collectives.axis import AxisName, to_varying, zeros_of, zeros_varying_as
from jaxcomm.kernels import noise
from jaxcomm.kernels.scopes import DECODE, ENCODE, EXCHANGE


class Encoded(NamedTuple):
    """One array of activations, written.

    Attributes:
      values: (m,) of the activations' dtype. Gradients come back through them.
      words: (w,) uint32, the coded positions of the values.
    """

    values: jax.Array
    words: jax.Array


class Route(NamedTuple):
    """An axis of a mesh, and the positions of sender and receiver."""

    axis_name: AxisName
    source: int
    target: int


class Format(Protocol):
    """How the values of one array of activations travel, and their gradient back; see `jaxcomm.layers.activations`."""

    @property
    def values_as(self) -> ValueCodec | Tiles:
        """The codec of a value on its way forward."""
        ...

    def gradients_as(self, key: jax.Array) -> ValueCodec | GradientLevels:
        """Returns the codec of a gradient; `key` () uint32 is that of random rounding."""
        ...


def send(
    formats: Sequence[Format],
    encoded: list[Encoded],
    axis_name: AxisName,
    source: int,
    key: jax.Array,
    target: int | None = None,
) -> list[Encoded]:
    """Moves arrays from one position of an axis to another, in one permutation; all others receive zeros.

    Gradients of the values travel back the same way when the result is differentiated.

    Args:
      formats: the format of each array.
      encoded: the arrays; only the sender's are read.
      axis_name: the axis of stages.
      source: the sender's position.
      key: () uint32, the seed of random rounding, the same on both sides.
      target: the receiver's position, by default the one after the sender's.

    Returns:
      The arrays, on the receiver. It receives 4 bytes a word, for values and positions; in the backward pass, so does
      the sender.
    """
    route = Route(axis_name, source, source + 1 if target is None else target)
    values, words = [item.values for item in encoded], [item.words for item in encoded]
    return [Encoded(*pair) for pair in zip(*_send(tuple(formats), route, values, words, key), strict=True)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(formats, route, values, words, key):
    del key
    arrived = send_forward(formats, route, [Encoded(*pair) for pair in zip(values, words, strict=True)])
    return [item.values for item in arrived], [item.words for item in arrived]


def _send_forward(formats, route, values, words, key):
    return _send(formats, route, values, words, key), key


def _send_backward(formats, route, key, gradients):
    return send_backward(formats, route, gradients[0], key), None, None


_send.defvjp(_send_forward, _send_backward)


def send_forward(formats: Sequence[Format], route: Route, encoded: list[Encoded]) -> list[Encoded]:
    """Moves arrays as `send` does, without a gradient."""
    return _permute([item.values_as for item in formats], route, encoded)


def send_backward(
    formats: Sequence[Format], route: Route, gradients: list[jax.Array], key: jax.Array
) -> list[jax.Array]:
    """Moves the gradients of what was received back over the route; returns zeros except on the sender."""
    key = noise.make_key(key, 1)
    codecs = [item.gradients_as(noise.make_key(key, number)) for number, item in enumerate(formats)]
    encoded = [Encoded(gradient, zeros_varying_as((0,), jnp.uint32, gradient)) for gradient in gradients]
    return_route = Route(route.axis_name, route.target, route.source)
    return [item.values for item in _permute(codecs, return_route, encoded)]


def _permute(
    codecs: Sequence[ValueCodec | Tiles | GradientLevels], route: Route, encoded: list[Encoded]
) -> list[Encoded]:
    """Moves the values and positions of all arrays as one buffer of 32-bit words, each with its codec of values.

    Returns:
      The arrays on the receiver; zeros elsewhere.
    """

    @jax.named_scope(ENCODE)
    def write() -> jax.Array:
        parts = []
        for codec, item in zip(codecs, encoded, strict=True):
            parts += [codec.encode(item.values), item.words]
        return jnp.concatenate(parts)

    @jax.named_scope(DECODE)
    def read() -> list[Encoded]:
        arrived, start = [], 0
        for codec, item in zip(codecs, encoded, strict=True):
            middle = start + jax.eval_shape(codec.encode, item.values).size
            values = codec.decode(buffer[start:middle], item.values.size).astype(item.values.dtype)
            start = middle + item.words.size
            arrived.append(Encoded(values, buffer[middle:start]))
        return arrived

    buffer = _only_at(route.source, route.axis_name, write)
    with jax.named_scope(EXCHANGE):
        buffer = lax.ppermute(buffer, route.axis_name, [(route.source, route.target)])
    return _only_at(route.target, route.axis_name, read)


def _only_at(position: int, axis_name: AxisName, function: Callable[[], Any]) -> Any:
    """Runs a function at one position of an axis; all others return zeros without running it."""

    def run() -> Any:
        return to_varying(function(), axis_name)

    kinds = jax.eval_shape(run)
    return lax.cond(lax.axis_index(axis_name) == position, run, lambda: jax.tree.map(zeros_of, kinds))
