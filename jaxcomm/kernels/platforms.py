"""The platform that a program is traced for, and what only XLA for CPUs has to be told."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def traced_platform() -> str | None:
    """Returns the platform ("cpu", "tpu", ...) that the program is traced for; None if the mesh does not tell."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


def by_platform(*args: Any, default: Callable[..., Any], **ways: Callable[..., Any]) -> Any:
    """Calls the function for the platform of the program; all return the same shapes.

    If neither the mesh nor JAX_PLATFORMS tells the platform, all functions are traced, and JAX chooses as it lowers the
    program. Tracing a method then takes up to half as long again.

    Args:
      *args: arrays.
      default: the function for all other platforms.
      **ways: functions by platform, as in `jax.lax.platform_dependent`.
    """
    platform = traced_platform() or _setting()
    if not platform or "," in platform:
        return lax.platform_dependent(*args, default=default, **ways)
    return ways.get(platform, default)(*args)


def _setting() -> str | None:
    """Returns JAX_PLATFORMS: a name, or several that are separated by commas."""
    config: Any = jax.config  # its attributes have no types
    return config.jax_platforms


def in_memory(array: jax.Array) -> jax.Array:
    """Makes XLA for CPUs compute an array once, and write it to memory, before anything reads it.

    Else it computes the array again wherever it is read. On other platforms the array stays as it is.
    """
    return by_platform(array, cpu=_in_memory, default=lambda array: array)


def _in_memory(array: jax.Array) -> jax.Array:
    # XLA removes barriers before it fuses (in jax 0.10; no longer in 0.12). So a loop, whose length XLA does not know,
    # writes the first element again.
    if not array.size:
        return array
    start = (0,) * array.ndim
    first = lax.slice(array, start, (1,) * array.ndim)
    times = 1 + (first.reshape(()) == 0)
    return lax.while_loop(
        lambda carry: carry[0] < times,
        lambda carry: (carry[0] + 1, lax.dynamic_update_slice(carry[1], first, start)),
        (jnp.zeros_like(times), array),
    )[1]
