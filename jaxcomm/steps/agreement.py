"""Proof that the layers and the exchange agree on which gradients are already reduced.

If an exchange's `where` leaves out a parameter, its gradient bypasses the exchange, and a late layer (`late_multiply`
or `late_lookup`) must produce it. If the loss also uses that parameter in another way (another layer, a penalty, tied
weights), JAX computes the gradient of that use by a dense all-reduce: a sum instead of a mean, with no error.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from jaxcomm.collectives.axis import OTHER_USES, AxisName, abstract_mesh, to_varying, use_mesh, varies
from jaxcomm.state import TrainState, bypassing, state_specs, trained, vary_exchanged
from jaxcomm.steps.batch import Batch
from jaxcomm.types import PyTree


def check_agreement(
    loss_fn: Callable[..., Any], state: TrainState, batch: Batch, axes: Mapping[str, int], axis_name: AxisName
) -> None:
    """Refuses parameters that bypass the exchange if anything but a late layer uses them. Nothing is computed.

    The loss, (params, model_state, batch) -> (loss, auxiliary), is traced once more, with an extra axis along which
    these parameters differ. A late layer hides that axis, so the loss differs along it exactly if something else uses
    one of the parameters.
    """
    marked = bypassing(state.opt_state, trained(state.params))
    if not marked:
        return

    def reaches_the_loss(paths: frozenset[str]) -> bool:
        is_reached = False

        def worker(state: TrainState, batch: PyTree) -> jax.Array:
            nonlocal is_reached

            def differ(path: KeyPath, leaf: jax.Array) -> jax.Array:
                return to_varying(leaf, OTHER_USES) if jax.tree_util.keystr(path) in paths else leaf

            params = vary_exchanged(state.params, state.opt_state, axis_name)
            params = jax.tree_util.tree_map_with_path(differ, params)
            loss, _ = loss_fn(params, state.model_state, batch)
            is_reached = varies(loss, OTHER_USES)
            return jnp.zeros(())

        trace_on(worker, {**axes, OTHER_USES: 1}, axis_name, state, batch, out_specs=P())
        return is_reached

    if reaches_the_loss(marked):
        wrong = [path for path in sorted(marked) if reaches_the_loss(frozenset([path]))]
        raise ValueError(
            "A parameter whose gradient is already reduced must be used by late_lookup or late_multiply alone; got a "
            f"loss that uses {', '.join(wrong)} in another way, for which JAX would insert a dense all-reduce. Pass "
            "mode=plan.mode(path) to the layer ('auto' compares with a dense exchange, a plan with any), put a penalty "
            "on the weights into the chain (optax.add_decayed_weights), or have the exchange's where= choose the "
            "parameter."
        )


def trace_on(
    worker: Callable[..., Any],
    axes: Mapping[str, int],
    axis_name: AxisName,
    state: TrainState,
    batch: Batch,
    *,
    out_specs: PyTree,
    how: Callable[..., Any] = jax.shard_map,
) -> None:
    """Traces a worker's function on a mesh without devices, on which JAX tracks what differs between workers."""
    mesh = abstract_mesh(axes)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), (state, batch))
    in_specs = (state_specs(state), batch.like(P(axis_name), P()))
    with use_mesh(mesh):
        jax.eval_shape(how(worker, mesh=mesh, in_specs=in_specs, out_specs=out_specs), *shapes)
