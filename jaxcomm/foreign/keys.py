"""Random keys: each worker's own, derived from a replicated one."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.types import PyTree


def is_key(leaf: PyTree) -> bool:
    """Returns whether a leaf is a single random key: a typed one, or two uint32 words."""
    dtype, shape = jnp.result_type(leaf), jnp.shape(leaf)
    return (jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()) or (dtype == jnp.uint32 and shape == (2,))


def worker_keys(pattern: str, names: list[str], leaves: list[Any], worker: jax.Array) -> list[Any]:
    """Returns the leaves, with this worker's own keys in place of those that a pattern finds; it must find one."""
    is_drawn = [re.search(pattern, name) is not None and is_key(leaf) for name, leaf in zip(names, leaves, strict=True)]
    if not any(is_drawn):
        key_names = [name for name, leaf in zip(names, leaves, strict=True) if is_key(leaf)]
        raise ValueError(
            f"rng must be a regular expression that finds a random key among the arguments; got {pattern!r} for keys "
            f"at {key_names or 'none'}. Pass a key of jax.random.key in an argument, and that argument's name as rng=."
        )
    return [
        jax.random.fold_in(jax.random.fold_in(leaf, 1), worker) if is_one else leaf
        for leaf, is_one in zip(leaves, is_drawn, strict=True)
    ]


def shared_keys(pairs: dict[str, tuple[Any, Any]], names: list[str], out: list[Any]) -> list[Any]:
    """Returns a step's outputs with replicated keys in place of the worker's own.

    A key that the step left unchanged becomes the given key again. One that it changed becomes the next replicated key.
    `pairs` has the given key and the worker's own by the name in the arguments, `names` the outputs' names there.
    """

    def shared(name: str, leaf: PyTree) -> PyTree:
        if name not in pairs or not is_key(leaf):
            return leaf
        key, worker_key = pairs[name]
        return key if leaf is worker_key else jax.random.fold_in(key, 0)

    return [shared(name, leaf) for name, leaf in zip(names, out, strict=True)]
