"""Bytes and memory of a training step of DLRM at the size of Criteo's Kaggle log, for each way to train its tables.

    python -m benchmarks.embeddings

compiles the whole step of `dlrm_criteo` (33,762,577 rows of 16 numbers; DCT-DP for the dense layers, SGD) on simulated
devices for every `--embeddings`, from shapes alone: nothing is allocated, and no step is taken. received_predicted and
received_compiled are the bytes that each worker receives in a step, by the traced step and by the compiled text.
tables_formula is the part of the tables, by the docstring of `models.dlrm`. A worker's arguments (its state, and its
rows of the batch) and temporaries (including gradients) are XLA's own account for this backend. "columns" is left out
where the number of workers does not divide the 16 columns.
"""

import dataclasses
import itertools
from dataclasses import dataclass

from benchmarks import harness
from benchmarks.harness import Options, Row
from configs import CONFIGS
from configs.dlrm_criteo import TABLE_SIZES
from jaxcomm.accounting.hlo import read_program
from train.data import ClickInfo
from train.job import make_job
from train.processes import prepare_jax

MB = 10**6
WAYS = ("exchange", "late", "columns", "rows")
DIM = 16


@dataclass(frozen=True)
class Config(Options):
    """Count the bytes and the memory of DLRM's step at Criteo's size in compiled programs."""

    workers: str = "4,16,32"  # Numbers of workers, separated by commas.
    batch: int = CONFIGS["dlrm_criteo"].global_batch  # Rows per step, over all workers.


def main(config: Config) -> None:
    """Compiles every step, prints the table, and writes it where asked."""
    workers = harness.numbers("--workers", config.workers, least=1)
    if config.batch < 1 or any(config.batch % K for K in workers):
        raise ValueError(f"--workers must divide --batch evenly; got {config.workers} and {config.batch}.")
    prepare_jax(simulated_devices=max(workers))
    compare(config, workers, TABLE_SIZES)


def compare(config: Config, workers: list[int], sizes: tuple[int, ...]) -> None:
    """Does the work of `main` for tables of some sizes, once the devices are there."""
    records = []
    for K, way in itertools.product(workers, WAYS):
        if way != "columns" or DIM % K == 0:
            records.append(measure(way, K, config.batch, sizes))
            print(records[-1], flush=True)
    title = f"DLRM of {sum(sizes):,} rows, {config.batch} rows a step: each worker's bytes and memory"
    harness.report(config.json, (title, records))


def measure(way: str, K: int, batch: int, sizes: tuple[int, ...]) -> Row:
    """Compiles one step and counts."""
    experiment = dataclasses.replace(CONFIGS["dlrm_criteo"], embeddings=way, workers=K, global_batch=batch)
    if way == "exchange":  # DCT-DP is for the dense layers
        experiment = dataclasses.replace(experiment, compress="linear")
    info = ClickInfo("criteo", experiment.steps * batch, batch, sizes)
    job = make_job(experiment, experiment.method, info=info)
    compiled = job.step.compile(*job.inputs)
    memory = compiled.memory_analysis()
    return {
        "embeddings": way,
        "workers": K,
        "tables_formula": tables_received(way, K, batch, sizes),
        "received_predicted": job.report.received,
        "received_compiled": float(read_program(compiled.as_text()).received),
        "arguments_mb": memory.argument_size_in_bytes / MB,
        "temporaries_mb": memory.temp_size_in_bytes / MB,
    }


def tables_received(way: str, K: int, batch: int, sizes: tuple[int, ...]) -> float:
    """Returns the bytes that a worker receives for the tables, by the docstring of `models.dlrm`."""
    ids = batch * len(sizes)
    words = {
        "exchange": 2 * sum(sizes) * DIM,
        "late": ids * (1 + DIM),
        "columns": ids * (1 + 2 * DIM / K),
        "rows": ids * (1 + 2 * DIM),
    }
    return (K - 1) / K * 4 * words[way]


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
