"""A train step that was written for one device, run by the workers of a mesh."""

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.checks import check_count
from jaxcomm.collectives import dense_mean
from jaxcomm.collectives.axis import on_own_mesh
from jaxcomm.exchange import SCOPE, exchange_states, lets_bypass
from jaxcomm.parallel import objects
from jaxcomm.parallel.keys import is_key, own_keys, shared_keys
from jaxcomm.parallel.replicas import differing_replicas
from jaxcomm.parallel.replication import Axes, collectives_outside, varying_axes
from jaxcomm.parallel.sharding import spec_axes
from jaxcomm.parallel.state import check_axis, check_batch, check_global, row_axes
from jaxcomm.states import check_rows
from jaxcomm.traffic import count_bytes
from jaxcomm.types import is_per_worker


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Out:
    """The output of a step: what it returned, and those of its arguments that are objects, as it changed them."""

    returned: Any
    changed: dict[str, Any]

    def names(self) -> list[str]:
        """Returns the path of every leaf."""
        return objects.names(self.returned) + objects.names(self.changed)

    def origins(self, state: dict[str, Any]) -> list[str]:
        """Returns, for every leaf that is state, its path in the arguments, and "" for the others.

        An output is state if it has the structure of an argument.
        """
        kinds = {jax.tree.structure(arg): name for name, arg in reversed(state.items()) if not _is_array(arg)}
        bare = {
            (jnp.shape(arg), jnp.result_type(arg)): name
            for name, arg in reversed(state.items())
            if _is_array(arg) and (jnp.ndim(arg) or is_key(arg))
        }

        def origin(node: Any) -> str | None:
            if _is_array(node):
                return bare.get((jnp.shape(node), jnp.result_type(node)))
            return kinds.get(jax.tree.structure(node))

        found: list[str] = []
        for node in jax.tree.leaves(self.returned, is_leaf=lambda node: origin(node) is not None):
            name = origin(node)
            found += [""] * len(jax.tree.leaves(node)) if name is None else objects.names({name: node})
        return found + objects.names(self.changed)


class _Leaf(NamedTuple):
    """An output array of a step: its path, its PartitionSpec, and its origin, see `_Out.origins`."""

    name: str
    spec: P
    origin: str


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Packed:
    """A tree as the list of its arrays. Its other leaves, such as the functions in a model, are static."""

    arrays: list[Any]
    treedef: Any = field(metadata={"static": True})
    others: tuple[Any, ...] = field(metadata={"static": True})  # None in place of an array
    sharing: Any = field(default=None, metadata={"static": True})  # see `objects.sharing`

    @classmethod
    def of(cls, tree: Any, sharing: Any = None) -> "_Packed":
        leaves, treedef = jax.tree.flatten(tree)
        others = tuple(None if is_traced else leaf for leaf, is_traced in zip(leaves, _traced(tree), strict=True))
        arrays = [leaf for leaf, other in zip(leaves, others, strict=True) if other is None]
        return cls(arrays, treedef, others, sharing)

    def replace(self, arrays: list[Any]) -> "_Packed":
        """Returns this tree with other arrays, still packed."""
        return replace(self, arrays=arrays)

    def tree(self, arrays: Iterable[Any] | None = None) -> Any:
        """Returns the tree, with other arrays if they are given."""
        each = iter(self.arrays if arrays is None else arrays)
        return self.treedef.unflatten([next(each) if other is None else other for other in self.others])

    def pick(self, of_leaves: list[Any]) -> list[Any]:
        """Returns, of a list with an item for each leaf, the items of the arrays."""
        return [leaf for leaf, other in zip(of_leaves, self.others, strict=True) if other is None]


class DataParallel:
    """A step made by `data_parallel`: call it, or pass it to `jaxcomm.verify`."""

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        batch: Sequence[int | str],
        batch_axis: Any,
        mean: str | None,
        rng: str | None,
        check_every: int | None,
        donate: bool,
        compiler_options: dict[str, Any] | None,
    ):
        """See `data_parallel`."""
        functools.update_wrapper(self, step)
        self.mesh, self._step, self._mean, self._rng, self._every = mesh, step, mean, rng, check_every
        self._names, self._batch_axis = _parameters(step), batch_axis
        self._batch = frozenset(self._argument(each) if isinstance(each, int) else each for each in batch)
        donated = 0 if donate else ()
        self._jitted = jax.jit(self._on_mesh, donate_argnums=donated, compiler_options=compiler_options)
        self._calls = 0
        self._axes: tuple[str, ...] = ()
        self._returned: set[int] = set()  # ids of the arrays that the last call returned

    @on_own_mesh
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step, with the arguments of the wrapped step; objects of Flax NNX are changed in place."""
        given = self._given(args, kwargs)
        state, batch = self._parted(given)
        out = self._take(state, batch)
        for name, new in out.changed.items():
            objects.update(given[name], new)
        return objects.split_states(out.returned)

    @on_own_mesh
    def place(self, state: Any) -> Any:
        """Gives a state that is fresh from `tx.init` a row for each worker, and places it on the mesh.

        A call of the step does this itself. Call it for the carry of a `jax.lax.scan`, and for the target that a
        checkpoint is restored into: both must have their rows from the start.
        """
        self._axes, workers = self._workers(state)
        return self._placed(_Packed.of(_spread(state, workers)), _specs).tree()

    @on_own_mesh
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the step for arrays or shapes, as `jax.jit(...).trace` does."""
        state, batch = self._parted(self._given(args, kwargs))
        return self._jitted.trace(_Packed.of(state, objects.sharing(state)), _Packed.of(batch))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step for arrays or shapes, as `jax.jit(...).lower` does."""
        return self.trace(*args, **kwargs).lower()

    def _take(self, state: dict[str, Any], batch: dict[str, Any]) -> "_Out":
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, batch))):
            if self._every is not None:
                raise ValueError(
                    f"check_every must be None inside jax.jit, which cannot report; got {self._every}. Call the step "
                    "as it is: it is compiled."
                )
            return self._on_mesh(_Packed.of(state, objects.sharing(state)), _Packed.of(batch)).tree()
        packed = _Packed.of(state, objects.sharing(state))
        if not all(id(leaf) in self._returned for leaf in packed.arrays):  # else it is placed already
            self._axes, workers = self._workers(state)
            if not self._calls:
                check_rows(state, workers)
            packed = self._placed(_Packed.of(_spread(state, workers), packed.sharing), _specs)
        self._check_batch(batch, math.prod(self.mesh.shape[name] for name in self._axes))
        rows = self._placed(_Packed.of(batch), partial(self._row_specs, self._axes))
        out = self._jitted(packed, rows)
        self._returned = {id(leaf) for leaf in out.arrays}
        self._calls += 1
        returned = out.tree()
        if self._every is not None and self._calls % self._every == 0:
            self._check(returned)
        return returned

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments by name."""
        given = {self._argument(place): arg for place, arg in enumerate(args)} | kwargs
        if not self._batch <= given.keys():
            raise ValueError(
                f"batch must name arguments of the call; got {sorted(self._batch)} for {sorted(given)}. Pass the "
                "position, or the name, of an argument."
            )
        return given

    def _parted(self, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the arguments that are state, and those that are batches, by name."""
        state = {name: arg for name, arg in given.items() if name not in self._batch}
        return objects.merge_states(state, objects.graph_in(state)), {name: given[name] for name in sorted(self._batch)}

    def _argument(self, place: int) -> str:
        """Returns the name of a positional argument."""
        return self._names[place] if place < len(self._names) else f"args[{place}]"

    def _workers(self, state: Any) -> tuple[tuple[str, ...], int]:
        """Returns the axes of workers and their number.

        Raises:
          ValueError: without an exchange in the state, or with one that the step cannot run.
        """
        states = list(exchange_states(state))
        if not states:
            raise ValueError(
                "A data-parallel step must get the state of an exchange in an argument that is not a batch; got none. "
                "Put jaxcomm.plump_dp() (dense) or a compressor first in jaxcomm.chain(...), and pass the state of "
                "tx.init as it is: restore a checkpoint into it as the target, and pass the graph of nnx.split as an "
                "argument too."
            )
        wrappers = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.MultiStepsState))
        if any(isinstance(node, optax.MultiStepsState) and next(exchange_states(node), None) for node in wrappers):
            raise ValueError(
                f"An exchange must not be inside optax.MultiSteps, whose gradients are each worker's own; got "
                f"{states[0].method.name} there. Write jaxcomm.chain(exchange, optimizer, accumulate=G) in its place."
            )
        for found in states:
            method = found.method
            if method.period is not None or lets_bypass(found):
                what = "whose workers train on their own" if method.period is not None else "that gradients bypass"
                raise ValueError(
                    f"The exchange of a foreign step must average all gradients; got {method.name}, {what}. Use "
                    "jaxcomm.make_train_step, or pass others= beside where=."
                )
        axes = states[0].method.axes
        check_axis(self.mesh, axes)
        return axes, math.prod(self.mesh.shape[name] for name in axes)

    def _check_batch(self, batch: dict[str, Any], workers: int) -> None:
        axes = self._axes_in(batch)
        check_batch(batch, workers, batch_axis=axes)
        check_global(batch, axes)

    def _row_specs(self, axes: tuple[str, ...], batch: dict[str, Any]) -> list[P]:
        """Returns the PartitionSpec of every leaf of a batch."""
        rows = row_axes(batch, self._axes_in(batch))
        return [P() if axis is None else P(*[None] * axis, axes) for axis in rows]

    def _axes_in(self, batch: dict[str, Any]) -> Any:
        """Returns `batch_axis` for the batches by name; given for the one argument, it may leave out the name."""
        axis = self._batch_axis
        is_whole = axis is None or isinstance(axis, int) or (isinstance(axis, dict) and axis.keys() == batch.keys())
        return axis if is_whole or len(batch) > 1 else dict.fromkeys(batch, axis)

    def _placed(self, packed: _Packed, specs: Callable[[Any], list[P]]) -> _Packed:
        shardings = [NamedSharding(self.mesh, spec) for spec in packed.pick(specs(packed.tree()))]
        return packed.replace(jax.device_put(packed.arrays, shardings))

    @on_own_mesh
    def _on_mesh(self, state: _Packed, batch: _Packed) -> _Packed:
        """The function that is compiled."""
        axes, workers = self._workers(state.tree())
        self._check_batch(batch.tree(), workers)
        whole = _spread(state.tree(), workers)
        state = _Packed.of(whole, state.sharing)
        specs = state.pick(_specs(whole)), batch.pick(self._row_specs(axes, batch.tree()))
        graph = objects.graph_in(whole)
        names = state.pick(objects.names(whole))
        about: list[_Leaf] = []  # the outputs; noted while tracing, as some trees can only be built from arrays

        @jax.jit  # traced once, for the check and for the step
        def own_step(own_state: list[Any], own_batch: list[Any]) -> _Packed:
            own = own_state
            if self._rng is not None:
                own = own_keys(self._rng, names, own_state, jax.lax.axis_index(axes))
            changed = objects.shared(state.tree(own), state.sharing)
            given = objects.split_states(changed) | batch.tree(own_batch)
            args: list[Any] = []
            while (name := self._argument(len(args))) in given:
                args.append(given.pop(name))
            returned = objects.merge_states(self._step(*args, **given), graph)
            out = _Out(returned, {name: arg for name, arg in changed.items() if objects.is_changed(arg)})
            packed = _Packed.of(out)
            about[:] = map(_Leaf, *map(packed.pick, (out.names(), _specs(out), out.origins(whole))))
            if self._rng is None:
                return packed
            pairs = {
                name: (key, mine) for name, key, mine in zip(names, own_state, own, strict=True) if mine is not key
            }
            arrays = shared_keys(pairs, [leaf.origin for leaf in about], packed.arrays)
            return packed.replace(arrays)

        def on_workers(function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
            # check_vma is off: with it, jax.grad of replicated parameters would insert a dense all-reduce. `_averaged`
            # checks what it would have proven.
            return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

        arrays = state.arrays, batch.arrays
        if AxisType.Explicit in self.mesh.axis_types:  # the arrays' types may have other shardings
            arrays = jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(self.mesh, spec)), arrays, specs)
        traced, out = jax.make_jaxpr(on_workers(own_step, P()), return_shape=True)(*arrays)
        varying = _varying_outputs(
            traced.jaxpr, [frozenset(spec_axes(spec)) for spec in (*specs[0], *specs[1])], frozenset(axes)
        )
        is_averaged = self._averaged(about, out.arrays, varying)
        out_specs = [leaf.spec for leaf in about]

        def averaged_step(own_state: list[Any], own_batch: list[Any]) -> list[Any]:
            arrays = own_step(own_state, own_batch).arrays
            local = [leaf for leaf, is_one in zip(arrays, is_averaged, strict=True) if is_one]
            means = iter(dense_mean(local, axes)[0])
            return [next(means) if is_one else leaf for leaf, is_one in zip(arrays, is_averaged, strict=True)]

        return out.replace(on_workers(averaged_step, out_specs)(*arrays))

    def _averaged(self, about: list["_Leaf"], arrays: list[Any], varying: list[Axes]) -> list[bool]:
        """Returns whether each output is averaged; refuses outputs that must not differ.

        Raises:
          ValueError: naming the outputs that differ between workers and cannot be averaged.
        """
        refused, is_averaged = [], []
        for leaf, array, axes in zip(about, arrays, varying, strict=True):
            is_named = self._mean is not None and re.search(self._mean, leaf.name) is not None
            may_be = is_named if leaf.origin else array.shape == ()
            differs = bool(axes) and leaf.spec == P()
            is_averaged.append(differs and may_be and jnp.issubdtype(array.dtype, jnp.floating))
            if differs and not is_averaged[-1]:
                refused.append(f"{leaf.name!r} {array.dtype}{list(array.shape)}{' (state)' if leaf.origin else ''}")
        if refused:
            raise ValueError(
                "What a step returns must be the same on all workers, or a scalar of floats, which is averaged; got "
                f"{', '.join(refused[:8])}{' and others' if refused[8:] else ''}, computed from each worker's own rows "
                "or gradients and not exchanged. Pass mean='batch_stats' for running statistics (a regular expression "
                "of paths); decide by jaxcomm.exchange_metrics(opt_state).skipped, not by the local gradients; return "
                "the mean of a metric."
            )
        return is_averaged

    def _check(self, out: "_Out") -> None:
        """Compares replicated arrays across the devices, and checks that every row is its worker's own."""
        check_rows(out, math.prod(self.mesh.shape.values()))
        packed = _Packed.of(out)
        about = zip(packed.pick(out.names()), packed.pick(_specs(out)), packed.arrays, strict=True)
        named = {name: array for name, spec, array in about if spec == P()}
        if found := differing_replicas(self.mesh, named):
            names = [f"{name} (on device {', '.join(map(str, places))})" for name, places in found.items()]
            raise ValueError(
                f"What is replicated must be the same on all workers; got other numbers at {', '.join(names[:8])}"
                f"{' and others' if names[8:] else ''} after {self._calls} steps. Start all processes with the same "
                "parameters and seeds, and look for callbacks and kernels whose result is not determined."
            )


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh,
    *,
    batch: int | str | Sequence[int | str] = 1,
    batch_axis: Any = 0,
    mean: str | None = None,
    rng: str | None = None,
    check_every: int | None = None,
    donate: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> DataParallel:
    """Runs a train step written for one device on the workers of a mesh.

        tx = jc.chain(jc.dct_dp(0.99), optax.adamw(3e-4))
        step = jc.data_parallel(train_step, mesh)  # train_step(state, batch), as it was under jax.jit
        state, metrics = step(state, batch)

    The step may use Flax (`TrainState.apply_gradients`), Equinox, Haiku or plain JAX; it is compiled here, and may be
    under `jax.jit` already. On each worker it gets that worker's rows of the batch. Its `jax.grad` gives the worker's
    own gradient, which the exchange in its optimizer averages. All other arguments are placed by type: `PerWorker` rows
    over the workers (a state fresh from `tx.init` gets a row for each), the rest replicated. Scalar outputs that differ
    between workers, such as a loss, are averaged.

    Values that a step computes from its gradients before the exchange (a norm, whether they are finite) are those of
    one worker. At trace time, every output is traced back to the inputs. State that would differ between workers is
    refused by name, and so is any collective over the workers outside the exchange, such as a `pmean` left in the step.

    Objects of Flax NNX (a model, an `nnx.Optimizer`, metrics) are changed in place, as by `nnx.jit`; pass a state of
    `nnx.split` together with its graph. On the wire: the bytes of `tx`, and one all-reduce of 4 bytes for each number
    that is averaged.

    Args:
      step: a function of the optimizer's state and a batch, among other arguments, that returns new state and metrics
        in any order. Arguments may be any pytrees; leaves that are not arrays, such as a model's functions, are static.
      mesh: a mesh whose only axes are those of workers.
      batch: the arguments that are batches: positions or names. All their arrays have the same number of rows, a
        multiple of K. Scalars in them, including a key of `jax.random.key`, are replicated.
      batch_axis: the axis of the rows; or a tree of axes, a prefix of the batch, None for what is replicated; see
        `make_train_step`. Of several batches, a tree by the names of the arguments.
      mean: a regular expression of paths in the outputs, for state that each worker computes from its own rows and that
        is to be averaged: "batch_stats" for the running statistics of Flax, "BatchStat|Metric" for the running
        statistics and metrics of NNX.
      rng: a regular expression of paths in the arguments that are not batches, for random keys of which each worker
        gets its own: "key" for an argument of that name, "RngKey" for the keys of NNX. A key that is returned in the
        state is replicated. Without `rng`, all workers draw the same numbers, each for its own rows.
      check_every: calls from one comparison of all replicated state across the devices to the next; None for never. It
        waits for the step, and each device receives 4 bytes an array from every other. It finds what no trace can
        show: processes that started with other parameters, kernels that are not deterministic.
      donate: reuse the buffers of the arguments that are not batches. The old state cannot be read afterwards.
      compiler_options: see `make_train_step`. JAX refuses them where the step is part of another `jax.jit`.

    Returns:
      A callable like `step`, for global arrays; `jaxcomm.verify` takes it as its step.

    Raises:
      ValueError: at trace time, if there is no exchange in the state; for a local method, or gradients that bypass the
        exchange; for a batch that does not divide, or that has local arrays where there are several processes; for
        outputs that differ between workers and cannot be averaged; for collectives outside the exchange. At the first
        call and at every check, for rows that are not those of their workers; at a check, for replicated state that
        differs.
    """
    if check_every is not None:
        check_count("check_every", check_every, 1, "None never checks")
    chosen = [batch] if isinstance(batch, int | str) else batch
    return DataParallel(step, mesh, chosen, batch_axis, mean, rng, check_every, donate, compiler_options)


def _parameters(step: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's positional parameters, as far as they are known."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _traced(tree: Any) -> list[bool]:
    """Returns, for every leaf of a tree, whether it is traced. A Python number in an Equinox module is static."""
    equinox = sys.modules.get("equinox")

    def is_module(node: Any) -> bool:
        return equinox is not None and isinstance(node, equinox.Module)

    found: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=is_module):
        found += [hasattr(leaf, "dtype") for leaf in jax.tree.leaves(node)] if is_module(node) else [_is_array(node)]
    return found


def _specs(tree: Any) -> list[P]:
    """Returns the PartitionSpec of every leaf: `state_specs` as a list, since not every tree can hold them."""
    found: list[P] = []
    for node in jax.tree.leaves(tree, is_leaf=is_per_worker):
        spec = P(node.axes[0] if len(node.axes) == 1 else node.axes) if is_per_worker(node) else P()
        found += [spec] * len(jax.tree.leaves(node))
    return found


def _spread(state: Any, workers: int) -> Any:
    """Gives a state that is fresh from `tx.init` a row for each worker."""

    def rows(leaf: Any) -> Any:
        if leaf.shape[0] == workers or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if leaf.shape[0] != 1:
            raise ValueError(
                f"A state must have a row for each worker; got {leaf.shape[0]} rows for {workers} workers. Use "
                "jaxcomm.resize_workers to continue with another number of them."
            )
        return jnp.repeat(jnp.asarray(leaf), workers, axis=0)

    return jax.tree.map(
        lambda node: jax.tree.map(rows, node) if is_per_worker(node) else node, state, is_leaf=is_per_worker
    )


def _varying_outputs(jaxpr: Any, inputs: list[Axes], axes: Axes) -> list[Axes]:
    """Returns the axes along which the outputs of a traced `shard_map` may differ.

    Raises:
      ValueError: for collectives outside the exchange.
    """
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    body, known = eqn.params["jaxpr"], dict(zip(jaxpr.invars, inputs, strict=True))
    if found := collectives_outside(body, SCOPE, axes):
        first = found[0]
        shapes = ", ".join(str(v.aval) for v in first.invars)
        size = sum(count_bytes(v.aval.shape, v.aval.dtype.itemsize) for eqn in found for v in eqn.invars)
        raise ValueError(
            f"A step must leave all communication between workers to its exchange; got {len(found)} collectives of its "
            f"own over {size:,} bytes, the first a {first.primitive.name} of {shapes}. Delete lax.pmean and lax.psum: "
            "gradients are averaged by the exchange, scalars by data_parallel, running statistics by mean=."
        )
    return varying_axes(body, [known.get(v, frozenset()) for v in eqn.invars])
