"""What collectives cost on a link: measured on the live mesh, or reckoned from a rate and a latency."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.report import WireReport
from jaxcomm.checks import check_range
from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.traffic import Program, Traffic

Axes = tuple[str, ...]

_BYTES = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24)  # that a worker receives: five sizes
_LONG = 0.25  # seconds of a collective from which no larger one is measured, of three sizes at least
_REPEATS = 5


@dataclass(frozen=True)
class Link:
    """What one collective costs: latency + bytes received * seconds_per_byte.

    Attributes:
      latency: seconds of a collective that moves nothing.
      seconds_per_byte: seconds a byte that each worker receives.
      error: how far the measured sizes are from this line, as a part of the time; 0 where nothing was measured.
    """

    latency: float
    seconds_per_byte: float
    error: float = 0.0

    @property
    def bits_per_second(self) -> float:
        """The speed that a worker receives with."""
        return 8 / self.seconds_per_byte if self.seconds_per_byte else math.inf


@dataclass(frozen=True)
class Wire:
    """Seconds of a program's collectives in a usual step.

    Attributes:
      latency: what does not depend on the link's speed.
      transfer: what does, in proportion to seconds a byte.
      error: how far off both may be, in seconds.
    """

    latency: float = 0.0
    transfer: float = 0.0
    error: float = 0.0

    @property
    def seconds(self) -> float:
        """Latency and transfer together."""
        return self.latency + self.transfer

    def __add__(self, other: "Wire") -> "Wire":
        return Wire(self.latency + other.latency, self.transfer + other.transfer, self.error + other.error)

    def __mul__(self, factor: float) -> "Wire":
        return Wire(self.latency * factor, self.transfer * factor, self.error * factor)


@dataclass(frozen=True)
class Links:
    """What every collective costs, by its operation and the axes of the mesh that it goes over.

    Attributes:
      table: of what was measured.
      rate: bits a second that a worker receives where nothing was measured; None if only `table` counts.
      latency: seconds of a message there.
      source: "measured" or "given".
    """

    table: Mapping[tuple[str, Axes], Link]
    rate: float | None = None
    latency: float = 0.0
    source: str = "measured"

    def link(self, traffic: Traffic) -> Link:
        """Returns the cost of one kind of collective.

        Raises:
          ValueError: if nothing is known of it.
        """
        found = self.table.get((traffic.op, traffic.axes))
        if found is not None:
            return found
        if self.rate is None:
            known = ", ".join(f"{op} over {'/'.join(axes)}" for op, axes in self.table) or "none"
            raise ValueError(
                f"A collective must be measured to be predicted; got {traffic.op} over {'/'.join(traffic.axes)}, and "
                f"measured were {known}. Measure its axes too, or give a rate."
            )
        return Link(self.latency * _messages(traffic), 8 / self.rate)

    def wire(self, report: WireReport) -> Wire:
        """Returns the seconds of the collectives of a usual step, one after another.

        Of a local method it is the average over its steps.
        """
        exchange = Program(conditionals=report.program.conditionals)
        return self._sum(report.program.always) + self._sum(_usual(exchange)) * (1 / report.every)

    def _sum(self, operations: Sequence[Traffic]) -> Wire:
        total = Wire()
        for traffic in operations:
            link = self.link(traffic)
            latency = link.latency * traffic.times if traffic.workers > 1 else 0.0
            transfer = float(traffic.received) * link.seconds_per_byte
            total += Wire(latency, transfer, link.error * (latency + transfer))
        return total


def _usual(program: Program) -> list[Traffic]:
    return [*program.always, *(t for branches in program.conditionals for t in _usual(branches[0]))]


def _messages(traffic: Traffic) -> int:
    """Returns the messages that a collective sends one after another, by its ring algorithm."""
    rounds = traffic.workers - 1
    return {"all_reduce": 2 * rounds, "permute": min(1, rounds), "all_to_all": min(1, rounds)}.get(traffic.op, rounds)


def given_links(rate: float, latency: float = 0.0) -> Links:
    """Makes the costs of collectives from a link that nobody measured.

    Args:
      rate: bits a second that each worker receives.
      latency: seconds from one worker to another.

    Raises:
      ValueError: for numbers that no link has.
    """
    check_range("rate", rate, "a positive number of bits a second", rate > 0 and math.isfinite(rate), "write 1e9")
    check_range("latency", latency, "seconds, 0 or more", latency >= 0 and math.isfinite(latency), "write 1e-4")
    return Links({}, rate, latency, "given")


def measure_links(mesh: Mesh, programs: Sequence[Program]) -> Links:
    """Measures the collectives that some programs use, over the axes of a mesh that they use.

    Every process of the mesh calls it together. Of each collective five sizes are timed, from 4 KiB to 16 MiB that a
    worker receives, fewer where the link is slow; a line is fitted to their medians, relative to the time.

    Raises:
      ValueError: for a program whose axes the mesh does not have.
    """
    kinds = dict.fromkeys((t.op, t.axes) for program in programs for _, t in program.operations() if t.workers > 1)
    for _, axes in kinds:
        missing = set(axes) - set(mesh.axis_names)
        if missing:
            raise ValueError(
                f"A mesh must have the axes of the workers; got {mesh.axis_names} for {sorted(missing)}. Make it with "
                "jaxcomm.make_mesh, or pass axis_name=."
            )
    return Links({(op, axes): _measure(mesh, op, axes) for op, axes in kinds})


def _measure(mesh: Mesh, op: str, axes: Axes) -> Link:
    workers = math.prod(mesh.shape[name] for name in axes)
    one = float(Traffic(op, 1, workers).received)
    points = []
    for size in _BYTES:
        words = max(1, round(size / one / 4 / workers)) * workers  # that a worker puts in, in equal parts
        run = jax.jit(
            jax.shard_map(lambda x: _COLLECTIVES[op](x, axes), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        )
        x = jax.device_put(np.zeros(words, np.float32), NamedSharding(mesh, P()))
        jax.block_until_ready(run(x))
        seconds = agreed(statistics.median(time_calls(lambda run=run, x=x: run(x), _REPEATS)), mesh)
        points.append((float(Traffic(op, 4 * words, workers).received), seconds))
        if seconds > _LONG and len(points) >= 3:
            break
    return fit_link(points)


def fit_link(points: Sequence[tuple[float, float]]) -> Link:
    """Fits latency and seconds a byte to (bytes received, seconds), relative to the seconds."""
    received, seconds = np.array(points).T
    weights = 1 / seconds
    columns = np.stack([weights, received * weights], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)
    if latency < 0:
        latency, per_byte = 0.0, (received * weights).sum() / ((received * weights) ** 2).sum()
    if per_byte < 0:
        latency, per_byte = weights.sum() / (weights**2).sum(), 0.0
    error = np.abs((latency + per_byte * received) * weights - 1)
    return Link(float(latency), float(per_byte), float(np.median(error)))


def _all_to_all(x: jax.Array, axes: AxisName) -> jax.Array:
    return lax.all_to_all(x.reshape(lax.axis_size(axes), -1), axes, 0, 0)


def _permute(x: jax.Array, axes: AxisName) -> jax.Array:
    workers = math.prod(lax.axis_size(name) for name in axis_names(axes))
    return lax.ppermute(x, axes, [(worker, (worker + 1) % workers) for worker in range(workers)])


_COLLECTIVES: dict[str, Callable[[jax.Array, AxisName], jax.Array]] = {
    "all_reduce": lax.psum,
    "all_gather": lax.all_gather,
    "reduce_scatter": lambda x, axes: lax.psum_scatter(x, axes, tiled=True),
    "all_to_all": _all_to_all,
    "permute": _permute,
}


def time_calls(call: Callable[[], Any], repeats: int) -> list[float]:
    """Returns the seconds of some calls, each until its result is there."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return seconds


def agreed(seconds: float, mesh: Mesh) -> float:
    """Returns the largest of all processes' numbers: a step ends when the last worker does. Nothing for one process."""
    if jax.process_count() == 1:
        return seconds
    axes = mesh.axis_names
    rows = np.full((mesh.local_mesh.devices.size, 1), seconds, np.float32)
    values = jax.make_array_from_process_local_data(NamedSharding(mesh, P(axes)), rows)
    largest = jax.jit(jax.shard_map(lambda x: lax.pmax(x, axes), mesh=mesh, in_specs=P(axes), out_specs=P()))(values)
    return float(np.asarray(largest.addressable_data(0)).max())
