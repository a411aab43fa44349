"""The data-parallel train step: on a mesh, or with simulated workers on one device."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import ALL_EXCHANGED, AxisName, axis_names, axis_size, in_axes_of_workers
from jaxcomm.exchange import (
    bypassing,
    communication_period,
    get_exchange,
    is_exchange_state,
    keep_unless,
    vary_exchanged,
)
from jaxcomm.numerics import is_finite_tree
from jaxcomm.parallel.agreement import check_agreement, trace_on
from jaxcomm.parallel.state import (
    TrainState,
    check_axes,
    check_axis,
    check_model_state,
    check_workers,
    make_local,
    state_specs,
    without_rows,
)
from jaxcomm.types import is_per_worker

LossFn = Callable[..., Any]
GradientsFn = Callable[[Any, Any, Any], tuple[tuple[Any, tuple[dict[str, Any], Any]], Any]]
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    has_aux: bool = False,
    has_state: bool = False,
    axis_name: AxisName = "data",
    donate: bool = True,
) -> Step:
    """Compiles a train step whose gradients are exchanged by `tx`.

    Every worker differentiates the loss of its own rows of the batch with respect to its own copy of the parameters
    (no reduction is inserted), `tx` exchanges the gradients and makes the update, and all workers apply it alike. If
    the exchange was skipped (a non-finite gradient on some worker), parameters and optimizer state stay as they were,
    but for the exchange's own counts.

    With a local method (`slim_dp`, `local_sgd`, `plump_dp(p=...)`) every worker has its own parameters and its own
    optimizer state, and a worker whose gradient is not finite leaves its own as they were; `global_params(state)` is
    the model.

    A model with running statistics (batch normalisation) keeps them in `state.model_state`. Every worker makes new ones
    from its own rows, and all go on from the workers' mean, local methods included: there too in every step. They stay
    as they were if the step is skipped; with a local method, a worker whose gradient is not finite gives the old ones.

    Args:
      loss_fn: (params, batch) -> the mean loss of the rows given, a scalar; or (loss, dict of scalars) with `has_aux`;
        or (params, model_state, batch) -> (loss, (dict of scalars, new model_state)) with `has_state`.
      tx: a chain with one exchange of this library in it.
      mesh: a mesh with the axis of workers.
      has_aux: whether `loss_fn` returns a dict of scalars as well; they are averaged over the workers.
      has_state: whether `loss_fn` takes and returns `state.model_state` (which `init_state` is given), and a dict of
        scalars, which may be empty, whatever `has_aux` says. The new state has the structure, shapes and types of the
        old.
      axis_name: the axis of workers, or the axes along which they lie, outermost first.
      donate: reuse the state's buffers for the new state. The old state cannot be read afterwards.

    Returns:
      A jitted step(state, batch) -> (state, metrics). All arrays of the batch have the global batch as first dimension,
      a multiple of K. Metrics, the same on every worker: loss, the scalars of `loss_fn`, and those of the exchange (see
      `ExchangeMetrics`). On the wire: what `tx` costs, and one all-reduce of 4 bytes a scalar and a number of the
      model's state.

    Raises:
      ValueError: if the mesh lacks the axis or has others, or if the chain's order is refused (see `check_chain`); at
        trace time if the batch is not divisible by K, or for a model's state that `loss_fn` does not take, has not
        kept in its shape, or that is not of floats; and if the loss uses a parameter whose gradient bypasses the
        exchange other than by `late_multiply`.
    """
    check_axis(mesh, axis_name)
    loss = loss_of(loss_fn, has_aux, has_state)
    own_step = partial(worker_step, jax.value_and_grad(loss, has_aux=True), tx, axis_name)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        check_axes(get_exchange(state.opt_state), axis_name)
        check_batch(batch, math.prod(mesh.shape[name] for name in axis_names(axis_name)))
        check_agreement(loss, state, batch, dict(mesh.shape), axis_name)
        specs = state_specs(state)
        return jax.shard_map(own_step, mesh=mesh, in_specs=(specs, P(axis_name)), out_specs=(specs, P()))(state, batch)

    return jax.jit(step, donate_argnums=0 if donate else ())


def simulate(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    workers: int | tuple[int, ...],
    *,
    has_aux: bool = False,
    has_state: bool = False,
    axis_name: AxisName = "data",
    donate: bool = True,
) -> Step:
    """Compiles the step of `make_train_step` for K workers that live together on one device, under `jax.vmap`.

    The same arguments, results and errors; nothing crosses a wire. The state comes from `init_state(params, tx, K)`.

    Args:
      loss_fn: as in `make_train_step`.
      tx: as in `make_train_step`.
      workers: K, any number (96, say), or one for each axis. Memory grows with K; the decoded mean is held once.
      has_aux: as in `make_train_step`.
      has_state: as in `make_train_step`.
      axis_name: as in `make_train_step`.
      donate: as in `make_train_step`.
    """
    loss = loss_of(loss_fn, has_aux, has_state)
    own_step = partial(worker_step, jax.value_and_grad(loss, has_aux=True), tx, axis_name)
    sizes, names = check_workers(workers, axis_name), axis_names(axis_name)

    def in_axes(state: TrainState, name: str) -> Any:
        return jax.tree.map(
            lambda node: 0 if is_per_worker(node) and name in node.axes else None, state, is_leaf=is_per_worker
        )

    # (K, ...) <-> (*sizes, 1, ...): each worker sees its row as (1, ...), as on a mesh.
    def rows_apart(node: Any) -> Any:
        if not is_per_worker(node):
            return node
        along = [size for name, size in zip(names, sizes, strict=True) if name in node.axes]
        return jax.tree.map(lambda rows: rows.reshape(*along, 1, *rows.shape[1:]), node)

    def rows_together(node: Any) -> Any:
        if not is_per_worker(node):
            return node
        depth = len(node.axes) + 1
        return jax.tree.map(lambda rows: rows.reshape(math.prod(rows.shape[:depth]), *rows.shape[depth:]), node)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        check_axes(get_exchange(state.opt_state), axis_name)
        check_batch(batch, math.prod(sizes))
        by_name = dict(zip(names, sizes, strict=True))
        if bypassing(state.opt_state, state.params):  # nothing is tracked here, so that a mesh has to tell what differs
            check_agreement(loss, state, batch, by_name, axis_name)
            trace_on(own_step, by_name, axis_name, state, batch, out_specs=(state_specs(state), P()))
            function = own_step
        else:
            function = in_axes_of_workers(own_step, (1,), ALL_EXCHANGED)
        parts = jax.tree.map(lambda x: x.reshape(*sizes, -1, *x.shape[1:]), batch)
        state = jax.tree.map(rows_apart, state, is_leaf=is_per_worker)
        for name in reversed(names):
            own = in_axes(state, name)
            function = jax.vmap(function, in_axes=(own, 0), out_axes=(own, None), axis_name=name)
        state, metrics = function(state, parts)
        return jax.tree.map(rows_together, state, is_leaf=is_per_worker), metrics

    return jax.jit(step, donate_argnums=0 if donate else ())


def check_batch(batch: Any, workers: int, micro_batches: int = 1) -> None:
    """Refuses a batch that does not divide evenly.

    Raises:
      ValueError: if the first dimension of an array is not a multiple of K, or of K times the micro-batches.
    """
    parts = workers * micro_batches
    cut = f"{workers} workers" + (f" of {micro_batches} micro-batches each" if micro_batches > 1 else "")
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        rows = leaf.shape[0] if leaf.ndim else 0
        if rows == 0 or rows % parts:
            raise ValueError(
                f"The rows of a batch are a multiple of the number of workers, got {rows} rows at "
                f"{jax.tree_util.keystr(path)!r} for {cut}: use a batch size of {max(rows // parts, 1) * parts}, or "
                "another number of workers."
            )


def loss_of(loss_fn: LossFn, has_aux: bool, has_state: bool) -> LossFn:
    """Returns (params, model_state, batch) -> (loss, (scalars, new model_state)) of any loss."""
    if has_state:
        return loss_fn

    def loss(params: Any, model_state: Any, batch: Any) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
        if jax.tree.leaves(model_state):
            raise ValueError(
                f"A model's state is given to the loss, which returns a new one, got a state of "
                f"{len(jax.tree.leaves(model_state))} arrays for a loss without: pass has_state=True and "
                "loss_fn(params, model_state, batch), or leave model_state out of init_state."
            )
        value = loss_fn(params, batch)
        value, scalars = value if has_aux else (value, {})
        return value, (scalars, model_state)

    return loss


def worker_step(
    gradients_fn: GradientsFn,
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    state: TrainState,
    batch: Any,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One worker's step; runs inside the axis of workers."""
    old = without_rows(state)
    is_local = communication_period(state.opt_state) is not None
    params = vary_exchanged(old.params, old.opt_state, axis_name)
    (loss, (scalars, model_state)), gradients = gradients_fn(params, old.model_state, batch)
    _check_new_state(model_state, old.model_state)
    updates, opt_state = tx.update(gradients, old.opt_state, old.params)
    exchanged = get_exchange(opt_state).metrics
    exchange_ok = ok = exchanged.skipped == 0
    if is_local:  # between two exchanges a worker is on its own
        ok = ok & is_finite_tree(gradients)
    new_params = optax.apply_updates(old.params, updates)

    own_state = _keep_unless(ok, model_state, old.model_state)
    averaged, mean_state = _mean_over_workers({"loss": loss, **scalars}, own_state, axis_name)
    new = TrainState(
        params=_keep_unless(ok, new_params, old.params),
        opt_state=_keep_unless(ok, opt_state, old.opt_state),
        step=state.step + 1,
        model_state=_keep_unless(exchange_ok, mean_state, old.model_state),
    )
    return make_local(new, axis_name), {**averaged, **exchanged._asdict()}


def _keep_unless(ok: jax.Array, new: Any, old: Any) -> Any:
    """Takes the old tree where the step was skipped; an exchange's own state already knows what to keep."""

    def choose(new_node: Any, old_node: Any) -> Any:
        if is_exchange_state(new_node):
            return new_node
        return keep_unless(ok, new_node, old_node)

    return jax.tree.map(choose, new, old, is_leaf=is_exchange_state)


def _check_new_state(new: Any, old: Any) -> None:
    """Refuses a new state of the model that is not what the next step would take."""
    check_model_state(old)
    kinds = [jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree) for tree in (new, old)]
    if jax.tree.structure(new) != jax.tree.structure(old) or kinds[0] != kinds[1]:
        raise ValueError(
            "A new model state has the structure, shapes and types of the old, got "
            f"{jax.tree.map(jax.typeof, new)} for {jax.tree.map(jax.typeof, old)}: return from loss_fn what it was "
            "given as model_state, with new numbers."
        )


def _mean_over_workers(
    scalars: dict[str, jax.Array], tree: Any, axis_name: AxisName
) -> tuple[dict[str, jax.Array], Any]:
    """Averages scalars, and the leaves of a tree, over the workers in one all-reduce of float32.

    What is `PerWorker` in the tree stays each worker's own.
    """
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_per_worker)
    leaves = [node for node in nodes if not is_per_worker(node)]
    stacked = jnp.stack([jnp.asarray(value, jnp.float32) for value in scalars.values()])
    vector = jnp.concatenate([stacked, *(leaf.reshape(-1).astype(jnp.float32) for leaf in leaves)])
    mean = lax.psum(vector, axis_name) / axis_size(axis_name)
    start, means = len(scalars), []
    for leaf in leaves:
        means.append(mean[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype))
        start += leaf.size
    averaged = iter(means)
    nodes = [node if is_per_worker(node) else next(averaged) for node in nodes]
    return dict(zip(scalars, mean[: len(scalars)], strict=True)), treedef.unflatten(nodes)
