"""A train step that was written for one device, run by the workers of a mesh."""

import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.jaxpr import jaxpr_program
from jaxcomm.chain import FROZEN
from jaxcomm.checks import check_count, check_range
from jaxcomm.collectives.axis import on_step_mesh
from jaxcomm.exchange import SCOPE, exchange_states, lets_bypass
from jaxcomm.foreign import nnx
from jaxcomm.foreign.keys import shared_keys, worker_keys
from jaxcomm.foreign.outputs import Leaf, Out, combine, pattern_of
from jaxcomm.foreign.trees import (
    Packed,
    Static,
    buffer_of,
    copy_repeats,
    has_scalars_alone,
    in_exchange,
    is_array,
    leaf_specs,
    spread,
)
from jaxcomm.foreign.walk import GIVEN, follows, varying_outputs
from jaxcomm.order import check_frozen, check_states, has_error_feedback
from jaxcomm.state import check_rows
from jaxcomm.steps.batch import check_batch, check_global, row_axes
from jaxcomm.steps.mesh import check_axis, place
from jaxcomm.steps.reductions import StepScaling
from jaxcomm.steps.replicas import differing_replicas
from jaxcomm.steps.replication import LINEAR, OTHER, Axes, by_scope, naming_axes
from jaxcomm.steps.shard_map import shard_map
from jaxcomm.steps.sharding import spec_axes
from jaxcomm.traffic import Program
from jaxcomm.types import PyTree


class DataParallel:
    """A step made by `data_parallel`: call it, or pass it to `jaxcomm.verify`."""

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        batch: int | str | Sequence[int | str],
        batch_axis: PyTree,
        patterns: dict[str, str | None],
        static: int | str | Sequence[int | str],
        rng: str | None,
        check_every: int | None,
        donate: bool,
        compiler_options: dict[str, Any] | None,
    ):
        functools.update_wrapper(self, step)
        self.mesh, self._step, self._said, self._rng, self._every = mesh, step, patterns, rng, check_every
        self._names, self._batch_axis, self._donates = _parameters(step), batch_axis, donate
        self._batch, self._static = self._selected(batch), self._selected(static)
        donated = 0 if donate else ()
        self._jitted = jax.jit(self._on_mesh, donate_argnums=donated, compiler_options=compiler_options)
        self._calls = 0
        self._axes: tuple[str, ...] = ()
        self._returned: set[int] = set()  # ids of the arrays that the last call returned

    @on_step_mesh
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step, with the arguments of the wrapped step; objects of Flax NNX are changed in place."""
        return self._call(self._jitted, args, kwargs)

    def _call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Takes a step by a jitted or compiled `_on_mesh`."""
        named_args = self._given(args, kwargs)
        state, batch = self._parted(named_args)
        out = self._take(state, batch, run)
        for name, new in out.changed.items():
            nnx.update(named_args[name], new)
        return nnx.split_states(out.returned)

    @on_step_mesh
    def place(self, state: PyTree) -> PyTree:
        """Gives a state that is fresh from `tx.init` a row for each worker, and places it on the mesh.

        A call of the step does this itself. Call it for the carry of a `jax.lax.scan`, and for the target that a
        checkpoint is restored into: both must have their rows from the start.
        """
        self._axes, workers = self._workers(state)
        return self._placed(Packed.of(spread(state, workers)), self._state_specs).tree()

    @on_step_mesh
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the step for arrays or shapes, as `jax.jit(...).trace` does."""
        state, batch = self._parted(self._given(args, kwargs))
        return self._jitted.trace(Packed.of(state, nnx.sharing(state)), Packed.of(batch))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step for arrays or shapes, as `jax.jit(...).lower` does; pass what `place` returns."""
        return _Stage(self.trace(*args, **kwargs).lower(), self._call)

    def loss_program(self, *args: Any, **kwargs: Any) -> Program:
        """Returns the collectives that the step has beside its exchange, as those of its loss, for `verify`."""
        return jaxpr_program(self.trace(*args, **kwargs).jaxpr, outside=SCOPE)

    def _take(self, state: dict[str, Any], batch: dict[str, Any], run: Callable[..., Any]) -> "Out":
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, batch))):
            rule, remedy = "None inside jax.jit, which cannot report", "Call the step as it is: it is compiled"
            check_range("check_every", self._every, rule, self._every is None, remedy)
            return self._on_mesh(Packed.of(state, nnx.sharing(state)), Packed.of(batch)).tree()
        packed = Packed.of(state, nnx.sharing(state))
        if not all(id(leaf) in self._returned for leaf in packed.arrays):  # else it is placed already
            self._axes, workers = self._workers(state)
            if not self._calls:
                check_rows(state, workers)
            packed = Packed.of(spread(state, workers), packed.sharing)
            if self._donates:
                packed = packed.replace(copy_repeats(packed.arrays, batch, buffer_of))
            packed = self._placed(packed, self._state_specs)
        elif self._donates:
            packed = packed.replace(copy_repeats(packed.arrays, batch, id))
        self._check_batch(batch, math.prod(self.mesh.shape[name] for name in self._axes))
        rows = self._placed(Packed.of(batch), self._row_specs)
        out = run(packed, rows)
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
            state[name] = Static(state[name], type(state[name]))
        return nnx.merge_states(state, nnx.graph_in(state)), {name: named_args[name] for name in sorted(self._batch)}

    def _selected(self, selectors: int | str | Sequence[int | str]) -> frozenset[str]:
        """Returns the names of arguments, of which one or several are given by position or name."""
        several = [selectors] if isinstance(selectors, int | np.integer | str) else selectors
        return frozenset(self._argument(int(x)) if isinstance(x, int | np.integer) else x for x in several)

    def _argument(self, place: int) -> str:
        """Returns the name of a positional argument."""
        return self._names[place] if place < len(self._names) else f"args[{place}]"

    def _workers(self, state: PyTree) -> tuple[tuple[str, ...], int]:
        """Returns the axes of workers and their number; refuses a state without an exchange that the step can run."""
        states = list(exchange_states(state))
        if not states:
            raise ValueError(
                "A data-parallel step must get the state of an exchange in an argument that is not a batch; got none. "
                "Put jaxcomm.plump_dp() (dense) or a compressor first in jaxcomm.chain(...), and pass the state of "
                "tx.init as it is: restore a checkpoint into it as the target, and pass the graph of nnx.split as an "
                "argument too."
            )
        for node in jax.tree.leaves(state, is_leaf=lambda node: type(node) in _WRAPPERS):
            if type(node) in _WRAPPERS and next(exchange_states(node), None):
                wrapper, remedy = _WRAPPERS[type(node)]
                raise ValueError(
                    f"An exchange must not be inside optax.{wrapper}, whose gradients are each worker's own; got "
                    f"{states[0].method.name} there. {remedy}."
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

    def _state_specs(self, state: PyTree) -> list[P]:
        """Returns the PartitionSpec of every leaf of the arguments that are not batches."""
        specs, rows = leaf_specs(state), self._said["rows"]
        if rows is None:
            return specs
        workers = math.prod(self.mesh.shape[name] for name in self._axes)
        for i, (name, leaf) in enumerate(zip(nnx.names(state), jax.tree.leaves(state), strict=True)):
            if specs[i] == P() and is_array(leaf) and jnp.ndim(leaf) and re.search(rows, name):
                specs[i] = P(self._axes)
                if jnp.shape(leaf)[0] % workers:
                    raise ValueError(
                        f"The rows of what rows= names must be a multiple of the number of workers; got "
                        f"{jnp.shape(leaf)[0]} rows at {name!r} for {workers} workers. Give it the rows of all "
                        "workers, in the order of the workers."
                    )
        return specs

    def _about(self, out: Out, args: dict[str, Any], specs: dict[str, P]) -> list[Leaf]:
        """Returns what is known, and what is said, of the leaves of an output."""
        names, origins, leaves = out.names(), out.origins(args), list[Leaf]()
        patterns = {reduction: pattern for reduction, pattern in self._said.items() if pattern is not None}
        for reduction, pattern in patterns.items():
            places = [*names, *origins, *(specs if reduction == "rows" else ())]
            if not any(re.search(pattern, place) for place in places if place):
                pairs = sorted(zip(origins, names, strict=True), key=lambda pair: bool(pair[0]))
                raise ValueError(
                    f"{reduction}= must be a regular expression that finds an output; got {pattern!r} for "
                    f"{[origin or name for origin, name in pairs[:12]]}{' and others' if pairs[12:] else ''}. Leave it "
                    "out, or take the path of an output, or of the argument that it continues."
                )
        for name, spec, origin, x in zip(names, leaf_specs(out), origins, jax.tree.leaves(out), strict=True):
            hows = [how for how, regex in patterns.items() if any(re.search(regex, x) for x in (name, origin or name))]
            if "rows" in hows and not jnp.ndim(x):
                hows.remove("rows")  # a scalar has none, in the state either
            if len(hows) > 1:
                raise ValueError(
                    f"One of mean, sum, max and rows must match an output; got {' and '.join(hows)} for {name!r}"
                    f"{f', which continues {origin!r}' if origin else ''}. Narrow the patterns, {patterns}."
                )
            if spec == P() and (hows == ["rows"] or not hows):
                spec = specs.get(origin, P(self._axes) if hows else P())
            leaves.append(Leaf(name, spec, origin, "" if hows == ["rows"] else "".join(hows)))
        return leaves

    def _check_batch(self, batch: dict[str, Any], workers: int) -> None:
        axes = self._axes_in(batch)
        check_batch(batch, workers, batch_axis=axes)
        check_global(batch, axes)

    def _row_specs(self, batch: dict[str, Any]) -> list[P]:
        """Returns the PartitionSpec of every leaf of a batch."""
        rows = row_axes(batch, self._axes_in(batch))
        return [P() if axis is None else P(*[None] * axis, self._axes) for axis in rows]

    def _axes_in(self, batch: dict[str, Any]) -> Any:
        """Returns `batch_axis` for the batches by name; given for the one argument, it may leave out the name."""
        axis = self._batch_axis
        is_whole = (
            axis is None
            or isinstance(axis, int | np.integer)
            or (isinstance(axis, dict) and axis.keys() == batch.keys())
        )
        return axis if is_whole or len(batch) > 1 else dict.fromkeys(batch, axis)

    def _placed(self, packed: Packed, specs: Callable[[Any], list[P]]) -> Packed:
        shardings = [NamedSharding(self.mesh, spec) for spec in packed.pick(specs(packed.tree()))]
        return packed.replace(place(packed.arrays, shardings))

    def _worker_step(self, state: Packed, batch: Packed, specs: tuple[list[P], list[P]], about: list[Leaf]) -> Any:
        """Returns a worker's own part of the step, a function of its arrays that returns `Out`, packed.

        The state has a row for each worker; `specs` are the PartitionSpecs of both. `about` is filled with the outputs
        while the step is traced, as some trees can only be built from arrays.
        """
        whole, workers = state.tree(), math.prod(self.mesh.shape[name] for name in self._axes)
        graph, names = nnx.graph_in(whole), state.pick(nnx.names(whole))
        row_names = [*names, *batch.pick(nnx.names(batch.tree()))]
        specs_of = {name: spec for name, spec in zip(row_names, [*specs[0], *specs[1]], strict=True) if spec != P()}

        @jax.jit  # traced once, for the check and for the step
        def own_step(own_state: list[Any], own_batch: list[Any]) -> Packed:
            keyed = own_state
            if self._rng is not None:
                keyed = worker_keys(self._rng, names, own_state, jax.lax.axis_index(self._axes))
            rebuilt = nnx.shared(state.tree(keyed), state.sharing)
            named_args = nnx.split_states(rebuilt) | batch.tree(own_batch)
            named_args = {name: arg.value if isinstance(arg, Static) else arg for name, arg in named_args.items()}
            args: list[Any] = []
            while (name := self._argument(len(args))) in named_args:
                args.append(named_args.pop(name))
            try:
                result = nnx.merge_states(self._step(*args, **named_args), graph)
            except (TypeError, ValueError) as error:
                if "Non-hashable static" not in str(error):
                    _note_rows(error, workers, batch, specs[1], zip(names, state.arrays, specs[0], strict=True))
                    _note_static(error, rebuilt)
                    raise
                raise ValueError(
                    "Static arguments of a step's own jax.jit must be named for data_parallel, too; got a traced one. "
                    "Pass static= with their names or positions, or bind them by functools.partial."
                ) from error
            out = Out(result, {name: arg for name, arg in rebuilt.items() if nnx.is_changed(arg)})
            packed = Packed.of(out)
            named_inputs = state.tree(own_state) | {
                name: arg
                for name, arg in batch.tree(own_batch).items()
                if not is_array(arg) or self._is_rows(name)  # a bare array of such a shape may be anything
            }
            about[:] = packed.pick(self._about(out, named_inputs, specs_of))
            if self._rng is None:
                return packed
            pairs = {
                name: (key, mine) for name, key, mine in zip(names, own_state, keyed, strict=True) if mine is not key
            }
            arrays = shared_keys(pairs, [leaf.origin for leaf in about], packed.arrays)
            return packed.replace(arrays)

        return own_step

    @on_step_mesh
    def _on_mesh(self, state: Packed, batch: Packed) -> Packed:
        """The function that is compiled."""
        self._axes, workers = axes, _ = self._workers(state.tree())
        for message in check_states(state.tree()):
            warnings.warn(message, stacklevel=2)
        self._check_batch(batch.tree(), workers)
        spread_state = spread(state.tree(), workers)
        state = Packed.of(spread_state, state.sharing)
        specs = state.pick(self._state_specs(spread_state)), batch.pick(self._row_specs(batch.tree()))
        names = state.pick(nnx.names(spread_state))
        about: list[Leaf] = []  # the outputs, noted while tracing
        own_step = self._worker_step(state, batch, specs, about)
        # check_vma is off: with it, jax.grad of replicated parameters would insert a dense all-reduce. The walk proves
        # what it would have proven.
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
        scalars = {name for name, arg in state.tree().items() if has_scalars_alone(arg)}
        for i, (name, is_exchange) in enumerate(zip(names, state.pick(in_exchange(spread_state)), strict=True)):
            if is_exchange or name.split("/")[0] in scalars:
                inputs[i] |= {GIVEN if is_exchange else follows(name)}
        varying = varying_outputs(traced.jaxpr, inputs, frozenset(axes))
        is_own = [spec != P() for spec in state.pick(leaf_specs(spread_state))]  # as many rows as there are workers
        has_rows = [spec != P() and not own for spec, own in zip(specs[0], is_own, strict=True)]
        has_rows += [spec != P() for spec in specs[1]]
        step_alone = self._worker_step(state, batch, specs, [])  # its outputs may be named otherwise
        scaling = StepScaling.of(step_alone, traced, arrays, specs, has_rows, axes)
        self._check_rows(about, out.pick(leaf_specs(out.tree())), scaling.rows)
        counts = [number.is_count for number in scaling.outputs] or [False] * len(about)
        differs = [mark or not marks.isdisjoint(axes) for mark, marks in zip(counts, varying, strict=True)]
        is_summed = self._summed(about, out.arrays, differs, state, specs[0])
        if any(is_summed):
            inputs = [marks | {LINEAR} if i < len(names) and is_summed[i] else marks for i, marks in enumerate(inputs)]
            varying = varying_outputs(traced.jaxpr, inputs, frozenset(axes))
        hows = self._hows(about, out.arrays, varying, scalars, counts)
        checked = [how * (how == "sum" or x.dtype != bool) for how, x in zip(hows, out.arrays, strict=True)]
        scaling.check_named([leaf.name for leaf in about], checked, [LINEAR in marks for marks in varying], self._said)
        pairs = zip(about, hows, strict=True)  # a metric of NNX has sums and counts, whose quotient is the mean
        scaling.check(
            [leaf.name for leaf in about],
            [leaf.name * (how == "mean" and ":MetricState" not in leaf.name) for leaf, how in pairs],
            [leaf.name * any(map(self._is_rows, (leaf.name, leaf.origin or ""))) for leaf in about],
            [
                bool(leaf.origin) and how == "mean" and leaf.spec == P() and x.ndim > 0
                for leaf, how, x in zip(about, hows, out.arrays, strict=True)
            ],
            any(map(has_error_feedback, exchange_states(state.tree()))),
        )
        out_specs = [leaf.spec for leaf in about]

        def whole_step(own_state: list[Any], own_batch: list[Any]) -> list[Any]:
            arrays = own_step(own_state, own_batch).arrays
            if any(LINEAR in marks for marks, reduction in zip(varying, hows, strict=True) if reduction == "sum"):
                # Of a sum that goes on, such as 0.9 * old + new, each worker has the whole old part: take a Kth of it.
                start = [jnp.zeros_like(x) if one else x for x, one in zip(own_state, is_summed, strict=True)]
                increments = own_step(start, own_batch).arrays
            else:
                increments = arrays
            return combine(arrays, increments, hows, axes)

        return out.replace(shard_map(whole_step, out_specs=out_specs, **how)(*arrays))

    def _summed(
        self, about: list[Leaf], outputs: list[Any], differs: list[bool], state: Packed, specs: list[P]
    ) -> list[bool]:
        """Returns which arrays of the state are sums that go on, by `sum=`.

        So is a bare number of the type of an output that is a sum and has no origin. A counter, which is the same on
        all workers, needs no sum.
        """
        if (pattern := self._said["sum"]) is None:
            return [False] * len(specs)
        args = state.tree()
        sums = {leaf.origin for leaf in about if leaf.said == "sum"}
        kinds = {x.dtype for leaf, x in zip(about, outputs, strict=True) if leaf.said == "sum" and not leaf.origin}
        same = {leaf.origin for leaf, one in zip(about, differs, strict=True) if not one}

        def is_one(name: str, x: Any) -> bool:
            is_bare = not jnp.ndim(x) and is_array(args.get(name)) and jnp.result_type(x) in kinds
            return (name in sums or is_bare or re.search(pattern, name) is not None) and name not in same

        named = zip(state.pick(nnx.names(args)), state.arrays, specs, strict=True)
        return [spec == P() and is_one(name, x) for name, x, spec in named]

    def _is_rows(self, name: str) -> bool:
        rows = self._said["rows"]
        return rows is not None and re.search(rows, name) is not None

    def _check_rows(self, about: list[Leaf], own: list[P], rows: Sequence[list[int]]) -> None:
        """Refuses outputs that are cut along another axis than that of their rows."""
        for leaf, own_spec, axes in zip(about, own, rows, strict=False):
            if own_spec == P() and leaf.spec != P() and axes != [len(leaf.spec) - 1]:
                raise ValueError(
                    f"rows= must name what each row has of its own, along axis {len(leaf.spec) - 1}; got {leaf.name!r}"
                    f", whose axes of rows are {axes or 'none'}. Narrow the pattern; move the rows to that axis; or "
                    f"gather what is of pairs of rows: jax.lax.all_gather(x, {self._axes[0]!r}, tiled=True)."
                )

    def _hows(
        self, about: list["Leaf"], arrays: list[Any], varying: list[Axes], scalars: set[str], counts: list[bool]
    ) -> list[str]:
        """Returns how the workers' values of each output become one: "mean", "sum", "max", and "" for one as it is.

        Numbers of a worker's rows are to be summed; those in a mean, as the counts of a metric, are left to it.

        Raises:
          ValueError: naming the outputs that differ between workers and of which nothing is said.
        """
        hows: list[str] = []
        refused: list[tuple[str, Leaf, bool]] = []
        for leaf, array, array_axes, is_count in zip(about, arrays, varying, counts, strict=True):
            is_float, is_bool = (jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.bool_))
            is_state = bool(leaf.origin) and not leaf.is_loss(array_axes, scalars)
            usual = "mean" if array.shape == () and not is_state else ""
            reduction = leaf.said or usual
            is_sum = is_count and (reduction in ("sum", "") or not leaf.said)
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
            if is_count and leaf.said == "mean" and leaf.spec == P() and ":MetricState" not in leaf.name:
                raise ValueError(
                    f"mean= must name means over rows; got {leaf.name!r}, in which a worker counts its own rows. "
                    f"Narrow it, and pass sum={pattern_of(leaf)!r}; or count those of all: len(x) * "
                    f"jax.lax.axis_size({self._axes[0]!r})."
                )
            takes = {"mean": is_float, "sum": not is_bool, "max": True, "": False}[reduction]
            hows.append(reduction if differs else "")
            if differs and not takes:
                label = f"{leaf.name!r} {array.dtype}{list(array.shape)}{' (state)' if is_state else ''}"
                refused.append((label, leaf, bool(is_float)))
        if refused:
            axis = self._axes[0] if len(self._axes) == 1 else self._axes
            is_trained = any(is_float and leaf.origin for _, leaf, is_float in refused)
            pattern = "|".join(dict.fromkeys(pattern_of(leaf) for _, leaf, _ in refused))
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

    def _check(self, out: "Out") -> None:
        """Compares replicated arrays across the devices, and checks that every row is its worker's own."""
        check_rows(out, math.prod(self.mesh.shape.values()))
        packed = Packed.of(out)
        about = zip(packed.pick(out.names()), packed.pick(leaf_specs(out)), packed.arrays, strict=True)
        replicated = {name: array for name, spec, array in about if spec == P() and array.is_fully_replicated}
        if differing := differing_replicas(self.mesh, replicated):
            names = [f"{name} (on device {', '.join(map(str, places))})" for name, places in differing.items()]
            raise ValueError(
                f"What is replicated must be the same on all workers; got other numbers at {', '.join(names[:8])}"
                f"{' and others' if names[8:] else ''} after {self._calls} steps. Start all processes with the same "
                "parameters and seeds, and look for callbacks and kernels whose result is not determined."
            )


class _Stage:
    """A lowered or compiled step, with JAX's methods; the compiled one takes the step's own arguments."""

    def __init__(self, stage: PyTree, call: Callable[..., Any]):
        self._stage, self._call = stage, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def compile(self, *args: Any, **kwargs: Any) -> "_Stage":
        """Does as `jax.stages.Lowered.compile`."""
        return _Stage(self._stage.compile(*args, **kwargs), self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step."""
        return self._call(self._stage, args, kwargs)


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh,
    *,
    batch: int | str | Sequence[int | str] = 1,
    batch_axis: PyTree = 0,
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
        state is replicated. Without `rng`, all workers draw the same numbers; where these are of rows, the
        step warns.
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
        warns); for a pattern that finds nothing, or what is no sum or maximum; for gradients that do not differ; for
        collectives of gradients or updates outside the exchange; for a static argument that cannot be hashed. At the
        first call and at every check, for rows that are not those of their workers; at a check, for replicated state
        that differs.
    """
    if check_every is not None:
        check_count("check_every", check_every, 1, "None never checks")
    patterns = {"mean": mean, "sum": sum, "max": max, "rows": rows}
    return DataParallel(step, mesh, batch, batch_axis, patterns, static, rng, check_every, donate, compiler_options)


# Transformations that decide by a worker's own gradients, and what to do in their place.
_WRAPPERS: dict[type, tuple[str, str]] = {
    optax.MultiStepsState: ("MultiSteps", "Write jaxcomm.chain(exchange, optimizer, accumulate=G) in its place"),
    optax.ApplyIfFiniteState: (
        "apply_if_finite",
        "Leave it out, and keep the old parameters and optimizer's state where "
        "jaxcomm.exchange_metrics(opt_state).skipped is 1: on all workers, if a number of one is not finite",
    ),
    optax.contrib.SAMState: (
        "contrib.sam",
        "Write jaxcomm.chain(exchange, sam); with opaque_mode=True, average the gradients of grad_fn over the "
        "workers: jax.tree.map(lambda leaf: jax.lax.pmean(leaf, axis), gradients)",
    ),
}


def _parameters(step: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's positional parameters, as far as they are known."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return []
    return [param.name for param in parameters if param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)]


def _note_static(error: Exception, args: dict[str, Any]) -> None:
    """Notes at an error about traced values which arguments, but for the batches, may have been Python's numbers."""
    names = [name for name, arg in args.items() if is_array(arg) and not jnp.ndim(arg) and jax.typeof(arg).weak_type]
    if names and re.search("[Tt]race[dr]|[Cc]oncret", str(error)):
        error.add_note(
            "data_parallel compiles the step, and passes numbers as arrays. Name by static= the arguments that must be "
            f"Python's own, a size or a flag; numbers are {', '.join(map(repr, names))}."
        )


def _note_rows(error: Exception, workers: int, batch: Packed, cut: list[P], named_arrays: Iterable[Any]) -> None:
    """Notes at an error about shapes which arguments are cut over the workers, and which have as many rows and are not.

    `cut` has the PartitionSpecs of the batches' arrays; `named_arrays` path, array and PartitionSpec of all else.
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
