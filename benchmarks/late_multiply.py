"""Late-multiply against the reduction of gradients, between real processes on rate-limited links.

    python -m benchmarks.late_multiply --hosts 2,4 --rate 1gbit,10gbit      # AlexNet's dense layers, batch 256
    python -m benchmarks.late_multiply --crossover --hosts 2 --rate 1gbit   # the batch at which both cost the same

Every host of a network lab is a process with its rows of the batch. A step turns each host's inputs and errors of every
layer into the workers' mean gradients of the kernels: by products and an all-reduce, or by gathers and products.
ms_communication is the time of the collectives alone, as in the paper's table (GPUs, 10 Gbit/s Ethernet).

The crossover in bytes is found by bisection over compiled programs, the one in time by timing some batches around it.
"""

import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.control import Control, check_run, merge_records, print_record, read_records, run, run_hosts, spread
from benchmarks.crossover import bisect, crossing
from benchmarks.netlab import Lab
from train.tables import print_table, write_records

ALEXNET = "9216x4096,4096x4096,4096x1000"
SMALL = "1024x512"  # the default for a crossover, where a batch has about as many numbers as the kernel
MODES = ("reduce", "late")
# Yang et al., 2017, table 1: AlexNet, batch 256, 10 Gbit/s Ethernet; by GPUs and mode.
PAPER_MS = {(2, "reduce"): 894.0, (2, "late"): 164.0, (4, "reduce"): 1287.0, (4, "late"): 399.0}
_SIZES = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # batches of a crossover in time, as multiples of the one at equal bytes

Shape = tuple[int, int]


@dataclass(frozen=True)
class Config:
    """Time late-multiply against the reduction of gradients on rate-limited links."""

    layers: str | None = None
    """Dense layers, inputs x outputs, separated by commas; AlexNet's three (58.6M weights) if not given, or one of
    1024x512 for a crossover."""
    batch: int = 256
    """Rows over all hosts."""
    hosts: str = "2,4"
    """Numbers of hosts, separated by commas; one worker each."""
    rate: str = "1gbit,10gbit"
    """Link rates, separated by commas: "100mbit", "10gbit", or "none" for no limit."""
    steps: int = 5
    """Timed steps of each mode and rate."""
    crossover: bool = False
    """Find the batch at which both ways move equal bytes, and the one at which both take equal time."""
    json: Path | None = None
    """File for the table, as a list of records."""


@dataclass
class Record:
    """One row of the table."""

    hosts: int
    rate: str
    batch: int
    mode: str
    ms_median: float
    ms_min: float
    ms_max: float
    ms_communication: float
    bytes_kernel: float | None
    bytes_predicted: float
    bytes_compiled: float
    compile_s: float
    paper_ms: float | None = None
    times_fewer_bytes: float | None = None
    times_faster: float | None = None


@dataclass(frozen=True)
class Crossover:
    """The batches at which late-multiply stops paying.

    Attributes:
      batch_by_formula: 2 N M / (N + M).
      batch_by_bytes: where the compiled programs move equal bytes.
      batch_by_time: where steps take equal time, by their medians; None if no such batch is between those tried.
      batch_by_fastest: the same, by the fastest step of every batch.
    """

    hosts: int
    rate: str
    layer: str
    batch_by_formula: float
    batch_by_bytes: float
    batch_by_time: float | None
    batch_by_fastest: float | None


def main(config: Config) -> None:
    """Runs the hosts, prints the tables, and writes them where asked."""
    records: list[Record] = []
    crossovers: list[Crossover] = []
    layers, counts, rates = check(config)
    for count in counts:
        with Lab(count, rates[0]) as lab:
            outputs = run_hosts(lab, "benchmarks.late_multiply")
        records += merge_records([read_records(Record, text) for text in outputs], lab.isolated)
        crossovers += read_records(Crossover, outputs[0])
    compare(records, is_papers=layers == parse_layers(ALEXNET) and config.batch == 256)
    rows = [dataclasses.asdict(record) for record in records]
    print_table(f"Mean gradients of {', '.join(_name(layer) for layer in layers)}", rows)
    crossover_rows = [dataclasses.asdict(crossover) for crossover in crossovers]
    if crossover_rows:
        print_table("Late-multiply pays below a batch of", crossover_rows)
    write_records(config.json, [*rows, *crossover_rows])


def check(config: Config) -> tuple[list[Shape], list[int], list[str]]:
    """Returns the layers, the numbers of hosts and the rates.

    Raises:
      ValueError: for options that cannot work, before a host starts.
    """
    layers = parse_layers(config.layers or (SMALL if config.crossover else ALEXNET))
    counts = [_count(text) for text in config.hosts.split(",")]
    rates = check_run(config.rate, config.steps)
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


def compare(records: list[Record], *, is_papers: bool) -> None:
    """Fills in how late-multiply compares with the reduction in the same setting, and what the paper measured."""
    places = {(r.hosts, r.rate, r.batch): r for r in records if r.mode == "reduce"}
    for record in records:
        reduced = places[record.hosts, record.rate, record.batch]
        record.times_faster = reduced.ms_median / record.ms_median
        record.times_fewer_bytes = reduced.bytes_compiled / record.bytes_compiled if record.bytes_compiled else None
        if is_papers and record.rate == "10gbit":
            record.paper_ms = PAPER_MS.get((record.hosts, record.mode))


def bytes_crossover(layer: Shape, mesh: Any) -> float:
    """Returns the batch at which both modes, compiled for the workers of a mesh, move equal bytes."""
    step_bytes = functools.cache(lambda mode, batch: compile_step([layer], mesh, mode, batch)[1])

    def gap(batch: int) -> float:
        return step_bytes("late", batch) - step_bytes("reduce", batch) if batch else -step_bytes("reduce", mesh.size)

    low, high = bisect(lambda batch: gap(batch) < 0, mesh.size, equal_batch(layer))
    return low + (high - low) * gap(low) / (gap(low) - gap(high))


def run_host(config: Config) -> None:
    """Runs one host's part; prints a JSON record for each mode, batch and rate, and the crossovers."""
    control = Control()
    import jaxcomm as jc

    layers, _, rates = check(config)
    host = _Host(layers, control, config.steps, jc.make_mesh(data=control.hosts))
    sizes, by_bytes = [config.batch], 0.0
    if config.crossover:
        by_bytes = bytes_crossover(layers[0], host.mesh)
        sizes = sorted({max(round(by_bytes * part / host.count), 1) * host.count for part in _SIZES})
    records = [record for size in sizes for record in host.measure(size, rates)]
    for record in records:
        print_record(record)
    for rate in rates if config.crossover else ():
        timed = {(r.batch, r.mode): r for r in records if r.rate == rate}
        pairs = [(size, timed[size, "late"], timed[size, "reduce"]) for size in sizes]
        by_time = crossing([(size, late.ms_median / reduced.ms_median) for size, late, reduced in pairs])
        by_fastest = crossing([(size, late.ms_min / reduced.ms_min) for size, late, reduced in pairs])
        name, formula = _name(layers[0]), equal_batch(layers[0])
        print_record(Crossover(host.count, rate, name, formula, by_bytes, by_time, by_fastest))


def compile_step(layers: Sequence[Shape], mesh: Any, mode: str, batch: int) -> tuple[Callable[..., Any], float]:
    """Returns the compiled (inputs, errors of every layer) -> mean gradients, and the bytes that it receives."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxcomm as jc
    from jaxcomm.accounting.hlo import read_program
    from jaxcomm.state import vary_exchanged

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
    compiled = step.lower(*like).compile()
    return compiled, float(read_program(compiled.as_text()).received)


@dataclass
class _Host:
    layers: list[Shape]
    control: Control
    steps: int
    mesh: Any

    @property
    def count(self) -> int:
        return self.control.hosts

    def measure(self, batch: int, rates: Sequence[str]) -> list[Record]:
        """Times both modes with a batch at all rates; each mode is compiled once."""
        import jax

        import jaxcomm as jc

        rows = [self._own(batch // self.count, width) for shape in self.layers for width in shape]
        kernels = [self._own(1, math.prod(shape)) for shape in self.layers]
        records = []
        for mode in MODES:
            self.control.set_rate("none")
            begin = time.perf_counter()
            step, compiled_bytes = compile_step(self.layers, self.mesh, mode, batch)
            compile_s = time.perf_counter() - begin
            communicate = self._communication(mode, rows, kernels)
            full_step = functools.partial(step, *rows)
            plan = jc.planner.plan_late_multiply({_name(shape): shape for shape in self.layers}, batch, self.count)
            exact = {"late": sum(x.bytes_late for x in plan.layers), "reduce": sum(x.bytes_reduce for x in plan.layers)}
            jax.block_until_ready((full_step(), communicate()))  # Gloo's connections
            for rate in rates:
                self.control.set_rate(rate)
                times, counts, _ = zip(*(self.control.timed(full_step) for _ in range(self.steps)), strict=True)
                communication = [self.control.timed(communicate)[0] for _ in range(self.steps)]
                records.append(
                    Record(
                        hosts=self.count,
                        rate=rate,
                        batch=batch,
                        mode=mode,
                        **spread(times),
                        ms_communication=statistics.median(communication),
                        bytes_kernel=statistics.fmean(counts),
                        bytes_predicted=exact[mode],
                        bytes_compiled=compiled_bytes,
                        compile_s=compile_s,
                    )
                )
        return records

    def _communication(self, mode: str, rows: list[Any], kernels: list[Any]) -> Callable[[], Any]:
        """Returns a function that runs only the collectives of a mode."""
        import jax
        from jax.sharding import PartitionSpec as P

        from jaxcomm.collectives import dense_mean
        from jaxcomm.layers.late_multiply import gather_rows

        def worker(*arrays: jax.Array) -> Any:
            return [gather_rows(x, "data") for x in arrays] if mode == "late" else dense_mean(arrays, "data")[0]

        operands = rows if mode == "late" else kernels
        compiled = jax.jit(jax.shard_map(worker, mesh=self.mesh, in_specs=P("data"), out_specs=P()))
        return lambda: compiled(*operands)

    def _own(self, rows: int, width: int) -> Any:
        """Returns normal noise (K * rows, width), of which each host makes its own rows."""
        import jax
        import numpy as np
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        noise = np.random.default_rng(self.control.host).standard_normal((rows, width), np.float32)
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, P("data")), noise)


def _name(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}"


def _count(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"--hosts must be integers of at least 1, separated by commas; got {text!r}.")
    return int(text)


if __name__ == "__main__":
    run(Config, __doc__, main, run_host)
