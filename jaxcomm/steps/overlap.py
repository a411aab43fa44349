"""A delayed step between CPU hosts: exchanges the last gradients while it computes the next.

XLA's CPU backend runs the collectives and the arithmetic of one program one after the other. It runs two programs at
the same time only if two threads start them. So the step is split into three programs: the loss and its gradient,
without collectives, from a second thread; the exchange and the update; and the means of what is reported. On GPU and
TPU one program is enough: its collectives do not depend on anything that the step computes.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import axis_names, to_varying
from jaxcomm.exchange import get_exchange, keep_unless, without_frozen
from jaxcomm.kernels.numerics import is_finite_tree
from jaxcomm.state import TrainState, applies_step, is_averaged, state_specs, trained
from jaxcomm.steps.engine import check_new_state, mean_over_workers, settle
from jaxcomm.steps.loss import GradientsFn
from jaxcomm.steps.mesh import mixes_messages
from jaxcomm.steps.replication import over_workers
from jaxcomm.steps.settings import StepSettings
from jaxcomm.types import DelayedState, Params, PerWorker, PyTree


class HostOverlap:
    """The programs of a delayed step, each compiled when it is first called."""

    def __init__(self, gradients_fn: GradientsFn, tx: optax.GradientTransformation, mesh: Mesh, settings: StepSettings):
        self.mesh, axis_name = mesh, settings.axis_name
        rows, on_mesh = P(axis_name), partial(jax.shard_map, mesh=mesh)
        workers = math.prod(mesh.shape[name] for name in axis_names(axis_name))

        def gradients(params: Params, model_state: PyTree, step: jax.Array, batch: PyTree) -> PyTree:
            def local_gradients(params: Params, model_state: PyTree, batch: PyTree) -> Any:
                varying = to_varying(params, axis_name)
                (loss, (scalars, new_state)), gradient_tree = gradients_fn(varying, model_state, batch)
                check_new_state(new_state, model_state)
                out = ({"loss": loss, **scalars}, new_state, gradient_tree)
                return jax.tree.map(lambda x: to_varying(jnp.asarray(x), axis_name)[None], out)

            batch = settings.batch(step, batch, workers)
            in_specs = (P(), P(), batch.like(P(axis_name), P()))
            return over_workers(local_gradients, mesh=mesh, in_specs=in_specs, out_specs=rows)(
                params, model_state, batch
            )

        def update(params: Params, opt_state: PyTree) -> Any:
            def local_update(params: Params, opt_state: PyTree) -> Any:
                last = jax.tree.map(lambda row: row[0], opt_state.gradients.rows)  # in place of this step's gradients
                updates, new = tx.update(last, opt_state, trained(params))
                exchange = get_exchange(new)
                ok = applies_step(exchange.metrics, exchange.method.reverts_on_skip)
                params, new = settle(ok, without_frozen(updates, exchange), new, params, opt_state)
                return params, new.inner, exchange.metrics

            specs = state_specs(opt_state)
            return on_mesh(local_update, in_specs=(P(), specs), out_specs=(P(), specs.inner, P()))(params, opt_state)

        def means(scalars: PyTree, new_state: PyTree, old_state: PyTree, step: jax.Array) -> Any:
            def local_means(scalars: PyTree, new_state: PyTree, old_state: PyTree) -> Any:
                scalars, new_state = jax.tree.map(lambda row: row[0], (scalars, new_state))
                averaged, mean_state = mean_over_workers(scalars, new_state, axis_name, settings.kinds)
                return averaged, keep_unless(is_finite_tree(mean_state), mean_state, old_state)

            averaged, state = on_mesh(local_means, in_specs=(rows, rows, P()), out_specs=P())(
                scalars, new_state, old_state
            )
            return averaged, state, step + 1

        self._gradients, self._means = settings.jit(gradients), settings.jit(means)
        self._update = settings.jit(update, donate_argnums=1 if settings.donate else ())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxcomm-gradients")

    def serves(self, state: PyTree) -> bool:
        """Returns whether it takes the step of this state: that of a delayed chain, on CPUs of several processes."""
        return (
            isinstance(getattr(state, "opt_state", None), DelayedState)
            and mixes_messages(self.mesh)
            and AxisType.Explicit not in self.mesh.axis_types
            and all(map(is_averaged, jax.tree.leaves(state.model_state)))
        )

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes a step: starts its programs without waiting for their results."""
        # All collectives start in the caller's thread, in order: Gloo would mix the messages of two programs.
        future = self._thread.submit(self._gradients, state.params, state.model_state, state.step, batch)
        params, inner, metrics = self._update(state.params, state.opt_state)
        scalars, new_state, gradients = future.result()
        averaged, model_state, step = self._means(scalars, new_state, state.model_state, state.step)
        delayed = DelayedState(inner, PerWorker(gradients, state.opt_state.gradients.axes))
        return TrainState(params, delayed, step, model_state), {**averaged, **metrics._asdict()}
