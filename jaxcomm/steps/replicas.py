"""A check that arrays declared as replicated are identical on all devices."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomm.kernels.numerics import digest


def differing_replicas(mesh: Mesh, named: Mapping[str, jax.Array]) -> dict[str, list[int]]:
    """Finds replicated arrays whose bits are not the same on all devices of a mesh.

    Every array is read once; each device receives 4 bytes an array from every other. All processes must call it.

    Returns:
      For each array that differs: the devices whose copy is not the most common one, by their positions in the mesh.
    """
    if not named:
        return {}
    digests = np.asarray(_gatherer(mesh)(list(named.values())))  # (devices, arrays)
    differing = {}
    for name, array_digests in zip(named, digests.T, strict=True):
        values, counts = np.unique(array_digests, return_counts=True)
        if len(values) > 1:
            differing[name] = np.flatnonzero(array_digests != values[counts.argmax()]).tolist()
    return differing


@lru_cache
def _gatherer(mesh: Mesh) -> Any:
    def gather(leaves: list[jax.Array]) -> jax.Array:
        return lax.all_gather(jnp.stack([digest(leaf) for leaf in leaves]), mesh.axis_names)

    # check_vma is off: it would take the inputs as replicated, which is what this checks.
    return jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
