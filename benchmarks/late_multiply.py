"""Late-multiply against the reduction of gradients, between real processes on rate-limited links.

    python -m benchmarks.late_multiply --hosts 2,4 --rate 1gbit,10gbit      # AlexNet's dense layers, batch 256
    python -m benchmarks.late_multiply --crossover --hosts 2 --rate 1gbit   # the batch at which both cost the same

Every host of a network lab is a process with its rows of the batch. A step turns each host's inputs and errors of every
layer into the workers' mean gradients of the kernels: by products and an all-reduce, or by gathers and products.
ms_communication is the time of the collectives alone, as in the paper's table (GPUs, 10 Gbit/s Ethernet).

The crossover in bytes is found by bisection over compiled programs, the one in time by timing some batches around it.
"""

import functools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks import harness
from benchmarks.crossover import bisect, crossing
from benchmarks.harness import Control, HostOptions, Row
from jaxcomm.accounting.hlo import read_program
from jaxcomm.collectives import dense_mean
from jaxcomm.layers.late_multiply import gather_rows
from jaxcomm.state import vary_exchanged

ALEXNET = "9216x4096,4096x4096,4096x1000"
SMALL = "1024x512"  # the default for a crossover, where a batch has about as many numbers as the kernel
MODES = ("reduce", "late")
# Yang et al., 2017, table 1: AlexNet, batch 256, 10 Gbit/s Ethernet; by GPUs and mode.
PAPER_MS = {(2, "reduce"): 894.0, (2, "late"): 164.0, (4, "reduce"): 1287.0, (4, "late"): 399.0}
_SIZES = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # batches of a crossover in time, as multiples of the one at equal bytes

Shape = tuple[int, int]


@dataclass(frozen=True)
class Config(HostOptions):
    """Time late-multiply against the reduction of gradients on rate-limited links."""

    layers: str | None = None
    """Dense layers, inputs x outputs, separated by commas; AlexNet's three (58.6M weights) if not given, or one of
    1024x512 for a crossover."""
    batch: int = 256  # Rows over all hosts.
    hosts: str = "2,4"  # Numbers of hosts, separated by commas; one worker each.
    rate: str = "1gbit,10gbit"  # Link rates, separated by commas: "100mbit", "10gbit", or "none" for no limit.
    steps: int = 5  # Timed steps of each mode and rate.
    crossover: bool = False
    """Find the batch at which both ways move equal bytes, and the one at which both take equal time."""


def main(config: Config) -> None:
    """Runs the hosts, prints the tables, and writes them where asked.

    The crossovers are the batches at which late-multiply stops paying: by the formula 2 N M / (N + M); where the
    compiled programs move equal bytes; and where steps take equal time by their medians, and by the fastest step of
    every batch (None if no such batch is between those tried).
    """
    layers, counts, rates = check(config)
    rows = [row for K in counts for row in harness.on_hosts(K, rates[0], config)]
    timed = compare(
        [row for row in rows if "mode" in row],
        is_papers=layers == parse_layers(ALEXNET) and config.batch == 256,
    )
    tables = [(f"Mean gradients of {', '.join(_name(layer) for layer in layers)}", timed)]
    if crossovers := [row for row in rows if "mode" not in row]:
        tables.append(("Late-multiply pays below a batch of", crossovers))
    harness.report(config.json, *tables)


def check(config: Config) -> tuple[list[Shape], list[int], list[str]]:
    """Returns the layers, the numbers of hosts and the rates.

    Raises:
      ValueError: for options that cannot work, before a host starts.
    """
    layers = parse_layers(config.layers or (SMALL if config.crossover else ALEXNET))
    counts, rates = harness.numbers("--hosts", config.hosts, least=1), harness.check_run(config.rate, config.steps)
    if config.crossover and len(layers) > 1:
        raise ValueError(
            f"--layers must be one layer with --crossover; got {config.layers}. Give one, such as {SMALL}."
        )
    for count in counts:
        if not config.crossover and (config.batch < count or config.batch % count):
            raise ValueError(
                f"--batch must be a multiple of the number of hosts; got {config.batch} for {count} hosts."
            )
    return layers, counts, rates


def parse_layers(text: str) -> list[Shape]:
    """Reads shapes such as "9216x4096,4096x1000".

    Raises:
      ValueError: for anything else.
    """
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part.strip())
        if match is None:
            raise ValueError(
                f"--layers must be inputs x outputs, separated by commas; got {part!r}. Give {ALEXNET}, say."
            )
        shapes.append((int(match[1]), int(match[2])))
    return shapes


def equal_batch(shape: Shape) -> float:
    """Returns the batch at which both ways move equal bytes, 2 N M / (N + M)."""
    return 2 * math.prod(shape) / sum(shape)


def compare(rows: Sequence[Row], *, is_papers: bool) -> list[Row]:
    """Adds what the paper measured, and how late-multiply compares with the reduction in the same setting."""

    def paper_ms(row: Row) -> float | None:
        return PAPER_MS.get((row["hosts"], row["mode"])) if is_papers and row["rate"] == "10gbit" else None

    rows = [row | {"paper_ms": paper_ms(row)} for row in rows]
    return harness.compare(rows, ["hosts", "rate", "batch"], mode="reduce")


def bytes_crossover(layer: Shape, mesh: Any) -> float:
    """Returns the batch at which both modes, compiled for the workers of a mesh, move equal bytes."""
    step_bytes = functools.cache(lambda mode, batch: compile_step([layer], mesh, mode, batch)[1])

    def gap(batch: int) -> float:
        return step_bytes("late", batch) - step_bytes("reduce", batch) if batch else -step_bytes("reduce", mesh.size)

    low, high = bisect(lambda batch: gap(batch) < 0, mesh.size, equal_batch(layer))
    return low + (high - low) * gap(low) / (gap(low) - gap(high))


def run_host(config: Config, control: Control) -> Iterator[Row]:
    """Runs one host's part; yields a row for each mode, batch and rate, and the crossovers."""
    layers, _, rates = check(config)
    mesh, K = jc.make_mesh(data=control.hosts), control.hosts
    sizes, by_bytes = [config.batch], 0.0
    if config.crossover:
        by_bytes = bytes_crossover(layers[0], mesh)
        sizes = sorted({max(round(by_bytes * part / K), 1) * K for part in _SIZES})
    rows = [row for batch in sizes for row in _measure(layers, batch, rates, config.steps, mesh, control)]
    yield from rows
    for rate in rates if config.crossover else ():
        pairs = [
            [harness.find(rows, rate=rate, batch=batch, mode=mode) or {} for mode in ("late", "reduce")]
            for batch in sizes
        ]
        by_time, by_fastest = (
            crossing([(late["batch"], late[column] / reduced[column]) for late, reduced in pairs])
            for column in ("ms_median", "ms_min")
        )
        yield {
            "hosts": K,
            "rate": rate,
            "layer": _name(layers[0]),
            "batch_by_formula": equal_batch(layers[0]),
            "batch_by_bytes": by_bytes,
            "batch_by_time": by_time,
            "batch_by_fastest": by_fastest,
        }


def compile_step(layers: Sequence[Shape], mesh: Any, mode: str, batch: int) -> tuple[Callable[..., Any], float, float]:
    """Returns the compiled (inputs, errors of every layer) -> mean gradients, what it receives, and compile seconds."""
    tx = jc.plump_dp(where=lambda path, leaf: mode != "late")

    def worker(*rows: jax.Array) -> Any:
        kernels = [jnp.zeros(shape, jnp.float32) for shape in layers]  # no gradient depends on their values
        state = tx.init(kernels)

        def loss(kernels: list[jax.Array]) -> jax.Array:
            products = [jc.late_multiply(x, w, mode=mode) for x, w in zip(rows[::2], kernels, strict=True)]
            return sum(jnp.sum(y * error) for y, error in zip(products, rows[1::2], strict=True))

        return tx.update(jax.grad(loss)(vary_exchanged(kernels, state, "data")), state)[0]

    step = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=P("data"), out_specs=P()))
    sharding = NamedSharding(mesh, P("data"))
    widths = [width for shape in layers for width in shape]
    like = [jax.ShapeDtypeStruct((batch, width), jnp.float32, sharding=sharding) for width in widths]
    compiled, text, seconds = harness.timed_compile(step, *like)
    return compiled, float(read_program(text).received), seconds


def _measure(
    layers: list[Shape], batch: int, rates: Sequence[str], steps: int, mesh: Any, control: Control
) -> Iterator[Row]:
    """Times both modes with a batch at all rates; each mode is compiled once."""

    def noise(rows: int, width: int) -> Any:
        """Returns normal noise (K * rows, width), of which each host makes its own rows."""
        return harness.place(mesh, np.random.default_rng(control.host).standard_normal((rows, width), np.float32))

    rows = [noise(batch // control.hosts, width) for shape in layers for width in shape]
    kernels = [noise(1, math.prod(shape)) for shape in layers]
    plan = jc.planner.plan_late_multiply({_name(shape): shape for shape in layers}, batch, control.hosts).layers
    predicted = {"late": sum(x.bytes_late for x in plan), "reduce": sum(x.bytes_reduce for x in plan)}
    for mode in MODES:
        control.set_rate("none")
        step, compiled_bytes, compile_s = compile_step(layers, mesh, mode, batch)
        communicate = _communication(mode, mesh)
        operands = rows if mode == "late" else kernels
        jax.block_until_ready((step(*rows), communicate(*operands)))  # Gloo's connections
        for rate in rates:
            control.set_rate(rate)
            times, counts, _ = control.measure(lambda _, step=step: step(*rows), None, steps)
            alone, _, _ = control.measure(lambda _, run=communicate, xs=operands: run(*xs), None, steps)
            yield {
                "hosts": control.hosts,
                "rate": rate,
                "batch": batch,
                "mode": mode,
                **harness.spread(times),
                "ms_communication": statistics.median(alone),
                "bytes_kernel": statistics.fmean(counts),
                "bytes_predicted": predicted[mode],
                "bytes_compiled": compiled_bytes,
                "compile_s": compile_s,
            }


def _communication(mode: str, mesh: Any) -> Callable[..., Any]:
    """Returns a function that runs only the collectives of a mode."""

    def worker(*arrays: jax.Array) -> Any:
        return [gather_rows(x, "data") for x in arrays] if mode == "late" else dense_mean(arrays, "data")[0]

    return jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=P("data"), out_specs=P()))


def _name(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}"


if __name__ == "__main__":
    harness.run(Config, __doc__, main, run_host)
