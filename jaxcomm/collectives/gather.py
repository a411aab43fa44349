"""The all-gather of payloads as one buffer of 32-bit words."""

from typing import Any

import jax

from jaxcomm.collectives.axis import AxisName
from jaxcomm.collectives.messages import all_gather_same
from jaxcomm.kernels.vectors import computed_end_to_end
from jaxcomm.types import Payload


def fuse(payload: Payload) -> jax.Array:
    """Puts the arrays of a payload, all (m,) uint32, end to end in the order of their names."""
    return computed_end_to_end([payload[name] for name in sorted(payload)])


def split_words(words: jax.Array, like: dict[str, Any]) -> Payload:
    """Cuts a fused payload apart again; `like` gives the shapes that `fuse` was given."""
    payload, start = {}, 0
    for name in sorted(like):
        size = like[name].size
        payload[name] = words[start : start + size]
        start += size
    return payload


def gather_words(words: jax.Array, axis_name: AxisName) -> jax.Array:
    """Gathers every worker's words (m,) uint32: (K, m), the same on every worker.

    Each worker receives (K-1) * 4 m bytes.
    """
    return all_gather_same(words, axis_name)
