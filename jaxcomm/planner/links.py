"""The costs of collectives on a link: measured on the live mesh, or estimated from a rate and a latency."""

import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.report import WireReport
from jaxcomm.checks import check_range
from jaxcomm.collectives.axis import AxisName, axis_names, axis_size
from jaxcomm.collectives.messages import LARGE, all_gather_same, all_to_all, sum_scatter, to_next
from jaxcomm.traffic import Program, Traffic

Axes = tuple[str, ...]

_BYTES = tuple(1 << exponent for exponent in range(12, 25, 2))  # bytes that a worker receives: 4 KiB to 16 MiB
_LONG = 0.25  # seconds: after a collective that takes longer, no larger one is measured
REPEATS = 5
_CHAINED = 5  # collectives in one program, to separate the program's start from a collective
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_GIVEN_BYTES = 2.0**40  # of the largest message on a given link: far more than its latency, so that its rate is exact
_GIVEN_ERROR = 0.25  # of a given link: Gloo takes 0.9 to 2 times the time of the bytes


@dataclass(frozen=True)
class Link:
    """The time of one collective, by the bytes that each worker receives.

    Time is not proportional to size: with Gloo a large message takes up to twice as long per byte as a small one. So it
    is interpolated between measured sizes. Above the largest size it grows in proportion.

    Attributes:
      points: (bytes received, seconds), ascending in bytes from 0.
      error: the relative error of a time.
    """

    points: tuple[tuple[float, float], ...]
    error: float

    def seconds(self, received: float) -> float:
        """Returns the seconds of one collective."""
        sizes, times = np.array(self.points).T
        if received <= sizes[-1]:
            return float(np.interp(received, sizes, times))
        return float(times[0] + (times[-1] - times[0]) * received / sizes[-1])

    @property
    def latency(self) -> float:
        """Seconds of a collective that moves nothing."""
        return self.points[0][1]

    @property
    def bits_per_second(self) -> float:
        """The rate at which a worker receives the largest message; infinite if that takes no longer than none."""
        message_bytes, seconds = self.points[-1]
        return 8 * message_bytes / (seconds - self.latency) if seconds > self.latency else math.inf


@dataclass(frozen=True)
class Wire:
    """Seconds of a program's collectives in a usual step.

    Attributes:
      latency: the part that does not depend on the link's speed.
      transfer: the part that does, proportional to the link's seconds per byte.
      error: the error of their sum, in seconds.
    """

    latency: float = 0.0
    transfer: float = 0.0
    error: float = 0.0

    @property
    def seconds(self) -> float:
        """Latency and transfer together."""
        return self.latency + self.transfer

    def __add__(self, addend: "Wire") -> "Wire":
        return Wire(self.latency + addend.latency, self.transfer + addend.transfer, self.error + addend.error)

    def __mul__(self, factor: float) -> "Wire":
        return Wire(self.latency * factor, self.transfer * factor, self.error * factor)


@dataclass(frozen=True)
class Links:
    """The costs of collectives, by their kind (see `Traffic.kind`) and the mesh axes that they go over.

    Attributes:
      table: the measured links.
      rate: bits a second, for collectives that are not in `table`: that each worker receives, or from every worker to
        every other, as in `given_links`; None if only `table` counts.
      latency: seconds of a message, for the same collectives.
    """

    table: Mapping[tuple[str, Axes], Link]
    rate: float | tuple[tuple[float, ...], ...] | None = None
    latency: float = 0.0

    def link(self, traffic: Traffic) -> Link:
        """Returns the cost of one kind of collective.

        Raises:
          ValueError: if it was not measured and there is no rate.
        """
        link = self.table.get((traffic.kind, traffic.axes)) or self.table.get((traffic.op, traffic.axes))
        if link is not None:
            return link
        if self.rate is None:
            collectives = ", ".join(f"{op} over {'/'.join(axes)}" for op, axes in self.table) or "none"
            raise ValueError(
                f"A collective must be measured to be predicted; got {traffic.op} over {'/'.join(traffic.axes)}, and "
                f"measured were {collectives}. Measure its axes too, or give a rate."
            )
        latency = self.latency * _messages(traffic)
        rate = _slowest(self.rate, traffic) if isinstance(self.rate, tuple) else self.rate
        return Link(((0.0, latency), (_GIVEN_BYTES, latency + 8 * _GIVEN_BYTES / rate)), _GIVEN_ERROR)

    def seconds(self, program: Program) -> float:
        """Returns the seconds of a program's collectives in a usual step."""
        return self._sum(program.usual).seconds

    def wire(self, report: WireReport) -> Wire:
        """Returns the seconds of a report's collectives in a step, one after another.

        This is the average over the steps of a local method, and over the full exchanges of one that has them.
        """
        exchange, turns = Program(conditionals=report.program.conditionals), report.turns
        programs = [exchange.in_turn(turn, turns) for turn in range(turns)]
        total = self._sum([traffic for program in programs for traffic in program.usual])
        if report.full_every:
            full = self._sum([traffic for program in programs for traffic in program.most_expensive])
            total = total * (1 - 1 / report.full_every) + full * (1 / report.full_every)
        return self._sum(report.program.always) + total * (1 / report.steps)

    def _sum(self, operations: Sequence[Traffic]) -> Wire:
        total = Wire()
        for traffic in operations:
            if traffic.workers > 1:
                link = self.link(traffic)
                seconds = link.seconds(traffic.longest)
                total += Wire(link.latency, seconds - link.latency, link.error * seconds) * traffic.times
        return total


def _messages(traffic: Traffic) -> int:
    """Returns the number of messages that a collective sends one after another, by its ring algorithm."""
    rounds = traffic.workers - 1
    return {"all_reduce": 2 * rounds, "permute": min(1, rounds), "all_to_all": min(1, rounds)}.get(traffic.op, rounds)


def _slowest(pairs: tuple[tuple[float, ...], ...], traffic: Traffic) -> float:
    """Returns the bits a second that a worker receives if links differ; see `given_links`."""
    rates, workers = np.array(pairs), len(pairs)  # (K, K)
    if traffic.workers != workers:
        raise ValueError(
            f"A link must be given for every worker of a collective; got {workers} rates for {traffic.op} of "
            f"{traffic.workers} workers. Give one for each of them."
        )
    if traffic.op == "all_to_all":
        seconds = 1 / rates  # a bit, 0 from a worker to itself
        return (workers - 1) / float(max(seconds.sum(0).max(), seconds.sum(1).max()))
    hops = traffic.pairs or [(worker, (worker + 1) % workers) for worker in range(workers)]
    return min(float(rates[hop]) for hop in hops)


def bits_per_second(rate: str, name: str = "--rate") -> float:
    """Parses the rate of a link: "100mbit", "1gbit".

    Raises:
      ValueError: if it is not a positive number with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits = float(match[1]) * _UNITS[match[2]] if match else 0.0
    check_range(name, rate, "a positive number with its unit", bits > 0, "Write 100mbit, say")
    return bits


def given_links(rate: float | str | Sequence[float] | Sequence[Sequence[float]], latency: float = 0.0) -> Links:
    """Makes the costs of collectives from given rates, without a measurement.

    If links differ, a collective takes as long as its slowest part. For a ring (all-reduce, all-gather, reduce-scatter)
    this is the slowest link from a worker to the next, in their order. For an all-to-all it is the worker whose sent or
    received messages, one after another, take longest. For a permutation it is the slowest pair.

    Args:
      rate: bits a second: one number that each worker receives, or with its unit, "100mbit"; or one for every worker's
        link, (K,), where a message has the rate of the slower end; or one from every worker (row) to every other
        (column), (K, K), whose diagonal is ignored.
      latency: seconds from one worker to another.

    Raises:
      ValueError: for an impossible rate or latency, and for rows that do not have a rate for every worker.
    """
    rate = bits_per_second(rate, "rate") if isinstance(rate, str) else rate
    try:
        rates = np.array(rate, float)
    except (TypeError, ValueError):  # rows of different lengths
        rates = np.zeros(0)
    if not rates.size or rates.ndim > 2 or (rates.ndim == 2 and len(set(rates.shape)) > 1):
        raise ValueError(
            f"rate must be one, one for every worker, or one from every worker to every other; got {rate!r}. Write 1e9."
        )
    links = rates[~np.eye(len(rates), dtype=bool)] if rates.ndim == 2 and len(rates) > 1 else rates
    holds = bool(np.all((links > 0) & np.isfinite(links)))
    check_range("rate", rate, "a positive number of bits a second", holds, "Write 1e9")
    holds = isinstance(latency, Real) and 0 <= latency <= 10
    check_range("latency", latency, "seconds, from 0 to 10", holds, "Write 0.05 for 50 ms")
    if rates.size == 1:
        return Links({}, rates.item(), latency)
    pairs = np.minimum.outer(rates, rates) if rates.ndim == 1 else rates
    pairs = np.where(np.eye(len(pairs), dtype=bool), np.inf, pairs)
    return Links({}, tuple(tuple(map(float, row)) for row in pairs), latency)


def measure_links(mesh: Mesh, programs: Sequence[Program]) -> Links:
    """Measures the collectives of some programs, over the mesh axes that they use.

    All processes of the mesh must call it together. Each collective is timed at seven sizes, from 4 KiB to 16 MiB
    received per worker, fewer if the link is slow.

    Raises:
      ValueError: for a program whose axes the mesh does not have.
    """
    moving = [traffic for program in programs for _, traffic in program.operations() if traffic.workers > 1]
    kinds = {(traffic.kind, traffic.axes): traffic for traffic in moving}
    for _, axes in kinds:
        check_axes(mesh, axes)
    return Links({kind: _measure(mesh, traffic.op, traffic.axes, traffic.dtype) for kind, traffic in kinds.items()})


def check_axes(mesh: Mesh, axes: AxisName) -> None:
    """Refuses a mesh that lacks an axis of the workers.

    Raises:
      ValueError: naming the axes of the mesh.
    """
    if set(axis_names(axes)) - set(mesh.axis_names):
        raise ValueError(
            f"A mesh must have the axes of the workers; got {dict(mesh.shape)} for axis_name={axes!r}. Make it with "
            "jaxcomm.make_mesh(data=K), or pass axis_name=."
        )


def _measure(mesh: Mesh, op: str, axes: Axes, dtype: str) -> Link:
    element = np.dtype(dtype or "float32")
    workers = math.prod(mesh.shape[name] for name in axes)
    one = float(Traffic(op, 1, workers).received)

    def timed(size: int, chained: int = 1) -> tuple[float, float, float]:
        """Returns the bytes that a worker receives, and the median and half the interquartile range of the seconds."""
        count = max(1, round(size / one / element.itemsize / workers)) * workers  # elements of a worker, in equal parts

        def collectives(x: jax.Array) -> jax.Array:
            for _ in range(chained - 1):
                x += _COLLECTIVES[op](x, axes).reshape(-1)[0].astype(element)  # each waits for the one before
            return _COLLECTIVES[op](x, axes)

        run = jax.jit(jax.shard_map(collectives, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
        # Noise, not zeros: Gloo sums 16-bit numbers in software, and zeros faster than gradients.
        noise = np.random.default_rng(0).uniform(-100, 100, count).astype(element)
        x = jax.device_put(noise, NamedSharding(mesh, P()))
        jax.block_until_ready(run(x))
        # If one worker starts late, large messages of both directions take turns: start them together.
        seconds = time_calls(lambda: run(x), mesh if size >= LARGE else None)
        low, median, high = all_agreed(statistics.quantiles(seconds, n=4), mesh)
        return float(Traffic(op, element.itemsize * count, workers).received), median, (high - low) / 2

    # A step has many collectives in one program, and its start is counted as computing: subtract the start.
    smallest, chained = timed(_BYTES[0]), timed(_BYTES[0], _CHAINED)[1]
    single = smallest[1]
    start = max(0.0, single - (chained - single) / (_CHAINED - 1))
    points, errors = [], []
    for size in _BYTES:
        message_bytes, median, spread = smallest if size == _BYTES[0] else timed(size)
        points.append((message_bytes, max(median - start, median / _CHAINED)))
        errors.append(spread / median)
        if points[-1][1] - points[0][1] > _LONG:  # not only slow to answer
            break
    latency = min(seconds for _, seconds in points)
    return Link(((0.0, latency), *points), statistics.median(errors))


def _parts(x: jax.Array, axes: AxisName) -> jax.Array:
    return x.reshape(axis_size(axes), -1)


_COLLECTIVES: dict[str, Callable[[jax.Array, AxisName], jax.Array]] = {
    "all_reduce": lax.psum,
    "all_gather": all_gather_same,
    "reduce_scatter": lambda x, axes: sum_scatter(_parts(x, axes), axes),
    "all_to_all": lambda x, axes: all_to_all(_parts(x, axes), axes),
    "permute": to_next,
}


def time_calls(call: Callable[[], Any], barrier_mesh: Mesh | None = None) -> list[float]:
    """Returns the seconds of repeated calls, each until its result is ready.

    Args:
      call: the function to time; it returns JAX arrays.
      barrier_mesh: the mesh whose processes start each call together; None if they need not.
    """
    seconds = []
    for _ in range(REPEATS):
        if barrier_mesh is not None:
            agreed(0.0, barrier_mesh)  # a barrier
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return seconds


def agreed(seconds: float, mesh: Mesh) -> float:
    """Returns the largest number of all processes: a step ends when the last worker does.

    It is also a barrier. With one process it returns the number at once.
    """
    return all_agreed([seconds], mesh)[0]


def all_agreed(seconds: Sequence[float], mesh: Mesh) -> list[float]:
    """Returns the elementwise maximum over all processes, which must give equally many numbers."""
    if jax.process_count() == 1:
        return list(seconds)
    sharding, largest = _largest(mesh)
    rows = np.tile(np.asarray(seconds, np.float32), (mesh.local_mesh.devices.size, 1))
    maxima = largest(jax.make_array_from_process_local_data(sharding, rows))
    return [float(value) for value in np.asarray(maxima.addressable_data(0)).max(0)]


@functools.lru_cache(maxsize=8)
def _largest(mesh: Mesh) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    axes = mesh.axis_names
    function = jax.shard_map(lambda x: lax.pmax(x, axes), mesh=mesh, in_specs=P(axes), out_specs=P())
    return NamedSharding(mesh, P(axes)), jax.jit(function)
