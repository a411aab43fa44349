"""A train step that was written for one device, run by the workers of a mesh."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.checks import check_count
from jaxcomm.collectives import dense_mean
from jaxcomm.exchange import SCOPE, exchange_states, leaf_name, lets_bypass
from jaxcomm.parallel.replicas import differing_replicas
from jaxcomm.parallel.replication import Axes, collectives_outside, varying_axes
from jaxcomm.parallel.sharding import spec_axes
from jaxcomm.parallel.state import check_axis, check_batch, state_specs
from jaxcomm.states import check_rows
from jaxcomm.traffic import count_bytes
from jaxcomm.types import is_per_worker


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Packed:
    """A tree as the list of its arrays. Its other leaves, such as the functions in a model, are static."""

    arrays: list[Any]
    treedef: Any = field(metadata={"static": True})
    others: tuple[Any, ...] = field(metadata={"static": True})  # None in the place of an array

    @classmethod
    def of(cls, tree: Any) -> "_Packed":
        leaves, treedef = jax.tree.flatten(tree)
        others = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
        return cls([leaf for leaf in leaves if _is_array(leaf)], treedef, others)

    def tree(self, arrays: Iterable[Any] | None = None) -> Any:
        """Returns the tree, with other arrays if they are given."""
        each = iter(self.arrays if arrays is None else arrays)
        return self.treedef.unflatten([next(each) if other is None else other for other in self.others])

    def pick(self, tree: Any) -> list[Any]:
        """Returns the leaves of a tree of the same structure that are in the places of arrays."""
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, P))
        return [leaf for leaf, other in zip(leaves, self.others, strict=True) if other is None]


class DataParallel:
    """A step that `data_parallel` made: call it, or give it to `jaxcomm.verify`."""

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        batch: frozenset[str],
        mean: str | None,
        check_every: int | None,
        donate: bool,
    ):
        """See `data_parallel`."""
        functools.update_wrapper(self, step)
        self.mesh, self._step, self._batch, self._mean, self._every = mesh, step, batch, mean, check_every
        self._jitted = jax.jit(self._on_mesh, donate_argnums=0 if donate else ())
        self._calls = 0
        self._axes: tuple[str, ...] = ()
        self._returned: set[int] = set()  # ids of the arrays that the last call has returned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step, with the arguments of the step that was given."""
        state, batch = self._arguments(args, kwargs)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, batch))):
            if self._every is not None:
                raise ValueError(
                    f"check_every must be None inside jax.jit, which cannot report; got {self._every}. Call the step "
                    "as it is: it is compiled."
                )
            return self._on_mesh(_Packed.of(state), _Packed.of(batch)).tree()
        packed = _Packed.of(state)
        if not all(id(leaf) in self._returned for leaf in packed.arrays):  # else it is where it belongs
            self._axes, workers = self._workers(state)
            if not self._calls:
                check_rows(state, workers)
            packed = _Packed.of(_spread(state, workers))
            packed = self._placed(packed, packed.pick(state_specs(packed.tree())))
        check_batch(_with_rows(batch), math.prod(self.mesh.shape[name] for name in self._axes))
        rows = _Packed.of(batch)
        _check_global(rows.arrays)
        rows = self._placed(rows, [_batch_spec(leaf, self._axes) for leaf in rows.arrays])
        out = self._jitted(packed, rows)
        self._returned = {id(leaf) for leaf in out.arrays}
        self._calls += 1
        returned = out.tree()
        if self._every is not None and self._calls % self._every == 0:
            self._check(returned)
        return returned

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the step for arrays or shapes, as `jax.jit(...).trace` does."""
        state, batch = self._arguments(args, kwargs)
        return self._jitted.trace(_Packed.of(state), _Packed.of(batch))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step for arrays or shapes, as `jax.jit(...).lower` does."""
        return self.trace(*args, **kwargs).lower()

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the arguments that are state, and those that are batches, by their names."""
        given = {_argument(place): arg for place, arg in enumerate(args)} | kwargs
        if not self._batch <= given.keys():
            raise ValueError(
                f"batch must name arguments of the call; got {sorted(self._batch)} for {sorted(given)}. Pass the "
                "position, or the name of a keyword argument."
            )
        state = {name: arg for name, arg in given.items() if name not in self._batch}
        return state, {name: given[name] for name in self._batch}

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
                "tx.init as it is: nnx.split and flax.serialization.to_state_dict take its types away."
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

    def _placed(self, packed: _Packed, specs: list[P]) -> _Packed:
        shardings = [NamedSharding(self.mesh, spec) for spec in specs]
        return _Packed(jax.device_put(packed.arrays, shardings), packed.treedef, packed.others)

    def _on_mesh(self, state: _Packed, batch: _Packed) -> _Packed:
        """What is compiled."""
        axes, workers = self._workers(state.tree())
        check_batch(_with_rows(batch.tree()), workers)
        state = _Packed.of(_spread(state.tree(), workers))
        specs = (
            state.pick(state_specs(state.tree())),
            [_batch_spec(leaf, axes) for leaf in batch.arrays],
        )

        @jax.jit  # traced once, for the check and for the step
        def own_step(own_state: list[Any], own_batch: list[Any]) -> _Packed:
            given = state.tree(own_state) | batch.tree(own_batch)
            args = [given.pop(_argument(place)) for place in range(len(given)) if _argument(place) in given]
            return _Packed.of(self._step(*args, **given))

        def on_workers(function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
            # JAX would make jax.grad of replicated parameters a dense all-reduce if it tracked what differs. What it
            # would have proven is checked by `_outputs`.
            return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

        arrays = state.arrays, batch.arrays
        traced, out = jax.make_jaxpr(on_workers(own_step, P()), return_shape=True)(*arrays)
        varying = _varying_outputs(
            traced.jaxpr, [frozenset(spec_axes(spec)) for spec in (*specs[0], *specs[1])], frozenset(axes)
        )
        out_specs, is_averaged = self._outputs(state.tree(), out, varying)

        def averaged_step(own_state: list[Any], own_batch: list[Any]) -> list[Any]:
            arrays = own_step(own_state, own_batch).arrays
            local = [leaf for leaf, is_one in zip(arrays, is_averaged, strict=True) if is_one]
            means = iter(dense_mean(local, axes)[0])
            return [next(means) if is_one else leaf for leaf, is_one in zip(arrays, is_averaged, strict=True)]

        return _Packed(on_workers(averaged_step, out_specs)(*arrays), out.treedef, out.others)

    def _outputs(self, state: dict[str, Any], out: _Packed, varying: list[Axes]) -> tuple[list[P], list[bool]]:
        """Returns the PartitionSpec of every output, and whether it is averaged; refuses what must not differ.

        Raises:
          ValueError: naming the outputs that differ between workers and cannot be averaged.
        """
        tree, refused = out.tree(), []
        specs = out.pick(state_specs(tree))
        is_state = out.pick(_marked(tree, state))
        paths = out.pick(jax.tree_util.tree_map_with_path(lambda path, _: leaf_name(path), tree))
        is_averaged = []
        for path, leaf, spec, is_kept, axes in zip(paths, out.arrays, specs, is_state, varying, strict=True):
            may_be = re.search(self._mean, path) if is_kept and self._mean else not is_kept and leaf.shape == ()
            differs = bool(axes) and spec == P()
            is_averaged.append(differs and bool(may_be) and jnp.issubdtype(leaf.dtype, jnp.floating))
            if differs and not is_averaged[-1]:
                refused.append(f"{path!r} {leaf.dtype}{list(leaf.shape)}{' (state)' if is_kept else ''}")
        if refused:
            raise ValueError(
                "What a step returns must be the same on all workers, or a scalar of floats, which is averaged; got "
                f"{', '.join(refused[:8])}{' and others' if refused[8:] else ''}, computed from each worker's own rows "
                "or gradients and not exchanged. Pass mean='batch_stats' for running statistics (a regular expression "
                "of paths); decide by jaxcomm.exchange_metrics(opt_state).skipped, not by the local gradients; return "
                "the mean of a metric."
            )
        return specs, is_averaged

    def _check(self, out: Any) -> None:
        """Compares what is replicated across the workers, and whose rows are where."""
        check_rows(out, math.prod(self.mesh.shape.values()))
        nodes = jax.tree_util.tree_leaves_with_path(out, is_leaf=is_per_worker)
        named = {leaf_name(path): leaf for path, leaf in nodes if not is_per_worker(leaf) and _is_array(leaf)}
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
    mean: str | None = None,
    check_every: int | None = None,
    donate: bool = False,
) -> DataParallel:
    """Runs a train step that was written for one device on the workers of a mesh.

        tx = jc.chain(jc.dct_dp(0.99), optax.adamw(3e-4))
        step = jc.data_parallel(train_step, mesh)  # train_step(state, batch), as it was under jax.jit
        state, metrics = step(state, batch)

    The step may be of Flax (`TrainState.apply_gradients`), Equinox, Haiku or plain JAX; it is compiled here, and may be
    under `jax.jit` already. On each worker it gets the worker's own rows of the batch; its `jax.grad` gives the
    worker's own gradient, which the exchange in its optimizer averages. Everything else is placed by its type:
    `PerWorker` rows over the workers (a state fresh from `tx.init` gets a row for each), the rest replicated. Scalars
    that come out and differ between workers, a loss, are averaged.

    What a step computes from its gradients before the exchange (a norm, whether they are finite) is of one worker's.
    At trace time, every output is followed back: state that would differ between workers is refused by name, as is any
    collective over the workers beside the exchange, such as a `pmean` that was left in the step.

    On the wire: what `tx` costs, and one all-reduce of 4 bytes for each number that is averaged. A step that draws from
    a key of its own draws the same on all workers, each for its own rows; fold `jax.lax.axis_index("data")` into the
    key to draw differently.

    Args:
      step: a function of the optimizer's state and a batch, among other arguments, that returns new state and metrics
        in any order. Arguments may be any pytrees; leaves that are no arrays, such as a model's functions, are static.
      mesh: a mesh of workers alone.
      batch: which arguments are batches: positions, or names of keyword arguments. Their arrays have the global batch
        as first dimension, a multiple of K; scalars in them are replicated.
      mean: a regular expression of paths in what the step returns, for state that each worker makes from its own rows
        and that is to be averaged: the running statistics of batch normalisation.
      check_every: calls from one comparison of all replicated state across the workers (a digest of every array, 8
        bytes) to the next; None for never. It waits for the step. For what no trace can show: processes that began
        with other parameters, kernels that are not deterministic.
      donate: reuse the buffers of the arguments that are not batches. The old state cannot be read afterwards.

    Returns:
      A callable like `step`, for global arrays; `jaxcomm.verify` takes it as its step.

    Raises:
      ValueError: at trace time, without an exchange in the state; for a local method, or gradients that bypass the
        exchange; for a batch that does not divide, or of local arrays where there are several processes; for what comes
        out and differs between workers; for collectives beside the exchange. At the first call and at every check, for
        rows that are not those of their workers; at a check, for replicated state that differs.
    """
    if check_every is not None:
        check_count("check_every", check_every, 1, "None for never")
    chosen = [batch] if isinstance(batch, int | str) else batch
    names = frozenset(_argument(each) if isinstance(each, int) else each for each in chosen)
    return DataParallel(step, mesh, names, mean, check_every, donate)


def _argument(place: int) -> str:
    return f"args[{place}]"


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _batch_spec(leaf: Any, axes: tuple[str, ...]) -> P:
    return P(axes) if jnp.ndim(leaf) else P()


def _check_global(rows: list[Any]) -> None:
    """Refuses rows of one process where there are several: JAX would compare them over the network in every call."""
    if jax.process_count() == 1:
        return
    if any(jnp.ndim(leaf) and (not isinstance(leaf, jax.Array) or leaf.is_fully_addressable) for leaf in rows):
        raise ValueError(
            f"A batch must be of global arrays where there are several processes; got arrays of this one of "
            f"{jax.process_count()}. Make it by jax.make_array_from_process_local_data(NamedSharding(mesh, "
            'P("data")), own_rows).'
        )


def _with_rows(batch: Any) -> Any:
    """Returns the arrays of a batch that have rows."""
    return jax.tree.map(lambda leaf: leaf if _is_array(leaf) and jnp.ndim(leaf) else None, batch)


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
    """Returns the axes along which the outputs of a traced `shard_map` differ; refuses collectives beside the exchange.

    Raises:
      ValueError: naming them.
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


def _marked(tree: Any, state: dict[str, Any]) -> Any:
    """Returns a tree of bools: whether a leaf of what a step returns is state, of an argument's structure."""
    kinds = {jax.tree.structure(arg) for arg in state.values() if not _is_array(arg)}
    bare = {(jnp.shape(arg), jnp.result_type(arg)) for arg in state.values() if _is_array(arg) and jnp.ndim(arg)}

    def is_state(node: Any) -> bool:
        if _is_array(node):
            return (node.shape, node.dtype) in bare
        return jax.tree.structure(node) in kinds

    return jax.tree.map(lambda node: jax.tree.map(lambda _: is_state(node), node), tree, is_leaf=is_state)
