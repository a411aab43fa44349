"""Workers whose parameters are sharded: over the workers themselves, or over other mesh axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from jaxcomm.accounting.jaxpr import traced_program
from jaxcomm.accounting.report import check_bytes, exchange_report, kind_of_device, model_state_bytes
from jaxcomm.collectives.axis import AxisName, axis_names, on_step_mesh
from jaxcomm.exchange import is_local, keep_unless
from jaxcomm.kernels.numerics import is_applicable_tree
from jaxcomm.order import check_descent
from jaxcomm.state import (
    TrainState,
    applies_step,
    check_aliases,
    check_model_state,
    state_specs,
    trained,
    with_untrained,
    works_alone,
)
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.engine import settle
from jaxcomm.steps.gradients import ByCompiler, ByWorkers
from jaxcomm.steps.lookups import Lookups, Tables, check_additive, tables_of
from jaxcomm.steps.mesh import place, shapes_on
from jaxcomm.steps.settings import StepSettings
from jaxcomm.steps.sharding import ShardedExchange, ShardedState, plan_shards, spec_axes
from jaxcomm.steps.step import Placement, Report, Update, params_like
from jaxcomm.traffic import Program, Traffic
from jaxcomm.types import Params, PyTree, is_per_worker, map_rows


class SplitState(NamedTuple):
    """The optimizer's state of a chain that is split at its exchange.

    Attributes:
      exchange: the state of the exchange and of the links before it; with a local method, that of the exchange alone.
      rest: the state of the links after the exchange; arrays like a parameter are sharded as that parameter. With a
        local method, the state of the optimizer before it, a row for each worker.
    """

    exchange: ShardedState
    rest: Any


def split_state(state: TrainState) -> SplitState:
    """Returns the optimizer's state; refuses that of another step."""
    if not isinstance(state.opt_state, SplitState):
        raise ValueError(
            f"The state must be made by the step's init; got an optimizer's state of {type(state.opt_state).__name__}. "
            "Call step.init(params)."
        )
    return state.opt_state


class Sharded(Placement):
    """Workers whose parameters each have a PartitionSpec, which decides how its gradient is reduced.

    With a local method, the parameters and the optimizer's state have a row for each worker. See `make_train_step`.

    Attributes:
      specs: the PartitionSpecs, or shardings; None until parameters are seen whose specs hold.
      lookups: by path, (batch) -> ids, for tables whose rows the step looks up.
      manual: the axes that are not left to XLA.
      is_explicit: whether the axes of the mesh are of type Explicit.
      is_local: whether the exchange is a local method.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        specs: PyTree,
        auto: tuple[str, ...],
        axis_name: AxisName,
        lookups: Lookups | None = None,
    ):
        names, kinds = axis_names(axis_name), set(mesh.axis_types)
        gaps = [name for name in (*names, *auto) if name not in mesh.axis_names]
        if gaps or set(names) & set(auto):
            raise ValueError(
                f"axis_name and auto must be different axes of the mesh; got {axis_name!r} and {auto} for a mesh with "
                f"{mesh.axis_names}. Make it with make_mesh({names[0]}=..., model=...)."
            )
        if len(kinds) > 1 or AxisType.Manual in kinds:
            raise ValueError(
                f"The axes of the mesh must all be of type Auto, or all of type Explicit; got {mesh.axis_types}. "
                "Make the mesh with jaxcomm.make_mesh."
            )
        super().__init__(tx, mesh, axis_name, tuple(mesh.shape[name] for name in names))
        self.specs, self.lookups, self.is_local = specs, lookups or {}, is_local(tx)
        self.manual = tuple(name for name in mesh.axis_names if name not in auto)
        self.is_explicit = kinds == {AxisType.Explicit}
        if self.lookups and (auto or self.is_explicit):
            raise ValueError(
                f"lookups must be on a mesh of Auto axes, all of them manual; got auto={auto} and {mesh.axis_types}. "
                "Make it with jaxcomm.make_mesh, and leave auto out."
            )
        if self.is_local and self.is_explicit:
            raise ValueError(
                "The axes of the mesh must be of type Auto for a local method, whose workers have parameters of their "
                f"own; got {self.mesh.axis_types}. Make the mesh with jaxcomm.make_mesh."
            )
        self._jitted_model = jax.jit(self._model)

    @on_step_mesh
    def init(self, params: Params, model_state: PyTree) -> TrainState:
        """Makes the state on the mesh; see `TrainStep.init`."""
        check_aliases(params)
        exchange = self.plan(params)
        tables = self.tables(params, exchange)
        if tables is not None:
            check_additive(exchange, trained(params), tables)
        check_model_state(model_state, takes_counts=not self.is_local)
        specs = exchange.specs_of(params)
        params = jax.tree.map(lambda leaf, spec: place(leaf, NamedSharding(self.mesh, spec)), params, specs)
        model_state = place(jax.tree.map(jnp.asarray, model_state), NamedSharding(self.mesh, P()))
        return jax.jit(partial(self._first_state, exchange))(params, model_state)  # the jit copies

    def shapes(self, params: Params, model_state: PyTree) -> TrainState:
        """Returns the shapes of what `init` makes; see `TrainStep.shapes`."""
        exchange = self.plan(params)
        params = shapes_on(self.mesh, params, exchange.specs_of(params))
        model_state = shapes_on(self.mesh, model_state, jax.tree.map(lambda _: P(), model_state))
        state = jax.eval_shape(partial(self._first_state, exchange), params, model_state)
        return shapes_on(self.mesh, state, self.specs_of(state, exchange))

    def specs_of(self, state: TrainState, exchange: ShardedExchange | None = None) -> TrainState:
        """Returns the PartitionSpec of every array: of arrays like a parameter, `specs_like`, that parameter's."""
        exchange = exchange or self.plan(params_like(state))
        workers = (exchange.names,) if self.is_local else ()
        params, specs = state.params, exchange.specs_of(params_like(state))
        specs = [P(*workers, *spec) for spec in jax.tree.leaves(specs)]
        trees = {"params": params, "rest": state.opt_state.rest}
        placed = specs_like(trees, params.rows if is_per_worker(params) else params, specs, P(*workers))
        opt_state = SplitState(state_specs(state.opt_state.exchange), placed["rest"])
        specs: Any = (placed["params"], opt_state, P(), state_specs(state.model_state))
        return TrainState(*specs)

    def params(self, state: TrainState) -> Params:
        """Returns the model, placed as `specs` say; see `TrainStep.params`."""
        if not self.is_local:
            return state.params
        self.see(state)
        return self._jitted_model(state)

    @on_step_mesh
    def _model(self, state: TrainState) -> Any:
        like = params_like(state)
        model = self.plan(like).global_model(split_state(state).exchange, trained(like))
        return with_untrained(model, jax.tree.map(lambda rows: rows[0], state.params.rows))

    def see(self, state: PyTree) -> None:
        """Takes the specs from the first parameters, if none were given; see `Placement.see`."""
        if self.specs is not None or not isinstance(state, TrainState):  # the step itself refuses any other state
            return

        def without_row(leaf: PyTree) -> Any:
            sharding = getattr(leaf, "sharding", None)
            placed = NamedSharding(self.mesh, P(*sharding.spec[1:])) if isinstance(sharding, NamedSharding) else None
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=placed)

        has_rows = is_per_worker(state.params)
        self._locate(jax.tree.map(without_row, state.params.rows) if has_rows else state.params)

    def plan(self, params: Params) -> ShardedExchange:
        """Returns the exchange of parameters, or of their shapes."""
        if self.specs is None:
            self._locate(params)
        return plan_shards(self.tx, self.mesh, self.specs, params, self.axis_name)

    def tables(self, params: Params, exchange: ShardedExchange) -> Tables | None:
        """Returns the tables among the parameters whose rows the step looks up."""
        return tables_of(self.lookups, trained(params), exchange) if self.lookups else None

    def _locate(self, params: Params) -> None:
        """Takes the specs from the first parameters; refuses any sharded over the workers, and only replicated ones."""
        shardings = jax.tree.map(_sharding_of, params)
        exchange = plan_shards(self.tx, self.mesh, shardings, params, self.axis_name)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained(params))]
        for path, spec, is_reduced in zip(paths, exchange.specs, exchange.reduced, strict=True):
            if is_reduced:
                raise ValueError(
                    "Every worker must hold all parameters, or shards of them on devices of its own; got one that is "
                    f"sharded over the workers, {spec} at {path!r}. Shard it along another axis, "
                    f"P({exchange.others[0]!r}); for dense layers that are split over the workers, pass specs= and "
                    "call split_dense."
                )
        if not any(map(spec_axes, exchange.specs)):
            raise ValueError(
                "On a mesh with other axes than those of the workers, some parameter must be sharded; got "
                f"{dict(self.mesh.shape)} and replicated parameters alone. Place them by jax.device_put, or pass "
                f"specs=; or make the mesh with {', '.join(exchange.names)} alone."
            )
        self.specs = shardings

    def _first_state(self, exchange: ShardedExchange, params: Params, model_state: PyTree) -> TrainState:
        first, step = exchange.init(trained(params)), self.lay(jnp.zeros((), jnp.int32), P())
        if not self.is_local:
            state = TrainState(params, SplitState(first, exchange.chain.after.init(trained(params))), step, model_state)
            return self.constrained(state, exchange)

        def rows(tree: PyTree) -> Any:
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (math.prod(self.sizes), *leaf.shape)), tree)

        if works_alone(first):
            model_state = jax.tree.map(exchange.per_worker, rows(model_state))
        params = rows(params)
        opt_state = SplitState(first, exchange.per_worker(jax.vmap(exchange.chain.before.init)(trained(params))))
        return self.constrained(TrainState(exchange.per_worker(params), opt_state, step, model_state), exchange)

    def constrained(self, state: TrainState, exchange: ShardedExchange) -> TrainState:
        """Places, in a program, what is not the exchange's by `specs_of`."""
        trees = ((it.params, it.opt_state.rest, it.model_state) for it in (state, self.specs_of(state, exchange)))
        params, optimizer, model_state = jax.tree.map(self.lay, *trees)
        return TrainState(params, state.opt_state._replace(rest=optimizer), state.step, model_state)

    def lay(self, leaf: jax.Array, spec: P) -> jax.Array:
        """Places an array in a program."""
        lay = jax.reshard if self.is_explicit else lax.with_sharding_constraint
        return lay(leaf, NamedSharding(self.mesh, spec))


@dataclass(frozen=True)
class ShardedUpdate(Update):
    """The update of parameters that are sharded: the exchange works on shards, the optimizer on whole tensors.

    Attributes:
      placement: where the parameters are.
      gradients: every worker's gradients.
      settings: the step's options.
    """

    placement: Sharded
    gradients: ByWorkers | ByCompiler
    settings: StepSettings

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Exchanges gradients, and then applies the optimizer; the other way round with a local method."""
        old = split_state(state)
        check_descent(self.placement.tx, old, trained(state.params))
        return (self._optimizer_first if self.placement.is_local else self._exchange_first)(state, old, batch)

    def _exchange_first(self, state: TrainState, old: SplitState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Takes the mean of the gradients to the links after the exchange, which see whole arrays."""
        exchange, params, ids = self.placement.plan(state.params), state.params, []
        tables = self.placement.tables(params, exchange)
        if tables is not None:
            exchange = tables.exchange
            looked_up, ids = tables.look_up(trained(params), batch)
            params = with_untrained(looked_up, params)
        scalars, model_state, rows, *_ = self.gradients(exchange, params, state.model_state, batch)
        of_gradients = trained(params)
        means, exchanged = exchange(rows, old.exchange, of_gradients)
        after = optax.with_extra_args_support(exchange.chain.after)

        def value_fn(trained_params: Params) -> jax.Array:
            at = with_untrained(trained_params, params)
            return self.gradients.mean_loss(exchange, at, state.model_state, batch)

        further = {"value": scalars["loss"], "grad": means, "value_fn": value_fn}
        updates, optimizer = after.update(means, old.rest, of_gradients, **further)
        ok = applies_step(exchanged.metrics, exchange.chain.reverts_on_skip)
        new_params, optimizer = settle(ok, updates, optimizer, params, old.rest)
        model_state = keep_unless(ok, model_state, state.model_state)
        new = TrainState(new_params, SplitState(exchanged, optimizer), state.step + 1, model_state)
        new = self.placement.constrained(new, exchange)
        if tables is not None:  # if the step is skipped, the means are zeros, and so are the updates
            added = tables.add(trained(state.params), trained(new.params), updates, ids)
            new = new._replace(params=with_untrained(added, new.params))
        return new, {**scalars, **exchanged.metrics._asdict()}

    def _optimizer_first(self, state: TrainState, old: SplitState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """Lets every worker's optimizer update its own parameters, and exchanges what a local method does."""
        exchange, params = self.placement.plan(params_like(state)), state.params.rows
        is_alone = works_alone(old.exchange)
        old_state = map_rows(lambda node: node.rows, state.model_state)
        scalars, model_state, gradients, losses, own_ok = self.gradients(exchange, params, old_state, batch, is_alone)
        local = optax.with_extra_args_support(exchange.chain.before)

        def optimize(gradients: PyTree, optimizer_state: Any, params: Params, loss: jax.Array) -> Any:
            try:
                return local.update(gradients, optimizer_state, params, value=loss)
            except TypeError as error:
                if "keyword-only argument" not in str(error):
                    raise
                raise ValueError(
                    "The optimizer of workers that are sharded must take the loss at most beside gradients; got one "
                    f"that takes more: {error}. Use one without a line search."
                ) from error

        updates, optimizer = jax.vmap(optimize)(gradients, old.rest.rows, trained(params), losses)
        # A number that is not finite, or is too large, in one shard counts for all shards of that worker.
        own_ok &= jax.vmap(is_applicable_tree)(updates)
        updates = jax.vmap(partial(keep_unless, old=jax.tree.map(lambda _: jnp.nan, updates)))(own_ok, updates)
        updates, exchanged = exchange(updates, old.exchange, trained(params))
        ok = applies_step(exchanged.metrics, exchange.chain.reverts_on_skip)
        new_rows = jax.vmap(partial(settle, ok))(updates, optimizer, params, old.rest.rows, own_ok)
        worker_params, optimizer = map(exchange.per_worker, new_rows)
        model_state = keep_unless(ok, model_state, old_state)
        if is_alone:
            model_state, scalars = jax.tree.map(exchange.per_worker, (model_state, scalars))
        new = TrainState(worker_params, SplitState(exchanged, optimizer), state.step + 1, model_state)
        new = self.placement.constrained(new, exchange)
        scalars = jax.tree.map(self.placement.lay, scalars, state_specs(scalars))
        return new, {**scalars, **exchanged.metrics._asdict()}

    def verify(self, step: Any, state: PyTree, batch: PyTree, other_bytes: int, beside: Sequence[Traffic]) -> Report:
        """Proves what the step sends over the workers' axes; see `TrainStep.verify`."""
        place, params = self.placement, params_like(state)
        claimed, of_layers, exchange = Program(), Program(list(beside)), place.plan(params)
        keyed = jax.eval_shape(partial(self.settings.batch, workers=step.workers), state.step, batch)
        tables = place.tables(params, exchange)
        if tables is not None:
            whole = trained(params)
            looked_up, ids = jax.eval_shape(tables.look_up, whole, keyed)
            for program in (
                traced_program(tables.look_up, whole, keyed),
                traced_program(tables.add, whole, looked_up, looked_up, ids),
            ):
                of_layers.add(program.over(*exchange.names))
            exchange, params = tables.exchange, with_untrained(looked_up, params)
        kind = kind_of_device(state)
        for shapes in exchange.shard_shapes(trained(params)):
            report = exchange_report(exchange.chain.exchange, shapes, place.sizes, (), place.axis_name, kind)
            claimed.add(report.program)
        if any(exchange.reduced) and not place.is_explicit:
            gradients = partial(self.gradients, exchange)
            of_layers.add(traced_program(gradients, params, state.model_state, keyed).over(*exchange.names))
        claimed.add(of_layers)
        slack = other_bytes + model_state_bytes(state, step.workers)
        traced, text = step.report(state, batch), step.compile(state, batch).as_text()
        layers = float(of_layers.received)
        return check_bytes(text, traced, claimed, slack, place.axis_name, place.mesh, activations=layers)


def _sharding_of(leaf: PyTree) -> Any:
    """Returns the sharding of a parameter, or P() if it has none or is replicated."""
    sharding = getattr(leaf, "sharding", None)
    return P() if sharding is None or sharding.is_fully_replicated else sharding


def specs_like(tree: PyTree, params: Params, specs: Sequence[P], default: P) -> Any:
    """Returns the PartitionSpecs of a tree: those of parameters for arrays like them, `default` for the rest.

    An array is like a parameter if its path ends in the parameter's path and its shape is the same.
    """
    paths = jax.tree_util.tree_leaves_with_path(params)
    like = {path: (leaf.shape, spec) for (path, leaf), spec in zip(paths, specs, strict=True)}

    def spec(path: KeyPath, leaf: PyTree) -> P:
        ends = (like.get(tuple(path[start:])) for start in range(len(path) + 1))
        shape, spec = next((candidate for candidate in ends if candidate is not None), ((), default))
        return spec if leaf.shape == shape else default

    return jax.tree_util.tree_map_with_path(spec, tree)
