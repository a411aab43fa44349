"""The axis of workers, be it a manual axis of a mesh or the axis of a `jax.vmap`.

On a mesh JAX tracks which values differ between the workers, and collectives may promise that their result does not.
Under `vmap` nothing is tracked, and the functions that make such promises raise. This module owns that difference;
nothing else asks on which of the two it runs.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxcomm.checks import check_count
from jaxcomm.types import PyTree

AxisName = str | tuple[str, ...]  # the workers may be along several axes of a mesh

# An axis of size 1, along which parameters are made to differ to see what depends on them: JAX tracks it like any other
# axis (see steps/agreement.py).
OTHER_USES = "uses other than a late layer"
# An axis of size 1 that is in scope where all gradients are exchanged and nothing is tracked.
ALL_EXCHANGED = "all gradients are exchanged"


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """Returns the names of the axes, outermost first."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def axis_size(axis_name: AxisName) -> int:
    """Returns K, the number of workers on the axis, or on the axes together.

    Raises:
      ValueError: if no such axis is in scope.
    """
    names = axis_names(axis_name)
    try:
        return math.prod(lax.axis_size(name) for name in names)
    except NameError:
        axis_name = names[0] if len(names) == 1 else names
        raise ValueError(
            f"An exchange must run where the axis of workers is in scope; got no axis {axis_name!r}. Call it inside "
            f"jax.shard_map over that axis, or under jax.vmap(..., axis_name={axis_name!r}); wrap a step that was "
            "written for one device by jaxcomm.data_parallel(step, mesh), or a loss by jaxcomm.make_train_step; or "
            "pass the name of your own axis as axis_name=."
        ) from None


def check_workers(workers: int | tuple[int, ...], axis_name: AxisName) -> tuple[int, ...]:
    """Returns the number of simulated workers along each axis.

    Raises:
      ValueError: for what is no integer of at least 1, or another number of axes.
    """
    sizes = workers if isinstance(workers, tuple) else (workers,)
    for size in sizes:
        check_count("workers", size, 1, "Pass a mesh or a positive integer")
    if len(sizes) != len(axis_names(axis_name)):
        raise ValueError(
            f"workers must have one number for each axis of workers; got {workers} for axis_name={axis_name!r}. Pass a "
            "tuple for several axes."
        )
    return sizes


def abstract_mesh(axes: Mapping[str, int], kind: Any = None) -> AbstractMesh:
    """Makes a mesh without devices, on which to trace a worker's function.

    Args:
      axes: the sizes of its axes, by name.
      kind: the `AbstractDevice` of the mesh that it stands for; by default that of CPU hosts.
    """
    types, kind = (AxisType.Auto,) * len(axes), kind or AbstractDevice("cpu", None, "cpu")
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, abstract_device=kind)


@contextlib.contextmanager
def use_mesh(mesh: Mesh | AbstractMesh | None) -> Iterator[None]:
    """Makes a mesh, or none, the one in use while something is traced; outside of a trace none is.

    So a script may have set any mesh by `jax.set_mesh`: JAX requires that one, if there is one, to be that of each
    `jax.shard_map`.
    """
    if jax.sharding.get_abstract_mesh().empty:  # and is left so: checkify then looks into a `jax.shard_map`
        yield
        return
    nothing = AbstractMesh((), ())  # first, since one mesh cannot replace another of another size
    with contextlib.ExitStack() as contexts:
        try:
            contexts.enter_context(jax.set_mesh(Mesh(np.empty((), object), ())))
        except ValueError:  # inside of a trace
            for context_mesh in (nothing, nothing if mesh is None else mesh.abstract_mesh):
                contexts.enter_context(jax.sharding.use_abstract_mesh(context_mesh))
        yield


def on_step_mesh(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `self.mesh` the mesh in use while a method runs; see `use_mesh`."""

    @functools.wraps(method)
    def on_mesh(self: Any, *args: Any, **kwargs: Any) -> Any:
        with use_mesh(self.mesh):
            return method(self, *args, **kwargs)

    return on_mesh


def in_axes_of_workers(function: Callable[..., Any], sizes: tuple[int, ...], axis_name: AxisName) -> Callable[..., Any]:
    """Puts the workers' axes in scope for a function that does the same on all workers; it runs once."""
    for name, size in reversed(list(zip(axis_names(axis_name), sizes, strict=True))):
        function = jax.vmap(function, in_axes=None, out_axes=None, axis_name=name, axis_size=size)
    return function


def is_in_scope(axis_name: AxisName) -> bool:
    """Returns whether there are workers along the axis, or along all of the axes."""
    try:
        axis_size(axis_name)
    except ValueError:
        return False
    return True


def varies(value: Any, axis_name: str) -> bool:
    """Returns whether JAX knows that a value differs between the workers; always False where nothing is tracked."""
    return axis_name in jax.typeof(value).manual_axis_type.varying


def is_tracked(axis_name: str) -> bool:
    """Returns whether JAX tracks, on this axis, which values differ (a mesh axis with check_vma=True)."""
    return varies(lax.axis_index(axis_name), axis_name)


def to_varying(tree: PyTree, axis_name: AxisName) -> Any:
    """Marks replicated values as differing between workers, so that `jax.grad` with respect to them stays local.

    Moves no bytes. Values that already differ are left as they are, as is everything where nothing is tracked.
    """

    def vary(value: Any) -> PyTree:
        for name in axis_names(axis_name):
            if is_tracked(name) and not varies(value, name):
                value = lax.pcast(value, name, to="varying")
        return value

    return jax.tree.map(vary, tree)


def other_axes(value: jax.Array, axis_name: AxisName) -> tuple[str, ...]:
    """Returns the axes other than the workers' along which JAX knows a value to differ: those of a sharded model."""
    return tuple(sorted(set(jax.typeof(value).manual_axis_type.varying) - set(axis_names(axis_name))))


def zeros_varying_as(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Returns zeros that JAX takes to differ between workers wherever `like` does, as a loop's first carry must."""
    zeros = jnp.zeros(shape, dtype)
    names = tuple(jax.typeof(like).manual_axis_type.varying)
    return lax.pcast(zeros, names, to="varying") if names else zeros


def zeros_of(kind: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros of a shape from `jax.eval_shape`, which JAX takes to differ along the same axes."""
    zeros = jnp.zeros(kind.shape, kind.dtype)
    names = () if kind.manual_axis_type is None else tuple(kind.manual_axis_type.varying)
    return lax.pcast(zeros, names, to="varying") if names else zeros


def at_positions(branches: Mapping[int, Callable[..., Any]], axis_name: AxisName, *args: Any) -> Any:
    """Runs the function of this position of an axis; positions without one return zeros and run none.

    Args:
      branches: functions by position, with results of the same shapes.
      axis_name: the axis.
      args: of every function.
    """
    size = axis_size(axis_name)
    functions: list[Callable[..., Any]] = [
        lambda *args, branch=branch: to_varying(branch(*args), axis_name) for branch in branches.values()
    ]
    if len(functions) == size == 1:
        return functions[0](*args)
    index = np.full(size, len(functions), np.int32)
    index[list(branches)] = np.arange(len(functions))
    if len(functions) < size:
        kinds = jax.eval_shape(functions[0], *args)
        functions.append(lambda *_: jax.tree.map(zeros_of, kinds))
    return lax.switch(jnp.asarray(index)[lax.axis_index(axis_name)], functions, *args)


def check_per_worker(gradients: PyTree, axis_name: str) -> None:
    """Refuses gradients that are already reduced.

    Inside `jax.shard_map`, `jax.grad` with respect to replicated parameters already inserts the dense all-reduce. A
    compressor after it would save nothing, and its mean would be wrong by a factor of K.

    Raises:
      ValueError: at trace time, if a gradient is known to be the same on all workers, or outside the axis.
    """
    axis_size(axis_name)
    if not is_tracked(axis_name):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        if not varies(leaf, axis_name):
            raise ValueError(
                f"A compressor must get each worker's own gradient; got one at {jax.tree_util.keystr(path)!r} that is "
                f"already reduced over axis {axis_name!r}: jax.grad with respect to replicated parameters has inserted "
                "a dense all-reduce (a sum, not a mean). Differentiate with respect to the workers' own copies "
                f"instead: params = jax.lax.pcast(params, {axis_name!r}, to='varying') before jax.grad, or use "
                "jaxcomm.make_train_step, which does so."
            )
