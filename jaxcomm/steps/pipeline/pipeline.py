"""A model cut into stages along a mesh axis: the schedule of its micro-batches, and its gradients.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019. The
boundaries are those of Gupta et al., KDD 2021.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm.accounting.jaxpr import jaxpr_communicates
from jaxcomm.accounting.report import BoundaryBytes, PipelineReport, wire_report
from jaxcomm.checks import check_range
from jaxcomm.collectives.axis import AxisName, at_positions, axis_names, to_varying
from jaxcomm.collectives.boundary import Encoded, Route, send
from jaxcomm.kernels import noise
from jaxcomm.layers.activations import Whole
from jaxcomm.layers.boundary import Boundary, dct_mp
from jaxcomm.layout import stacked
from jaxcomm.steps.batch import check_batch
from jaxcomm.steps.pipeline.stage_params import StackedParams, plan_stacked
from jaxcomm.types import Params, PyTree

StageFn = Callable[..., Any]
STAGE_AXIS = "stage"


@dataclass(frozen=True)
class Pipeline:
    """A model in S stages, and the way they are run.

    In the backward pass a stage recomputes its activations. Memory: the activations of one tick and the inputs of the
    stages; time: one more forward pass.

    Attributes:
      stages: a function for every stage, (params, x, batch) -> x: of its own parameters, the output of the stage before
        (a pytree of arrays with the samples first; None for the first stage), and a micro-batch. With a `model_state`:
        (params, model_state, x, batch) -> (x, new model state). The shapes of different stages need not agree.
      loss_fn: (output of the last stage, micro-batch) -> (mean loss, dict of scalars).
      params: the parameters of every stage, or `jax.ShapeDtypeStruct`s; only their shapes are kept.
      model_state: the model state of every stage, or shapes; None without one. Every micro-batch starts from the same
        state, and the mean of their new states is kept.
      boundaries: the boundary after every stage but the last, S-1 of them; by default they send whole activations.
      micro_batches: M, into which each worker's rows are divided. A step has M + S - 1 ticks; a stage is busy in M.
      schedule: "gpipe", all micro-batches forward and then all backward; or "1f1b", each backward as early as possible.
        The gradients are equal up to the order of their sum; "1f1b" keeps the inputs of at most 2 S - 3 micro-batches
        instead of M (see `OneForwardOneBackward`).
    """

    stages: Sequence[StageFn]
    loss_fn: Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array]]]
    params: Sequence[Any]
    model_state: Sequence[Any] | None = None
    boundaries: Sequence[Boundary] | None = None
    micro_batches: int = 1
    schedule: str = "gpipe"

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("A pipeline must have at least one stage; got none. Pass a function for each.")
        for name, trees in (("params", self.params), ("model_state", self.model_state)):
            if trees is not None and len(trees) != len(self.stages):
                raise ValueError(
                    f"{name} must have a tree for every stage; got {len(trees)} for {len(self.stages)} stages. Pass () "
                    "for a stage without."
                )
            object.__setattr__(self, name, None if trees is None else [_shapes(tree) for tree in trees])
        count = self.micro_batches
        check_range("micro_batches", count, "at least 1", count >= 1, "1 is the whole batch at once")
        holds = self.schedule in ("gpipe", "1f1b")
        check_range("schedule", self.schedule, "gpipe or 1f1b", holds, "1f1b keeps the inputs of fewer micro-batches")
        cuts = len(self.stages) - 1
        if self.boundaries is not None and len(self.boundaries) != cuts:
            raise ValueError(
                f"boundaries must have one for every stage but the last; got {len(self.boundaries)} for "
                f"{len(self.stages)} stages. Pass {cuts}, dct_mp(0.0) where nothing is to be left out."
            )

    @property
    def size(self) -> int:
        """S, the number of stages."""
        return len(self.stages)

    @cached_property
    def param_slots(self) -> StackedParams:
        """The layout of the stacked stage parameters in the state of a run."""
        return plan_stacked(self.params)

    @cached_property
    def state_slots(self) -> StackedParams:
        """The layout of the stages' stacked model state."""
        return plan_stacked([()] * self.size if self.model_state is None else self.model_state)

    def boundary(self, stage: int) -> Boundary:
        """Returns the boundary after a stage."""
        return dct_mp(0.0) if self.boundaries is None else self.boundaries[stage]

    def run_stage(self, stage: int, params: Params, model_state: PyTree, x: Any, batch: PyTree) -> tuple[Any, Any]:
        """Runs one stage on one micro-batch; returns (x, model state)."""
        if self.model_state is not None:
            return self.stages[stage](params, model_state, x, batch)
        return self.stages[stage](params, x, batch), model_state

    def plan(self, batch: PyTree) -> "Plan":
        """Finds the shapes of the activations that cross, from the shapes of one worker's batch.

        Raises:
          ValueError: if the rows are not a multiple of the micro-batches, if a boundary cannot send an activation, if a
            stage changes the shape of its model state, has float64, or has collectives of its own.
        """
        micro = jax.tree.map(self._micro_struct, batch)
        cuts, x = [], None
        states = [()] * self.size if self.model_state is None else self.model_state
        for stage in range(self.size):
            x, new = _trace_stage(stage, partial(self.run_stage, stage), self.params[stage], states[stage], x, micro)
            _check_new_state(stage, _shapes(new), states[stage])
            _check_32_bits((self.params[stage], states[stage], x), stage)
            if stage < self.size - 1:
                leaves, tree = jax.tree.flatten(x)
                cuts.append(Cut([self.boundary(stage).plan(leaf) for leaf in leaves], tree))
        _, scalars = jax.eval_shape(self.loss_fn, x, micro)
        return Plan(cuts, tuple(scalars))

    def report(
        self, tx: optax.GradientTransformation, batch: PyTree, workers: int, *, axis_name: AxisName = "data"
    ) -> PipelineReport:
        """Predicts the bytes of a step from shapes alone; no devices are needed.

        Args:
          tx: a chain with an exchange.
          batch: a global batch, or the shapes of one.
          workers: K, data-parallel workers.
          axis_name: the axis of workers.

        Raises:
          ValueError: if the batch does not divide.
        """
        check_batch(batch, workers, self.micro_batches, takes_scalars=False)
        worker_batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // workers, *leaf.shape[1:]), leaf.dtype), batch
        )
        count, boundaries = self.micro_batches, []
        for cut in self.plan(worker_batch).cuts:
            forward, backward = cut.bytes_each_way()
            boundaries.append(BoundaryBytes(count * forward, count * backward, count * cut.dense_bytes))
        with self.exchanging():
            exchange = wire_report(tx, self.exchanged_shapes(), workers, axis_name=axis_name)
        return PipelineReport(boundaries, exchange, count)

    def exchanging(self, *, on_stages: bool = False) -> AbstractContextManager[None]:
        """Makes exchanges inside count each stage's own elements; `on_stages` inside the axis of stages."""
        return stacked(self.param_slots.sizes(), STAGE_AXIS if on_stages else None)

    def exchanged_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the gradients that every stage exchanges: those of the stacked parameters."""
        slots = self.param_slots
        return [jax.ShapeDtypeStruct(*pair) for pair in zip(slots.shapes, slots.dtypes, strict=True)]

    def _micro_struct(self, leaf: PyTree) -> jax.ShapeDtypeStruct:
        rows = leaf.shape[0] if leaf.ndim else 0
        if rows == 0 or rows % self.micro_batches:
            raise ValueError(
                f"Each worker's rows must be a multiple of micro_batches; got {rows} rows for {self.micro_batches} "
                "micro-batches. Use another batch size, or another micro_batches=."
            )
        return jax.ShapeDtypeStruct((rows // self.micro_batches, *leaf.shape[1:]), leaf.dtype)


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree)


def _check_32_bits(trees: Any, stage: int) -> None:
    """Refuses float64, which would cross the boundaries as float32."""
    wide = [leaf.dtype for leaf in jax.tree.leaves(trees) if jnp.dtype(leaf.dtype) == jnp.float64]
    if wide:
        raise ValueError(
            "The parameters, states and outputs of a stage must have at most 32 bits a number, since boundaries send "
            f"no more; got float64 in stage {stage}. Cast them to float32, or train without stages."
        )


def _trace_stage(stage: int, run: Callable[..., Any], *args: Any) -> Any:
    """Returns the output shapes of a stage; refuses collectives, which in one branch of many would wait for ever."""
    refusal = ValueError(
        f"A stage must not have collectives, since the devices of other stages run another branch and would never "
        f"answer; got one in stage {stage}. Leave it out: the step averages losses, gradients and the model state over "
        "the workers by itself."
    )
    try:
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
    except NameError as error:
        if "unbound axis name" in str(error):  # in a report there are no axes
            raise refusal from error
        raise
    if jaxpr_communicates(traced):
        raise refusal
    return shapes


def _check_new_state(stage: int, new: PyTree, old: PyTree) -> None:
    if jax.tree.structure(new) != jax.tree.structure(old) or jax.tree.leaves(new) != jax.tree.leaves(old):
        raise ValueError(
            f"A stage must return a model state of the structure, shapes and types of the old one; got {new} for {old} "
            f"from stage {stage}. Return what it was given, with new values."
        )


class Cut(NamedTuple):
    """The arrays that cross one boundary, for one micro-batch.

    Attributes:
      formats: the format of every array.
      tree: the structure of the arrays.
    """

    formats: list[Whole]
    tree: Any

    def encode(self, x: Any) -> list[Encoded]:
        """Encodes the output of a stage."""
        return [fmt.encode(leaf) for fmt, leaf in zip(self.formats, jax.tree.leaves(x), strict=True)]

    def decode(self, encoded: list[Encoded]) -> Any:
        """Decodes the input of the next stage."""
        return self.tree.unflatten([fmt.decode(one) for fmt, one in zip(self.formats, encoded, strict=True)])

    def nothing(self) -> list[Encoded]:
        """Returns encoded arrays of zeros."""
        shapes = jax.eval_shape(lambda: [fmt.encode(jnp.zeros(fmt.shape, fmt.dtype)) for fmt in self.formats])
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def bytes_each_way(self) -> tuple[int, int]:
        """Returns the bytes that cross forward and backward for one micro-batch."""
        forward = backward = 0
        for item in self.formats:
            encoded = jax.eval_shape(item.encode, jax.ShapeDtypeStruct(item.shape, item.dtype))
            forward += 4 * (jax.eval_shape(item.values_as.encode, encoded.values).size + encoded.words.size)
            backward += 4 * jax.eval_shape(item.gradients_as(noise.make_key()).encode, encoded.values).size
        return forward, backward

    @property
    def dense_bytes(self) -> int:
        """Bytes of one micro-batch's whole activations, in one direction."""
        return sum(math.prod(fmt.shape) * jnp.dtype(fmt.dtype).itemsize for fmt in self.formats)


class Plan(NamedTuple):
    """The shapes of a pipeline.

    Attributes:
      cuts: the arrays that cross after every stage but the last.
      scalars: the names of the loss function's scalars.
    """

    cuts: list[Cut]
    scalars: tuple[str, ...]


class _Totals(NamedTuple):
    """Sums over the micro-batches. Loss and scalars are zero except in the last stage; each has its model state."""

    loss: jax.Array
    scalars: dict[str, jax.Array]
    model_state: list[jax.Array]


class Schedule:
    """One worker's run of all micro-batches through all stages (GPipe), inside a manual region of the mesh."""

    def __init__(self, pipeline: Pipeline, axis_name: AxisName, batch: PyTree, seed: jax.Array):
        """Prepares a batch of one worker's rows; `seed` is for random boundaries, and differs between steps."""
        self.pipeline, self.plan = pipeline, pipeline.plan(batch)
        self.all_axes = (*axis_names(axis_name), STAGE_AXIS)
        count = pipeline.micro_batches
        self.batch = jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), self._vary(batch))
        self.seed = seed

    def gradients(self, params: list[jax.Array], model_state: list[jax.Array]) -> PyTree:
        """Returns the totals of `run`, and the gradients of this stage's stacked parameters."""

        def loss_fn(params: list[jax.Array]) -> tuple[jax.Array, _Totals]:
            totals = self.run(params, model_state)
            return totals.loss, totals

        (_, totals), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return totals, gradients

    def run(self, params: list[jax.Array], model_state: list[jax.Array]) -> _Totals:
        """Returns the loss, the scalars and the new model state of this device's stage.

        Differentiable with respect to the stacked parameters. The loss is zero except in the last stage.
        """
        size, count = self.pipeline.size, self.pipeline.micro_batches
        carry = self._vary(self._nothing(model_state))

        def tick(carry: PyTree, time: Any, active: list[int], in_loop: bool) -> PyTree:
            inboxes, totals = carry

            def compute(params: Params, inboxes: Any) -> Any:
                branches = {stage: self._branch(stage, model_state, time - stage) for stage in active}
                return self._switch(branches, params, inboxes)

            outboxes, new = jax.checkpoint(compute, prevent_cse=not in_loop)(params, inboxes)
            inboxes = list(inboxes)
            if senders := [stage for stage in active if stage < size - 1]:
                keys = [self._key(stage, time - stage) for stage in senders]
                arrived = send(self._routes(senders), [outboxes[stage] for stage in senders], STAGE_AXIS, keys)
                for stage, boxes in zip(senders, arrived, strict=True):
                    inboxes[stage] = boxes
            return inboxes, jax.tree.map(jnp.add, totals, new)

        def active_at(time: int) -> list[int]:
            return [stage for stage in range(size) if 0 <= time - stage < count]

        _, totals = run_ticks(tick, carry, active_at, count + size - 1)
        return jax.tree.map(lambda total: total / count, totals)

    def _switch(self, branches: dict[int, Callable[..., Any]], *args: Any) -> Any:
        """Runs the branch of this device's stage, if it is active; otherwise returns zeros."""
        branches = {stage: lambda *args, run=run: self._vary(run(*args)) for stage, run in branches.items()}
        return at_positions(branches, STAGE_AXIS, *args)

    def _branch(self, stage: int, model_state: list[jax.Array], micro_batch: PyTree) -> Callable[..., Any]:
        pipeline, cuts, last = self.pipeline, self.plan.cuts, self.pipeline.size - 1

        def branch(slots: list[jax.Array], inboxes: list[list[Encoded]]) -> Any:
            micro = jax.tree.map(lambda leaf: at(leaf, micro_batch), self.batch)
            params = pipeline.param_slots.of_stage(stage, slots)
            own_state = pipeline.state_slots.of_stage(stage, model_state)
            x = cuts[stage - 1].decode(inboxes[stage - 1]) if stage else None
            x, new_state = pipeline.run_stage(stage, params, own_state, x, micro)
            outboxes, totals = self._nothing(model_state)
            if stage == last:
                loss, scalars = pipeline.loss_fn(x, micro)
                scalars = {name: jnp.asarray(scalars[name], jnp.float32) for name in self.plan.scalars}
                totals = totals._replace(loss=jnp.asarray(loss, jnp.float32), scalars=scalars)
            else:
                outboxes[stage] = cuts[stage].encode(x)
            totals = totals._replace(model_state=pipeline.state_slots.to_slots(stage, new_state))
            return outboxes, totals

        return branch

    def _nothing(self, model_state: list[jax.Array]) -> tuple[list[list[Encoded]], _Totals]:
        zero = jnp.zeros((), jnp.float32)
        totals = _Totals(zero, dict.fromkeys(self.plan.scalars, zero), [jnp.zeros_like(slot) for slot in model_state])
        return [cut.nothing() for cut in self.plan.cuts], totals

    def _routes(self, stages: Iterable[int]) -> list[Route]:
        return [Route(tuple(self.plan.cuts[stage].formats), stage, stage + 1) for stage in stages]

    def _key(self, stage: int, micro_batch: PyTree) -> jax.Array:
        return noise.make_key(self.seed, stage, micro_batch)

    def _vary(self, tree: PyTree) -> Any:
        return to_varying(tree, self.all_axes)


def at(array: jax.Array, index: Any) -> jax.Array:
    """Returns the row at an index, which may be traced."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def run_ticks(tick: Callable[..., Any], carry: PyTree, active_at: Callable[[int], Any], count: int) -> Any:
    """Runs ticks in order; successive ticks with the same active stages become one loop.

    A tick is (carry, time, active stages, whether it is in a loop) -> carry, and `active_at` time -> active stages.
    """
    for active, times in itertools.groupby(range(count), active_at):
        first, *later_times = times
        if later_times:
            times = jnp.arange(first, later_times[-1] + 1)
            carry, _ = lax.scan(lambda carry, time, at=active: (tick(carry, time, at, True), None), carry, times)
        else:
            carry = tick(carry, first, active, False)
    return carry
