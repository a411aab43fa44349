"""Outputs of a step: which argument each continues, what is said of it, and how the workers' values become one."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives import dense_mean
from jaxcomm.foreign import nnx
from jaxcomm.foreign.trees import kind_of
from jaxcomm.foreign.walk import follows
from jaxcomm.kernels.numerics import largest_by
from jaxcomm.steps.replication import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Out:
    """The output of a step: what it returned, and those of its arguments that are objects, as it changed them."""

    returned: Any
    changed: dict[str, Any]

    def names(self) -> list[str]:
        """Returns the path of every leaf."""
        return nnx.names(self.returned) + nnx.names(self.changed)

    def origins(self, args: dict[str, Any]) -> list[str]:
        """Returns, for every leaf that continues an argument, its path in the arguments, and "" for the others.

        An output continues an argument of its structure and shapes; several of one kind, in their order. A bare scalar
        continues none.
        """
        kinds: dict[Any, list[str]] = {}
        for name, arg in args.items():
            kinds.setdefault(kind_of(arg), []).append(name)
        kinds.pop(None, None)
        origins: list[str] = []
        for node in jax.tree.leaves(self.returned, is_leaf=lambda node: kind_of(node) in kinds):
            names = kinds.get(kind_of(node))
            if names is None:
                origins += [""] * len(jax.tree.leaves(node))
                continue
            origins += nnx.names({names[0]: node})
            kinds[kind_of(node)] = names[1:] or names
        return origins + nnx.names(self.changed)


class Leaf(NamedTuple):
    """An output array of a step: its path, its PartitionSpec, its origin (see `Out.origins`), and what is said of it.

    `said` is "mean", "sum" or "max", and "" if nothing is.
    """

    name: str
    spec: P
    origin: str
    said: str

    def is_loss(self, axes: Axes, scalars: set[str]) -> bool:
        """Returns whether it only has the place of a scalar in one of the arguments of scalars alone.

        Then it does not follow from that scalar.
        """
        is_alone = self.origin.split("/")[0] in scalars and self.name != self.origin
        return is_alone and follows(self.origin) not in axes


def pattern_of(leaf: Leaf) -> str:
    """Returns a regular expression, as short as a name, that finds an output."""
    path = leaf.origin or leaf.name
    if ":" in path:
        return path.rsplit(":", 1)[1]  # the type of a variable of NNX
    parts = path.split("/")
    if "batch_stats" in parts:
        return "batch_stats"
    word = re.search(r"[A-Za-z]\w{2,}", parts[-1])  # of a name, or of what stands for it in a path, as an error's type
    return word[0] if word else f"^{re.escape(path)}$"


def combine(arrays: list[Any], increments: list[Any], hows: list[str], axes: tuple[str, ...]) -> list[Any]:
    """Combines the workers' values; `increments` has the outputs without the old part of their sums."""
    workers = jax.lax.axis_size(axes)
    means = iter(dense_mean([x for x, reduction in zip(arrays, hows, strict=True) if reduction == "mean"], axes)[0])

    def total(x: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x - new + jax.lax.psum(new, axes)
        # One sum, that all workers may get the same bits.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x, new = x.astype(wide), new.astype(wide)
        return jax.lax.psum(new + (x - new) / workers, axes)

    def one(x: jax.Array, new: jax.Array, reduction: str) -> jax.Array:
        if reduction == "mean":
            return next(means)
        if reduction == "sum":
            return total(x, new).astype(x.dtype)
        return largest_by(partial(jax.lax.pmax, axis_name=axes), x) if reduction == "max" else x

    return [one(*item) for item in zip(arrays, increments, hows, strict=True)]
