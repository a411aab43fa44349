"""What a device holds if a worker is several devices: the state of a GPT, and the temporaries of a step.

    python -m benchmarks.memory

First, two workers, each of 1, 2 or 4 devices over which its parameters, its optimizer's state, the state of the method
and its rows are sharded. Then, one worker whose model is cut into stages, by schedule and number of micro-batches, each
of one row. All is read from the compiled step (`memory_analysis`); nothing is run.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from benchmarks.control import run
from configs import CONFIGS
from configs.experiment import Architecture
from configs.methods import DctDp, LocalSgd, PlumpDp, SparseLoco
from train.tables import print_table, write_records

METHODS = (PlumpDp(), DctDp(0.99), LocalSgd(steps=30), SparseLoco())


@dataclass(frozen=True)
class Config:
    """Read the memory of a step from its compiled program."""

    layers: int = 4
    """Blocks of the GPT."""
    width: int = 256
    """Width of the GPT, a multiple of its 4 heads."""
    batch: int = 16
    """Rows per step, over both workers."""
    stages: int = 3
    """Stages of the pipeline, at most 8."""
    micro_batches: tuple[int, ...] = (4, 16, 64)
    """Micro-batches of the pipeline."""
    json: Path | None = None
    """File for the tables, as a list of records."""


def main(config: Config) -> None:
    """Prints the tables."""
    from train.processes import prepare_jax

    prepare_jax(8)
    from train.job import make_job
    from train.methods import run_name

    architecture = Architecture("gpt", {"layers": config.layers, "width": config.width, "heads": 4})
    records = []
    for method in METHODS:
        for devices in (1, 2, 4):
            experiment = dataclasses.replace(
                CONFIGS["gpt_stdlib"], architecture=architecture, global_batch=config.batch, workers=2, fsdp=devices
            )
            job = make_job(experiment, method)
            memory = job.step.compile(*job.inputs).memory_analysis()
            records.append(
                {
                    "method": run_name(method),
                    "devices": devices,
                    "parameters": job.report.parameters,
                    "state_mb": memory.argument_size_in_bytes / 1e6,
                    "step_mb": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e6,
                    "received_over_workers": job.step.report(*job.inputs).received_over("data"),
                }
            )
    print_table("What a device of a worker holds (MB), and receives from other workers a step (bytes)", records)
    of_stages = []
    for count in config.micro_batches:
        for schedule in ("gpipe", "1f1b"):
            experiment = dataclasses.replace(
                CONFIGS["gpt_stdlib"],
                architecture=architecture,
                workers=1,
                stages=config.stages,
                global_batch=count,
                micro_batches=count,
                pipeline_schedule=schedule,
            )
            job = make_job(experiment, PlumpDp())
            memory = job.step.compile(*job.inputs).memory_analysis()
            state, step = memory.argument_size_in_bytes / 1e6, memory.temp_size_in_bytes / 1e6
            about = {"schedule": schedule, "stages": config.stages, "micro_batches": count}
            of_stages.append(about | {"state_mb": state, "temporary_mb": step, "step_mb": state + step})
    print_table("What a device of a stage holds (MB), with micro-batches of one row", of_stages)
    write_records(config.json, records + of_stages)


if __name__ == "__main__":
    run(Config, __doc__, main)
