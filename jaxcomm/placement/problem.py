"""An assignment problem: blocks, tensors with the options to exchange them, devices, links; and the cost of a step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from jaxcomm.checks import check_count, check_range


@dataclass(frozen=True)
class Option:
    """One way to exchange a tensor's gradient.

    Attributes:
      name: the option's name, such as "topk(0.99)". Tensors of one stage that share it pay its start once.
      seconds: seconds that this tensor adds to a step, coding and wire.
      error: the error that it adds to the mean gradient; 0 for a dense exchange.
      memory: bytes on each device that holds the tensor.
    """

    name: str
    seconds: float
    error: float = 0.0
    memory: int = 0

    def __post_init__(self):
        suffix = f"of option {self.name!r}"
        _check_amount(f"seconds {suffix}", self.seconds)
        _check_amount(f"error {suffix}", self.error)
        _check_bytes(f"memory {suffix}", self.memory)


@dataclass(frozen=True)
class Tensor:
    """A tensor, or tensors that are exchanged in the same way.

    Attributes:
      name: a unique name.
      options: the ways to exchange it; one is chosen.
    """

    name: str
    options: tuple[Option, ...]

    def __post_init__(self):
        names = [option.name for option in self.options]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"A tensor must have at least one option, and their names must differ; got {names} for tensor "
                f"{self.name!r}. Give it a dense one, and every name once."
            )


@dataclass(frozen=True)
class Block:
    """A part of a model that stays in one stage.

    Attributes:
      name: its name in messages.
      seconds: forward and backward, for one worker's whole batch on a device of speed 1.
      memory: bytes of parameters, optimizer and activations.
      boundary_bytes: bytes that cross in a step if the model is cut after this block, for each worker, both directions
        together.
      tensors: the tensors whose gradients are exchanged.
    """

    name: str
    seconds: float
    memory: int = 0
    boundary_bytes: float = 0
    tensors: tuple[Tensor, ...] = ()

    def __post_init__(self):
        suffix = f"of block {self.name!r}"
        _check_amount(f"seconds {suffix}", self.seconds)
        _check_bytes(f"memory {suffix}", self.memory)
        _check_amount(f"boundary_bytes {suffix}", self.boundary_bytes)


@dataclass(frozen=True)
class Device:
    """The slowest and smallest device of a stage.

    Attributes:
      speed: a block takes `seconds / speed`.
      memory: bytes, or None for no limit.
    """

    speed: float = 1.0
    memory: int | None = None

    def __post_init__(self):
        holds = isinstance(self.speed, Real) and math.isfinite(self.speed) and self.speed > 0
        check_range("speed of a device", self.speed, "finite and above 0", holds, "1.0 is the speed of Block.seconds")
        if self.memory is not None:
            _check_bytes("memory of a device", self.memory)


@dataclass(frozen=True)
class Problem:
    """The blocks to assign to stages, and the costs and limits.

    Attributes:
      blocks: the blocks of the model, in order.
      devices: one for every stage, in order.
      link_seconds_per_byte: for the link between every stage and the next.
      link_seconds: latency of a message on each of these links; over Gloo a round trip.
      starts: by option name, the seconds that a stage pays once if any of its tensors uses the option, such as the
        latency of its collectives. Other names cost nothing.
      micro_batches: M, into which a batch is divided.
      error_budget: the largest sum of the errors of all tensors, or None for no limit.
    """

    blocks: tuple[Block, ...]
    devices: tuple[Device, ...] = (Device(),)
    link_seconds_per_byte: tuple[float, ...] = ()
    link_seconds: tuple[float, ...] = ()
    starts: Mapping[str, float] = field(default_factory=dict)
    micro_batches: int = 1
    error_budget: float | None = None

    def __post_init__(self):
        B, S = len(self.blocks), len(self.devices)
        if not B or not 1 <= S <= B:
            raise ValueError(
                f"A model must have at least one stage, and at most as many as blocks; got {S} stages for {B} blocks. "
                "Give one device for each stage."
            )
        for name in ("link_seconds_per_byte", "link_seconds"):
            values = getattr(self, name)
            if len(values) != S - 1:
                raise ValueError(
                    f"{name} must have a value for every stage but the last; got {len(values)} for {S} stages. Give "
                    f"{S - 1}."
                )
            for value in values:
                _check_amount(name, value)
        for name, value in self.starts.items():
            _check_amount(f"start of option {name!r}", value)
        check_count("micro_batches", self.micro_batches, 1, "1 is the whole batch at once")
        if self.error_budget is not None:
            _check_amount("error_budget", self.error_budget)
        names = [tensor.name for block in self.blocks for tensor in block.tensors]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"The names of tensors must differ; got {twice!r} twice. Put the block's name before it.")

    def start(self, option: str) -> float:
        """Returns the seconds that a stage pays once for using an option."""
        return self.starts.get(option, 0.0)


@dataclass(frozen=True)
class StepParts:
    """The seconds of a step, in three parts.

    Attributes:
      compute: forward and backward of all micro-batches, until the slowest stage is done.
      boundaries: the traffic between stages.
      exchange: the exchange of gradients, in the stage where it takes longest.
    """

    compute: float
    boundaries: float
    exchange: float

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        return self.compute + self.boundaries + self.exchange


def fill(problem: Problem) -> float:
    """Returns the time of a pipeline relative to its slowest stage: (M + S - 1) / M, as with GPipe."""
    return (problem.micro_batches + len(problem.devices) - 1) / problem.micro_batches


def crossing_seconds(problem: Problem, stage: int, block: int) -> float:
    """Returns a micro-batch's seconds on the link after a stage whose last block is `block`: two messages."""
    size = problem.blocks[block].boundary_bytes / problem.micro_batches
    return 2 * problem.link_seconds[stage] + size * problem.link_seconds_per_byte[stage]


def step_parts(problem: Problem, stages: Sequence[int], options: Mapping[str, str]) -> StepParts:
    """Returns the cost of a step.

    compute = (M + S - 1) / M * the slowest stage's sum of `seconds / speed`
    boundaries = the sum over cuts of t, and M - 1 times the largest t, where t is a micro-batch's time on the link:
        2 * latency + bytes / M * seconds per byte; that of `PipelineReport.boundary_seconds` if all t are equal
    exchange = the slowest stage's sum of its tensors' option seconds, and of the starts of the options that it uses

    Args:
      problem: blocks, devices, links.
      stages: the stage of each block.
      options: the name of each tensor's option.
    """
    S = len(problem.devices)
    compute, exchange, names = [0.0] * S, [0.0] * S, [set[str]() for _ in range(S)]
    for stage, block in zip(stages, problem.blocks, strict=True):
        compute[stage] += block.seconds / problem.devices[stage].speed
        for tensor in block.tensors:
            (selected,) = [option for option in tensor.options if option.name == options[tensor.name]]
            exchange[stage] += selected.seconds
            names[stage].add(selected.name)
    starts = [sum(problem.start(name) for name in sorted(stage_names)) for stage_names in names]
    crossing = [crossing_seconds(problem, stages[b], b) for b in range(len(stages) - 1) if stages[b] != stages[b + 1]]
    return StepParts(
        compute=fill(problem) * max(compute),
        boundaries=math.fsum([*crossing, (problem.micro_batches - 1) * max(crossing, default=0.0)]),
        exchange=max(a + b for a, b in zip(exchange, starts, strict=True)),
    )


def _check_amount(name: str, value: float) -> None:
    holds = isinstance(value, Real) and math.isfinite(value) and value >= 0
    check_range(name, value, "finite and at least 0", holds, "Measure it, or leave the option or the limit out")


def _check_bytes(name: str, value: int) -> None:
    holds = isinstance(value, Integral) and value >= 0
    check_range(name, value, "a whole number of bytes, at least 0", holds, "Round it up")
