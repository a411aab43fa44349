"""The train step as an object: on a mesh of workers, or with simulated workers on one device."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.report import PipelineReport, WireReport, step_report, verify
from jaxcomm.collectives import dense_mean
from jaxcomm.collectives.axis import ALL_EXCHANGED, AxisName, axis_names, check_workers, in_axes_of_workers
from jaxcomm.exchange import get_exchange, is_exchange_state, keep_unless
from jaxcomm.numerics import is_finite_tree
from jaxcomm.parallel.agreement import check_agreement, trace_on
from jaxcomm.parallel.chain import check_chain
from jaxcomm.parallel.resize import resize_workers
from jaxcomm.parallel.state import (
    TrainState,
    check_axes,
    check_axis,
    check_batch,
    check_model_state,
    global_params,
    make_local,
    state_shardings,
    state_specs,
    without_rows,
)
from jaxcomm.states import bypassing, check_rows, communication_period, vary_exchanged
from jaxcomm.traffic import Traffic
from jaxcomm.types import is_per_worker

LossFn = Callable[..., Any]
GradientsFn = Callable[[Any, Any, Any], tuple[tuple[Any, tuple[dict[str, Any], Any]], Any]]


class TrainStep(ABC):
    """A compiled train step that knows its chain, its mesh and its workers.

        state = step.init(params)
        state, metrics = step(state, batch)

    Attributes:
      tx: the chain, with one exchange of this library in it.
      axis_name: the axis of workers, or the axes, outermost first.
      sizes: the number of workers along each axis.
    """

    def __init__(self, tx: optax.GradientTransformation, axis_name: AxisName, sizes: tuple[int, ...], donate: bool):
        """Compiles nothing yet; see `make_train_step` and `simulate`."""
        self.tx, self.axis_name, self.sizes = tx, axis_name, sizes
        self._jitted = jax.jit(self._step, donate_argnums=0 if donate else ())
        self._executable: Any = None
        self._is_checked = False

    @property
    def workers(self) -> int:
        """K, the number of workers."""
        return math.prod(self.sizes)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes a step; returns the new state and the metrics. The first call looks at whose rows the state has."""
        if not self._is_checked:
            check_rows(state, self.workers)
            self._is_checked = True
        if self._executable is not None:
            try:
                return self._executable(state, batch)
            except (TypeError, ValueError):  # it was compiled for other arguments
                self._executable = None
        return self._jitted(state, batch)

    def trace(self, state: Any, batch: Any) -> Any:
        """Traces the step for arrays or shapes, as `jax.jit(...).trace` does."""
        return self._jitted.trace(state, batch)

    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers the step for arrays or shapes, as `jax.jit(...).lower` does."""
        return self._jitted.lower(state, batch)

    def compile(self, state: Any, batch: Any) -> Any:
        """Compiles the step for arrays or shapes; later calls use the program while their arguments are of its kind."""
        self._executable = self.lower(state, batch).compile()
        return self._executable

    @abstractmethod
    def init(self, params: Any, model_state: Any = ()) -> TrainState:
        """Makes the state of a run, placed where the step wants it.

        Args:
          params: the parameters, the same in every process. They are copied: a step that donates its state does not
            take the caller's arrays away.
          model_state: what the model keeps besides its parameters (running statistics), of floats, the same in every
            process; copied as well. For a step with `has_state`.

        Raises:
          ValueError: if no transformation of the chain exchanges gradients, if their order is refused (see the guide;
            warnings are emitted here), or for a model state that cannot be averaged.
        """

    def shapes(self, params: Any, model_state: Any = ()) -> TrainState:
        """Returns what `init` would make, as `jax.ShapeDtypeStruct`s with shardings.

        A checkpoint is restored into it, and a step is compiled for it before any array exists.
        """
        return jax.eval_shape(self.init, params, model_state)

    def params(self, state: TrainState) -> Any:
        """Returns the model to evaluate and to keep: one set of parameters, of a local method the global model."""
        return global_params(state)

    def model_state(self, state: TrainState) -> Any:
        """Returns what the model keeps besides its parameters."""
        return state.model_state

    def resize(self, state: TrainState, workers: int) -> TrainState:
        """Carries a state over to another number of workers; see `resize_workers`. NumPy rows, on one host.

        The arrays that workers share stay where they are: place all for the step of another mesh, see its `shapes`.
        """
        return resize_workers(state, workers)

    def report(self, state: Any, batch: Any) -> WireReport:
        """Predicts the bytes of a whole step, losses and metrics included, by tracing it. Shapes are enough."""
        return step_report(self, state, batch, params=self._like(state), workers=self.workers)

    def verify(
        self, state: Any, batch: Any, *, other_bytes: int = 256, beside: Sequence[Traffic] = ()
    ) -> WireReport | PipelineReport:
        """Proves on the compiled text that the step sends what its exchange claims, no more and no less.

        Args:
          state: the state, or its shapes.
          batch: the batch, or its shapes.
          other_bytes: bytes that the step may receive in addition to the exchange (losses and metrics). Those of the
            model's state are added.
          beside: collectives that gradients cost in addition to the exchange: `plan.traffic` of `plan_late_multiply`.

        Returns:
          The report of the compiled step; of a pipeline, that of its boundaries and its exchange.

        Raises:
          ValueError: see `jaxcomm.verify`.
        """
        return verify(
            self,
            state,
            batch,
            tx=self.tx,
            params=self._like(state),
            workers=self.sizes,
            other_bytes=other_bytes,
            beside=beside,
            axis_name=self.axis_name,
            text=self.compile(state, batch).as_text(),
        )

    @abstractmethod
    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """What is compiled."""

    def _like(self, state: Any) -> Any:
        """Returns the shapes of one worker's parameters."""
        rows = state.params
        return jax.eval_shape(lambda: jax.tree.map(lambda row: row[0], rows.rows)) if is_per_worker(rows) else rows

    def _worker_state(self, params: Any, model_state: Any) -> TrainState:
        state = TrainState(params, self.tx.init(params), jnp.zeros((), jnp.int32), model_state)
        return make_local(state, self.axis_name)

    def _checked_shapes(self, params: Any, model_state: Any) -> TrainState:
        """Returns the shapes of one worker's state; refuses what cannot be trained, and warns."""
        check_model_state(model_state)
        init = in_axes_of_workers(self._worker_state, self.sizes, self.axis_name)
        shapes = jax.eval_shape(init, params, model_state)
        check_axes(get_exchange(shapes.opt_state), self.axis_name)
        for message in check_chain(self.tx, shapes.opt_state, params):
            warnings.warn(message, stacklevel=3)
        return shapes


class WorkersStep(TrainStep):
    """Workers that hold the whole model each, on a mesh."""

    def __init__(self, loss: LossFn, tx: optax.GradientTransformation, mesh: Mesh, axis_name: AxisName, donate: bool):
        """See `make_train_step`; the loss is of `loss_of`."""
        check_axis(mesh, axis_name)
        super().__init__(tx, axis_name, tuple(mesh.shape[name] for name in axis_names(axis_name)), donate)
        self.mesh, self._loss = mesh, loss

    def init(self, params: Any, model_state: Any = ()) -> TrainState:
        """Makes the state on the mesh; see `TrainStep.init`."""
        specs = state_specs(self._checked_shapes(params, model_state))
        on_worker = jax.shard_map(self._worker_state, mesh=self.mesh, in_specs=P(), out_specs=specs)
        given = jax.tree.map(jnp.asarray, (params, model_state))
        return jax.jit(on_worker)(*jax.device_put(given, NamedSharding(self.mesh, P())))

    def shapes(self, params: Any, model_state: Any = ()) -> TrainState:
        """Returns what `init` would make; see `TrainStep.shapes`."""
        shapes = jax.eval_shape(self.init, params, model_state)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            state_shardings(shapes, self.mesh),
        )

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        check_axes(get_exchange(state.opt_state), self.axis_name)
        check_batch(batch, self.workers)
        check_agreement(self._loss, state, batch, dict(self.mesh.shape), self.axis_name)
        specs = state_specs(state)
        own_step = partial(worker_step, jax.value_and_grad(self._loss, has_aux=True), self.tx, self.axis_name)
        in_specs, out_specs = (specs, P(self.axis_name)), (specs, P())
        return jax.shard_map(own_step, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)(state, batch)


class SimulatedStep(TrainStep):
    """Workers that live together on one device, under `jax.vmap`."""

    def __init__(
        self,
        loss: LossFn,
        tx: optax.GradientTransformation,
        workers: int | tuple[int, ...],
        axis_name: AxisName,
        donate: bool,
    ):
        """See `simulate`; the loss is of `loss_of`."""
        super().__init__(tx, axis_name, check_workers(workers, axis_name), donate)
        self._loss = loss
        self._by_name = dict(zip(axis_names(axis_name), self.sizes, strict=True))

    def init(self, params: Any, model_state: Any = ()) -> TrainState:
        """Makes the state, on one device; see `TrainStep.init`."""
        self._checked_shapes(params, model_state)

        def rows(node: Any) -> Any:
            if not is_per_worker(node):
                return node
            count = math.prod(self._by_name[name] for name in node.axes)
            return jax.tree.map(lambda row: jnp.repeat(row, count, axis=0), node)

        init = in_axes_of_workers(self._worker_state, self.sizes, self.axis_name)
        return jax.tree.map(rows, jax.jit(init)(params, model_state), is_leaf=is_per_worker)

    def verify(self, state: Any, batch: Any, *, other_bytes: int = 256, beside: Sequence[Traffic] = ()) -> WireReport:
        """Refuses: nothing crosses a wire where workers are simulated."""
        raise ValueError("A step must run on a mesh to be verified; got simulated workers. Use make_train_step.")

    def report(self, state: Any, batch: Any) -> WireReport:
        """Refuses: nothing crosses a wire where workers are simulated."""
        raise ValueError("A step must run on a mesh to be reported; got simulated workers. Use jaxcomm.wire_report.")

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        check_axes(get_exchange(state.opt_state), self.axis_name)
        check_batch(batch, self.workers)
        own_step = partial(worker_step, jax.value_and_grad(self._loss, has_aux=True), self.tx, self.axis_name)
        if bypassing(state.opt_state, state.params):  # nothing is tracked here, so that a mesh has to tell what differs
            check_agreement(self._loss, state, batch, self._by_name, self.axis_name)
            trace_on(own_step, self._by_name, self.axis_name, state, batch, out_specs=(state_specs(state), P()))
            function = own_step
        else:
            function = in_axes_of_workers(own_step, (1,), ALL_EXCHANGED)
        parts = jax.tree.map(lambda x: x.reshape(*self.sizes, -1, *x.shape[1:]), batch)
        state = jax.tree.map(self._rows_apart, state, is_leaf=is_per_worker)
        for name in reversed(self._by_name):
            own = _axes_of(state, name)
            function = jax.vmap(function, in_axes=(own, 0), out_axes=(own, None), axis_name=name)
        state, metrics = function(state, parts)
        return jax.tree.map(_rows_together, state, is_leaf=is_per_worker), metrics

    def _rows_apart(self, node: Any) -> Any:
        """Gives rows (K, ...) the shape (*sizes, 1, ...): each worker sees its row as (1, ...), as on a mesh."""
        if not is_per_worker(node):
            return node
        along = [size for name, size in self._by_name.items() if name in node.axes]
        return jax.tree.map(lambda rows: rows.reshape(*along, 1, *rows.shape[1:]), node)


def _rows_together(node: Any) -> Any:
    """Does the inverse of `_rows_apart`."""
    if not is_per_worker(node):
        return node
    depth = len(node.axes) + 1
    return jax.tree.map(lambda rows: rows.reshape(math.prod(rows.shape[:depth]), *rows.shape[depth:]), node)


def _axes_of(state: Any, name: str) -> Any:
    """Returns the `in_axes` of a `jax.vmap` over one axis of workers."""

    def axis(node: Any) -> int | None:
        return 0 if is_per_worker(node) and name in node.axes else None

    return jax.tree.map(axis, state, is_leaf=is_per_worker)


def loss_of(loss_fn: LossFn, has_aux: bool, has_state: bool) -> LossFn:
    """Returns (params, model_state, batch) -> (loss, (scalars, new model_state)) of any loss."""

    def loss(params: Any, model_state: Any, batch: Any) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
        if has_state:
            value, (scalars, model_state) = loss_fn(params, model_state, batch)
        else:
            if jax.tree.leaves(model_state):
                raise ValueError(
                    f"A model's state is given to the loss, which returns a new one, got a state of "
                    f"{len(jax.tree.leaves(model_state))} arrays for a loss without: pass has_state=True and "
                    "loss_fn(params, model_state, batch), or leave model_state out of init."
                )
            value = loss_fn(params, batch)
            value, scalars = value if has_aux else (value, {})
            if not has_aux and isinstance(value, tuple):
                raise ValueError(
                    f"A loss must be a scalar; got a tuple of {len(value)}. Pass has_aux=True for a loss_fn that "
                    "returns the loss and a dict of scalars."
                )
        for name, scalar in {"loss": value, **scalars}.items():
            if jnp.shape(scalar) != ():
                raise ValueError(f"{name!r} must be a scalar; got shape {jnp.shape(scalar)}. Take its mean.")
        return value, (scalars, model_state)

    return loss


def worker_step(
    gradients_fn: GradientsFn,
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    state: TrainState,
    batch: Any,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One worker's step; runs inside the axis of workers."""
    old = without_rows(state)
    is_local = communication_period(state.opt_state) is not None
    params = vary_exchanged(old.params, old.opt_state, axis_name)
    (loss, (scalars, model_state)), gradients = gradients_fn(params, old.model_state, batch)
    _check_new_state(model_state, old.model_state)
    updates, opt_state = tx.update(gradients, old.opt_state, old.params)
    exchanged = get_exchange(opt_state).metrics
    exchange_ok = ok = exchanged.skipped == 0
    if is_local:  # between two exchanges a worker is on its own
        ok = ok & is_finite_tree(gradients)
    new_params = optax.apply_updates(old.params, updates)

    own_state = _keep_unless(ok, model_state, old.model_state)
    averaged, mean_state = _mean_over_workers({"loss": loss, **scalars}, own_state, axis_name)
    new = TrainState(
        params=_keep_unless(ok, new_params, old.params),
        opt_state=_keep_unless(ok, opt_state, old.opt_state),
        step=state.step + 1,
        model_state=_keep_unless(exchange_ok, mean_state, old.model_state),
    )
    return make_local(new, axis_name), {**averaged, **exchanged._asdict()}


def _keep_unless(ok: jax.Array, new: Any, old: Any) -> Any:
    """Takes the old tree where the step was skipped; an exchange's own state already knows what to keep."""

    def choose(new_node: Any, old_node: Any) -> Any:
        if is_exchange_state(new_node):
            return new_node
        return keep_unless(ok, new_node, old_node)

    return jax.tree.map(choose, new, old, is_leaf=is_exchange_state)


def _check_new_state(new: Any, old: Any) -> None:
    """Refuses a new state of the model that is not what the next step would take."""
    check_model_state(old)
    kinds = [jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree) for tree in (new, old)]
    if jax.tree.structure(new) != jax.tree.structure(old) or kinds[0] != kinds[1]:
        raise ValueError(
            "A new model state has the structure, shapes and types of the old, got "
            f"{jax.tree.map(jax.typeof, new)} for {jax.tree.map(jax.typeof, old)}: return from loss_fn what it was "
            "given as model_state, with new numbers."
        )


def _mean_over_workers(
    scalars: dict[str, jax.Array], tree: Any, axis_name: AxisName
) -> tuple[dict[str, jax.Array], Any]:
    """Averages scalars, and the leaves of a tree, over the workers in one all-reduce of float32.

    What is `PerWorker` in the tree is not averaged.
    """
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_per_worker)
    leaves = [node for node in nodes if not is_per_worker(node)]
    values = [jnp.asarray(value, jnp.float32) for value in scalars.values()]
    means, _ = dense_mean([*values, *leaves], axis_name)
    averaged = iter(means[len(values) :])
    nodes = [node if is_per_worker(node) else next(averaged) for node in nodes]
    return dict(zip(scalars, means[: len(values)], strict=True)), treedef.unflatten(nodes)
