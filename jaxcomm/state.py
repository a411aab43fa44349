"""The state of a training run: where its parts are placed, what an exchange's state says, and resizing.

What an exchange keeps is found by its type, `ExchangeState`, wherever it is in an optimizer's state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from jaxcomm.checks import check_count
from jaxcomm.collectives.axis import AxisName, axis_names, to_varying
from jaxcomm.exchange import (
    ExchangeState,
    bypasses,
    exchange_states,
    get_exchange,
    is_exchange_state,
    keep_unless,
    worker_of,
)
from jaxcomm.kernels.numerics import widened
from jaxcomm.serialization import has_lost_types
from jaxcomm.types import (
    AccumulatedState,
    DelayedState,
    ExchangeMetrics,
    Params,
    PerWorker,
    PyTree,
    is_per_worker,
    join_parts,
    map_rows,
    nodes_of,
)


class TrainState(NamedTuple):
    """The state that a train step takes and returns.

    Attributes:
      params: the parameters, replicated; with a local method a row for each worker, see `global_params`.
      opt_state: the optimizer's state. Its `PerWorker` leaves have a row for each worker; the rest is replicated.
      step: () int32, steps so far, skipped ones included.
      model_state: arrays that the model changes without a gradient, such as the running statistics of batch
        normalisation: replicated; floats, and integers, booleans and keys that are the same on all workers. A row for
        each worker, floats alone, with a local method that does not exchange in every step. Empty for most models.
    """

    params: Params
    opt_state: PyTree
    step: jax.Array
    model_state: PyTree = ()


def state_specs(state: PyTree) -> PyTree:
    """Returns the PartitionSpec of every leaf: rows of workers over their axes, the rest replicated.

    Args:
      state: an optimizer's state or a `TrainState`, of arrays or of `jax.ShapeDtypeStruct`s.

    Returns:
      A tree of the state's structure, for the `in_specs` and `out_specs` of `jax.shard_map`.

    Raises:
      ValueError: for a state that has lost its types.
    """
    if has_lost_types(state):
        raise ValueError(
            "A state must have its types to say where its rows are; got rows in dicts, of nnx.split, nnx.state or a "
            "checkpoint that was restored without a target. Pass optimizer.opt_state as it is, or restore into the "
            "state of tx.init."
        )

    def spec(node: PyTree) -> Any:
        rows = P(node.axes) if is_per_worker(node) else P()
        return jax.tree.map(lambda _: rows, node)

    return jax.tree.map(spec, state, is_leaf=is_per_worker)


def check_rows(state: PyTree, workers: int) -> None:
    """Refuses a tree with a state whose rows are on other workers than their own, as far as this process can read."""
    for node in exchange_states(state):
        check_rows((node.memory, node.others), workers)
        rows = None if node.worker is None or node.worker.shards else jax.tree.leaves(node.worker)[0]
        if isinstance(rows, Tracer) or not isinstance(rows, jax.Array | np.ndarray):
            continue
        for shard in jnp.asarray(rows).addressable_shards:  # (K, 1), of a pipeline (stages, K, 1)
            row = np.asarray(shard.data)[..., 0]
            index, k = worker_of(row)
            position = np.arange(index.shape[-1]) + (shard.index[-2].start or 0)
            if rows.shape[-2] == workers and ((row >= 0) & (k != 0) & (k != workers)).any():
                raise ValueError(
                    f"The rows of {node.method.name} must be those of {workers} workers; got rows of {k.max()}, some "
                    "cut off or padded with zeros (strict=False of a checkpoint's restore), and with them gradients "
                    f"that were not sent yet. Restore with the state of {k.max()} workers as the target, and convert "
                    f"it: step.resize(state, {workers}), or jaxcomm.resize_workers."
                )
            if ((row >= 0) & (index != position)).any() or (rows.shape[-2] == 1 < workers and (row >= 0).any()):
                raise ValueError(
                    f"The rows of {node.method.name} must be those of their {workers} workers; got those of workers "
                    f"{index.tolist()}. The state was kept as if it were replicated (pmap with out_axes=None, "
                    "shard_map with P(), nnx.split), and the other workers' residuals are gone: place PerWorker "
                    "leaves by jaxcomm.state_specs, and begin with the state of tx.init."
                )


def communication_period(state: PyTree) -> int | None:
    """Returns the steps from one exchange of a local method to the next; None if the parameters are replicated."""
    return next((exchange.method.period for exchange in exchange_states(state)), None)


def works_alone(state: PyTree, model_state: PyTree = ()) -> bool:
    """Returns whether the state is of a local method, or of a chain that accumulates, without an exchange in each step.

    In the other steps no worker waits for another, so their scalars are their own, and a local method's model states.
    The model state of a chain that accumulates is replicated: the workers wait for each other to average it.
    """
    is_replicated = communication_period(state) is None and bool(jax.tree.leaves(model_state))
    return exchange_interval(state) > 1 and not is_replicated


def exchange_interval(state: PyTree) -> int:
    """Finds the steps from one exchange to the next, of a local method or of a chain that accumulates; else 1."""
    return next((node.every for node in nodes_of(state, AccumulatedState)), communication_period(state) or 1)


def has_delay(state: PyTree) -> bool:
    """Returns whether the state is that of a chain whose exchange takes the gradients of the step before."""
    return bool(nodes_of(state, DelayedState))


def exchange_turns(state: PyTree) -> int:
    """Finds how many exchanges a local method takes to exchange all parameters once; 1 for other methods."""
    return next((exchange.method.turns for exchange in exchange_states(state)), 1)


def full_interval(state: PyTree) -> int | None:
    """Finds the exchanges from one that sends everything to the next, on average; None without one."""
    return next((exchange.method.full_every for exchange in exchange_states(state)), None)


def applies_step(metrics: ExchangeMetrics, reverts_on_skip: bool) -> jax.Array:
    """Returns whether a step should change parameters and optimizer: () bool, False if a skipped exchange undoes it."""
    ok = metrics.skipped == 0
    return ok if reverts_on_skip else jnp.asarray(True)


def keep_states_unless(ok: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns the new state if `ok`, else the old one; states of exchanges, and of chains around them, are always new.

    These have already kept what they must.
    """

    def is_kept(node: PyTree) -> bool:
        return is_exchange_state(node) or isinstance(node, AccumulatedState | DelayedState)

    return jax.tree.map(lambda n, o: n if is_kept(n) else keep_unless(ok, n, o), new, old, is_leaf=is_kept)


def update_with(
    tx: optax.GradientTransformation,
    gradients: PyTree,
    state: PyTree,
    params: Params,
    value: Any,
    value_fn: Callable[..., Any],
) -> tuple[Any, Any]:
    """Calls `tx.update` with the further arguments of a line search and of `reduce_on_plateau`.

    The gradients are each worker's own, `value` is the mean loss of all workers, `value_fn` params -> each worker's own
    loss. Only a `jaxcomm.chain` gets `value_fn` and `grad`, and averages them over the workers.
    """
    extra_args: dict[str, Any] = {"value": value}
    if hasattr(tx, "links"):
        extra_args |= {"grad": gradients, "value_fn": value_fn}
    try:
        return update_with_more(tx, gradients, state, params, extra_args)
    except TypeError as error:
        if "keyword-only argument" in str(error):
            error.add_note(
                "A train step gives a jaxcomm.chain value=, grad= and value_fn=, and another transformation value= "
                "alone. Write jaxcomm.chain in the place of optax.chain. A pipeline gives none of them."
            )
        raise


def update_with_more(
    tx: optax.GradientTransformation, updates: PyTree, state: PyTree, params: Params, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Calls `tx.update` with further arguments, or without them if it only says that it takes any (PSGD's Kron)."""

    def call() -> tuple[Any, Any]:
        return optax.with_extra_args_support(tx).update(updates, state, params, **extra_args)

    try:
        # Traced by itself: of a call that fails, no collective is left in the step. A jaxcomm.chain does not fail so.
        return call() if hasattr(tx, "links") or not extra_args else jax.jit(call, inline=True)()
    except TypeError as error:
        if not extra_args or "unexpected keyword argument" not in str(error):
            raise
    return tx.update(updates, state, params)


def trained(params: Params) -> PyTree:
    """Returns the parameters that have gradients: the tree with None in place of integers, booleans and keys."""
    return jax.tree.map(lambda leaf: leaf if is_trained(leaf) else None, params)


def is_trained(leaf: PyTree) -> bool:
    """Returns whether a parameter has a gradient; refuses what is no array."""
    try:
        dtype = jnp.result_type(leaf)
    except TypeError:
        raise ValueError(
            f"Parameters must be arrays; got a {type(leaf).__name__}. Pass what is trained, and bind the rest to the "
            "loss: eqx.partition(model, eqx.is_array), nnx.split(model, nnx.Param, ...), variables['params']."
        ) from None
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return not (is_key or dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer))


def with_untrained(trained_params: Params, params: Params) -> PyTree:
    """Returns trained parameters together with the untrained ones of `params`; the inverse of `trained`."""
    return jax.tree.map(
        lambda new, old: old if new is None else new, trained_params, params, is_leaf=lambda leaf: leaf is None
    )


def exchange_metrics(state: PyTree) -> ExchangeMetrics | None:
    """Finds the metrics of the exchange in an optimizer's state.

    Args:
      state: the state of one transformation or of an Optax chain.

    Returns:
      The metrics of the first exchange (with sharded parameters, of all groups together), or None if the state has no
      exchange of this library.
    """
    first_node = next(iter(nodes_of(state, ExchangeMetrics, ExchangeState)), None)
    return first_node.metrics if isinstance(first_node, ExchangeState) else first_node


def bypassing(state: PyTree, tree: PyTree) -> frozenset[str]:
    """Returns the paths of the leaves whose gradients bypass the exchange, as `jax.tree_util.keystr` writes them."""
    exchanges = list(exchange_states(state))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return frozenset(
        jax.tree_util.keystr(path)
        for path, leaf in leaves
        if any(bypasses(exchange, path, leaf) for exchange in exchanges)
    )


def vary_exchanged(tree: PyTree, state: PyTree, axis_name: AxisName) -> PyTree:
    """Marks parameters as varying between workers, except those whose gradients bypass the exchange. Moves no bytes."""
    paths = bypassing(state, trained(tree))

    def vary(path: KeyPath, leaf: jax.Array) -> jax.Array:
        return leaf if jax.tree_util.keystr(path) in paths else to_varying(leaf, axis_name)

    return jax.tree_util.tree_map_with_path(vary, tree)


def vary_rows(state: PyTree, extra_axes: tuple[str, ...]) -> PyTree:
    """Marks as varying what may differ in a state, since the branches of a conditional must agree on it.

    Rows differ along their axes, and everything along `extra_axes`, the axes of sharded parameters.
    """

    def vary(node: PyTree) -> PyTree:
        return to_varying(node, (*node.axes, *extra_axes) if is_per_worker(node) else extra_axes)

    return jax.tree.map(vary, state, is_leaf=is_per_worker)


def is_averaged(leaf: PyTree) -> bool:
    """Returns whether a leaf of a model's state is averaged over the workers: floats are, counters and keys are not."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def check_model_state(model_state: PyTree, *, takes_counts: bool = False) -> None:
    """Refuses a model's state with a leaf that is not of a real floating type, to be averaged over the workers.

    With `takes_counts` it may have counters, booleans and keys that are the same on all workers.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        dtype = jnp.result_type(leaf)
        if not is_averaged(leaf) and not (takes_counts and not jnp.issubdtype(dtype, jnp.complexfloating)):
            raise ValueError(
                "The leaves of a model's state must be of a real floating type, since they are averaged over the "
                f"workers; got {dtype} at {jax.tree_util.keystr(path)!r}. Keep counters and random keys out of it "
                "(nnx.state(model, nnx.BatchStat) has running statistics alone), or make the leaf a float. A step "
                "with an exchange of gradients, without stages, takes counters and keys."
            )


def check_axes(exchange: ExchangeState, axis_name: AxisName) -> None:
    """Refuses an exchange over other axes than those of the workers."""
    expected, actual = set(axis_names(axis_name)), set(exchange.method.axes)
    if actual != expected:
        raise ValueError(
            f"{exchange.method.name} must average over all axes of workers, {axis_name!r}; got {exchange.method.axes}. "
            "Pass axis_name= to both."
        )


def make_local(state: TrainState, axis_name: AxisName) -> TrainState:
    """With a local method, makes a worker's parameters, optimizer and model state a row of `PerWorker`s."""
    if communication_period(state.opt_state) is None:
        return state
    axes = axis_names(axis_name)

    def is_kept(node: PyTree) -> bool:
        return is_exchange_state(node) or is_per_worker(node)

    def row(node: PyTree) -> PyTree:
        return node if is_kept(node) else PerWorker(node[None], axes, is_local=True)

    opt_state, model_state = jax.tree.map(row, (state.opt_state, state.model_state), is_leaf=is_kept)
    model_state = model_state if works_alone(state.opt_state) else state.model_state
    params = PerWorker(jax.tree.map(lambda leaf: leaf[None], state.params), axes, is_local=True)
    return state._replace(params=params, opt_state=opt_state, model_state=model_state)


def mean_model_state(model_state: PyTree, axis: int = 0) -> PyTree:
    """Returns a model's state with the mean over the workers in place of rows, which a local method has."""
    return _of_local(lambda rows: widened(rows).mean(axis).astype(rows.dtype), model_state)


def without_rows(state: TrainState) -> TrainState:
    """Returns the state with a local worker's own arrays, without the row dimension; the inverse of `make_local`."""
    return _of_local(lambda row: row[0], state)


def _of_local(function: Callable[[jax.Array], jax.Array], tree: PyTree) -> Any:
    """Puts a function of the rows in the place of every `PerWorker` of workers that train on their own."""
    return map_rows(lambda node: jax.tree.map(function, node.rows) if node.is_local else node, tree)


def global_params(state: TrainState) -> Params:
    """Returns the model to evaluate and to save: one set of parameters.

    For a method that exchanges gradients these are the parameters themselves. The workers of a local method have their
    own parameters, and the global model is built from the method's state. Call it under `jax.jit` where several
    processes share that state.

    Raises:
      ValueError: if the parameters have rows and the state has no exchange, or has shards.
    """
    if not isinstance(state.params, PerWorker):
        return state.params
    if any(node.shards for node in nodes_of(state, PerWorker)):
        raise ValueError(
            "The model of workers that hold shards must be put together by their step; got such a state. Call "
            "step.params(state)."
        )
    like = jax.tree.map(lambda rows: rows[0], state.params.rows)
    exchange = get_exchange(state.opt_state)
    return with_untrained(exchange.method.global_model(exchange, trained(like)), like)


def resize_workers(state: PyTree, workers: int) -> PyTree:
    """Changes the number of rows of every `PerWorker` array, and keeps the mean over the rows.

    A residual is a gradient that was not applied yet, and reaches the parameters divided by the number of workers. So
    the mean of the rows (the update that is still owed) must be preserved, not their sum. The rows are spread over the
    new workers in order: a new worker's row is the average of the old rows it covers. Momenta and thresholds are
    averaged too, and so are the parameters of a local method's workers. A vector that the workers hold together
    (`resizing="parts"`) is joined and divided again. A method may mark a refresh as due (`Exchange.resized`).

    An array that is sharded over other axes of the mesh keeps its shards, each with a row for every new worker. Under
    `hierarchical`, workers are added and removed in whole groups: each share keeps the mean of the groups' rows.

    Args:
      state: an optimizer's state or a `TrainState`, on one host (NumPy or addressable arrays). For the state of a
        pipeline, whose first dimension is that of the stages, call `step.resize`.
      workers: the new K; under `hierarchical`, the workers of all groups.

    Returns:
      The state with (K, ...) NumPy rows.

    Raises:
      ValueError: for fewer than one worker, for a number of workers that is not a multiple of the group size, and for
        the state of a pipeline.
    """
    check_count("workers", workers, 1, "K rows become that many")
    nodes = nodes_of(state, PerWorker)
    # State that differs between shards alone has a row for each shard.
    shards = {(): 1} | {node.axes: len(node.rows) for node in nodes if node.shards == len(node.axes)}

    def fold(node: PerWorker, axes: tuple[str, ...]) -> PerWorker:
        sharded = node.axes[len(node.axes) - node.shards :]
        if sharded == node.axes:
            return node
        inside = shards[sharded] // shards[tuple(name for name in sharded if name not in axes)]  # workers in a group
        if workers % inside:
            raise ValueError(
                f"Workers must make whole groups of {inside}, the number along {sharded[0]!r}; got {workers}. Pass a "
                f"multiple of {inside}."
            )
        new = workers // inside
        return replace(
            node, rows=jax.tree.map(lambda rows: _FOLDS[node.resizing](rows, shards[sharded], new), node.rows)
        )

    def walk(tree: PyTree, axes: tuple[str, ...] | None) -> Any:
        """Resizes a tree, from the state of an exchange over these axes; None for a tree outside of any exchange."""

        def resize(node: PyTree) -> PyTree:
            if is_per_worker(node):
                return fold(node, node.axes if axes is None else axes)
            if not isinstance(node, ExchangeState):
                return node
            if np.ndim(node.step):
                raise ValueError(
                    f"A state must have the workers first to be resized; got stages first in that of "
                    f"{node.method.name}. Call step.resize(state, workers) of the pipeline's step."
                )
            row_axes = node.method.axes if axes is None else axes
            parts = {name: walk(getattr(node, name), row_axes) for name in ("residual", "memory", "others", "worker")}
            worker = jax.tree.map(lambda rows: np.full_like(rows, -1), parts.pop("worker"))
            return node.method.resized(node.replace(worker=worker, **parts))

        return jax.tree.map(resize, tree, is_leaf=lambda node: is_per_worker(node) or is_exchange_state(node))

    return walk(state, None)


def _mean(rows: PyTree, shards: int, new: int) -> Any:
    """Averages rows (K * shards, ...), workers first, to (new * shards, ...): every shard keeps its mean.

    Random keys have no mean: a new row has that of an old one.
    """
    if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(rows)).reshape(len(rows) // shards, shards, *rows.shape[1:], -1)
        words = words[np.arange(new) * len(words) // new].reshape(new * shards, *rows.shape[1:], -1)
        return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(rows))
    rows = np.asarray(rows)
    old = len(rows) // shards
    flat = _overlap(old, new) @ rows.reshape(old, -1).astype(np.float64)
    flat = flat if jnp.issubdtype(rows.dtype, jnp.inexact) else np.rint(flat)  # counts, equal in every row
    return flat.astype(rows.dtype).reshape(new * shards, *rows.shape[1:])


def _parts(rows: PyTree, shards: int, new: int) -> np.ndarray:
    """Joins each shard's vector, of which every row holds its worker's part, and gives it to all new rows."""
    rows = np.asarray(rows).reshape(-1, shards, np.shape(rows)[-1])
    rows_of_shard = [np.asarray(join_parts(rows[:, shard])) for shard in range(shards)]
    return np.concatenate([np.stack(rows_of_shard)] * new)


_FOLDS = {"mean": _mean, "parts": _parts}


def _overlap(old: int, new: int) -> np.ndarray:
    """Returns the weight of each old row in each new row: (new, old); rows sum to 1, columns to new/old."""
    edge_old, edge_new = np.arange(old + 1) / old, np.arange(new + 1) / new
    low = np.maximum(edge_new[:-1, None], edge_old[None, :-1])
    high = np.minimum(edge_new[1:, None], edge_old[None, 1:])
    return np.maximum(high - low, 0) * new


def check_aliases(params: Params) -> None:
    """Refuses an array at two places of the parameters, whose copies would be trained apart."""
    places: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array | np.ndarray) or not leaf.size:
            continue
        name = jax.tree_util.keystr(path)
        if (first := places.setdefault(id(leaf), name)) != name:
            raise ValueError(
                f"An array must be at one place of the parameters; got one at {first!r} and at {name!r}, of which a "
                "step would make two parameters. If they are tied, keep one, and have the loss use it twice (of a "
                "pipeline, in one stage); if they only start equal, pass a copy: jax.numpy.copy."
            )
