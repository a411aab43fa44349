"""Bytes and milliseconds of a DLRM cut into stages, each on a host of its own, with DCT-MP at the boundaries.

    python -m benchmarks.boundary --rate 100mbit

The model of Gupta et al. (KDD 2021) on random clicks, cut where they cut it: after two layers of each MLP, with 256
features per sample. Every sparsity is compiled once and run at all rates. Bytes are for one step: predicted from
shapes, counted in the compiled program, and counted by the kernel on each host's link, including TCP/IP headers.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxcomm as jc
from benchmarks import harness
from benchmarks.conditions import headed
from benchmarks.harness import Control, HostOptions, Row
from jaxcomm.accounting.hlo import read_program
from models.dlrm import Dlrm
from models.functional import apply, cut
from train.tables import print_table, write_records

CUTS = {2: (2,), 3: (2, 7)}


@dataclass(frozen=True)
class Config(HostOptions):
    """Time the steps of a pipeline over real links."""

    stages: int = 3  # Stages, one host each: 2 or 3.
    sparsity: str = "0,0.75,0.9,0.95"  # Fractions of a sample's activations that are not sent, separated by commas.
    rate: str = "100mbit"  # Link rates, separated by commas: "100mbit", "1gbit", or "none" for no limit.
    batch: int = 2048  # Samples per step.
    micro_batches: int = 1  # Micro-batches per step.
    value_dtype: str = "float32"  # Type of a value on the wire: float32 or bfloat16.
    table_rows: int = 1000  # Rows of each of the 26 embedding tables.
    steps: int = 7  # Timed steps of each sparsity and rate.


def main(config: Config) -> None:
    """Runs the hosts, prints the table, and writes it where asked."""
    rates = harness.check_run(config.rate, config.steps)
    if config.stages not in CUTS:
        raise ValueError(f"--stages must be 2 or 3, where the paper cuts; got {config.stages}.")
    if config.batch % config.micro_batches:
        raise ValueError(
            f"--batch must be a multiple of --micro-batches; got {config.batch} and {config.micro_batches}."
        )
    _boundaries(config)
    rows = harness.on_hosts(config.stages, rates[0], config, kernel="kernel_by_host")
    rows = harness.compare(rows, ["rate"], lambda row: sum(row["compiled_by_host"]), sparsity=0.0)
    title = (
        f"DLRM in {config.stages} stages, {config.batch} samples in {config.micro_batches} micro-batches, "
        f"{config.value_dtype} values"
    )
    title, shown = headed(title, rows)
    print_table(
        title,
        [{name: _cell(value) if name.endswith("_by_host") else value for name, value in row.items()} for row in shown],
    )
    write_records(config.json, rows)


def _cell(counts: list[float] | None) -> str:
    return "-" if counts is None else " ".join(f"{count:,.0f}" for count in counts)


def _boundaries(config: Config) -> dict[float, Any]:
    sparsities = harness.numbers("--sparsity", config.sparsity, float)
    return {sparsity: jc.dct_mp(sparsity, value_dtype=config.value_dtype) for sparsity in sparsities}


def run_host(config: Config, control: Control) -> Iterator[Row]:
    """Runs one host's part: every sparsity at every rate; yields a row for each."""
    for sparsity, boundary in _boundaries(config).items():
        yield from _time(sparsity, boundary, config, control)


def make_pipeline(stages: int, boundary: Any, table_rows: int, micro_batches: int = 1) -> tuple[Any, list[Any]]:
    """Returns the DLRM as a `jc.Pipeline`, cut where the paper cuts, and its parameters.

    Args:
      stages: 2 or 3.
      boundary: between each two stages.
      table_rows: rows of each of the 26 embedding tables.
      micro_batches: micro-batches per step.
    """
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
    rng = np.random.default_rng(worker)
    host_batch = {
        "dense": rng.normal(size=(rows, 13)).astype(np.float32),
        "categories": rng.integers(0, table_rows, (rows, 26)).astype(np.int32),
        "label": rng.integers(0, 2, rows).astype(np.float32),
    }
    return harness.place(mesh, host_batch)


def _time(sparsity: float, boundary: Any, config: Config, control: Control) -> Iterator[Row]:
    mesh = jc.make_mesh(data=1, stage=config.stages)
    pipeline, params = make_pipeline(config.stages, boundary, config.table_rows, config.micro_batches)
    batch = make_batch(mesh, config.batch, config.table_rows)
    tx = optax.chain(jc.plump_dp(), optax.sgd(0.1))
    step = jc.make_train_step(pipeline, tx, mesh)
    state = jax.jit(step.init)(params)
    control.set_rate("none")
    compiled, text, _ = harness.timed_compile(step, state, batch)
    costs, links = pipeline.report(tx, batch, 1).boundaries, read_program(text).links()
    predicted = [0] * config.stages
    for stage, cost in enumerate(costs):
        predicted[stage + 1] += cost.forward
        predicted[stage] += cost.backward
    for rate in config.rate.split(","):
        control.set_rate(rate)
        times, counts, state = control.measure(lambda state: compiled(state, batch)[0], state, config.steps)
        yield {
            "sparsity": sparsity,
            "stages": config.stages,
            "batch": config.batch,
            "rate": rate,
            **harness.spread(times),
            "forward_bytes": sum(cost.forward for cost in costs),
            "backward_bytes": sum(cost.backward for cost in costs),
            "predicted_by_host": predicted,
            "compiled_by_host": [
                sum(count for (_, target), count in links.items() if target == stage) for stage in range(config.stages)
            ],
            "kernel_by_host": [statistics.median(counts)],
        }


if __name__ == "__main__":
    harness.run(Config, __doc__, main, run_host)
