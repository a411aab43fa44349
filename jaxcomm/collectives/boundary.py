"""Activations from one stage of a model to the next, and their gradients back: one permutation of words each way."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.codecs.tiles import GradientLevels, Tiles
from jaxcomm.codecs.values import ValueCodec
from jaxcomm.collectives.axis import AxisName, to_varying, zeros_of
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

    def forward(self, values: jax.Array, key: jax.Array) -> jax.Array:
        """Returns what travels forward for the values."""
        ...

    def forwarded(self, values: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the values, from what travelled forward."""
        ...

    def backward(self, gradient: jax.Array, residual: Any) -> tuple[Encoded, Any]:
        """Returns what travels backward for the gradient of the values, and the new residual."""
        ...

    def returned(self, encoded: Encoded) -> jax.Array:
        """Returns the gradient of the values, from what travelled backward."""
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
    """Moves arrays from one position of an axis to another, in one permutation; all others receive zeros.

    Gradients of the values travel back the same way when the result is differentiated. The "gradient" with respect to
    a residual is the new residual.

    Args:
      formats: the format of each array.
      encoded: the arrays; only the sender's are read.
      axis_name: the axis of stages.
      source: the sender's position.
      key: () uint32, the seed of random formats and of random rounding, the same on both sides.
      residuals: for every format with a residual, an array of its shape; None for the others.
      target: the receiver's position, by default the one after the sender's.

    Returns:
      The arrays, on the receiver. It receives 4 bytes a word, for values and positions; in the backward pass, so does
      the sender.
    """
    route = Route(axis_name, source, source + 1 if target is None else target)
    values, words = [each.values for each in encoded], [each.words for each in encoded]
    return [Encoded(*pair) for pair in zip(*_send(tuple(formats), route, values, words, key, residuals), strict=True)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(formats, route, values, words, key, residuals):
    del residuals
    received = send_forward(formats, route, [Encoded(*pair) for pair in zip(values, words, strict=True)], key)
    return [each.values for each in received], [each.words for each in received]


def _send_forward(formats, route, values, words, key, residuals):
    return _send(formats, route, values, words, key, residuals), (key, residuals)


def _send_backward(formats, route, kept, gradients):
    key, residuals = kept
    returned, residuals = send_backward(formats, route, gradients[0], key, residuals)
    return returned, None, None, residuals


_send.defvjp(_send_forward, _send_backward)


def send_forward(formats: Sequence[Format], route: Route, encoded: list[Encoded], key: jax.Array) -> list[Encoded]:
    """Moves arrays as `send` does, without a gradient."""

    def write() -> tuple[list[Encoded], None]:
        return [e._replace(values=f.forward(e.values, key)) for f, e in zip(formats, encoded, strict=True)], None

    def read(arrived: list[Encoded]) -> list[Encoded]:
        return [e._replace(values=f.forwarded(e.values, key)) for f, e in zip(formats, arrived, strict=True)]

    return _permute([each.values_as for each in formats], route, write, read)[0]


def send_backward(
    formats: Sequence[Format], route: Route, gradients: list[jax.Array], key: jax.Array, residuals: list[Any]
) -> tuple[list[jax.Array], list[Any]]:
    """Moves the gradients of what was received back over the route.

    Returns:
      The gradients of what was sent, on the sender; the new residuals, on the receiver; zeros elsewhere.
    """

    def write() -> tuple[list[Encoded], list[Any]]:
        pairs = [f.backward(g, r) for f, g, r in zip(formats, gradients, residuals, strict=True)]
        return [encoded for encoded, _ in pairs], [residual for _, residual in pairs]

    def read(arrived: list[Encoded]) -> list[jax.Array]:
        return [f.returned(each) for f, each in zip(formats, arrived, strict=True)]

    back = Route(route.axis_name, route.target, route.source)
    own = noise.make_key(key, 1)
    codecs = [each.gradients_as(noise.make_key(own, number)) for number, each in enumerate(formats)]
    return _permute(codecs, back, write, read)


def _permute(
    codecs: Sequence[ValueCodec | Tiles | GradientLevels],
    route: Route,
    write: Callable[[], tuple[list[Encoded], Any]],
    read: Callable[[list[Encoded]], Any],
) -> tuple[Any, Any]:
    """Moves the values and positions of all arrays as one buffer of 32-bit words, each with its codec of values.

    Returns:
      What the receiver reads, and the rest of what the sender's `write` returns; zeros elsewhere, where neither runs.
    """
    kinds, _ = jax.eval_shape(write)

    def to_buffer() -> tuple[jax.Array, Any]:
        encoded, rest = write()
        parts = []
        with jax.named_scope(ENCODE):
            for codec, each in zip(codecs, encoded, strict=True):
                parts += [codec.encode(each.values), each.words]
            return jnp.concatenate(parts), rest

    def from_buffer(buffer: jax.Array) -> Any:
        arrived, start = [], 0
        with jax.named_scope(DECODE):
            for codec, kind in zip(codecs, kinds, strict=True):
                middle = start + jax.eval_shape(codec.encode, kind.values).size
                values = codec.decode(buffer[start:middle], kind.values.size).astype(kind.values.dtype)
                start = middle + kind.words.size
                arrived.append(Encoded(values, buffer[middle:start]))
        return read(arrived)

    buffer, rest = _only_at(route.source, route.axis_name, to_buffer)
    with jax.named_scope(EXCHANGE):
        buffer = lax.ppermute(buffer, route.axis_name, [(route.source, route.target)])
    return _only_at(route.target, route.axis_name, lambda: from_buffer(buffer)), rest


def _only_at(position: int, axis_name: AxisName, function: Callable[[], Any]) -> Any:
    """Runs a function at one position of an axis; all others return zeros without running it."""

    def run() -> Any:
        return to_varying(function(), axis_name)

    kinds = jax.eval_shape(run)
    return lax.cond(lax.axis_index(axis_name) == position, run, lambda: jax.tree.map(zeros_of, kinds))
