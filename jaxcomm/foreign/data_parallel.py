"""A train step that was written for one device, run by the workers of a mesh."""

import functools
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.jaxpr import jaxpr_program
from jaxcomm.chain import FROZEN
from jaxcomm.checks import check_count
from jaxcomm.collectives import dense_mean
from jaxcomm.collectives.axis import on_step_mesh
from jaxcomm.exchange import SCOPE, exchange_states, is_exchange_state, lets_bypass
from jaxcomm.foreign import nnx
from jaxcomm.foreign.keys import is_key, shared_keys, worker_keys
from jaxcomm.order import check_frozen, check_states
from jaxcomm.state import check_rows
from jaxcomm.steps.batch import check_batch, check_global, row_axes
from jaxcomm.steps.mesh import check_axis, place
from jaxcomm.steps.replicas import differing_replicas
from jaxcomm.steps.replication import LINEAR, OTHER, Axes, by_scope, naming_axes, varying_axes
from jaxcomm.steps.scaling import StepScaling
from jaxcomm.steps.shard_map import shard_map
from jaxcomm.steps.sharding import spec_axes
from jaxcomm.traffic import Program, count_bytes
from jaxcomm.types import AccumulatedState, DelayedState, is_per_worker


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Out:
    """The output of a step: what it returned, and those of its arguments that are objects, as it changed them."""

    returned: Any
    changed: dict[str, Any]

    def names(self) -> list[str]:
        """Returns the path of every leaf."""
        return nnx.names(self.returned) + nnx.names(self.changed)

    def origins(self, args: dict[str, Any]) -> list[str]:
        """Returns, for every leaf that continues an argument, its path in the arguments, and "" for the others.

        An output continues an argument of its structure and shapes; several of one kind, in their order. A bare scalar
        continues none.

        Args:
          args: a worker's arguments by name.
        """
        kinds: dict[Any, list[str]] = {}
        for name, arg in args.items():
            kinds.setdefault(_kind(arg), []).append(name)
        kinds.pop(None, None)
        origins: list[str] = []
        for node in jax.tree.leaves(self.returned, is_leaf=lambda node: _kind(node) in kinds):
            names = kinds.get(_kind(node))
            if names is None:
                origins += [""] * len(jax.tree.leaves(node))
                continue
            origins += nnx.names({names[0]: node})
            kinds[_kind(node)] = names[1:] or names
        return origins + nnx.names(self.changed)


def _kind(node: Any) -> Any:
    """Returns the structure and the shapes of a tree, None for a bare scalar."""
    if not _is_array(node):
        shapes = tuple(jnp.shape(leaf) if _is_array(leaf) else None for leaf in jax.tree.leaves(node))
        return jax.tree.structure(node), shapes
    return (jnp.shape(node), jnp.result_type(node)) if jnp.ndim(node) or is_key(node) else None


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """An argument that is static, though it could be traced."""

    value: Any
    type: type  # True is equal to 1


class _Leaf(NamedTuple):
    """An output array of a step: its path, its PartitionSpec, its origin (see `_Out.origins`), and what is said of it.

    `said` is "mean", "sum" or "max", and "" if nothing is.
    """

    name: str
    spec: P
    origin: str
    said: str

    def is_loss(self, axes: Axes, scalars: set[str]) -> bool:
        """Returns whether it only has the place of a scalar in one of the arguments of scalars alone.

        Then it does not follow from that scalar.
        """
        is_alone = self.origin.split("/")[0] in scalars and self.name != self.origin
        return is_alone and _follows(self.origin) not in axes


def _follows(name: str) -> str:
    """Returns the mark, in the walk, of what follows from a scalar argument."""
    return f"(from {name})"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Packed:
    """A tree as the list of its arrays. Its other leaves, such as the functions in a model, are static."""

    arrays: list[Any]
    treedef: Any = field(metadata={"static": True})
    others: tuple[Any, ...] = field(metadata={"static": True})  # None in place of an array
    sharing: Any = field(default=None, metadata={"static": True})  # see `nnx.sharing`

    @classmethod
    def of(cls, tree: Any, sharing: Any = None) -> "_Packed":
        leaves, treedef = jax.tree.flatten(tree)
        statics = tuple(None if is_traced else leaf for leaf, is_traced in zip(leaves, _traced(tree), strict=True))
        arrays = [leaf for leaf, static in zip(leaves, statics, strict=True) if static is None]
        return cls(arrays, treedef, statics, sharing)

    def replace(self, arrays: list[Any]) -> "_Packed":
        """Returns this tree with other arrays, still packed."""
        return replace(self, arrays=arrays)

    def tree(self, arrays: Iterable[Any] | None = None) -> Any:
        """Returns the tree, with other arrays if they are given."""
        dynamic = iter(self.arrays if arrays is None else arrays)
        return self.treedef.unflatten([next(dynamic) if static is None else static for static in self.others])

    def pick(self, of_leaves: list[Any]) -> list[Any]:
        """Returns, of a list with an item for each leaf, the items of the arrays."""
        return [leaf for leaf, static in zip(of_leaves, self.others, strict=True) if static is None]


class DataParallel:
    """A step made by `data_parallel`: call it, or pass it to `jaxcomm.verify`."""

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        batch: Sequence[int | str],
        batch_axis: Any,
        patterns: dict[str, str | None],
        static: Sequence[int | str],
        rng: str | None,
        check_every: int | None,
        donate: bool,
        compiler_options: dict[str, Any] | None,
    ):
        """See `data_parallel`."""
        functools.update_wrapper(self, step)
        self.mesh, self._step, self._said, self._rng, self._every = mesh, step, patterns, rng, check_every
        self._names, self._batch_axis, self._donates = _parameters(step), batch_axis, donate
        self._batch, self._static = (
            frozenset(
                self._argument(int(selector)) if isinstance(selector, int | np.integer) else selector
                for selector in selectors
            )
            for selectors in (batch, static)
        )
        donated = 0 if donate else ()
        self._jitted = jax.jit(self._on_mesh, donate_argnums=donated, compiler_options=compiler_options)
        self._calls = 0
        self._axes: tuple[str, ...] = ()
        self._returned: set[int] = set()  # ids of the arrays that the last call returned

    @on_step_mesh
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step, with the arguments of the wrapped step; objects of Flax NNX are changed in place."""
        named_args = self._given(args, kwargs)
        state, batch = self._parted(named_args)
        out = self._take(state, batch)
        for name, new in out.changed.items():
            nnx.update(named_args[name], new)
        return nnx.split_states(out.returned)

    @on_step_mesh
    def place(self, state: Any) -> Any:
        """Gives a state that is fresh from `tx.init` a row for each worker, and places it on the mesh.

        A call of the step does this itself. Call it for the carry of a `jax.lax.scan`, and for the target that a
        checkpoint is restored into: both must have their rows from the start.
        """
        self._axes, workers = self._workers(state)
        return self._placed(_Packed.of(_spread(state, workers)), self._state_specs).tree()

    @on_step_mesh
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the step for arrays or shapes, as `jax.jit(...).trace` does."""
        state, batch = self._parted(self._given(args, kwargs))
        return self._jitted.trace(_Packed.of(state, nnx.sharing(state)), _Packed.of(batch))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step for arrays or shapes, as `jax.jit(...).lower` does."""
        return self.trace(*args, **kwargs).lower()

    def loss_program(self, *args: Any, **kwargs: Any) -> Program:
        """Returns the collectives that the step has beside its exchange, as those of its loss, for `verify`."""
        return jaxpr_program(self.trace(*args, **kwargs).jaxpr, outside=SCOPE)

    def _take(self, state: dict[str, Any], batch: dict[str, Any]) -> "_Out":
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, batch))):
            if self._every is not None:
                raise ValueError(
                    f"check_every must be None inside jax.jit, which cannot report; got {self._every}. Call the step "
                    "as it is: it is compiled."
                )
            return self._on_mesh(_Packed.of(state, nnx.sharing(state)), _Packed.of(batch)).tree()
        packed = _Packed.of(state, nnx.sharing(state))
        if not all(id(leaf) in self._returned for leaf in packed.arrays):  # else it is placed already
            self._axes, workers = self._workers(state)
            if not self._calls:
                check_rows(state, workers)
            packed = _Packed.of(_spread(state, workers), packed.sharing)
            if self._donates:
                packed = packed.replace(_copy_repeats(packed.arrays, batch, _buffers))
            packed = self._placed(packed, self._state_specs)
        elif self._donates:
            packed = packed.replace(_copy_repeats(packed.arrays, batch, id))
        self._check_batch(batch, math.prod(self.mesh.shape[name] for name in self._axes))
        rows = self._placed(_Packed.of(batch), partial(self._row_specs, self._axes))
        out = self._jitted(packed, rows)
        self._returned = {id(leaf) for leaf in out.arrays}
        self._calls += 1
        result = out.tree()
        if self._every is not None and self._calls % self._every == 0:
            self._check(result)
        return result

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments by name."""
        named_args = {self._argument(place): arg for place, arg in enumerate(args)} | kwargs
        if not self._batch <= named_args.keys():
            raise ValueError(
                f"batch must name arguments of the call; got {sorted(self._batch)} for {sorted(named_args)}. Pass the "
                "position, or the name, of an argument."
            )
        return named_args

    def _parted(self, named_args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the arguments that are state, and those that are batches, by name."""
        for name in self._batch:
            if next(exchange_states(named_args[name]), None) is not None:
                place = f"{self._names.index(name)}, " if name in self._names else ""
                candidates = [arg_name for arg_name in named_args if arg_name not in self._batch]
                raise ValueError(
                    f"batch must name the arguments that have rows; got argument {place}{name!r}, which holds an "
                    f"exchange's state. Pass batch= with the position or the name of the batch, as one of {candidates}."
                )
        state = {name: arg for name, arg in named_args.items() if name not in self._batch}
        for name in self._static & state.keys():
            try:
                hash(state[name])
            except TypeError:
                raise ValueError(
                    f"static must name arguments that can be hashed; got {name!r}, a {type(state[name]).__name__}. "
                    "Make it a frozen dataclass, or bind it by functools.partial."
                ) from None
            state[name] = _Static(state[name], type(state[name]))
        return nnx.merge_states(state, nnx.graph_in(state)), {name: named_args[name] for name in sorted(self._batch)}

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
        for exchange in states:
            method = exchange.method
            if method.period is not None or lets_bypass(exchange):
                cause = "whose workers train on their own" if method.period is not None else "that gradients bypass"
                raise ValueError(
                    f"The exchange of a foreign step must average all gradients; got {method.name}, {cause}. Use "
                    "jaxcomm.make_train_step, or pass others= beside where=."
                )
        axes = states[0].method.axes
        check_axis(self.mesh, axes)
        return axes, math.prod(self.mesh.shape[name] for name in axes)

    def _state_specs(self, state: Any) -> list[P]:
        """Returns the PartitionSpec of every leaf of the arguments that are not batches."""
        specs, rows = _specs(state), self._said["rows"]
        if rows is None:
            return specs
        workers = math.prod(self.mesh.shape[name] for name in self._axes)
        for i, (name, leaf) in enumerate(zip(nnx.names(state), jax.tree.leaves(state), strict=True)):
            if specs[i] == P() and _is_array(leaf) and jnp.ndim(leaf) and re.search(rows, name):
                specs[i] = P(self._axes)
                if jnp.shape(leaf)[0] % workers:
                    raise ValueError(
                        f"The rows of what rows= names must be a multiple of the number of workers; got "
                        f"{jnp.shape(leaf)[0]} rows at {name!r} for {workers} workers. Give it the rows of all "
                        "workers, in the order of the workers."
                    )
        return specs

    def _about(self, out: _Out, args: dict[str, Any], specs: dict[str, P]) -> list[list[Any]]:
        """Returns names, PartitionSpecs, origins, and what is said of them, of the leaves of an output."""
        names, origins, reductions = out.names(), out.origins(args), []
        out_specs = _specs(out)
        for reduction, pattern in self._said.items():
            places = [*names, *origins, *(specs if reduction == "rows" else ())]
            if pattern is not None and not any(re.search(pattern, place) for place in places if place):
                pairs = sorted(zip(origins, names, strict=True), key=lambda pair: bool(pair[0]))
                raise ValueError(
                    f"{reduction}= must be a regular expression that finds an output; got {pattern!r} for "
                    f"{[origin or name for origin, name in pairs[:12]]}{' and others' if pairs[12:] else ''}. Leave it "
                    "out, or take the path of an output, or of the argument that it continues."
                )
        for i, (name, origin) in enumerate(zip(names, origins, strict=True)):
            patterns = {reduction: pattern for reduction, pattern in self._said.items() if pattern is not None}
            hows = [
                reduction
                for reduction, regex in patterns.items()
                if re.search(regex, name) or re.search(regex, origin or name)
            ]
            if len(hows) > 1:
                raise ValueError(
                    f"One of mean, sum, max and rows must match an output; got {' and '.join(hows)} for {name!r}"
                    f"{f', which continues {origin!r}' if origin else ''}. Narrow the patterns, {patterns}."
                )
            if out_specs[i] == P() and (hows == ["rows"] or not hows):
                out_specs[i] = specs.get(origin, P(self._axes) if hows else P())
            reductions.append("" if hows == ["rows"] else "".join(hows))
        return [names, out_specs, origins, reductions]

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
        is_whole = (
            axis is None
            or isinstance(axis, int | np.integer)
            or (isinstance(axis, dict) and axis.keys() == batch.keys())
        )
        return axis if is_whole or len(batch) > 1 else dict.fromkeys(batch, axis)

    def _placed(self, packed: _Packed, specs: Callable[[Any], list[P]]) -> _Packed:
        shardings = [NamedSharding(self.mesh, spec) for spec in packed.pick(specs(packed.tree()))]
        return packed.replace(place(packed.arrays, shardings))

    @on_step_mesh
    def _on_mesh(self, state: _Packed, batch: _Packed) -> _Packed:
        """The function that is compiled."""
        self._axes, workers = axes, _ = self._workers(state.tree())
        for message in check_states(state.tree()):
            warnings.warn(message, stacklevel=2)
        self._check_batch(batch.tree(), workers)
        spread_state = _spread(state.tree(), workers)
        state = _Packed.of(spread_state, state.sharing)
        specs = state.pick(self._state_specs(spread_state)), batch.pick(self._row_specs(axes, batch.tree()))
        graph = nnx.graph_in(spread_state)
        names = state.pick(nnx.names(spread_state))
        row_names = [*names, *batch.pick(nnx.names(batch.tree()))]
        specs_of = {name: spec for name, spec in zip(row_names, [*specs[0], *specs[1]], strict=True) if spec != P()}
        about: list[_Leaf] = []  # the outputs; noted while tracing, as some trees can only be built from arrays

        @jax.jit  # traced once, for the check and for the step
        def own_step(own_state: list[Any], own_batch: list[Any]) -> _Packed:
            keyed = own_state
            if self._rng is not None:
                keyed = worker_keys(self._rng, names, own_state, jax.lax.axis_index(axes))
            rebuilt = nnx.shared(state.tree(keyed), state.sharing)
            named_args = nnx.split_states(rebuilt) | batch.tree(own_batch)
            named_args = {name: arg.value if isinstance(arg, _Static) else arg for name, arg in named_args.items()}
            args: list[Any] = []
            while (name := self._argument(len(args))) in named_args:
                args.append(named_args.pop(name))
            try:
                result = nnx.merge_states(self._step(*args, **named_args), graph)
            except (TypeError, ValueError) as error:
                if "Non-hashable static" not in str(error):
                    _note_rows(error, workers, batch, specs[1], zip(names, state.arrays, specs[0], strict=True))
                    raise
                raise ValueError(
                    "Static arguments of a step's own jax.jit must be named for data_parallel, too; got a traced one. "
                    "Pass static= with their names or positions, or bind them by functools.partial."
                ) from error
            out = _Out(result, {name: arg for name, arg in rebuilt.items() if nnx.is_changed(arg)})
            packed = _Packed.of(out)
            named_inputs = state.tree(own_state) | {
                name: arg
                for name, arg in batch.tree(own_batch).items()
                if not _is_array(arg) or self._is_rows(name)  # a bare array of such a shape may be anything
            }
            about[:] = map(_Leaf, *map(packed.pick, self._about(out, named_inputs, specs_of)))
            if self._rng is None:
                return packed
            pairs = {
                name: (key, mine) for name, key, mine in zip(names, own_state, keyed, strict=True) if mine is not key
            }
            arrays = shared_keys(pairs, [leaf.origin for leaf in about], packed.arrays)
            return packed.replace(arrays)

        # check_vma is off: with it, jax.grad of replicated parameters would insert a dense all-reduce. `_averaged`
        # checks what it would have proven.
        how = {"mesh": self.mesh, "in_specs": specs, "check_vma": False}

        arrays = state.arrays, batch.arrays
        if AxisType.Explicit in self.mesh.axis_types:  # the arrays' types may have other shardings
            arrays = jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(self.mesh, spec)), arrays, specs)
        with naming_axes(self.mesh):
            traced, out = jax.make_jaxpr(jax.shard_map(own_step, out_specs=P(), **how), return_shape=True)(*arrays)
        if not by_scope(traced.jaxpr, FROZEN, frozenset())[1]:
            for message in check_frozen(state.tree()):
                warnings.warn(message, stacklevel=2)
        inputs = [frozenset(spec_axes(spec)) for spec in (*specs[0], *specs[1])]
        scalars = {name for name, arg in state.tree().items() if _has_scalars_alone(arg)}
        for i, (name, is_exchange) in enumerate(zip(names, state.pick(_is_of_exchange(spread_state)), strict=True)):
            if is_exchange or name.split("/")[0] in scalars:
                inputs[i] |= {GIVEN if is_exchange else _follows(name)}
        varying = _varying_outputs(traced.jaxpr, inputs, frozenset(axes))
        is_own = [spec != P() for spec in state.pick(_specs(spread_state))]  # as many rows as there are workers
        has_rows = [spec != P() and not own for spec, own in zip(specs[0], is_own, strict=True)]
        has_rows += [spec != P() for spec in specs[1]]
        noted, scaling = list(about), StepScaling.of(own_step, traced, arrays, specs, has_rows, axes)
        about[:] = noted  # an only worker's outputs may be named otherwise
        counts = [number.is_count for number in scaling.outputs] or [False] * len(about)
        is_summed = [False] * len(names)
        if (pattern := self._said["sum"]) is not None:
            differs = {
                leaf.origin: is_count or not array_axes.isdisjoint(axes)
                for leaf, array_axes, is_count in zip(about, varying, counts, strict=True)
            }
            sums = {leaf.origin for leaf in about if leaf.said == "sum"}
            loose = {
                x.dtype for leaf, x in zip(about, out.arrays, strict=True) if leaf.said == "sum" and not leaf.origin
            }
            for i, (name, x, spec) in enumerate(zip(names, state.arrays, specs[0], strict=True)):
                is_bare = not jnp.ndim(x) and _is_array(spread_state.get(name)) and jnp.result_type(x) in loose
                is_named = name in sums or is_bare or re.search(pattern, name) is not None
                is_summed[i] = spec == P() and is_named and differs.get(name, True)  # a counter needs no sum
                inputs[i] |= {LINEAR} if is_summed[i] else set()
            varying = _varying_outputs(traced.jaxpr, inputs, frozenset(axes))
        hows = self._hows(about, out.arrays, varying, scalars, counts)
        pairs = zip(about, hows, strict=True)
        scaling.check([leaf.name if how == "mean" and not leaf.said else "" for leaf, how in pairs])
        out_specs = [leaf.spec for leaf in about]

        def whole_step(own_state: list[Any], own_batch: list[Any]) -> list[Any]:
            arrays = own_step(own_state, own_batch).arrays
            if any(LINEAR in marks for marks, reduction in zip(varying, hows, strict=True) if reduction == "sum"):
                # Of a sum that goes on, such as 0.9 * old + new, each worker has the whole old part: take a Kth of it.
                start = [jnp.zeros_like(x) if one else x for x, one in zip(own_state, is_summed, strict=True)]
                increments = own_step(start, own_batch).arrays
            else:
                increments = arrays
            return _combine(arrays, increments, hows, axes)

        return out.replace(shard_map(whole_step, out_specs=out_specs, **how)(*arrays))

    def _is_rows(self, name: str) -> bool:
        rows = self._said["rows"]
        return rows is not None and re.search(rows, name) is not None

    def _hows(
        self, about: list["_Leaf"], arrays: list[Any], varying: list[Axes], scalars: set[str], counts: list[bool]
    ) -> list[str]:
        """Returns how the workers' values of each output become one: "mean", "sum", "max", and "" for one as it is.

        Numbers of a worker's rows are to be summed; those in a mean, as the counts of a metric, are left to it.

        Raises:
          ValueError: naming the outputs that differ between workers and of which nothing is said.
        """
        hows: list[str] = []
        refused: list[tuple[str, _Leaf, bool]] = []
        for leaf, array, array_axes, is_count in zip(about, arrays, varying, counts, strict=True):
            is_float, is_bool = (jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.bool_))
            is_state = bool(leaf.origin) and not leaf.is_loss(array_axes, scalars)
            usual = "mean" if array.shape == () and not is_state else ""
            reduction = leaf.said or usual
            is_sum = is_count and (reduction in ("sum", "") or not (leaf.said or is_float))
            differs = leaf.spec == P() and (is_sum or not array_axes.isdisjoint(self.mesh.axis_names))
            if differs and reduction == "sum" and OTHER in array_axes:
                raise ValueError(
                    f"sum= must name sums over rows; got {leaf.name!r}, in which the old value, too, goes through "
                    "something else than sums and constant factors. Leave it out of the state and compute it from the "
                    "sums where it is used; or sum over the workers inside the step, by jax.lax.psum."
                )
            if differs and reduction == "mean" and nnx.is_spread(leaf.name):
                raise ValueError(
                    f"mean= must name means over rows; got {leaf.name!r}, squares of distances from a worker's own "
                    "mean. Give the metric the values of all workers: "
                    f"metric.update(values=jax.lax.all_gather(values, {self._axes[0]!r}, tiled=True))."
                )
            takes = {"mean": is_float, "sum": not is_bool, "max": True, "": False}[reduction]
            hows.append(reduction if differs else "")
            if differs and not takes:
                label = f"{leaf.name!r} {array.dtype}{list(array.shape)}{' (state)' if is_state else ''}"
                refused.append((label, leaf, bool(is_float)))
        if refused:
            axis = self._axes[0] if len(self._axes) == 1 else self._axes
            is_trained = any(is_float and leaf.origin for _, leaf, is_float in refused)
            pattern = "|".join(dict.fromkeys(_pattern(leaf) for _, leaf, _ in refused))
            means = f"mean={pattern!r} for means over the rows (running statistics), "
            chains = "Put an exchange into the chain of what trains them, if they are parameters or optimizer states. "
            raise ValueError(
                "What a step returns must be the same on all workers, or a scalar of floats, which is averaged; got "
                f"{', '.join(label for label, *_ in refused[:8])}{' and others' if refused[8:] else ''}, computed from "
                f"each worker's own rows or gradients and not exchanged. {chains * is_trained}Pass "
                f"{means if any(is_float for *_, is_float in refused) else ''}sum={pattern!r} for sums and counts, "
                f"max={pattern!r} for maxima, rows={pattern!r} for what each row has of its own (regular expressions "
                f"of paths). For anything else, as a least loss or a queue of embeddings, let the step communicate: "
                f"jax.lax.pmean(loss, {axis!r}), jax.lax.all_gather(rows, {axis!r}, tiled=True). Decide by "
                "jaxcomm.exchange_metrics(opt_state).skipped, not by the local gradients."
            )
        return hows

    def _check(self, out: "_Out") -> None:
        """Compares replicated arrays across the devices, and checks that every row is its worker's own."""
        check_rows(out, math.prod(self.mesh.shape.values()))
        packed = _Packed.of(out)
        about = zip(packed.pick(out.names()), packed.pick(_specs(out)), packed.arrays, strict=True)
        replicated = {name: array for name, spec, array in about if spec == P() and array.is_fully_replicated}
        if differing := differing_replicas(self.mesh, replicated):
            names = [f"{name} (on device {', '.join(map(str, places))})" for name, places in differing.items()]
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
    sum: str | None = None,
    max: str | None = None,
    rows: str | None = None,
    static: int | str | Sequence[int | str] = (),
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
    refused by name, and so is a `pmean` or `psum` of gradients or updates that was left in the step. Collectives inside
    a loss may stay (SyncBN, a contrastive loss, counts of valid tokens): the gradient is that of the mean of the
    workers' losses, to which each contributes its own.

    Objects of Flax NNX (a model, an `nnx.Optimizer`, metrics) are changed in place, as by `nnx.jit`; pass a state of
    `nnx.split` together with its graph. On the wire: the bytes of `tx`, and one all-reduce of 4 bytes for each number
    that is averaged.

    Args:
      step: a function of the optimizer's state and a batch, among other arguments, that returns new state and metrics
        in any order. Arguments may be any pytrees; leaves that are not arrays, such as a model's functions, are static.
      mesh: a mesh whose only axes are those of workers.
      batch: the arguments that are batches: positions or names; () for none. All their arrays have the same number of
        rows, a multiple of K. Scalars in them, including a key of `jax.random.key`, are replicated.
      batch_axis: the axis of the rows; or a tree of axes, a prefix of the batch, None for what is replicated; see
        `make_train_step`. Of several batches, a tree by the names of the arguments.
      mean: a regular expression of paths, for outputs that each worker computes from its own rows and that are to be
        averaged: "batch_stats" for the running statistics of Flax, "BatchStat|Metric" for the running statistics and
        metrics of NNX. An output has two paths: its own ("2/center"), and that of the argument that it continues, by
        the argument's name ("state/center"), which is one of the same structure and shapes.
      sum: the same, for sums over rows: counts, histograms, integers. State of sums may decay: with a state s of which
        a step makes a * s + b, a replicated and b of a worker's rows, the new state is a * s + the sum of all b.
      max: the same, for maxima; of booleans, whether any is true.
      rows: the same, for what has rows of its own in the order of the workers, in arguments and outputs: environments,
        recurrent state, logits, losses of rows. The first dimension is cut over the workers, as that of a batch. So is
        an output that continues a batch that is a tree. What has one item for each worker may also be a `PerWorker` of
        (K, ...): the step gets and returns (1, ...).
      static: arguments that are Python values in the step, positions or names: a flag, a number of layers. They must be
        named here, too, if they are static in a `jax.jit` of the step's own. (Strings and functions always are.)
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
        exchange; for a chain whose states show an order that is refused (`jaxcomm.chain` checks all rules in `init`);
        for a batch that does not divide, or that has local arrays where there are several processes; for outputs that
        differ between workers and of which nothing is said; for gradients of a loss that is a sum over rows, and for
        scalars that are sums or extremes over rows and are not named (a quotient of sums over a worker's own rows
        warns); for a pattern that finds nothing; for gradients that do not differ; for collectives of gradients or
        updates outside the exchange; for a static argument that cannot be hashed. At the first call and at every check,
        for rows that are not those of their workers; at a check, for replicated state that differs.
    """
    if check_every is not None:
        check_count("check_every", check_every, 1, "None never checks")
    batch_args, fixed = (
        [argument] if isinstance(argument, int | np.integer | str) else argument for argument in (batch, static)
    )
    patterns = {"mean": mean, "sum": sum, "max": max, "rows": rows}
    return DataParallel(step, mesh, batch_args, batch_axis, patterns, fixed, rng, check_every, donate, compiler_options)


def _parameters(step: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's positional parameters, as far as they are known."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return []
    return [param.name for param in parameters if param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _traced(tree: Any) -> list[bool]:
    """Returns, for every leaf of a tree, whether it is traced. A Python number in an Equinox module is static."""
    equinox = sys.modules.get("equinox")

    def is_module(node: Any) -> bool:
        return equinox is not None and isinstance(node, equinox.Module)

    flags: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=is_module):
        flags += [hasattr(leaf, "dtype") for leaf in jax.tree.leaves(node)] if is_module(node) else [_is_array(node)]
    return flags


def _is_owner(node: Any) -> bool:
    """Returns whether a node is a `PerWorker`, or the state of an exchange or of a chain around it, which has some."""
    return is_per_worker(node) or is_exchange_state(node) or isinstance(node, AccumulatedState | DelayedState)


def _members(node: Any) -> int:
    """Returns the axes of `jax.vmap` in front of the rows of a node: of models with a state each, as in an ensemble."""
    exchange = next(exchange_states(node), None)
    return 0 if exchange is None else jnp.ndim(jax.tree.leaves(exchange.step)[0])


def _specs(tree: Any) -> list[P]:
    """Returns the PartitionSpec of every leaf: `state_specs` as a list, since not every tree can hold them."""
    specs: list[P] = []
    for owner in jax.tree.leaves(tree, is_leaf=_is_owner):
        for node in jax.tree.leaves(owner, is_leaf=is_per_worker):
            axes = (node.axes[0] if len(node.axes) == 1 else node.axes) if is_per_worker(node) else None
            spec = P() if axes is None else P(*[None] * _members(owner), axes)
            specs += [spec] * len(jax.tree.leaves(node))
    return specs


def _spread(state: Any, workers: int) -> Any:
    """Gives a state that is fresh from `tx.init` a row for each worker."""

    def rows(leaf: Any, axis: int) -> Any:
        count = leaf.shape[axis]
        if count == workers or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if count != 1:
            raise ValueError(
                f"A state must have a row for each worker; got {count} rows for {workers} workers. Use "
                "jaxcomm.resize_workers to continue with another number of them; an array with several rows for each "
                "worker is no PerWorker: name it by rows=."
            )
        return jnp.repeat(jnp.asarray(leaf), workers, axis=axis)

    def spread(owner: Any) -> Any:
        of_rows = partial(rows, axis=_members(owner))
        return jax.tree.map(
            lambda node: jax.tree.map(of_rows, node) if is_per_worker(node) else node, owner, is_leaf=is_per_worker
        )

    return jax.tree.map(spread, state, is_leaf=_is_owner)


def _note_rows(error: Exception, workers: int, batch: _Packed, cut: list[P], named_arrays: Iterable[Any]) -> None:
    """Notes at an error about shapes which arguments are cut over the workers, and which have as many rows and are not.

    Args:
      error: the error.
      workers: K.
      batch: the batches by name.
      cut: the PartitionSpec of each of their arrays.
      named_arrays: path, array and PartitionSpec of everything else.
    """
    if not re.search("shape|broadcast|dimension", str(error)):
        return
    counts = {jnp.shape(x)[len(spec) - 1] for x, spec in zip(batch.arrays, cut, strict=True) if spec != P()}
    uncut = [
        f"{name!r} {tuple(x.shape)}"
        for name, x, spec in named_arrays
        if spec == P() and x.ndim and x.shape[0] in counts
    ]
    error.add_note(
        f"data_parallel gives each of {workers} workers its part of the rows of {sorted(batch.tree())} (batch=); whole "
        f"are, with as many rows, {', '.join(uncut[:8]) or 'none'}. Name by batch= the arguments that are batches, by "
        "rows= state that has the rows of a batch, by batch_axis= another axis than the first."
    )


def _pattern(leaf: _Leaf) -> str:
    """Returns a regular expression, as short as a name, that finds an output."""
    path = leaf.origin or leaf.name
    if ":" in path:
        return path.rsplit(":", 1)[1]  # the type of a variable of NNX
    parts = path.split("/")
    if "batch_stats" in parts:
        return "batch_stats"
    word = re.search(r"[A-Za-z]\w{2,}", parts[-1])  # of a name, or of what stands for it in a path, as an error's type
    return word[0] if word else f"^{re.escape(path)}$"


def _buffers(array: Any) -> Any:
    """Returns something that is equal for two arrays in the same memory."""
    if not isinstance(array, jax.Array) or not array.size or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return id(array)
    return array.addressable_shards[0].data.unsafe_buffer_pointer() if array.addressable_shards else id(array)


def _copy_repeats(arrays: list[Any], batch: Any, key: Callable[[Any], Any]) -> list[Any]:
    """Copies the arrays that are there twice, or in the batch, too: one buffer cannot be donated twice."""
    keys = {key(leaf) for leaf in jax.tree.leaves(batch)}
    distinct = []
    for array in arrays:
        is_new = key(array) not in keys
        keys.add(key(array))
        distinct.append(array if is_new or not isinstance(array, jax.Array) else jnp.copy(array))
    return distinct


def _combine(arrays: list[Any], increments: list[Any], hows: list[str], axes: tuple[str, ...]) -> list[Any]:
    """Combines the workers' values; `increments` has the outputs without the old part of their sums."""
    workers = jax.lax.axis_size(axes)
    means = iter(dense_mean([x for x, reduction in zip(arrays, hows, strict=True) if reduction == "mean"], axes)[0])

    def total(x: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x - new + jax.lax.psum(new, axes)
        # One sum, that all workers may get the same bits.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x, new = x.astype(wide), new.astype(wide)
        return jax.lax.psum(new + (x - new) / workers, axes)

    def largest(x: jax.Array) -> jax.Array:
        return jax.lax.pmax(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x, axes)

    def one(x: jax.Array, new: jax.Array, reduction: str) -> jax.Array:
        if reduction == "mean":
            return next(means)
        if reduction == "sum":
            return total(x, new).astype(x.dtype)
        return largest(x).astype(x.dtype) if reduction == "max" else x

    return [one(*item) for item in zip(arrays, increments, hows, strict=True)]


def _has_scalars_alone(arg: Any) -> bool:
    """Returns whether an argument is a tree of scalars."""
    leaves = jax.tree.leaves(arg)
    return (
        bool(leaves) and not _is_array(arg) and all(_is_array(x) and not jnp.ndim(x) and not is_key(x) for x in leaves)
    )


def _is_of_exchange(tree: Any) -> list[bool]:
    """Returns, for every leaf of a tree, whether it is in the state of an exchange."""
    flags: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=is_exchange_state):
        flags += [is_exchange_state(node)] * len(jax.tree.leaves(node))
    return flags


# What the walk notes of a state that was given to an exchange, and of what an exchange returned.
GIVEN, EXCHANGED = "(given to an exchange)", "(exchanged)"


def _varying_outputs(jaxpr: Any, inputs: list[Axes], axes: Axes) -> list[Axes]:
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
