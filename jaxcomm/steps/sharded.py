"""The train step of workers whose parameters are sharded: over the workers themselves, or over other mesh axes."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.jaxpr import traced_program
from jaxcomm.accounting.report import WireReport, check_bytes, exchange_report, kind_of_device, model_state_bytes
from jaxcomm.collectives.axis import AxisName, axis_names, on_step_mesh, to_varying
from jaxcomm.exchange import keep_unless
from jaxcomm.kernels.numerics import widened
from jaxcomm.order import check_descent
from jaxcomm.state import TrainState, check_aliases, check_model_state, state_specs
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.lookups import Lookups, check_additive, tables_of
from jaxcomm.steps.loss import LossFn, in_turns
from jaxcomm.steps.mesh import place, shapes_on
from jaxcomm.steps.replication import over_workers
from jaxcomm.steps.sharding import ShardedExchange, ShardedState, plan_shards, spec_axes
from jaxcomm.steps.workers import StepSettings, TrainStep
from jaxcomm.traffic import Program, Traffic

_REPLICATED = P()


class SplitState(NamedTuple):
    """The optimizer's state of a chain that is split at its exchange.

    Attributes:
      exchange: the state of the exchange and of the links before it; with a local method, that of the exchange alone.
      rest: the state of the links after the exchange; arrays like a parameter are sharded as that parameter. With a
        local method, the state of the optimizer before it, a row for each worker.
    """

    exchange: ShardedState
    rest: Any


class ShardedStep(TrainStep):
    """Workers whose parameters each have a PartitionSpec, which decides how its gradient is reduced.

    See `make_train_step`.
    """

    def __init__(
        self,
        loss: LossFn,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        specs: Any,
        auto: tuple[str, ...],
        axis_name: AxisName,
        settings: StepSettings,
        lookups: Lookups | None = None,
    ):
        """See `make_train_step`; the loss is from `loss_of`. If `specs` is None, those of the first parameters hold."""
        names, kinds, accumulate = axis_names(axis_name), set(mesh.axis_types), settings.accumulate
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
        super().__init__(tx, axis_name, tuple(mesh.shape[name] for name in names), settings)
        self.mesh, self.specs, self._loss = mesh, specs, loss
        self.manual = tuple(name for name in mesh.axis_names if name not in auto)
        self.is_explicit = kinds == {AxisType.Explicit}
        if self.is_explicit and accumulate > 1:
            raise ValueError(
                f"accumulate must be 1 on a mesh of Explicit axes, where a loss gets all rows; got {accumulate}. Make "
                "the mesh with jaxcomm.make_mesh, or jax.make_mesh(..., axis_types=(AxisType.Auto, ...))."
            )
        self.lookups = lookups or {}
        if self.lookups and accumulate > 1:
            raise ValueError(
                f"accumulate must be 1 with lookups, which take the rows of a whole batch; got {accumulate}. Leave one "
                "of them out."
            )
        if self.lookups and (auto or self.is_explicit):
            raise ValueError(
                f"lookups must be on a mesh of Auto axes, all of them manual; got auto={auto} and {mesh.axis_types}. "
                "Make it with jaxcomm.make_mesh, and leave auto out."
            )

    @on_step_mesh
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes a step; see `TrainStep.__call__`."""
        self._locate_once(state)
        return super().__call__(state, batch)

    @on_step_mesh
    def trace(self, state: Any, batch: Any) -> Any:
        """Traces the step; see `TrainStep.trace`."""
        self._locate_once(state)
        return super().trace(state, batch)

    @on_step_mesh
    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers the step; see `TrainStep.lower`."""
        self._locate_once(state)
        return super().lower(state, batch)

    @on_step_mesh
    def init(self, params: Any, model_state: Any = ()) -> TrainState:
        """Makes the state on the mesh; see `TrainStep.init`."""
        check_aliases(params)
        exchange = self._plan(params)
        if self.lookups:
            check_additive(exchange, params, tables_of(self.lookups, params, exchange))
        check_model_state(model_state)
        specs = jax.tree.structure(params).unflatten(exchange.specs)
        params = jax.tree.map(lambda leaf, spec: place(leaf, NamedSharding(self.mesh, spec)), params, specs)
        model_state = place(jax.tree.map(jnp.asarray, model_state), NamedSharding(self.mesh, P()))
        return jax.jit(partial(self._init, exchange))(params, model_state)  # the jit copies

    @on_step_mesh
    def shapes(self, params: Any, model_state: Any = ()) -> TrainState:
        """Returns the shapes of what `init` makes; see `TrainStep.shapes`."""
        exchange = self._plan(params)
        params = shapes_on(self.mesh, params, jax.tree.structure(params).unflatten(exchange.specs))
        model_state = shapes_on(self.mesh, model_state, jax.tree.map(lambda _: P(), model_state))
        state = jax.eval_shape(partial(self._init, exchange), params, model_state)
        return shapes_on(self.mesh, state, self._specs_of(state, exchange))

    def _specs(self, state: TrainState) -> TrainState:
        return self._specs_of(state, self._plan(self._like(state)))

    def _specs_of(self, state: TrainState, exchange: ShardedExchange) -> TrainState:
        """Returns the PartitionSpec of every array in a state."""
        exchange_state, optimizer_state = state.opt_state
        specs = jax.tree.map(lambda _: P(), state)
        params = jax.tree.structure(state.params).unflatten(exchange.specs)
        optimizer_state = specs_like(optimizer_state, state.params, exchange.specs)
        return specs._replace(params=params, opt_state=SplitState(state_specs(exchange_state), optimizer_state))

    @on_step_mesh
    def verify(self, state: Any, batch: Any, *, other_bytes: int = 256, beside: Sequence[Traffic] = ()) -> WireReport:
        """Proves that the step sends over the workers' axes what its exchange and its loss claim.

        Collectives over other axes do not count. The claim of the loss is traced; it has one if parameters are sharded
        over the workers (`split_dense`).
        """
        params = self._like(state)
        claimed, of_layers, exchange = Program(), Program(list(beside)), self._plan(params)
        keyed = jax.eval_shape(self._keyed, state.step, batch)
        if self.lookups:
            tables = tables_of(self.lookups, params, exchange)
            looked_up, ids = jax.eval_shape(tables.look_up, params, keyed)
            for program in (
                traced_program(tables.look_up, params, keyed),
                traced_program(tables.add, params, looked_up, looked_up, ids),
            ):
                of_layers.add(program.over(*exchange.names))
            exchange, params = tables.exchange, looked_up
        kind = kind_of_device(state)
        for shapes in exchange.shard_shapes(params):
            claimed.add(exchange_report(exchange.chain.exchange, shapes, self.sizes, (), self.axis_name, kind).program)
        if any(exchange.reduced) and not self.is_explicit:
            gradients = partial(self._by_workers, exchange)
            of_layers.add(traced_program(gradients, params, state.model_state, keyed).over(*exchange.names))
        claimed.add(of_layers)
        slack = other_bytes + model_state_bytes(state, self.workers)
        traced = self.report(state, batch)
        text = self.compile(state, batch).as_text()
        return check_bytes(
            text, traced, claimed, slack, self.axis_name, self.mesh, activations=float(of_layers.received)
        )

    def _plan(self, params: Any) -> ShardedExchange:
        if self.specs is None:
            self._locate(params)
        return plan_shards(self.tx, self.mesh, self.specs, params, self.axis_name)

    def _locate_once(self, state: Any) -> None:
        if self.specs is None and isinstance(state, TrainState):  # the step itself refuses any other state
            self._locate(state.params)

    def _locate(self, params: Any) -> None:
        """Takes the specs from the first parameters that the step gets.

        Raises:
          ValueError: if all parameters are replicated, or one is sharded over the workers themselves.
        """
        shardings = jax.tree.map(_sharding_of, params)
        exchange = plan_shards(self.tx, self.mesh, shardings, params, self.axis_name)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
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

    def _init(self, exchange: ShardedExchange, params: Any, model_state: Any) -> TrainState:
        tail_parts = (exchange.chain.after.init(params), jnp.zeros((), jnp.int32), model_state)
        optimizer_state, step, model_state = self._place(tail_parts, params, exchange)
        return TrainState(params, SplitState(exchange.init(params), optimizer_state), step, model_state)

    def _place(self, tree: Any, params: Any, exchange: ShardedExchange) -> Any:
        """Shards arrays that are like a parameter (`specs_like`) as that parameter is; replicates the others."""
        return jax.tree.map(self._lay, tree, specs_like(tree, params, exchange.specs))

    def _lay(self, leaf: jax.Array, spec: P) -> jax.Array:
        lay = jax.reshard if self.is_explicit else lax.with_sharding_constraint
        return lay(leaf, NamedSharding(self.mesh, spec))

    def _split(self, state: TrainState) -> SplitState:
        """Returns the optimizer's state; refuses that of another step."""
        if not isinstance(state.opt_state, SplitState):
            raise ValueError(
                f"The state must be made by the step's init; got an optimizer's state of "
                f"{type(state.opt_state).__name__}. Call step.init(params)."
            )
        return state.opt_state

    @on_step_mesh
    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        exchange, old = self._plan(state.params), self._split(state)
        check_descent(self.tx, state.opt_state, state.params)
        keyed = self._keyed(state.step, batch)
        tables = tables_of(self.lookups, state.params, exchange) if self.lookups else None
        params, ids = state.params, []
        if tables is not None:
            exchange = tables.exchange
            params, ids = tables.look_up(params, keyed)
        gradients = self._unreduced if self.is_explicit else self._by_workers
        scalars, model_state, gradients_of_rows = gradients(exchange, params, state.model_state, keyed)
        means, exchanged = exchange(gradients_of_rows, old.exchange, params)
        after = optax.with_extra_args_support(exchange.chain.after)
        extra_args = {
            "value": scalars["loss"],
            "grad": means,
            "value_fn": self._mean_loss(exchange, state.model_state, keyed),
        }
        updates, optimizer_state = after.update(means, old.rest, params, **extra_args)
        ok = exchanged.metrics.skipped == 0
        new = (optax.apply_updates(params, updates), optimizer_state, model_state)
        new = keep_unless(ok, new, (params, old.rest, state.model_state))
        params, optimizer_state, model_state = self._place(new, params, exchange)
        if tables is not None:  # if the step is skipped, the means are zeros, and so are the updates
            params = tables.add(state.params, params, updates, ids)
        new_state = TrainState(params, SplitState(exchanged, optimizer_state), state.step + 1, model_state)
        return new_state, {**scalars, **exchanged.metrics._asdict()}

    def _by_workers(
        self, exchange: ShardedExchange, params: Any, model_state: Any, batch: Batch
    ) -> tuple[dict[str, jax.Array], Any, Any]:
        """Computes each worker's gradient in a `jax.shard_map` that is manual over all axes but those in `auto`."""
        treedef = jax.tree.structure(params)
        inside = [over_axes(spec, self.manual) for spec in exchange.specs]
        rows = [
            spec if is_reduced else P(exchange.names, *spec)
            for spec, is_reduced in zip(inside, exchange.reduced, strict=True)
        ]
        worker = self._shard_map(exchange)(
            partial(self._worker, exchange),
            mesh=self.mesh,
            axis_names=set(self.manual),
            in_specs=(treedef.unflatten(inside), P(), batch.like(P(exchange.names), P())),
            out_specs=(P(), P(), treedef.unflatten(rows)),
        )
        return worker(params, model_state, batch)

    def _shard_map(self, exchange: ShardedExchange) -> Any:
        """Returns `over_workers` where every gradient is exchanged; else JAX must track what differs."""
        is_exchanged = not any(exchange.reduced) and set(self.manual) == set(exchange.names)
        return over_workers if is_exchanged else jax.shard_map

    def _worker(
        self, exchange: ShardedExchange, params: Any, model_state: Any, batch: Batch
    ) -> tuple[dict[str, jax.Array], Any, Any]:
        """Differentiates the sum of the workers' losses with respect to the worker's own copies, or its shards."""
        leaves, treedef = jax.tree.flatten(params)
        pairs = zip(leaves, exchange.reduced, strict=True)
        local_params = treedef.unflatten(
            [leaf if is_reduced else to_varying(leaf, self.axis_name) for leaf, is_reduced in pairs]
        )
        (loss, (scalars, new_state)), gradients = self._differentiate(exchange, local_params, model_state, batch)
        pairs = zip(jax.tree.leaves(gradients), exchange.reduced, strict=True)
        rows = [gradient / self.workers if is_reduced else gradient[None] for gradient, is_reduced in pairs]
        return *self._mean({"loss": loss, **scalars}, new_state), treedef.unflatten(rows)

    def _differentiate(self, exchange: ShardedExchange, local_params: Any, model_state: Any, batch: Batch) -> Any:
        """Returns ((loss, (scalars, new model_state)), gradients) for a worker's own rows."""

        def value_and_gradients(params: Any, model_state: Any, batch: Batch) -> Any:
            def objective(params: Any) -> tuple[jax.Array, Any]:
                loss, (scalars, new_state) = self._noted_loss(params, model_state, batch)
                _check_same_along_others(({"loss": loss, **scalars}, new_state), exchange)
                # A replicated loss of all rows is made to vary, so that the sum over the workers is K times it too.
                return to_varying(loss, self.axis_name), (scalars, new_state)

            return jax.value_and_grad(objective, has_aux=True)(params)

        return in_turns(value_and_gradients, self._settings.kinds, self.axis_name)(local_params, model_state, batch)

    def _mean(self, scalars: dict[str, Any], model_state: Any) -> tuple[dict[str, jax.Array], Any]:
        """Averages scalars and the model's state over the workers, in one all-reduce."""
        scalars = self._settings.kinds.largest(scalars, self.axis_name)
        vector, unravel = ravel_pytree((widened(scalars), model_state))
        return unravel(lax.psum(to_varying(vector, self.axis_name), self.axis_name) / self.workers)

    def _noted_loss(self, params: Any, model_state: Any, batch: Batch) -> Any:
        """Calls the loss; adds to an error of JAX a note on what a loss gets with `specs`."""
        try:
            return self._loss(params, model_state, batch)
        except (TypeError, ValueError) as error:
            error.add_note(
                f"With specs=, the loss runs on each device: it gets a worker's own rows, and its shards along "
                f"{self.manual}. Along an axis in auto= it gets whole tensors, and a sharding constraint there is a "
                "PartitionSpec, under jax.set_mesh(mesh). To shard parameters over a worker's devices (FSDP), give "
                'them an axis of their own: make_mesh(data=2, fsdp=4), specs P("fsdp") and auto=("fsdp",).'
            )
            raise

    def _mean_loss(self, exchange: ShardedExchange, model_state: Any, batch: Batch) -> Callable[[Any], jax.Array]:
        """Returns params -> the mean loss of all rows, which a line search evaluates and differentiates."""

        def of_worker(params: Any, model_state: Any, batch: Batch) -> jax.Array:
            loss, _ = self._noted_loss(params, model_state, batch)
            return lax.pmean(to_varying(loss, self.axis_name), self.axis_name)

        def mean_loss(params: Any) -> jax.Array:
            rows = batch.like(P(exchange.names), P())
            if self.is_explicit:
                placed = jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(self.mesh, spec)), batch, rows)
                with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                    return self._loss(params, model_state, placed)[0]
            inside = jax.tree.structure(params).unflatten([over_axes(spec, self.manual) for spec in exchange.specs])
            return jax.shard_map(
                of_worker,
                mesh=self.mesh,
                axis_names=set(self.manual),
                in_specs=(inside, P(), rows),
                out_specs=P(),
            )(params, model_state, batch)

        return mean_loss

    def _unreduced(
        self, exchange: ShardedExchange, params: Any, model_state: Any, batch: Batch
    ) -> tuple[dict[str, jax.Array], Any, Any]:
        """Computes each worker's gradient by JAX's `unreduced` type, on a mesh of Explicit axes.

        Parameters that are replicated over the workers are marked as `reduced` over their axes, so that `jax.grad`
        returns gradients that are not summed over the workers yet.
        """
        leaves, treedef = jax.tree.flatten(params)
        triples = list(zip(leaves, exchange.specs, exchange.reduced, strict=True))
        names = frozenset(exchange.names)
        places = batch.like(P(exchange.names), P())
        rows = jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(self.mesh, spec)), batch, places)

        def objective(params: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                loss, (scalars, new_state) = self._loss(params, model_state, rows)
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
        return scalars, new_state, treedef.unflatten(row_gradients)


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


def _sharding_of(leaf: Any) -> Any:
    """Returns the sharding of a parameter, or P() if it has none or is replicated."""
    sharding = getattr(leaf, "sharding", None)
    return P() if sharding is None or sharding.is_fully_replicated else sharding


def specs_like(tree: Any, params: Any, specs: Sequence[P], default: P = _REPLICATED) -> Any:
    """Returns the PartitionSpecs of a tree: those of parameters for arrays like them, `default` for the rest.

    An array is like a parameter if its path ends in the parameter's path and its shape is the same.
    """
    paths = jax.tree_util.tree_leaves_with_path(params)
    like = {path: (leaf.shape, spec) for (path, leaf), spec in zip(paths, specs, strict=True)}

    def spec(path: Any, leaf: Any) -> P:
        ends = (like.get(tuple(path[start:])) for start in range(len(path) + 1))
        shape, spec = next((candidate for candidate in ends if candidate is not None), ((), default))
        return spec if leaf.shape == shape else default

    return jax.tree_util.tree_map_with_path(spec, tree)


def over_axes(spec: P, manual: tuple[str, ...]) -> P:
    """Returns a PartitionSpec without the axes that are not `manual`."""
    entries = []
    for entry in spec:
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        entries.append(tuple(name for name in names if name in manual) or None)
    return P(*entries)


def _check_same_along_others(tree: Any, exchange: ShardedExchange) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        varying_axes = [axis for axis in exchange.others if axis in jax.typeof(leaf).manual_axis_type.varying]
        if varying_axes:
            raise ValueError(
                f"A loss, and what comes with it, must be replicated along other axes than {exchange.axis_name!r}; got "
                f"one at {jax.tree_util.keystr(path)!r} that may differ along {varying_axes}. Sum its parts with "
                "jax.lax.psum(..., axis), or, where all are equal, take jax.lax.pmean."
            )
