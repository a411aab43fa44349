"""Where the gradients of sharded parameters come from: the workers themselves, or XLA on a mesh of Explicit axes."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import to_varying, varies
from jaxcomm.exchange import keep_unless
from jaxcomm.kernels.numerics import is_applicable_tree, widened
from jaxcomm.state import trained, with_untrained
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.engine import mean_over_workers
from jaxcomm.steps.loss import LossFn, Scalars, in_turns
from jaxcomm.steps.replication import over_workers
from jaxcomm.steps.sharding import ShardedExchange
from jaxcomm.types import Params, PyTree


class Gradients(NamedTuple):
    """The gradients of all workers, and what comes with them.

    Attributes:
      scalars: the loss and its scalars, means over the workers; of workers that are alone rows (K,).
      model_state: the model's new state, the mean over the workers; of workers that are alone rows (K, ...).
      rows: the gradients, placed as in `ShardedExchange.gradient_specs`.
      losses: with a local method, every worker's loss (K,).
      ok: with a local method, which workers can apply their gradients: (K,) bool.
    """

    scalars: Any
    model_state: PyTree
    rows: PyTree
    losses: Any = None
    ok: Any = None


@dataclass(frozen=True)
class ByWorkers:
    """Every worker differentiates its own loss, in a region that is manual over all axes but those left to XLA.

    Attributes:
      loss: a loss of `loss_of`.
      kinds: how its scalars become one.
      manual: the axes of the region.
    """

    loss: LossFn
    kinds: Scalars
    manual: tuple[str, ...]

    def __call__(
        self, exchange: ShardedExchange, params: Params, model_state: PyTree, batch: Batch, is_alone: bool = False
    ) -> Gradients:
        """Returns the gradients of all workers.

        With a local method, `params` has rows (K, *shape); if `is_alone`, so have the model's state and the scalars.
        """
        treedef, is_local, names = jax.tree.structure(trained(params)), exchange.chain.is_local, exchange.names
        region = exchange.within(self.manual)
        rows, inside = region.gradient_specs(treedef), region.specs_of(params)
        if is_local:
            inside = jax.tree.map(lambda spec: P(names, *spec), inside)
        reported, of_worker = (P(names) if is_alone else P()), (P(names) if is_local else None)

        def worker(params: Params, model_state: PyTree, batch: Batch) -> Gradients:
            params = _first_row(params) if is_local else params
            model_state = _first_row(model_state) if is_alone else model_state
            pairs = zip(jax.tree.leaves(trained(params)), exchange.reduced, strict=True)
            local = [leaf if is_reduced or is_local else to_varying(leaf, names) for leaf, is_reduced in pairs]
            local_params = with_untrained(treedef.unflatten(local), params)
            (loss, (scalars, new_state)), gradients = self._differentiate(exchange, local_params, model_state, batch)
            scalars = {"loss": loss, **scalars}
            if not is_local:
                pairs = zip(jax.tree.leaves(gradients), exchange.reduced, strict=True)
                scaled = [leaf / math.prod(exchange.sizes) if reduced else leaf[None] for leaf, reduced in pairs]
                means = mean_over_workers(scalars, new_state, exchange.axis_name, self.kinds)
                return Gradients(*means, treedef.unflatten(scaled))
            ok, extra_axes = is_applicable_tree(gradients), tuple(axis for axis in self.manual if axis not in names)
            if extra_axes:
                ok = lax.pmin(ok.astype(jnp.int32), extra_axes) > 0
            new_state = keep_unless(ok, new_state, model_state)
            rows = _as_row((gradients, loss, ok))
            if is_alone:
                return Gradients(*_as_row((widened(scalars), new_state)), *rows)
            return Gradients(*mean_over_workers(scalars, new_state, exchange.axis_name, self.kinds), *rows)

        is_exchanged = not any(exchange.reduced) and set(self.manual) == set(names)
        shard_map: Any = over_workers if is_exchanged else jax.shard_map  # else JAX must track what differs
        return shard_map(
            worker,
            mesh=exchange.mesh,
            axis_names=set(self.manual),
            in_specs=(inside, reported, batch.like(P(names), P())),
            out_specs=Gradients(reported, reported, rows, of_worker, of_worker),
        )(params, model_state, batch)

    def mean_loss(self, exchange: ShardedExchange, params: Params, model_state: PyTree, batch: Batch) -> jax.Array:
        """Returns the mean loss of all rows, which a line search evaluates and differentiates."""

        def of_worker(params: Params, model_state: PyTree, batch: Batch) -> jax.Array:
            loss, _ = self._noted_loss(params, model_state, batch)
            return lax.pmean(to_varying(loss, exchange.names), exchange.names)

        return jax.shard_map(
            of_worker,
            mesh=exchange.mesh,
            axis_names=set(self.manual),
            in_specs=(exchange.within(self.manual).specs_of(params), P(), batch.like(P(exchange.names), P())),
            out_specs=P(),
        )(params, model_state, batch)

    def _differentiate(self, exchange: ShardedExchange, local_params: Params, model_state: PyTree, batch: Batch) -> Any:
        """Returns ((loss, (scalars, new model_state)), gradients) for a worker's own rows.

        The gradients are those of the sum of the workers' losses, with respect to a worker's own copies or its shards.
        """

        def value_and_gradients(params: Params, model_state: PyTree, batch: Batch) -> Any:
            def objective(trained_params: Params) -> tuple[jax.Array, Any]:
                at = with_untrained(trained_params, params)
                loss, (scalars, new_state) = self._noted_loss(at, model_state, batch)
                _check_same_along_others(({"loss": loss, **scalars}, new_state), exchange)
                # A replicated loss of all rows is made to vary, so that the sum over the workers is K times it too.
                return to_varying(loss, exchange.names), (scalars, new_state)

            return jax.value_and_grad(objective, has_aux=True)(trained(params))

        return in_turns(value_and_gradients, self.kinds, exchange.axis_name)(local_params, model_state, batch)

    def _noted_loss(self, params: Params, model_state: PyTree, batch: Batch) -> Any:
        """Calls the loss; adds to an error of JAX a note on what a loss gets with `specs`."""
        try:
            return self.loss(params, model_state, batch)
        except (TypeError, ValueError) as error:
            error.add_note(
                f"With specs=, the loss runs on each device: it gets a worker's own rows, and its shards along "
                f"{self.manual}. Along an axis in auto= it gets whole tensors, and a sharding constraint there is a "
                "PartitionSpec, under jax.set_mesh(mesh). To shard parameters over a worker's devices (FSDP), give "
                'them an axis of their own: make_mesh(data=2, fsdp=4), specs P("fsdp") and auto=("fsdp",).'
            )
            raise


@dataclass(frozen=True)
class ByCompiler:
    """XLA differentiates the loss of all rows, on a mesh of Explicit axes, without its sum over the workers.

    Parameters that are replicated over the workers are marked as `reduced` over their axes, so that `jax.grad` returns
    gradients of JAX's `unreduced` type.

    Attributes:
      loss: a loss of `loss_of`, that gets all rows.
      mesh: the mesh.
    """

    loss: LossFn
    mesh: Mesh

    def __call__(
        self, exchange: ShardedExchange, params: Params, model_state: PyTree, batch: Batch, is_alone: bool = False
    ) -> Gradients:
        """Returns the gradients of all workers; see `ByWorkers`. There are no local methods."""
        del is_alone
        leaves, treedef = jax.tree.flatten(trained(params))
        triples = list(zip(leaves, exchange.specs, exchange.reduced, strict=True))
        rows, names = self._placed(exchange, batch), frozenset(exchange.names)

        def objective(trained_params: Params) -> Any:
            at = with_untrained(trained_params, params)
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                loss, (scalars, new_state) = self.loss(at, model_state, rows)
                return loss, (widened({"loss": loss, **scalars}), new_state)

        marked = [
            leaf if is_reduced else jax.reshard(leaf, NamedSharding(self.mesh, P(*spec, reduced=names)))
            for leaf, spec, is_reduced in triples
        ]
        unreduced, (scalars, new_state) = jax.grad(objective, has_aux=True)(treedef.unflatten(marked))
        row_gradients = [
            gradient if is_reduced else _rows_of_workers(gradient, spec, exchange)
            for gradient, (_, spec, is_reduced) in zip(jax.tree.leaves(unreduced), triples, strict=True)
        ]
        return Gradients(scalars, new_state, treedef.unflatten(row_gradients))

    def mean_loss(self, exchange: ShardedExchange, params: Params, model_state: PyTree, batch: Batch) -> jax.Array:
        """Returns the mean loss of all rows; see `ByWorkers`."""
        rows = self._placed(exchange, batch)
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return self.loss(params, model_state, rows)[0]

    def _placed(self, exchange: ShardedExchange, batch: Batch) -> Batch:
        specs = batch.like(P(exchange.names), P())
        return jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(self.mesh, spec)), batch, specs)


def _rows_of_workers(gradient: jax.Array, spec: P, exchange: ShardedExchange) -> jax.Array:
    """Returns each worker's part of an unreduced gradient, scaled to its own mean: (K, *shape). Free: no bytes.

    A worker's part of the gradient of the mean over all rows is 1/K of the gradient of the mean over its own rows.
    """
    rows = jax.shard_map(
        lambda part: math.prod(exchange.sizes) * part[None],
        mesh=exchange.mesh,
        in_specs=P(*spec, unreduced=frozenset(exchange.names)),
        out_specs=P(exchange.names, *spec),
        check_vma=False,  # JAX has no cast yet from `unreduced` to `varying`
    )
    return rows(gradient)


def _check_same_along_others(tree: PyTree, exchange: ShardedExchange) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        varying_axes = [axis for axis in exchange.others if varies(leaf, axis)]
        if varying_axes:
            raise ValueError(
                f"A loss, and what comes with it, must be replicated along other axes than {exchange.axis_name!r}; got "
                f"one at {jax.tree_util.keystr(path)!r} that may differ along {varying_axes}. Sum its parts with "
                "jax.lax.psum(..., axis), or, where all are equal, take jax.lax.pmean."
            )


def _first_row(tree: PyTree) -> Any:
    return jax.tree.map(lambda row: row[0], tree)


def _as_row(tree: PyTree) -> Any:
    """Returns a worker's own arrays as its rows (1, ...)."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)
