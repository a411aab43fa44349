"""Meshes of workers."""

import math

import jax
from jax.sharding import AxisType, Mesh


def make_mesh(**axes: int) -> Mesh:
    """Makes a mesh over the first devices of all processes.

    Args:
      **axes: the size of each axis by its name, slowest first: `make_mesh(data=4)`.

    Returns:
      A mesh whose axes are all of type Auto, for use with `jax.shard_map`.

    Raises:
      ValueError: without axes, for a size below 1, or if there are fewer devices than the mesh needs.
    """
    if not axes:
        raise ValueError("A mesh needs at least one axis, got none: make_mesh(data=4) makes 4 data-parallel workers.")
    for name, size in axes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"A mesh axis has at least 1 device, got {name}={size!r}: pass a positive integer.")
    need, devices = math.prod(axes.values()), jax.devices()
    if need > len(devices):
        shape = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"A mesh has a device for each of its places, got {len(devices)} for ({shape}), which has {need}: start "
            f"more processes, or, to simulate them on a CPU, call jax.config.update('jax_num_cpu_devices', {need}) "
            "before anything else of JAX."
        )
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices[:need])
