"""The exchange of sharded parameters, or of their gradients, in a region that is manual over all axes of the mesh.

An exchange flattens the tensors that it gets into one vector. In a region that is manual over the axis of workers
alone, XLA would first gather each gradient over the other axes. Here every device flattens its own shards, and
exchanges them with the devices that hold the same shards of other workers' gradients.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxcomm.chain import SplitChain, split_chain
from jaxcomm.collectives.axis import AxisName, axis_names, in_axes_of_workers, to_varying
from jaxcomm.exchange import get_exchange, is_exchange_state, keep_unless, of_part, zeros_unless
from jaxcomm.kernels.numerics import is_finite_tree
from jaxcomm.state import communication_period, is_trained, state_specs, trained
from jaxcomm.steps.mesh import mixes_messages
from jaxcomm.types import ExchangeMetrics, Params, PerWorker, PyTree, from_shards, in_shards, is_per_worker, map_rows


class ShardedState(NamedTuple):
    """State of the exchange of sharded parameters.

    Attributes:
      metrics: counts of the last exchange, over all shards.
      exchanges: the state of each group's exchange; a group is the parameters that are sharded along the same axes.
      reduced: the state of the links before the exchange, for parameters whose gradients are already reduced.
    """

    metrics: ExchangeMetrics
    exchanges: tuple[Any, ...]
    reduced: Any


@dataclass(frozen=True)
class ShardedExchange:
    """The exchange of a chain, for sharded parameters.

    A parameter's PartitionSpec decides how its gradient is reduced:

    - The spec has none of the workers' axes: each worker has its own gradient, which is exchanged shard by shard.
      Parameters that are sharded along the same axes form a group, with an exchange of its own. So shards that differ
      along an axis are in one vector, and those that are replicated along it in another, and stay replicated.
    - The spec has all of the workers' axes: the gradient is already reduced, and bypasses the exchange.

    With a local method, the parameters, the updates that go in, and those that come out all have a row for each worker,
    (K, *shape).

    Attributes:
      mesh: the mesh.
      axis_name: the axis of workers, or the axes, outermost first.
      specs: the PartitionSpec of every parameter that is trained, in tree order.
      chain: the chain, split at its exchange.
      untrained: the PartitionSpecs of integers, booleans and keys, which have no gradients.
    """

    mesh: Mesh
    axis_name: AxisName
    specs: tuple[P, ...]
    chain: SplitChain
    untrained: tuple[P, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The axes of workers."""
        return axis_names(self.axis_name)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of workers along each of their axes."""
        return tuple(self.mesh.shape[name] for name in self.names)

    @property
    def others(self) -> tuple[str, ...]:
        """The other axes of the mesh."""
        return tuple(name for name in self.mesh.axis_names if name not in self.names)

    @property
    def reduced(self) -> tuple[bool, ...]:
        """For every parameter, whether its gradient is already reduced."""
        return tuple(self.names[0] in spec_axes(spec) for spec in self.specs)

    @cached_property
    def groups(self) -> dict[tuple[str, ...], tuple[bool, ...]]:
        """The groups: for every set of axes of shards, whether each parameter is in its group."""
        axes = [tuple(name for name in self.others if name in spec_axes(spec)) for spec in self.specs]
        pairs = list(zip(axes, self.reduced, strict=True))
        shard_groups = sorted({shards for shards, is_reduced in pairs if not is_reduced})
        return {
            group: tuple(shards == group and not is_reduced for shards, is_reduced in pairs) for group in shard_groups
        }

    def within(self, axes: tuple[str, ...]) -> "ShardedExchange":
        """Returns the exchange as it is in a region that is manual over some axes: with these in its specs alone."""

        def part(entry: PyTree) -> tuple[str, ...] | None:
            return tuple(name for name in _names_of(entry) if name in axes) or None

        specs, untrained = (tuple(P(*map(part, spec)) for spec in group) for group in (self.specs, self.untrained))
        return replace(self, specs=specs, untrained=untrained)

    def specs_of(self, params: Params) -> Any:
        """Returns the PartitionSpecs of all parameters, in a tree like theirs."""
        specs, untrained = iter(self.specs), iter(self.untrained)
        return jax.tree.map(lambda leaf: next(specs if is_trained(leaf) else untrained), params)

    def gradient_specs(self, treedef: Any) -> Any:
        """Returns the PartitionSpecs of the gradients: (K, *shape), a row for each worker, unless already reduced."""
        pairs = zip(self.specs, self.reduced, strict=True)
        return treedef.unflatten([spec if is_reduced else P(self.names, *spec) for spec, is_reduced in pairs])

    def per_worker(self, rows: PyTree) -> PerWorker:
        """Marks rows (K, ...) as those of workers that train on their own."""
        return PerWorker(rows, self.names, is_local=True)

    def init(self, params: Params) -> ShardedState:
        """Makes the first state; `params` are placed by their specs, and have no rows."""
        local, treedef = self._local(params), jax.tree.structure(params)
        shapes = jax.eval_shape(in_axes_of_workers(self._init, self.sizes, self.axis_name), local)
        init = jax.shard_map(
            self._init, mesh=self.mesh, in_specs=(treedef.unflatten(self.specs),), out_specs=state_specs(shapes)
        )
        return init(params)

    def shard_shapes(self, params: Params) -> list[Any]:
        """Returns the shapes that each group's exchange gets on a device, as trees without the other leaves."""
        local = self._local(params)
        return [_part(local, is_member) for is_member in self.groups.values()]

    def __call__(self, gradients: PyTree, state: ShardedState, params: Params) -> tuple[Any, ShardedState]:
        """Exchanges the gradients, all of them or none; returns their means and the new state.

        If a group's exchange is skipped, or an already reduced gradient is not finite, all means are zeros, and nothing
        in the state changes but `metrics` and the step counts of a local method. One all-reduce of 16 bytes decides it.
        A method whose `reverts_on_skip` is False handles a skip itself, group by group.

        The gradients are placed as in `gradient_specs`, the means as the parameters are.
        """
        treedef = jax.tree.structure(params)
        gradient_specs, exchange_specs = self.gradient_specs(treedef), state_specs(state)
        specs = gradient_specs if self.chain.is_local else treedef.unflatten(self.specs)
        update = jax.shard_map(
            self._update,
            mesh=self.mesh,
            in_specs=(gradient_specs, exchange_specs, specs),
            out_specs=(specs, exchange_specs),
        )
        return update(gradients, state, params)

    def global_model(self, state: ShardedState, like: PyTree) -> PyTree:
        """Returns a local method's model, placed by `specs`, like one worker's parameters. Call it under `jax.jit`."""
        treedef = jax.tree.structure(like)

        def split_rows(node: PerWorker) -> PerWorker:
            """Reshapes rows of workers and shards (K S, ...) to (K, S, ...); to (1, S, ...) what differs by shards."""
            workers = 1 if node.shards == len(node.axes) else math.prod(self.sizes)
            rows = jax.tree.map(lambda x: x.reshape(workers, len(x) // workers, *x.shape[1:]), node.rows)
            return replace(node, rows=rows)

        def spec_of(node: PyTree) -> P:
            return P(None, node.axes[len(node.axes) - node.shards :] or None) if is_per_worker(node) else P()

        def of_shard(node: PerWorker) -> Any:
            """Returns this shard's rows of all workers, as a method's `global_model` takes them."""
            rows = jax.tree.map(lambda x: x[:, 0], node.rows)
            return rows[0] if node.shards == len(node.axes) else replace(node, rows=rows)

        def model(exchanges: Any) -> Any:
            shards = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), self._local(like))
            parts = []
            for is_member, packed in zip(self.groups.values(), exchanges, strict=True):
                exchange = get_exchange(map_rows(of_shard, packed))
                parts.append(exchange.method.global_model(exchange, _part(shards, is_member)))
            return _join(parts, treedef)

        exchanges = map_rows(split_rows, state.exchanges)
        specs = jax.tree.map(spec_of, exchanges, is_leaf=is_per_worker)
        out_specs = treedef.unflatten(self.specs)
        return jax.shard_map(model, mesh=self.mesh, in_specs=(specs,), out_specs=out_specs)(exchanges)

    def _init(self, params: Params) -> ShardedState:
        with of_part():
            parts = {axes: _part(params, is_member) for axes, is_member in self.groups.items()}
            exchanges = tuple(in_shards(self.chain.exchange.init(part), axes) for axes, part in parts.items())
        reduced = () if self.chain.is_local else self.chain.before.init(_part(params, self.reduced))
        return ShardedState(ExchangeMetrics.zeros(), exchanges, reduced)

    def _update(self, gradients: PyTree, state: ShardedState, params: Params) -> tuple[Any, ShardedState]:
        """Exchanges one device's gradients."""
        leaves, treedef = jax.tree.flatten(gradients)
        pairs = zip(leaves, self.reduced, strict=True)
        gradients = treedef.unflatten([leaf if is_reduced else leaf[0] for leaf, is_reduced in pairs])
        if self.chain.is_local:
            params = jax.tree.map(lambda row: row[0], params)

        parts, new_reduced, is_bad = [], state.reduced, jnp.asarray(False)
        if any(self.reduced):
            part = _part(gradients, self.reduced)
            is_bad = ~is_finite_tree(part)  # of this device's shards
            part, new_reduced = self.chain.before.update(part, state.reduced, _part(params, self.reduced))
            parts.append(part)
        votes = to_varying(jnp.zeros(4).at[0].set(is_bad), self._all)
        exchanges, last, done = [], None, list[tuple[tuple[str, ...], jax.Array]]()
        for (axes, is_member), packed in zip(self.groups.items(), state.exchanges, strict=True):
            part, shard_state = _part(gradients, is_member), from_shards(packed, axes)
            if mixes_messages(self.mesh):
                part = _after(part, [skipped for others, skipped in done if set(others) <= set(axes)])
            part, shard_state = self.chain.exchange.update(part, shard_state, _part(params, is_member))
            last = get_exchange(shard_state)
            counts = last.metrics
            done.append((axes, counts.skipped))
            is_counted = self._is_first(axes)  # devices with the same shard have the same counts: one of them votes
            counts = jnp.stack([counts.skipped, counts.sent, counts.overflow, counts.drained]).astype(jnp.float32)
            votes = votes + jnp.where(is_counted, counts, 0.0)
            parts.append(part)
            exchanges.append(in_shards(shard_state, axes))

        def count() -> jax.Array:
            return lax.psum(votes, self._all)

        period = communication_period(state) or 1
        if last is None or period == 1:
            totals = count()
        else:  # there is nothing to count between two exchanges
            totals = lax.cond(last.step % period != 0, lambda: jnp.zeros(4), count)
        skipped, n_sent, overflow, drained = totals
        ok = skipped == 0
        metrics = ExchangeMetrics.of(ok, n_sent, overflow, drained=drained > 0)
        means, new_exchanges = _join(parts, treedef), tuple(exchanges)
        reduced = keep_unless(ok, new_reduced, state.reduced)
        if self.chain.reverts_on_skip:
            means, new_exchanges = zeros_unless(ok, means), keep_unless(ok, new_exchanges, state.exchanges)
        if self.chain.is_local:  # its step count goes on after a skip, or it would exchange again at once
            means = jax.tree.map(lambda row: row[None], means)
            new_exchanges = jax.tree.map(
                lambda shard_state, new: shard_state.replace(step=new.step),
                new_exchanges,
                tuple(exchanges),
                is_leaf=is_exchange_state,
            )
        return means, ShardedState(metrics, new_exchanges, reduced)

    @property
    def _all(self) -> tuple[str, ...]:
        return tuple(self.mesh.axis_names)

    def _is_first(self, axes: tuple[str, ...]) -> jax.Array:
        """Returns whether this device is the first of the devices that hold the same shard: () bool."""
        first = [lax.axis_index(name) == 0 for name in self._all if name not in axes]
        return jnp.stack(first).all()

    def _local(self, params: Params) -> Any:
        """Returns the shapes of a device's shards, in a tree like the parameters'."""

        def shape(leaf: PyTree, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(NamedSharding(self.mesh, spec).shard_shape(leaf.shape), leaf.dtype)

        return jax.tree.map(shape, params, jax.tree.structure(params).unflatten(self.specs))


def plan_shards(
    tx: optax.GradientTransformation, mesh: Mesh, specs: PyTree, params: Params, axis_name: AxisName
) -> ShardedExchange:
    """Splits a chain at its exchange, and checks the PartitionSpecs.

    `specs` are PartitionSpecs or NamedShardings, in a tree like that of the parameters or a prefix of it. A sharding
    that replicates counts as P().

    Raises:
      ValueError: for specs whose tree does not match the parameters, that name axes the mesh lacks, that have some of
        the workers' axes but not all, or that do not divide a dimension; for a chain as in `split_chain`; with sharded
        parameters, for a chain that looks at whole tensors before or in the exchange; and where gradients bypass the
        exchange, for momentum in it, or a local method.
    """
    names = axis_names(axis_name)
    parts: tuple[list[P], list[P]] = [], []
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(params), _flat_specs(specs, params), strict=True):
        _check_spec(jax.tree_util.keystr(path), tuple(jnp.shape(leaf)), spec, mesh, names)
        parts[is_trained(leaf)].append(spec)
    untrained, flat = map(tuple, parts)
    chain = split_chain(tx, trained(params), tuple(mesh.shape[name] for name in names), axis_name)
    if any(spec_axes(spec) for spec in flat) and chain.whole_tensors:
        raise ValueError(
            "Up to the exchange a chain must work element by element, since it sees shards; got "
            f"{chain.whole_tensors}, which looks at whole tensors. Clip after the exchange, where a chain sees whole "
            "arrays."
        )
    exchange = ShardedExchange(mesh, axis_name, flat, chain, untrained)
    if any(exchange.reduced) and chain.is_local:
        spec = flat[exchange.reduced.index(True)]
        raise ValueError(
            "With a local method every worker must hold all parameters, or shards of them on devices of its own; got "
            f"one that is sharded over the workers, {spec}. Shard it along another axis: make_mesh(data=2, fsdp=4) and "
            'P("fsdp").'
        )
    if any(exchange.reduced) and chain.momentum > 0:
        raise ValueError(
            "The momentum of an exchange must be 0 where parameters bypass it, since their already reduced gradients "
            f"would have none of it; got momentum={chain.momentum:g}. Use momentum=0, and optax.sgd(momentum=) after "
            "it."
        )
    return exchange


def _flat_specs(specs: PyTree, params: Params) -> tuple[P, ...]:
    """Returns the PartitionSpec of every parameter, from a tree of specs or a prefix of it."""

    def spec_of(node: PyTree) -> Any:
        if isinstance(node, Sharding) and node.is_fully_replicated:
            return P()
        return node.spec if isinstance(node, NamedSharding) else node

    specs = jax.tree.map(spec_of, specs)
    try:
        full = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, params)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"PartitionSpecs must be a tree like that of the parameters, or a prefix of it; got another one: {error}"
        ) from None
    flat = jax.tree.leaves(full)
    for spec in flat:
        if not isinstance(spec, P):
            raise ValueError(
                f"Each spec must be a jax.sharding.PartitionSpec; got {spec!r}. P() replicates a parameter."
            )
    return tuple(flat)


def _check_spec(path: str, shape: tuple[int, ...], spec: P, mesh: Mesh, names: tuple[str, ...]) -> None:
    spec_names = spec_axes(spec)
    gaps = [name for name in spec_names if name not in mesh.axis_names]
    if gaps or len(spec) > len(shape):
        raise ValueError(
            f"A PartitionSpec must name axes of the mesh, at most one entry for each dimension; got {spec} for "
            f"{path!r} of shape {shape} on a mesh with {mesh.axis_names}. Use P() to replicate it."
        )
    worker_names = [name for name in names if name in spec_names]
    if worker_names and len(worker_names) < len(names):
        raise ValueError(
            f"A parameter must be sharded along all axes of workers or along none; got {spec} for {path!r} with "
            f"workers along {names}. Use P({names!r}) or P()."
        )
    for size, entry in zip(shape, spec, strict=False):
        cut = math.prod(mesh.shape[name] for name in _names_of(entry))
        if size % cut:
            raise ValueError(
                f"A dimension must be a multiple of the number of its shards; got {size} for {cut} ({spec}, {path!r} "
                f"of shape {shape}). Pad it, or use P()."
            )


def _names_of(entry: PyTree) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def spec_axes(spec: P) -> tuple[str, ...]:
    """Returns the axes that a PartitionSpec names."""
    return tuple(name for entry in spec for name in _names_of(entry))


def _part(tree: PyTree, is_member: tuple[bool, ...]) -> Any:
    """Returns the tree with only the chosen leaves; their paths are unchanged."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([leaf if is_in else None for leaf, is_in in zip(leaves, is_member, strict=True)])


def _after(part: PyTree, skips: list[jax.Array]) -> Any:
    """Returns the same gradients, as a result of other exchanges, whose conditionals end before the next one begins.

    Counts are never below 0, which XLA cannot know.
    """
    for skipped in skips:
        part = zeros_unless(skipped >= 0, part)
    return part


def _join(parts: list[Any], treedef: Any) -> Any:
    """Joins parts of a tree; the inverse of `_part`."""
    rows = zip(*(treedef.flatten_up_to(part) for part in parts), strict=True)
    return treedef.unflatten([next(leaf for leaf in row if leaf is not None) for row in rows])
