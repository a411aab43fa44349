"""How steps are compiled."""

import functools
from typing import Any

import jax

_REGIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}


@functools.cache
def compiler_options() -> dict[str, Any]:
    """Returns the options that steps are compiled with, for `jax.jit`.

    On CPUs XLA copies what is donated and read twice, as a momentum is, by the new momentum and by the new parameters.
    Its analysis of regions, which it uses on other backends, sees that the copy is not needed: a dense step with
    momentum takes half as long with it. An XLA that does not know the option is not asked for it.
    """
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda: 0, compiler_options=_REGIONS).lower().compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return _REGIONS
