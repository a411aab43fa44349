"""A step of data-parallel workers whose models are cut into stages: dense, and with DCT-DP and DCT-MP together.

    python -m benchmarks.hybrid_dct --rate 100mbit

The model is the DLRM of Gupta et al. (KDD 2021) on random clicks; each stage of each worker is on a host of its own.
The table has the time of a step; the use of the network (bytes that a host receives, over what its link could carry in
that time); and the use of the processors (user and system seconds of all hosts' processes, over the seconds of the
machine's cores, which the hosts share). The thresholds of DCT-DP are those of an earlier step, as in all but one step
of a life-span.
"""

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import optax

import jaxcomm as jc
from benchmarks import harness
from benchmarks.boundary import CUTS, make_batch, make_pipeline
from benchmarks.harness import Control, HostOptions, Row
from benchmarks.netlab import parse_rate
from jaxcomm.accounting.hlo import read_program

EARLY = 9  # the first steps, which are not timed: 0, 1, 2, 4 and 8 renew thresholds


@dataclass(frozen=True)
class Config(HostOptions):
    """Time a hybrid step over real links, with the use of network and processors."""

    workers: int = 2  # Data-parallel workers.
    stages: int = 2  # Stages of each: 2 or 3.
    boundary_sparsity: float = 0.9  # Fraction of a sample's activations that DCT-MP does not send.
    sparsity: float = 0.99  # Fraction of the gradient that DCT-DP does not send.
    rate: str = "100mbit"  # Rate of all links: "100mbit", "1gbit", or "none" for no limit.
    batch: int = 2048  # Samples per step, over all workers.
    table_rows: int = 1000  # Rows of each of the 26 embedding tables.
    steps: int = 7  # Timed steps of each system.


def main(config: Config) -> None:
    """Runs the hosts, prints the table, and writes it where asked."""
    check(config)
    rows = harness.on_hosts(config.workers * config.stages, config.rate, config, sums=["cpu_seconds"])
    title = (
        f"DLRM, {config.workers} workers in {config.stages} stages, {config.batch} samples; cpu_seconds of all hosts "
        f"in a step, on {_cores()} cores"
    )
    harness.report(config.json, (title, [row | uses(row) for row in rows]))


def check(config: Config) -> None:
    """Refuses options that cannot work, before a host starts.

    Raises:
      ValueError: with the rule, the value and the remedy.
    """
    harness.check_run(config.rate, config.steps, one=True)
    if config.workers < 2 or config.stages not in CUTS or config.batch < 1 or config.batch % config.workers:
        raise ValueError(
            "--workers must be at least 2 and divide --batch evenly, and --stages must be 2 or 3; got "
            f"{config.workers}, {config.batch} and {config.stages}. Give 2, 2048 and 2, say."
        )
    jc.dct_mp(config.boundary_sparsity)
    jc.dct_dp(config.sparsity)


def uses(row: Row) -> Row:
    """Returns the use of network and processors, in %; the network's is None without limited links of each host."""
    bits, seconds, received = parse_rate(row["rate"]), row["ms_median"] / 1e3, row["bytes_kernel"]
    return {
        "network_%": None if bits is None or received is None else 100 * 8 * received / (bits * seconds),
        "cpu_%": 100 * row["cpu_seconds"] / (seconds * _cores()),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def run_host(config: Config, control: Control) -> Iterator[Row]:
    """Runs one host's part: both systems; yields a row for each."""
    for system, boundary, exchange in (
        ("dense", jc.dct_mp(0.0), jc.plump_dp()),
        ("DCT-DP and DCT-MP", jc.dct_mp(config.boundary_sparsity), jc.dct_dp(config.sparsity)),
    ):
        yield _time(system, boundary, exchange, config, control)


def _time(system: str, boundary: Any, exchange: Any, config: Config, control: Control) -> Row:
    mesh = jc.make_mesh(data=config.workers, stage=config.stages)
    pipeline, params = make_pipeline(config.stages, boundary, config.table_rows)
    batch = make_batch(mesh, config.batch // config.workers, config.table_rows, control.host // config.stages)
    step = jc.make_train_step(pipeline, optax.chain(exchange, optax.sgd(0.1)), mesh, donate=False)
    state = jax.jit(step.init)(params)
    control.set_rate("none")
    compiled, text, _ = harness.timed_compile(step, state, batch)
    for _ in range(EARLY):
        state, _ = compiled(state, batch)
    jax.block_until_ready(state)
    control.set_rate(config.rate)
    spent = []

    def work(state: Any) -> Any:
        before = time.process_time()
        jax.block_until_ready(compiled(state, batch))
        spent.append(time.process_time() - before)
        return state

    times, counts, _ = control.measure(work, state, config.steps)
    return {
        "system": system,
        "workers": config.workers,
        "stages": config.stages,
        "rate": config.rate,
        **harness.spread(times),
        "bytes_kernel": statistics.median(counts),
        "bytes_compiled": float(read_program(text).received),
        "cpu_seconds": statistics.median(spent),
    }


if __name__ == "__main__":
    harness.run(Config, __doc__, main, run_host)
