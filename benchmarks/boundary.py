"""Bytes and milliseconds of a DLRM cut into stages, each on a host of its own, with DCT-MP at the boundaries.

    python -m benchmarks.boundary --rate 100mbit

The model of Gupta et al. (KDD 2021) on random clicks, cut where they cut it: after two layers of each MLP, with 256
features per sample. Every sparsity is compiled once and run at all rates. Bytes are for one step: predicted from
shapes, counted in the compiled program, and counted by the kernel on each host's link, including TCP/IP headers.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.control import Control, check_run, merge_records, print_record, read_records, run, run_hosts, spread
from benchmarks.netlab import Lab
from train.tables import print_table, write_records

CUTS = {2: (2,), 3: (2, 7)}


@dataclass(frozen=True)
class Config:
    """Time the steps of a pipeline over real links."""

    stages: int = 3
    """Stages, one host each: 2 or 3."""
    sparsity: str = "0,0.75,0.9,0.95"
    """Fractions of a sample's activations that are not sent, separated by commas."""
    rate: str = "100mbit"
    """Link rates, separated by commas: "100mbit", "1gbit", or "none" for no limit."""
    batch: int = 2048
    """Samples per step."""
    micro_batches: int = 1
    """Micro-batches per step."""
    value_dtype: str = "float32"
    """Type of a value on the wire: float32 or bfloat16."""
    table_rows: int = 1000
    """Rows of each of the 26 embedding tables."""
    steps: int = 7
    """Timed steps of each sparsity and rate."""
    json: Path | None = None
    """File for the table, as a list of records."""


@dataclass
class Record:
    """One row of the table; bytes by host are what each receives in a step."""

    sparsity: float
    stages: int
    batch: int
    rate: str
    ms_median: float
    ms_min: float
    ms_max: float
    forward_bytes: int
    backward_bytes: int
    predicted_by_host: list[int]
    compiled_by_host: list[int]
    kernel_by_host: list[float] | None
    times_fewer_bytes: float | None = None
    times_faster: float | None = None


def main(config: Config) -> None:
    """Runs the hosts, prints the table, and writes it where asked."""
    rates = check_run(config.rate, config.steps)
    if config.stages not in CUTS:
        raise ValueError(f"--stages must be 2 or 3, where the paper cuts; got {config.stages}.")
    if config.batch % config.micro_batches:
        raise ValueError(
            f"--batch must be a multiple of --micro-batches; got {config.batch} and {config.micro_batches}."
        )
    _boundaries(config)
    with Lab(config.stages, rates[0]) as lab:
        outputs = [read_records(Record, text) for text in run_hosts(lab, "benchmarks.boundary")]
        records = merge_records(outputs, lab.isolated, "kernel_by_host")
    _compare_with_whole(records)
    print_table(
        f"DLRM in {config.stages} stages, {config.batch} samples in {config.micro_batches} micro-batches, "
        f"{config.value_dtype} values",
        [_row(record) for record in records],
    )
    write_records(config.json, [dataclasses.asdict(record) for record in records])


def _row(record: Record) -> dict[str, Any]:
    row = dataclasses.asdict(record)
    for name in ("predicted_by_host", "compiled_by_host", "kernel_by_host"):
        row[name] = "-" if row[name] is None else " ".join(f"{count:,.0f}" for count in row[name])
    return row


def _boundaries(config: Config) -> dict[float, Any]:
    import jaxcomm as jc

    return {
        float(sparsity): jc.dct_mp(float(sparsity), value_dtype=config.value_dtype)
        for sparsity in config.sparsity.split(",")
    }


def _compare_with_whole(records: list[Record]) -> None:
    for record in records:
        dense = next((r for r in records if r.sparsity == 0 and r.rate == record.rate), None)
        if dense is not None:
            record.times_faster = dense.ms_median / record.ms_median
            record.times_fewer_bytes = sum(dense.compiled_by_host) / sum(record.compiled_by_host)


def run_host(config: Config) -> None:
    """Runs one host's part: every sparsity at every rate; prints a JSON record for each."""
    control = Control()
    for sparsity, boundary in _boundaries(config).items():
        for record in _time(sparsity, boundary, config, control):
            print_record(record)


def make_pipeline(stages: int, boundary: Any, table_rows: int, micro_batches: int = 1) -> tuple[Any, list[Any]]:
    """Returns the DLRM as a `jc.Pipeline`, cut where the paper cuts, and its parameters.

    Args:
      stages: 2 or 3.
      boundary: between each two stages.
      table_rows: rows of each of the 26 embedding tables.
      micro_batches: micro-batches per step.
    """
    import optax
    from flax import nnx

    import jaxcomm as jc
    from models.dlrm import Dlrm
    from models.functional import apply, cut

    parts = cut(Dlrm((table_rows,) * 26, rngs=nnx.Rngs(0)), CUTS[stages])

    def stage_fn(graph: Any) -> Any:
        return lambda params, x, batch: apply(graph, params, {}, batch, x, training=True)[0]

    def loss_fn(logits: Any, batch: Any) -> Any:
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean(), {}

    params = [part.params for part in parts]
    pipeline = jc.Pipeline(
        stages=[stage_fn(part.graph) for part in parts],
        loss_fn=loss_fn,
        params=params,
        boundaries=[boundary] * (stages - 1),
        micro_batches=micro_batches,
    )
    return pipeline, params


def make_batch(mesh: Any, rows: int, table_rows: int, worker: int = 0) -> dict[str, Any]:
    """Returns random clicks on a mesh; this process has the rows of its own worker."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    rng = np.random.default_rng(worker)
    host_batch = {
        "dense": rng.normal(size=(rows, 13)).astype(np.float32),
        "categories": rng.integers(0, table_rows, (rows, 26)).astype(np.int32),
        "label": rng.integers(0, 2, rows).astype(np.float32),
    }
    by_rows = NamedSharding(mesh, P("data"))
    return {
        name: jax.make_array_from_process_local_data(by_rows, local_rows) for name, local_rows in host_batch.items()
    }


def _time(sparsity: float, boundary: Any, config: Config, control: Control) -> list[Record]:
    import jax
    import optax

    import jaxcomm as jc
    from jaxcomm.accounting.hlo import read_program

    mesh = jc.make_mesh(data=1, stage=config.stages)
    pipeline, params = make_pipeline(config.stages, boundary, config.table_rows, config.micro_batches)
    batch = make_batch(mesh, config.batch, config.table_rows)
    tx = optax.chain(jc.plump_dp(), optax.sgd(0.1))
    state = jax.jit(lambda params: jc.make_train_step(pipeline, tx, mesh).init(params))(params)
    step = jc.make_train_step(pipeline, tx, mesh)

    control.set_rate("none")
    compiled = step.lower(state, batch).compile()
    costs = pipeline.report(tx, batch, 1).boundaries
    predicted = [0] * config.stages
    for stage, cost in enumerate(costs):
        predicted[stage + 1] += cost.forward
        predicted[stage] += cost.backward
    links = read_program(compiled.as_text()).links()
    compiled_bytes = [sum(count for (_, target), count in links.items() if target == at) for at in range(config.stages)]
    records = []
    for rate in config.rate.split(","):
        control.set_rate(rate)
        times, counts = [], []
        for _ in range(config.steps + 1):
            ms, count, (state, _) = control.timed(partial(compiled, state, batch))
            times.append(ms)
            counts.append(count)
        records.append(
            Record(
                sparsity=sparsity,
                stages=config.stages,
                batch=config.batch,
                rate=rate,
                **spread(times[1:]),  # the first opens Gloo's connections
                forward_bytes=sum(cost.forward for cost in costs),
                backward_bytes=sum(cost.backward for cost in costs),
                predicted_by_host=predicted,
                compiled_by_host=compiled_bytes,
                kernel_by_host=[statistics.median(counts[1:])],
            )
        )
    return records


if __name__ == "__main__":
    run(Config, __doc__, main, run_host)
