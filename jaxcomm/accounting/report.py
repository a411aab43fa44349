"""Bytes per step: predicted from shapes, counted in compiled text, and proof that the two agree.

The prediction reads the traced program and needs no devices: it gives the cost of a method before it is tried.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Number, Real
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.hlo import read_overlap, read_program
from jaxcomm.accounting.jaxpr import jaxpr_program, traced_program
from jaxcomm.checks import check_range, check_transformation
from jaxcomm.collectives.axis import AxisName, abstract_mesh, axis_names, check_workers, use_mesh
from jaxcomm.exchange import axis_name_of, get_exchange
from jaxcomm.kernels.numerics import wide_type
from jaxcomm.state import exchange_interval, exchange_turns, full_interval, trained, update_with, vary_exchanged
from jaxcomm.traffic import Program, Traffic, count_bytes
from jaxcomm.types import Params, PyTree, is_per_worker


@dataclass(frozen=True)
class WireReport:
    """The cost of one exchange, for each worker.

    Attributes:
      workers: K, along all axes.
      parameters: n, elements of the gradient.
      program: its collectives.
      every: steps from one exchange to the next; 1 except for local methods and chains that accumulate.
      overlap: for a compiled step, the share of its products that can be computed while collectives are on their way,
        from 0 to 1; see `read_overlap`. None otherwise.
      turns: exchanges in which all parameters are exchanged once; 1 except for fragments of `local_sgd`.
      full_every: exchanges from one of the most expensive to the next, on average, as of `drain_every`; None if all
        send equally much, or those that do not are of the start of a run.
    """

    workers: int
    parameters: int
    program: Program
    every: int = 1
    overlap: float | None = None
    turns: int = 1
    full_every: int | None = None

    @property
    def steps(self) -> int:
        """Steps in which all parameters are exchanged once: `every` times `turns`, H for a local method."""
        return self.every * self.turns

    @property
    def received(self) -> float:
        """Bytes that each worker receives in a usual step; if not every step exchanges, the average over steps."""
        quiet = self.program.received_always
        return float(quiet + sum(program.received - quiet for program in self.exchanges()) / self.steps)

    @property
    def received_in_exchange(self) -> float:
        """Bytes that each worker receives in a usual step with an exchange, or with the largest of several fragments.

        Equal to `received` if every step exchanges everything.
        """
        return float(max(program.received for program in self.exchanges()))

    def exchanges(self) -> list[Program]:
        """Returns the collectives of a usual step with an exchange, for each of the `turns`."""
        return [self.program.in_turn(turn, self.turns) for turn in range(self.turns)]

    def of_step(self, step: int) -> Program:
        """Returns the collectives of a step; steps are counted from 1."""
        if step % self.every:
            return Program(self.program.always)
        return self.program.in_turn((step // self.every - 1) % self.turns, self.turns)

    def received_over(self, axis_name: str) -> float:
        """Bytes that each worker receives in a usual exchange over one axis of the mesh.

        Raises:
          ValueError: for a report of compiled text that was read without a mesh: its axes are not known.
        """
        return float(max(program.over(axis_name).received for program in self.exchanges()))

    @property
    def received_at_most(self) -> float:
        """Bytes that each worker receives in the most expensive step, such as one that drains."""
        return float(self.program.received_at_most)

    @property
    def received_on_average(self) -> float:
        """Bytes that each worker receives in a step, on average over usual and most expensive ones."""
        excess = sum(program.received_at_most - program.received for program in self.exchanges())
        return self.received + (float(excess) / (self.full_every * self.steps) if self.full_every else 0.0)

    @property
    def dense(self) -> float:
        """Bytes of a ring all-reduce of the same gradient in float32."""
        return float(Traffic("all_reduce", 4 * self.parameters, self.workers).received)

    @property
    def ratio_to_dense(self) -> float:
        """How many times fewer bytes than dense float32; infinite if nothing is received."""
        return self.dense / self.received if self.received else float("inf")

    @property
    def ratio_to_dense_bfloat16(self) -> float:
        """How many times fewer bytes than a dense exchange of two bytes a parameter."""
        return self.ratio_to_dense / 2

    def __str__(self) -> str:
        lines = [
            f"{self.parameters:,} parameters, {self.workers} workers: {self.received:,.0f} bytes received per worker "
            "and step"
        ]
        if self.received:
            lines[0] += f", {self.ratio_to_dense:.1f}x fewer than dense float32, "
            lines[0] += f"{self.ratio_to_dense_bfloat16:.1f}x fewer than dense bfloat16"
        if self.every > 1 or self.turns > 1:
            subject = "an exchange" if self.turns == 1 else f"the largest of {self.turns} exchanges in turn"
            interval = "every step" if self.every == 1 else f"{self.every} steps"
            lines.append(f"  {self.received_in_exchange:,.0f} bytes in {subject}, one in {interval}")
        if self.overlap is not None:
            lines.append(f"  {self.overlap:.1%} of the products can be computed while these bytes are on their way")
        if self.received_at_most != self.received_in_exchange:
            lines.append(f"  at most {self.received_at_most:,.0f} bytes in a rare step")
            if self.full_every:
                lines[-1] += f", one of {self.full_every * self.every}: {self.received_on_average:,.0f} on average"
        for place, traffic in self.program.operations():
            lines.append(
                f"  {traffic.op} of {traffic.operand_bytes:,} bytes over {traffic.workers} workers"
                f"{' (in one branch)' if place == 'branch' else ''}: {float(traffic.received):,.0f} bytes received"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class BoundaryBytes:
    """The bytes that cross one boundary in a step, for each data-parallel worker.

    Attributes:
      forward: bytes of activations that the next stage receives.
      backward: bytes of gradients that it sends back.
      dense: bytes of whole activations in their own type, in one direction.
    """

    forward: int
    backward: int
    dense: int


@dataclass(frozen=True)
class PipelineReport:
    """The cost of one step of a pipeline.

    Attributes:
      boundaries: the bytes of the boundary after every stage but the last.
      exchange: the exchange of one stage's gradients over the workers. Every stage costs the same: dense tensors have
        the size of the largest of any stage, and payloads have room for the stage that sends most of each.
      micro_batches: M.
    """

    boundaries: list[BoundaryBytes]
    exchange: WireReport
    micro_batches: int

    def boundary_seconds(self, rate: float, latency: float = 0.0) -> float:
        """Predicts for how long a step waits, at least, for activations and their gradients.

        A micro-batch's activations cross one cut after another, and then its gradients; the other micro-batches follow
        at the pace of the stage that waits longest. What a stage receives and sends in one direction travels at the
        same time where both of its cuts send equally many bytes, and one after the other where not. Over Gloo each
        takes a round trip. TCP takes longer where many bytes follow a pause.

        Args:
          rate: of every link, bits a second in each direction.
          latency: of a message, one way, seconds.
        """
        is_rate = isinstance(rate, Real) and rate > 0
        check_range("rate", rate, "bits a second, above 0", is_rate, "1e9 is 1 Gbit/s")
        is_latency = isinstance(latency, Real) and 0 <= latency < math.inf
        check_range("latency", latency, "seconds, 0 or more", is_latency, "0.05 is 50 ms")

        def wait(sizes: Sequence[int]) -> float:
            """Returns the seconds of a micro-batch's messages of these bytes a step."""
            return sum(8 * size / rate / self.micro_batches + 2 * latency for size in set(sizes))

        total = 0.0
        for sizes in ([cut.forward for cut in self.boundaries], [cut.backward for cut in self.boundaries]):
            of_stages = [wait(sizes[max(0, stage - 1) : stage + 1]) for stage in range(len(sizes) + 1)]
            total += sum(wait([size]) for size in sizes) + (self.micro_batches - 1) * max(of_stages)
        return total

    def __str__(self) -> str:
        lines = []
        for stage, boundary in enumerate(self.boundaries):
            line = (
                f"stage {stage} to {stage + 1}: {boundary.forward:,} bytes forward, {boundary.backward:,} back "
                f"({2 * boundary.dense / (boundary.forward + boundary.backward):.1f}x fewer than whole activations)"
            )
            if boundary.forward + boundary.backward > 2 * boundary.dense:
                line += ": MORE than whole activations, so few values are sent at once; use sparsity 0 here"
            lines.append(line)
        return "\n".join([*lines, f"each stage's gradients: {self.exchange}"])


def wire_report(
    tx: optax.GradientTransformation,
    params: Params,
    workers: int | tuple[int, ...],
    *,
    beside: Sequence[Traffic] = (),
    axis_name: AxisName | None = None,
) -> WireReport:
    """Predicts the bytes of one exchange from shapes alone.

    Nothing is computed and no device is needed, so K can be any number. Gradients that bypass the exchange cost it
    nothing: the traffic of their layers depends on the batch, and is given as `beside`. TPUs send whole tiles: up to 4
    kB more per message than predicted here. A step's own `report` and `verify` count them.

    Args:
      tx: a transformation or chain with an exchange.
      params: the parameters, or `jax.ShapeDtypeStruct`s of their shapes. Of a model that also has other arrays
        (running statistics), pass what is trained alone.
      workers: K, or the number along each axis.
      beside: collectives of gradients in addition to the exchange: `plan.traffic` of `plan_late_multiply`.
      axis_name: the axis of workers that `tx` was made for, or the axes, outermost first; None as in
        `make_train_step`.

    Raises:
      ValueError: for a chain without an exchange; for leaves that are no arrays, and running statistics of Flax.
    """
    return exchange_report(tx, params, workers, beside, axis_name, takes_statistics=False)


def trained_shapes(params: Params, *, takes_statistics: bool = False) -> Any:
    """Returns the shapes of the parameters that have gradients.

    Args:
      params: arrays, or their shapes.
      takes_statistics: whether running statistics of Flax may be among them, for a step that trains them.

    Raises:
      ValueError: for leaves that are no arrays, and for statistics that are not taken.
    """

    def is_statistic(node: PyTree) -> bool:
        return type(node).__name__ == "BatchStat" and not takes_statistics

    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_statistic):
        is_array = hasattr(leaf, "dtype") or isinstance(leaf, Number)
        is_collected = "['batch_stats']" in jax.tree_util.keystr(path) and not takes_statistics
        if is_statistic(leaf) or not is_array or is_collected:
            raise ValueError(
                f"params must be a tree of arrays or their shapes, all trained; got a {type(leaf).__name__} at "
                f"{jax.tree_util.keystr(path)!r}. Pass what is trained: eqx.filter(model, eqx.is_inexact_array), "
                "nnx.state(model, nnx.Param), or variables['params']."
            )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), trained(params))


def exchange_report(
    tx: optax.GradientTransformation,
    params: Params,
    workers: int | tuple[int, ...],
    layer_traffic: Sequence[Traffic],
    axis_name: AxisName | None,
    kind: Any = None,
    *,
    takes_statistics: bool = True,
) -> WireReport:
    """Predicts the bytes of one exchange between devices of one kind (an `AbstractDevice`); see `wire_report`."""
    check_transformation("tx", tx)
    params = trained_shapes(params, takes_statistics=takes_statistics)
    axis_name = axis_name_of(tx) if axis_name is None else axis_name
    sizes = check_workers(workers, axis_name)
    mesh = abstract_mesh(dict(zip(axis_names(axis_name), sizes, strict=True)), kind)
    interval, turns, full_every = 1, 1, None

    def worker(gradients: PyTree, params: Params) -> Any:
        nonlocal interval, turns, full_every
        state = tx.init(params)
        get_exchange(state)
        gradients, loss = vary_exchanged(gradients, state, axis_name), jnp.zeros(())
        updates, state = update_with(tx, gradients, state, params, loss, lambda _: loss)
        interval, turns, full_every = exchange_interval(state), exchange_turns(state), full_interval(state)
        return jax.tree.map(lambda update: update[None], updates)

    exchange = jax.shard_map(worker, mesh=mesh, in_specs=P(), out_specs=P(axis_name))
    with use_mesh(mesh):
        program = traced_program(exchange, params, params)
    program.always += layer_traffic
    n = sum(leaf.size for leaf in jax.tree.leaves(params))
    return WireReport(math.prod(sizes), n, program, interval, turns=turns, full_every=full_every)


def step_report(step: Any, *args: Any, params: Params, workers: int) -> WireReport:
    """Predicts the bytes of a whole step, its losses and metrics included, by tracing it.

    Args:
      step: a function under `jax.jit` that holds the whole step.
      *args: its arguments; only their shapes and shardings matter.
      params: the parameters, or their shapes.
      workers: K.
    """
    n = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(trained(params)))
    program = jaxpr_program(step.trace(*args).jaxpr)
    turns, full_every = exchange_turns(args), full_interval(args)
    return WireReport(workers, n, program, exchange_interval(args), turns=turns, full_every=full_every)


def verify(
    step: Any,
    *args: Any,
    tx: optax.GradientTransformation,
    params: Params,
    workers: int | tuple[int, ...],
    other_bytes: int = 256,
    beside: Sequence[Traffic] = (),
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    steps: int = 1,
    text: str | None = None,
) -> WireReport:
    """Proves from the compiled text of a step that it sends what its exchange claims, no more and no less.

    Both in a usual step and in the most expensive one, the compiled bytes must be at most the traced bytes, at least
    those of the exchange, and at most those of the exchange plus `other_bytes`.

    Args:
      step: a function under `jax.jit` that holds the whole step.
      *args: its arguments; only their shapes and shardings matter.
      tx: the transformation that exchanges the gradients in it.
      params: the parameters, or their shapes.
      workers: K, or the number along each axis.
      other_bytes: bytes that the step may receive in addition to the exchange (losses and metrics). The bytes of a
        model's state in a `TrainState` among the arguments are added; and, of a step of this library, those of the
        loss's own collectives (SyncBN, a contrastive loss).
      beside: as in `wire_report`.
      axis_name: the axis of workers, or the axes, outermost first; None as in `make_train_step`.
      mesh: the mesh of the step, if it has axes other than the workers': collectives over these alone do not count.
      steps: train steps that the function takes, in a `jax.lax.scan`.
      text: the text of the compiled step, if it is at hand.

    Returns:
      The report of the compiled step.

    Raises:
      ValueError: if XLA sends more bytes than the traced program; if the step sends more than the exchange plus
        `other_bytes` (a dense all-reduce is left in it); or if it sends less than the exchange.
    """
    axis_name = axis_name_of(tx) if axis_name is None else axis_name
    step = step if hasattr(step, "trace") else jax.jit(step)  # a step of jax.pmap has no trace
    claimed = exchange_report(tx, params, workers, beside, axis_name, kind_of_device(args)).program
    count = math.prod(check_workers(workers, axis_name))
    slack = other_bytes + sum(model_state_bytes(arg, count) for arg in args)
    if hasattr(step, "loss_program"):  # a step of this library
        loss, loss_claim = step.loss_program(*args).received_at_most, Program(list(beside)).received
        slack += max(0.0, float(loss) - float(loss_claim))
    traced = step_report(step, *args, params=params, workers=count)
    program: Any = step.lower(*args).compile().as_text() if text is None else text
    return check_bytes(program, traced, claimed, slack, axis_name, mesh, steps)


def kind_of_device(args: Any) -> Any:
    """Returns the `AbstractDevice` of the mesh that arrays, or their shapes, are on; None without a mesh."""
    for leaf in jax.tree.leaves(args):
        if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
            return sharding.mesh.abstract_mesh.abstract_device
    return None


def check_bytes(
    text: str,
    traced: WireReport,
    claimed: Program,
    slack: float,
    axis_name: AxisName,
    mesh: Mesh | None = None,
    steps: int = 1,
    activations: float = 0.0,
) -> WireReport:
    """Compares the compiled bytes of a step with the traced bytes, and with those that its exchange claims.

    Args:
      text: the text of the compiled program.
      traced: the report of the traced step.
      claimed: the collectives of the exchange in one train step.
      slack: bytes that a train step may receive in addition to the exchange.
      axis_name: the axis of workers, or the axes.
      mesh: the mesh of the step: collectives over other axes do not count. None if all count.
      steps: train steps that the program takes.
      activations: bytes of the claim that layers send. On TPUs XLA may send them as 16 bits, if it multiplies so.

    Raises:
      ValueError: as `verify`.
    """
    names = () if mesh is None else axis_names(axis_name)
    predicted, compiled = traced.program, read_program(text, mesh)
    if names:
        predicted, compiled = predicted.over(*names), compiled.over(*names)
    report = replace(traced, program=compiled, overlap=read_overlap(text))
    is_partitioned = mesh is not None and set(mesh.axis_names) > set(names)  # XLA may then add collectives of its own
    programs, turns = (predicted, compiled, claimed), traced.turns
    for turn in range(turns):  # each fragment of a local method by itself
        predicted, compiled, claimed = (program.in_turn(turn, turns) for program in programs)
        ceiling, compiled_claim = (as_compiled(program, text) for program in (predicted, claimed))
        narrower = Fraction(activations) / 2 if _is_of_tpus(text) else 0
        if not is_partitioned and (
            compiled.received > ceiling.received or compiled.received_at_most > ceiling.received_at_most
        ):
            raise ValueError(
                f"A compiled step must send no more bytes than were traced; got {float(compiled.received):,.0f} "
                f"(at most {float(compiled.received_at_most):,.0f}) for {float(predicted.received):,.0f} "
                f"(at most {float(predicted.received_at_most):,.0f}). XLA has changed the collectives (a widened type, "
                f"or a gather over another mesh axis).\n{report}"
            )
        padding = ceiling.received_at_most - predicted.received_at_most
        for kind, total, claim, bound in (
            ("usual", compiled.received, claimed.received, compiled_claim.received),
            ("most expensive", compiled.received_at_most, claimed.received_at_most, compiled_claim.received_at_most),
        ):
            claim, bound = steps * claim, steps * bound
            if total > bound + steps * slack + padding:
                counts, exchanged = _count_collectives(predicted), _count_collectives(claimed)
                times = min((counts[key] // count for key, count in exchanged.items()), default=1)
                if steps == 1 and times > 1:
                    cause = (
                        f"{times} exchanges are in the {kind} step. If it takes {times} steps in a loop, pass "
                        f"steps={times}"
                    )
                else:
                    cause = (
                        f"a dense all-reduce is left in the {kind} step. Take params = jax.lax.pcast(params, "
                        f"{axis_name!r}, to='varying') before jax.grad; or give other_bytes= room for the collectives "
                        "of the loss itself"
                    )
                raise ValueError(
                    f"A step must send its exchange and at most {float(slack):,.0f} bytes more; got "
                    f"{float(total):,.0f} where the exchange is {float(claim):,.0f}: {cause}.\n{report}"
                )
            if total < claim - steps * narrower:
                raise ValueError(
                    f"A step must send its whole exchange; got {float(total):,.0f} bytes where the exchange is "
                    f"{float(claim):,.0f}, in the {kind} step. Pass the tx= and the params= of this step. If they are, "
                    f"read_program has a fault: it missed bytes of the compiled text.\n{report}"
                )
    return report


def as_compiled(program: Program, text: str) -> Program:
    """Returns a program with the largest messages that XLA may make of it in this text: whole tiles on TPUs."""
    return program.in_tiles("_xla_megascale_" in text) if _is_of_tpus(text) else program


def _is_of_tpus(text: str) -> bool:
    return ":T(" in text  # arrays are tiled


def _count_collectives(program: Program) -> Counter[tuple[str, int]]:
    """Returns how often each unconditional collective is run in a step."""
    counts: Counter[tuple[str, int]] = Counter()
    for traffic in program.always:
        counts[traffic.op, traffic.operand_bytes] += traffic.times
    return counts


def model_state_bytes(arg: Any, workers: int) -> float:
    """Returns the bytes that a worker receives for the mean of a model's state; rows are not averaged."""
    nodes = jax.tree.leaves(getattr(arg, "model_state", ()), is_leaf=is_per_worker)
    leaves = [node for node in nodes if not is_per_worker(node)]
    averaged = sum(count_bytes(jnp.shape(leaf), wide_type(jnp.result_type(leaf)).itemsize) for leaf in leaves)
    return float(Traffic("all_reduce", averaged, workers).received)
