"""Meshes of workers."""

import math
import os
import warnings
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.types import PyTree


def _few_threads() -> bool:
    """Makes JAX start enough threads for simulated devices; returns True if it is too late for that.

    JAX before 0.12 starts PJRT_NPROC threads, or as many as there are cores. It reads PJRT_NPROC when its devices
    start, and then refuses to change the number of devices. With one device, more threads cost time.
    """
    if "PJRT_NPROC" in os.environ or jax.__version_info__ >= (0, 12):
        return False
    config: Any = jax.config
    simulated = config.jax_num_cpu_devices
    try:
        config.update("jax_num_cpu_devices", simulated + 1)  # fails once devices have started
    except RuntimeError:
        return True
    config.update("jax_num_cpu_devices", simulated)
    if simulated > (os.cpu_count() or 1):
        os.environ["PJRT_NPROC"] = str(max(16, simulated))
    return False


def mixes_messages(mesh: Any) -> bool:
    """Returns whether collectives that are under way at once may take each other's messages: Gloo's, between processes.

    XLA for CPUs starts a program's collectives in order, but does not wait for the end of a loop or a conditional that
    has some. A later collective must then need a result of it.
    """
    return isinstance(mesh, Mesh) and mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu"


def make_mesh(**axes: int) -> Mesh:
    """Makes a mesh over the first devices of all processes.

    Args:
      **axes: the size of each axis by name, slowest first: `make_mesh(data=4)`.

    Returns:
      A mesh whose axes are all of type Auto, for use with `jax.shard_map`. If no device has been used yet, JAX before
      0.12 is given enough threads for simulated devices (PJRT_NPROC); if it is too late for that, this warns.

    Raises:
      ValueError: without axes, for a size below 1, or if there are fewer devices than the mesh needs.
    """
    if not axes:
        raise ValueError(
            "A mesh must have at least one axis; got none. make_mesh(data=4) makes 4 data-parallel workers."
        )
    for name, size in axes.items():
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise ValueError(f"A mesh axis must have at least 1 device; got {name}={size!r}. Pass a positive integer.")
    need, may_wait = math.prod(axes.values()), _few_threads()
    devices = jax.devices()
    if need > len(devices):
        shape = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"A mesh must have a device for each of its places; got {len(devices)} for ({shape}), which has {need}. "
            "Start more processes, or, to simulate devices on a CPU, call jax.config.update('jax_num_cpu_devices', "
            f"{need}) before anything else of JAX."
        )
    if may_wait and devices[0].platform == "cpu" and need // jax.process_count() > (os.cpu_count() or 1):
        warnings.warn(
            f"PJRT_NPROC must be at least the number of CPU devices of a process, or their collectives wait for each "
            f"other until JAX before 0.12 aborts; got {need} devices on {os.cpu_count()} cores, without it. Set "
            f"PJRT_NPROC={max(16, need)} in the environment before Python starts, or call make_mesh before anything "
            "else that needs a device, jax.device_count() included.",
            stacklevel=2,
        )
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices[:need])


def shapes_on(mesh: Mesh, tree: PyTree, specs: PyTree) -> Any:
    """Returns the `jax.ShapeDtypeStruct` of every leaf of a tree, sharded over a mesh by its PartitionSpec."""

    def shape(leaf: PyTree, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shape, tree, specs)


def check_axis(mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses a mesh without the axis of workers, or with another axis of more than one device."""
    sizes = dict(mesh.shape)
    names = axis_names(axis_name)
    for name in names:
        if name not in sizes:
            raise ValueError(
                f"axis_name must be an axis of the mesh; got {name!r} and a mesh with {tuple(sizes)}. Make it with "
                f"make_mesh({name}=...), or pass axis_name= to the exchange and to make_train_step (with "
                "data_parallel, to the exchange alone)."
            )
    extra = {name: size for name, size in sizes.items() if name not in names and size > 1}
    if extra:
        raise ValueError(
            "The mesh of a data-parallel step must have the axes of workers alone, since parameters are replicated; "
            f"got {extra} beside {axis_name!r}. Make the mesh with {names[0]}= alone, pass specs= to make_train_step "
            "if parameters are sharded over the others, or call the transformation inside your own jax.shard_map that "
            "is manual over all axes."
        )


def place(tree: PyTree, shardings: Any) -> PyTree:
    """Does `jax.device_put`; refuses replicated arrays that are not equal in every process."""
    try:
        return jax.device_put(tree, shardings)
    except AssertionError:  # its text has whole arrays
        raise ValueError(
            "Parameters and states must be equal in every process; got other numbers in process "
            f"{jax.process_index()}. Begin with the same seed, or the same checkpoint, in all processes: what differs "
            "between workers are their rows of the batch, and the keys that rng= derives."
        ) from None
