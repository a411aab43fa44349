"""`jax.shard_map` of functions with many arrays, for which XLA takes a time that is quadratic in their number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomm.steps.sharding import spec_axes
from jaxcomm.types import PyTree

_MANY = 16  # arrays of a kind that are worth a concatenation


class _VariesError(Exception):
    """A result differs between devices that must be replicated."""


@dataclass(frozen=True)
class _Groups:
    """Arrays that may be concatenated, since they differ along one axis at most, which is not sharded.

    Attributes:
      dtypes: the types of all arrays.
      members: for every group, the places of its arrays in the list of all; a group of one is left as it is.
      specs: for every group, the PartitionSpec of its arrays.
      sizes: for every group of several, their sizes along that axis.
    """

    dtypes: list[Any]
    members: list[list[int]]
    specs: list[P]
    sizes: list[list[int]]

    @classmethod
    def of(cls, arrays: Sequence[Any], specs: Sequence[P], order: Sequence[P] = ()) -> "_Groups":
        """Groups arrays; the groups are in the order of their PartitionSpecs."""
        by_kind: dict[Any, list[int]] = {}
        for place, (array, spec) in enumerate(zip(arrays, specs, strict=True)):
            kind, axis = jax.typeof(array), _axis(spec)
            is_plain = kind.ndim > axis and not jnp.issubdtype(kind.dtype, jax.dtypes.extended)
            shape = (*kind.shape[:axis], *kind.shape[axis + 1 :])
            key = (kind.dtype, kind.weak_type, kind.sharding, shape, spec) if is_plain else place
            by_kind.setdefault(key, []).append(place)
        members = []
        for group in by_kind.values():
            members += [group] if len(group) >= _MANY else [[place] for place in group]
        if order:
            members.sort(key=lambda group: order.index(specs[group[0]]))
        sizes = [[jnp.shape(arrays[place])[_axis(specs[place])] for place in group] for group in members if group[1:]]
        return cls(list(map(jnp.result_type, arrays)), members, [specs[group[0]] for group in members], sizes)

    def join(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns an array for every group."""
        return [
            lax.concatenate([_as_bits(arrays[place]) for place in group], _axis(spec))
            if group[1:]
            else arrays[group[0]]
            for group, spec in zip(self.members, self.specs, strict=True)
        ]

    def cut(self, joined: Sequence[Any]) -> list[Any]:
        """Returns all arrays; the inverse of `join`."""
        by_place, sizes = dict[int, Any](), iter(self.sizes)
        for group, spec, array in zip(self.members, self.specs, joined, strict=True):
            parts = lax.split(array, next(sizes), _axis(spec)) if group[1:] else [array]
            by_place |= {place: _of_bits(part, self.dtypes[place]) for place, part in zip(group, parts, strict=True)}
        return [by_place[place] for place in range(len(by_place))]


def shard_map(function: Callable[..., Any], mesh: Mesh, in_specs: PyTree, out_specs: PyTree, **options: Any) -> Any:
    """Does what `jax.shard_map` does; where there are many arrays of a kind, they go in and out as one.

    For each use of an argument, XLA's partitioner goes through the shardings of all arguments. With 2,400 of them, it
    takes a third of the time to compile. A slice of a concatenation that is one of the operands is replaced by it: the
    compiled program is that of `jax.shard_map`.

    Args:
      function: what every device does.
      mesh: the devices.
      in_specs: as for `jax.shard_map`, without None.
      out_specs: likewise.
      **options: other arguments of `jax.shard_map`. Arrays may be sharded over axes that `axis_names` leaves out, along
        any of their own; so then each goes by itself.
    """
    plain = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    if not set(mesh.axis_names) <= set(options.get("axis_names", mesh.axis_names)):
        return plain

    def call(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        groups, results = _Groups.of(leaves, _spec_leaves(in_specs, args)), dict[str, Any]()
        kinds = list(dict.fromkeys(jax.tree.leaves(out_specs)))

        def on_device(*joined: jax.Array) -> list[list[Any]]:
            out = function(*treedef.unflatten(groups.cut(joined)))
            parts, specs = jax.tree.leaves(out), _spec_leaves(out_specs, out)
            for part, spec in zip(parts, specs, strict=True):
                if jax.typeof(part).manual_axis_type.varying - set(spec_axes(spec)):
                    raise _VariesError
            results.update(tree=jax.tree.structure(out), groups=(out_groups := _Groups.of(parts, specs, kinds)))
            pairs = list(zip(out_groups.join(parts), out_groups.specs, strict=True))
            return [[array for array, spec in pairs if spec == kind] for kind in kinds]

        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=tuple(groups.specs), out_specs=kinds, **options)
        try:
            arrays = mapped(*groups.join(leaves))
        except _VariesError:  # an error of JAX's, with the paths of the results
            return plain(*args)
        return results["tree"].unflatten(results["groups"].cut(jax.tree.leaves(arrays)))

    return call


def _spec_leaves(specs: PyTree, tree: PyTree) -> list[P]:
    return jax.tree.leaves(jax.tree.broadcast(specs, tree))


def _axis(spec: P) -> int:
    """Returns the first axis that is not sharded."""
    return next((axis for axis, entry in enumerate(spec) if entry is None), len(spec))


def _as_bits(array: Any) -> Any:
    """Returns narrow floats as integers: XLA for CPUs would make the concatenation one of float32, and keep it."""
    dtype = jnp.result_type(array)
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return lax.bitcast_convert_type(array, f"uint{8 * dtype.itemsize}") if is_narrow else array


def _of_bits(array: Any, dtype: Any) -> Any:
    return array if jnp.result_type(array) == dtype else lax.bitcast_convert_type(array, dtype)
