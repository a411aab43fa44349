"""The state of a training run, and where each part of it is placed."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.exchange import ExchangeState, get_exchange, is_exchange_state
from jaxcomm.methods.local_sgd import LocalExchange
from jaxcomm.numerics import widened
from jaxcomm.serialization import has_lost_types
from jaxcomm.states import communication_period, trained, with_untrained, works_alone
from jaxcomm.types import PerWorker, is_per_worker


class TrainState(NamedTuple):
    """The state that a train step takes and returns.

    Attributes:
      params: the parameters, replicated; with a local method a row for each worker, see `global_params`.
      opt_state: the optimizer's state. Its `PerWorker` leaves have a row for each worker; the rest is replicated.
      step: () int32, steps so far, skipped ones included.
      model_state: arrays that the model changes without a gradient, such as the running statistics of batch
        normalisation: floats, replicated; a row for each worker with a local method that does not exchange in every
        step. Empty for most models.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    model_state: Any = ()


def state_specs(state: Any) -> Any:
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

    def spec(node: Any) -> Any:
        rows = P(node.axes[0] if len(node.axes) == 1 else node.axes) if is_per_worker(node) else P()
        return jax.tree.map(lambda _: rows, node)

    return jax.tree.map(spec, state, is_leaf=is_per_worker)


def shapes_on(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Returns the `jax.ShapeDtypeStruct` of every leaf of a tree, sharded over a mesh by its PartitionSpec."""

    def shape(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shape, tree, specs)


def check_model_state(model_state: Any) -> None:
    """Refuses a model's state that cannot be averaged over the workers.

    Raises:
      ValueError: for a leaf that is not of a real floating type.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                "The leaves of a model's state must be of a real floating type, since they are averaged over the "
                f"workers; got {jnp.result_type(leaf)} at {jax.tree_util.keystr(path)!r}. Keep counters and random "
                "keys out of it (nnx.state(model, nnx.BatchStat) has running statistics alone), or make the leaf a "
                "float. A step of your own takes them as they are: jaxcomm.data_parallel."
            )


def check_apart(params: Any) -> None:
    """Refuses an array at two places of the parameters, whose copies would be trained apart.

    Raises:
      ValueError: naming both places.
    """
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


def check_axes(exchange: ExchangeState, axis_name: AxisName) -> None:
    """Refuses an exchange over other axes than those of the workers.

    Raises:
      ValueError: naming the axes of both.
    """
    wanted, got = set(axis_names(axis_name)), set(exchange.method.axes)
    if got != wanted:
        raise ValueError(
            f"{exchange.method.name} must average over all axes of workers, {axis_name!r}; got {exchange.method.axes}. "
            "Pass axis_name= to both."
        )


def make_local(state: TrainState, axis_name: AxisName) -> TrainState:
    """With a local method, makes a worker's parameters, optimizer and model state a row of `PerWorker`s."""
    if communication_period(state.opt_state) is None:
        return state
    axes = axis_names(axis_name)

    def is_kept(node: Any) -> bool:
        return is_exchange_state(node) or is_per_worker(node)

    def row(node: Any) -> Any:
        return node if is_kept(node) else PerWorker(node[None], axes, is_local=True)

    opt_state, model_state = jax.tree.map(row, (state.opt_state, state.model_state), is_leaf=is_kept)
    model_state = model_state if works_alone(state.opt_state) else state.model_state
    params = PerWorker(jax.tree.map(lambda leaf: leaf[None], state.params), axes, is_local=True)
    return state._replace(params=params, opt_state=opt_state, model_state=model_state)


def mean_model_state(model_state: Any, axis: int = 0) -> Any:
    """Returns a model's state with the mean over the workers in place of rows, which a local method has."""

    def mean(node: Any) -> Any:
        if not (is_per_worker(node) and node.is_local):
            return node
        return jax.tree.map(lambda rows: widened(rows).mean(axis).astype(rows.dtype), node.rows)

    return jax.tree.map(mean, model_state, is_leaf=is_per_worker)


def without_rows(state: TrainState) -> TrainState:
    """Returns the state with a local worker's own arrays, without the row dimension; the inverse of `make_local`."""

    def own(node: Any) -> Any:
        is_row = is_per_worker(node) and node.is_local
        return jax.tree.map(lambda row: row[0], node.rows) if is_row else node

    return jax.tree.map(own, state, is_leaf=is_per_worker)


def global_params(state: TrainState) -> Any:
    """Returns the model to evaluate and to save: one set of parameters.

    For a method that exchanges gradients these are the parameters themselves. The workers of a local method have their
    own parameters, and the global model is built from the method's state. Call it under `jax.jit` where several
    processes share that state.

    Raises:
      ValueError: if the parameters have rows and the state has no exchange, or has shards.
    """
    if not isinstance(state.params, PerWorker):
        return state.params
    if any(is_per_worker(node) and node.shards for node in jax.tree.leaves(state, is_leaf=is_per_worker)):
        raise ValueError(
            "The model of workers that hold shards must be put together by their step; got such a state. Call "
            "step.params(state)."
        )
    like = jax.tree.map(lambda rows: rows[0], state.params.rows)
    exchange = get_exchange(state.opt_state)
    assert isinstance(exchange.method, LocalExchange), "only a local method has parameters per worker"
    return with_untrained(exchange.method.global_model(exchange, trained(like)), like)


def check_axis(mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses a mesh on which the data-parallel step cannot run.

    Raises:
      ValueError: if the axis is not on the mesh, or another axis has more than one device.
    """
    sizes = dict(mesh.shape)
    names = axis_names(axis_name)
    for name in names:
        if name not in sizes:
            raise ValueError(
                f"axis_name must be an axis of the mesh; got {name!r} and a mesh with {tuple(sizes)}. Make it with "
                f"make_mesh({name}=...), or pass axis_name= to the exchange and to make_train_step (with "
                "data_parallel, to the exchange alone)."
            )
    others = {name: size for name, size in sizes.items() if name not in names and size > 1}
    if others:
        raise ValueError(
            "The mesh of a data-parallel step must have the axes of workers alone, since parameters are replicated; "
            f"got {others} beside {axis_name!r}. Make the mesh with {names[0]}= alone, pass specs= to make_train_step "
            "if parameters are sharded over the others, or call the transformation inside your own jax.shard_map that "
            "is manual over all axes."
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """A batch as a step takes it apart: what is cut into workers' rows, and what is replicated.

    Attributes:
      rows: the arrays that have rows, rows first: (B, ...).
      replicated: the other leaves: scalars, keys, and arrays that `batch_axis` says have no rows.
      key: the random key of the step, replicated; None without one.
      treedef: the structure of the user's batch. Static.
      axes: for every leaf the axis of its rows; None for what is replicated. Static.
    """

    rows: list[Any]
    replicated: list[Any]
    key: Any
    treedef: Any = field(metadata={"static": True})
    axes: tuple[int | None, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, batch: Any, batch_axis: Any = 0, key: Any = None) -> "Batch":
        """Takes a batch apart; see `row_axes`."""
        leaves, treedef = jax.tree.flatten(batch)
        axes = row_axes(batch, batch_axis)
        pairs = list(zip(leaves, axes, strict=True))
        rows = [leaf if axis == 0 else jnp.moveaxis(leaf, axis, 0) for leaf, axis in pairs if axis is not None]
        return cls(rows, [leaf for leaf, axis in pairs if axis is None], key, treedef, tuple(axes))

    def tree(self) -> Any:
        """Returns the user's batch, with the rows that this one has."""
        rows, others = iter(self.rows), iter(self.replicated)
        leaves = [
            next(others) if axis is None else next(rows) if axis == 0 else jnp.moveaxis(next(rows), 0, axis)
            for axis in self.axes
        ]
        return self.treedef.unflatten(leaves)

    def like(self, of_rows: Any, of_others: Any) -> Any:
        """Returns a tree of this structure, with one item for everything that has rows, and one for the rest."""
        both = [of_rows] * len(self.rows), [of_others] * len(self.replicated)
        return replace(self, rows=both[0], replicated=both[1], key=None if self.key is None else of_others)


def row_axes(batch: Any, batch_axis: Any = 0) -> list[int | None]:
    """Returns, for every leaf of a batch, the axis of its rows; None for what is replicated, as scalars are.

    Args:
      batch: any tree.
      batch_axis: an axis for all arrays, or a tree of axes that is a prefix of the batch, None for what is replicated.

    Raises:
      ValueError: for a tree that is no prefix of the batch, or an axis that an array does not have.
    """
    pairs = jax.tree_util.tree_leaves_with_path(batch)
    given: list[Any] = []
    try:
        jax.tree.map(
            lambda axis, part: given.extend([axis] * len(jax.tree.leaves(part))),
            batch_axis,
            batch,
            is_leaf=lambda node: node is None,
        )
    except ValueError as error:
        raise ValueError(
            f"batch_axis must be an axis, or a tree of axes like the batch; got {batch_axis!r} for a batch of "
            f"{jax.tree.structure(batch)}. Name every array: {{'x': 0, 'weights': None}}, None for what is replicated."
        ) from error
    axes: list[int | None] = []
    for (path, leaf), axis in zip(pairs, given, strict=True):
        ndim = jnp.ndim(leaf)
        if axis is not None and ndim and not (isinstance(axis, int) and -ndim <= axis < ndim):
            raise ValueError(
                f"batch_axis must be an axis of each array; got {axis!r} for the shape {jnp.shape(leaf)} at "
                f"{jax.tree_util.keystr(path)!r}. Give arrays different axes by a tree like the batch."
            )
        axes.append(None if axis is None or not ndim else axis % ndim)
    return axes


def check_batch(
    batch: Any, workers: int, micro_batches: int = 1, batch_axis: Any = 0, *, takes_scalars: bool = True
) -> None:
    """Refuses a batch that does not divide evenly, or whose arrays have different numbers of rows.

    Scalars, including a typed random key, have no rows.

    Args:
      batch: the global batch, or its shapes.
      workers: K.
      micro_batches: micro-batches of a worker.
      batch_axis: see `row_axes`.
      takes_scalars: whether a batch may have scalars; in a pipeline each array is cut into micro-batches.

    Raises:
      ValueError: for a scalar that is not taken; if the rows of an array are not a multiple of K times the
        micro-batches; if arrays have different numbers of rows; for the two words of an untyped random key among arrays
        of other sizes.
    """
    parts = workers * micro_batches
    cut = f"{workers} workers" + (f" of {micro_batches} micro-batches each" if micro_batches > 1 else "")
    axes, leaves = row_axes(batch, batch_axis), jax.tree_util.tree_leaves_with_path(batch)
    pairs = [(jax.tree_util.keystr(path), leaf, axis) for (path, leaf), axis in zip(leaves, axes, strict=True)]
    arrays = [(path, leaf, jnp.shape(leaf)[axis]) for path, leaf, axis in pairs if axis is not None]
    counts = [rows for *_, rows in arrays]
    if scalars := [path for path, leaf, _ in pairs if not jnp.ndim(leaf) and not takes_scalars]:
        raise ValueError(
            f"Each array in the batch of a pipeline must have rows; got a scalar at {scalars[0]!r}. Repeat it."
        )
    for path, leaf, _ in arrays:
        if jnp.shape(leaf) == (2,) and jnp.result_type(leaf) == jnp.uint32 and any(count != 2 for count in counts):
            raise ValueError(
                f"A random key in a batch must be a typed one; got two words at {path!r}, which are no rows. Make it "
                "with jax.random.key, or wrap it: jax.random.wrap_key_data."
            )
    if len(set(counts)) > 1:
        usual = max(counts, key=lambda rows: (counts.count(rows), rows % parts == 0, rows))
        found = ", ".join(f"{rows} at {path!r}" for path, _, rows in arrays)
        example = [None if axis is None or jnp.shape(leaf)[axis] != usual else axis for _, leaf, axis in pairs]
        raise ValueError(
            f"The arrays of a batch must have the same number of rows, which are divided among {cut}; got {found}. "
            "Say by batch_axis= which axis of each array has the rows, with None for what every worker needs whole, as "
            f"class weights and masks: batch_axis={jax.tree.unflatten(jax.tree.structure(batch), example)}. Pad what "
            "has several items for a row, as labels of sequences and edges of graphs, to an array of rows."
        )
    for path, leaf, rows in arrays:
        if rows == 0 or rows % parts:
            raise ValueError(
                f"The rows of a batch must be a multiple of the number of workers; got {rows} rows at {path!r} for "
                f"{cut}. Use a batch size of {max(rows // parts, 1) * parts}, or another number of workers."
                f"{' If the rows are along another axis (time first), pass batch_axis=.' * (jnp.ndim(leaf) > 1)}"
            )


def check_global(batch: Any, batch_axis: Any = 0) -> None:
    """Refuses a process's own arrays where there are several processes: each would be taken as the whole batch.

    Args:
      batch: the batch that a step was called with.
      batch_axis: see `row_axes`; what is replicated may be a process's own.

    Raises:
      ValueError: with the way to a global array.
    """
    if jax.process_count() == 1:
        return
    pairs = zip(jax.tree_util.tree_leaves_with_path(batch), row_axes(batch, batch_axis), strict=True)
    for (path, leaf), axis in pairs:
        is_shape = isinstance(leaf, Tracer | jax.ShapeDtypeStruct)
        if axis is not None and not is_shape and (not isinstance(leaf, jax.Array) or leaf.is_fully_addressable):
            raise ValueError(
                f"A batch must be of global arrays where there are several processes; got one of this process alone, "
                f"of {jax.process_count()}, at {jax.tree_util.keystr(path)!r}. Make it by "
                'jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), own_rows).'
            )
