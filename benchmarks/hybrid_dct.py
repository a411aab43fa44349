"""A step of data-parallel workers whose models are cut into stages: dense, and with DCT-DP and DCT-MP together.

    python -m benchmarks.hybrid_dct --rate 100mbit

The model is the DLRM of Gupta et al. (KDD 2021) on random clicks; each stage of each worker is on a host of its own.
The table has the time of a step; the use of the network (bytes that a host receives, over what its link could carry in
that time); and the use of the processors (user and system seconds of all hosts' processes, over the seconds of the
machine's cores, which the hosts share). The thresholds of DCT-DP are those of an earlier step, as in all but one step
of a life-span.
"""

import dataclasses
import os
import resource
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.boundary import CUTS, make_batch, make_pipeline
from benchmarks.control import Control, check_run, merge_records, print_record, read_records, run, run_hosts, spread
from benchmarks.netlab import Lab, parse_rate
from train.tables import print_table, write_records

EARLY = 9  # the first steps, which are not timed: 0, 1, 2, 4 and 8 renew thresholds


@dataclass(frozen=True)
class Config:
    """Time a hybrid step over real links, with the use of network and processors."""

    workers: int = 2
    """Data-parallel workers."""
    stages: int = 2
    """Stages of each: 2 or 3."""
    boundary_sparsity: float = 0.9
    """Fraction of a sample's activations that DCT-MP does not send."""
    sparsity: float = 0.99
    """Fraction of the gradient that DCT-DP does not send."""
    rate: str = "100mbit"
    """Rate of all links: "100mbit", "1gbit", or "none" for no limit."""
    batch: int = 2048
    """Samples per step, over all workers."""
    table_rows: int = 1000
    """Rows of each of the 26 embedding tables."""
    steps: int = 7
    """Timed steps of each system."""
    json: Path | None = None
    """File for the table, as a list of records."""


@dataclass
class Record:
    """One row of the table; bytes are those that a host receives in a step, on average over the hosts."""

    system: str
    workers: int
    stages: int
    rate: str
    ms_median: float
    ms_min: float
    ms_max: float
    bytes_kernel: float | None
    bytes_compiled: float
    cpu_seconds: float


def main(config: Config) -> None:
    """Runs the hosts, prints the table, and writes it where asked."""
    check(config)
    with Lab(config.workers * config.stages, config.rate) as lab:
        hosts = [read_records(Record, text) for text in run_hosts(lab, "benchmarks.hybrid_dct")]
        records = merge_records(hosts, lab.isolated)
    rows = []
    for record, host_records in zip(records, zip(*hosts, strict=True), strict=True):
        summed = dataclasses.replace(record, cpu_seconds=sum(host_record.cpu_seconds for host_record in host_records))
        rows.append(dataclasses.asdict(summed) | uses(summed))
    print_table(
        f"DLRM, {config.workers} workers in {config.stages} stages, {config.batch} samples; cpu_seconds of all hosts "
        f"in a step, on {_cores()} cores",
        rows,
    )
    write_records(config.json, rows)


def check(config: Config) -> None:
    """Refuses options that cannot work, before a host starts.

    Raises:
      ValueError: with the rule, the value and the remedy.
    """
    import jaxcomm as jc

    if len(check_run(config.rate, config.steps)) > 1:
        raise ValueError(f"--rate must be one rate; got {config.rate}. Run this once for each.")
    if config.workers < 2 or config.stages not in CUTS or config.batch < 1 or config.batch % config.workers:
        raise ValueError(
            "--workers must be at least 2 and divide --batch evenly, and --stages must be 2 or 3; got "
            f"{config.workers}, {config.batch} and {config.stages}. Give 2, 2048 and 2, say."
        )
    jc.dct_mp(config.boundary_sparsity)
    jc.dct_dp(config.sparsity)


def uses(record: Record) -> dict[str, float | None]:
    """Returns the use of network and processors, in %; the network's is None without limited links of each host."""
    bits, seconds = parse_rate(record.rate), record.ms_median / 1e3
    bytes_in = record.bytes_kernel
    return {
        "network_%": None if bits is None or bytes_in is None else 100 * 8 * bytes_in / (bits * seconds),
        "cpu_%": 100 * record.cpu_seconds / (seconds * _cores()),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_host(config: Config) -> None:
    """Runs one host's part: both systems; prints a JSON record for each."""
    control = Control()
    import jaxcomm as jc

    for system, boundary, exchange in (
        ("dense", jc.dct_mp(0.0), jc.plump_dp()),
        ("DCT-DP and DCT-MP", jc.dct_mp(config.boundary_sparsity), jc.dct_dp(config.sparsity)),
    ):
        print_record(_time(system, boundary, exchange, config, control))


def _time(system: str, boundary: Any, exchange: Any, config: Config, control: Control) -> Record:
    import jax
    import optax

    import jaxcomm as jc
    from jaxcomm.accounting.hlo import read_program

    mesh = jc.make_mesh(data=config.workers, stage=config.stages)
    pipeline, params = make_pipeline(config.stages, boundary, config.table_rows)
    batch = make_batch(mesh, config.batch // config.workers, config.table_rows, control.host // config.stages)
    step = jc.make_train_step(pipeline, optax.chain(exchange, optax.sgd(0.1)), mesh, donate=False)
    state = jax.jit(step.init)(params)
    control.set_rate("none")
    compiled = step.lower(state, batch).compile()
    for _ in range(EARLY):
        state, _ = compiled(state, batch)
    jax.block_until_ready(state)
    control.set_rate(config.rate)
    spent = []

    def work() -> Any:
        before = _cpu_seconds()
        result = jax.block_until_ready(compiled(state, batch))
        spent.append(_cpu_seconds() - before)
        return result

    times, counts, _ = zip(*(control.timed(work) for _ in range(config.steps)), strict=True)
    return Record(
        system=system,
        workers=config.workers,
        stages=config.stages,
        rate=config.rate,
        **spread(times),
        bytes_kernel=statistics.median(counts),
        bytes_compiled=float(read_program(compiled.as_text()).received),
        cpu_seconds=statistics.median(spent),
    )


if __name__ == "__main__":
    run(Config, __doc__, main, run_host)
