"""The train step of a local method whose workers each shard their parameters over several devices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import on_step_mesh
from jaxcomm.exchange import keep_unless
from jaxcomm.kernels.numerics import is_applicable_tree, widened
from jaxcomm.state import TrainState, applies_step, state_specs, works_alone
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.sharded import ShardedStep, SplitState, over_axes, specs_like
from jaxcomm.steps.sharding import ShardedExchange
from jaxcomm.types import PerWorker, is_per_worker


class LocalStep(ShardedStep):
    """A `ShardedStep` with a local method: parameters and the optimizer's state have a row for each worker.

    A worker's optimizer sees its whole tensors, which XLA partitions; the exchange works on shards.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """See `ShardedStep`.

        Raises:
          ValueError: also for a mesh of Explicit axes.
        """
        super().__init__(*args, **kwargs)
        self._jitted_model = jax.jit(self._model)
        if self.is_explicit:
            raise ValueError(
                "The axes of the mesh must be of type Auto for a local method, whose workers have parameters of their "
                f"own; got {self.mesh.axis_types}. Make the mesh with jaxcomm.make_mesh."
            )

    @on_step_mesh
    def params(self, state: TrainState) -> Any:
        """Returns the global model, placed as `specs` say; see `TrainStep.params`."""
        self._locate_once(state)
        return self._jitted_model(state)

    @on_step_mesh
    def _model(self, state: TrainState) -> Any:
        like = self._like(state)
        return self._plan(like).global_model(self._split(state).exchange, like)

    def _locate_once(self, state: Any) -> None:
        if self.specs is not None or not isinstance(state, TrainState) or not is_per_worker(state.params):
            return
        rows = state.params.rows

        def without_row(leaf: Any) -> Any:
            sharding = getattr(leaf, "sharding", None)
            placed = NamedSharding(self.mesh, P(*sharding.spec[1:])) if isinstance(sharding, NamedSharding) else None
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=placed)

        self._locate(jax.tree.map(without_row, rows))

    def _init(self, exchange: ShardedExchange, params: Any, model_state: Any) -> TrainState:
        rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.workers, *leaf.shape)), params)
        worker_rows = self._rows((rows, jax.vmap(exchange.chain.before.init)(rows)), rows, exchange)
        first = exchange.init(params)
        if works_alone(first):
            model_state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.workers, *leaf.shape)), model_state)
        step = self._lay(jnp.zeros((), jnp.int32), P())
        return TrainState(
            worker_rows[0], SplitState(first, worker_rows[1]), step, self._reported(model_state, first, exchange)
        )

    def _reported(self, tree: Any, state: Any, exchange: ShardedExchange) -> Any:
        """Places scalars, or the model's state: rows (K, ...), marked as such, if the workers work alone."""
        if not works_alone(state):
            return jax.tree.map(lambda leaf: self._lay(leaf, P()), tree)
        spec = P(exchange.names)
        return jax.tree.map(lambda rows: PerWorker(self._lay(rows, spec), exchange.names, is_local=True), tree)

    def _specs_of(self, state: TrainState, exchange: ShardedExchange) -> TrainState:
        exchange_state, optimizer_state = state.opt_state
        rows = {"params": state.params, "rest": optimizer_state}
        rows = specs_like(rows, state.params.rows, _row_specs(exchange), P(exchange.names))
        specs = jax.tree.map(lambda _: P(), state)._replace(model_state=state_specs(state.model_state))
        return specs._replace(params=rows["params"], opt_state=SplitState(state_specs(exchange_state), rows["rest"]))

    def _rows(self, trees: Any, params: Any, exchange: ShardedExchange) -> Any:
        """Places trees of rows, those like a parameter's with its spec, and marks them as the workers' own."""
        specs = specs_like(trees, params, _row_specs(exchange), P(exchange.names))
        placed = jax.tree.map(self._lay, trees, specs)
        return tuple(PerWorker(tree, exchange.names, is_local=True) for tree in placed)

    @on_step_mesh
    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        old = self._split(state)
        exchange, params = self._plan(self._like(state)), state.params.rows
        keyed = self._keyed(state.step, batch)
        old_state = jax.tree.map(_unwrap_rows, state.model_state, is_leaf=is_per_worker)
        by_workers = partial(self._by_workers, is_alone=works_alone(old.exchange))
        scalars, model_state, gradients, losses, own_ok = by_workers(exchange, params, old_state, keyed)
        local = optax.with_extra_args_support(exchange.chain.before)

        def optimize(gradients: Any, optimizer_state: Any, params: Any, loss: jax.Array) -> Any:
            try:
                return local.update(gradients, optimizer_state, params, value=loss)
            except TypeError as error:
                if "keyword-only argument" not in str(error):
                    raise
                raise ValueError(
                    "The optimizer of workers that are sharded must take the loss at most beside gradients; got one "
                    f"that takes more: {error}. Use one without a line search."
                ) from error

        updates, optimizer = jax.vmap(optimize)(gradients, old.rest.rows, params, losses)
        # A number that is not finite, or is too large, in one shard counts for all shards of that worker.
        own_ok &= jax.vmap(is_applicable_tree)(updates)
        updates = jax.vmap(partial(keep_unless, old=jax.tree.map(lambda _: jnp.nan, updates)))(own_ok, updates)
        updates, exchanged = exchange(updates, old.exchange, params)
        all_ok = applies_step(exchanged.metrics, exchange.chain.reverts_on_skip)
        optimizer = jax.vmap(keep_unless)(own_ok & all_ok, optimizer, old.rest.rows)
        updated = (keep_unless(all_ok, optax.apply_updates(params, updates), params), optimizer)
        worker_rows = self._rows(updated, params, exchange)
        model_state = self._reported(keep_unless(all_ok, model_state, old_state), old.exchange, exchange)
        new_state = TrainState(worker_rows[0], SplitState(exchanged, worker_rows[1]), state.step + 1, model_state)
        return new_state, {**self._reported(scalars, old.exchange, exchange), **exchanged.metrics._asdict()}

    def _by_workers(
        self, exchange: ShardedExchange, params: Any, model_state: Any, batch: Batch, is_alone: bool = False
    ) -> Any:
        """Returns scalars, the model's state, gradients, losses (K,), and which workers can apply theirs (K,)."""
        specs = [over_axes(spec, self.manual) for spec in _row_specs(exchange)]
        rows, row_spec = jax.tree.structure(params).unflatten(specs), P(exchange.names)
        worker = self._shard_map(exchange)(
            partial(self._worker, exchange, is_alone=is_alone),
            mesh=self.mesh,
            axis_names=set(self.manual),
            in_specs=(rows, row_spec if is_alone else P(), batch.like(row_spec, P())),
            out_specs=(row_spec if is_alone else P(), row_spec if is_alone else P(), rows, row_spec, row_spec),
        )
        return worker(params, model_state, batch)

    def _worker(
        self, exchange: ShardedExchange, params: Any, model_state: Any, batch: Batch, is_alone: bool = False
    ) -> Any:
        worker_params = jax.tree.map(lambda row: row[0], params)
        model_state = jax.tree.map(lambda row: row[0], model_state) if is_alone else model_state
        (loss, (scalars, new_state)), gradients = self._differentiate(exchange, worker_params, model_state, batch)
        ok, extra_axes = is_applicable_tree(gradients), tuple(name for name in self.manual if name in exchange.others)
        if extra_axes:
            ok = lax.pmin(ok.astype(jnp.int32), extra_axes) > 0
        new_state = keep_unless(ok, new_state, model_state)
        reported = widened({"loss": jnp.asarray(loss), **scalars}), new_state
        reported = _as_row(reported) if is_alone else self._mean({"loss": loss, **scalars}, new_state)
        return *reported, *_as_row((gradients, loss, ok))


def _as_row(tree: Any) -> Any:
    """Returns a worker's own arrays as its rows (1, ...)."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def _unwrap_rows(node: Any) -> Any:
    return node.rows if is_per_worker(node) else node


def _row_specs(exchange: ShardedExchange) -> list[P]:
    """Returns the PartitionSpecs of the rows of parameters, (K, *shape)."""
    return [P(exchange.names, *spec) for spec in exchange.specs]
