"""The walk over the program of a step: which outputs differ between workers, and what it may not reduce by itself."""

import math
from typing import Any

import jax.numpy as jnp

from jaxcomm.exchange import SCOPE
from jaxcomm.steps.replication import Axes, by_scope, varying_axes
from jaxcomm.traffic import count_bytes

# What the walk notes of a state that was given to an exchange, and of what an exchange returned.
GIVEN, EXCHANGED = "(given to an exchange)", "(exchanged)"


def follows(name: str) -> str:
    """Returns the mark, in the walk, of what follows from a scalar argument."""
    return f"(from {name})"


def varying_outputs(jaxpr: Any, inputs: list[Axes], axes: Axes) -> list[Axes]:
    """Returns the axes, and marks, of the outputs of a traced `shard_map`.

    Collectives inside a loss (SyncBN, a contrastive loss, counts of valid tokens) are right: untracked, the gradient is
    that of the sum of the workers' losses, and its mean that of their mean. A gradient that they have reduced, or an
    update that they reduce again, is a dense exchange beside the exchange.

    Raises:
      ValueError: for collectives that reduce gradients before the exchange, or what it returned; for gradients of which
        none differs between workers.
    """
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    body, axes_of_input = eqn.params["jaxpr"], dict(zip(jaxpr.invars, inputs, strict=True))
    outside, inside = by_scope(body, SCOPE, axes)
    reductions, entered = {f"#{i}": call for i, call in enumerate(outside)}, set(map(id, inside))
    marks = {id(call): mark for mark, call in reductions.items()}
    sizes: dict[int, tuple[int, Axes]] = {}  # of the gradients: arrays that enter an exchange and are not its state
    products: set[int] = set()
    extra: dict[int, Any] = {}

    def see(eqn: Any, ins: list[Axes], out: list[Axes]) -> list[Axes]:
        if id(eqn) in entered:
            for variable, input_axes in zip(eqn.invars, ins, strict=True):
                is_gradient = not hasattr(variable, "val") and jnp.issubdtype(variable.aval.dtype, jnp.floating)
                if is_gradient and id(variable) not in products and GIVEN not in input_axes:
                    sizes[id(variable)] = math.prod(variable.aval.shape), input_axes
            products.update(map(id, eqn.outvars))
            return [out_axes - reductions.keys() - {GIVEN} | {EXCHANGED} for out_axes in out]
        if id(eqn) not in marks:
            return out
        for variable, input_axes in zip(eqn.invars, ins, strict=True):
            if EXCHANGED in input_axes and not input_axes & axes and math.prod(variable.aval.shape) > 1:
                extra[id(eqn)] = eqn
        reduces = any(in_axes & axes for in_axes in ins)  # not what is the same on all workers
        return [in_axes | {marks[id(eqn)]} for in_axes in out] if reduces else out

    output_axes = varying_axes(body, [axes_of_input.get(v, frozenset()) for v in eqn.invars], see)
    differ = sum(size for size, names in sizes.values() if names & axes)
    reduced = [
        (size, names & reductions.keys())
        for size, names in sizes.values()
        if names & reductions.keys() and not names & axes
    ]
    if sum(size for size, _ in reduced) > differ:
        of_gradients = frozenset[str]().union(*(names for _, names in reduced))
        extra |= {id(reductions[mark]): reductions[mark] for mark in sorted(of_gradients)}
    if extra:
        first = next(iter(extra.values()))
        shapes = ", ".join(str(v.aval) for v in first.invars)
        size = sum(count_bytes(v.aval.shape, v.aval.dtype.itemsize) for eqn in extra.values() for v in eqn.invars)
        raise ValueError(
            f"A step must leave the mean of its gradients to its exchange; got gradients or updates reduced by "
            f"{len(extra)} collectives of its own over {size:,} bytes, the first a {first.primitive.name} of {shapes}. "
            "Delete lax.pmean and lax.psum of gradients, updates and parameters; those inside of a loss may stay."
        )
    workers = math.prod(eqn.params["mesh"].shape[axis] for axis in axes)
    if sizes and not differ and workers > 1:
        raise ValueError(
            f"Each worker must have rows of its own; got a step whose gradients are the same on all {workers} workers. "
            "Name by batch= the arguments that are batches, by rows= state that has rows, by rng= keys of which each "
            "worker is to draw its own examples. Data in the closure of a step is whole on every worker: pass it."
        )
    return output_axes
