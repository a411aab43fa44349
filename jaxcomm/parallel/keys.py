"""Random keys: each worker's own, made of one that is the same on all."""

import re
from typing import Any

import jax
import jax.numpy as jnp


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is one random key: a typed one, or two words."""
    dtype, shape = jnp.result_type(leaf), jnp.shape(leaf)
    return (jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()) or (dtype == jnp.uint32 and shape == (2,))


def own_keys(pattern: str, names: list[str], leaves: list[Any], worker: jax.Array) -> list[Any]:
    """Returns leaves with the keys that a pattern finds made each worker's own.

    Raises:
      ValueError: if it finds none.
    """
    chosen = [re.search(pattern, name) is not None and is_key(leaf) for name, leaf in zip(names, leaves, strict=True)]
    if not any(chosen):
        found = [name for name, leaf in zip(names, leaves, strict=True) if is_key(leaf)]
        raise ValueError(
            f"rng must be a regular expression that finds a random key among the arguments; got {pattern!r} for keys "
            f"at {found or 'none'}. Pass a key of jax.random.key in an argument, and that argument's name as rng=."
        )
    return [
        jax.random.fold_in(jax.random.fold_in(leaf, 1), worker) if is_one else leaf
        for leaf, is_one in zip(leaves, chosen, strict=True)
    ]


def shared_keys(pairs: dict[str, tuple[Any, Any]], names: list[str], out: list[Any]) -> list[Any]:
    """Returns a step's outputs with keys that are the same on all workers in the place of each worker's own.

    A key that the step has left as it was is the one that was given; for one that it has changed, the next.

    Args:
      pairs: by its name in the arguments, each key that was given, and the worker's own.
      names: of the outputs, in the arguments.
      out: the outputs.
    """

    def shared(name: str, leaf: Any) -> Any:
        if name not in pairs or not is_key(leaf):
            return leaf
        given, own = pairs[name]
        return given if leaf is own else jax.random.fold_in(given, 0)

    return [shared(name, leaf) for name, leaf in zip(names, out, strict=True)]
