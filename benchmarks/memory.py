"""What a device holds if a worker is several devices: the state of a GPT, and the temporaries of a step.

    python -m benchmarks.memory

First, two workers, each of 1, 2 or 4 devices over which its parameters, its optimizer's state, the state of the method
and its rows are sharded. Then, one worker whose model is cut into stages, by schedule and number of micro-batches, each
of one row. All is read from the compiled step (`memory_analysis`); nothing is run.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from benchmarks.harness import Options, Row
from configs import CONFIGS
from configs.experiment import Architecture
from configs.methods import DctDp, LocalSgd, PlumpDp, SparseLoco
from train.job import make_job
from train.methods import run_name
from train.processes import prepare_jax

METHODS = (PlumpDp(), DctDp(0.99), LocalSgd(steps=30), SparseLoco())


@dataclass(frozen=True)
class Config(Options):
    """Read the memory of a step from its compiled program."""

    layers: int = 4  # Blocks of the GPT.
    width: int = 256  # Width of the GPT, a multiple of its 4 heads.
    batch: int = 16  # Rows per step, over both workers.
    stages: int = 3  # Stages of the pipeline, at most 8.
    micro_batches: tuple[int, ...] = (4, 16, 64)  # Micro-batches of the pipeline.


def main(config: Config) -> None:
    """Prints the tables."""
    prepare_jax(8)
    architecture = Architecture("gpt", {"layers": config.layers, "width": config.width, "heads": 4})

    def compiled(method: Any, **fields: Any) -> tuple[Any, float, float]:
        """Returns the job, the MB of its state, and those of the temporaries."""
        experiment = dataclasses.replace(CONFIGS["gpt_stdlib"], architecture=architecture, **fields)
        job = make_job(experiment, method)
        memory = job.step.compile(*job.inputs).memory_analysis()
        return job, memory.argument_size_in_bytes / 1e6, memory.temp_size_in_bytes / 1e6

    of_workers: list[Row] = []
    for method, devices in itertools.product(METHODS, (1, 2, 4)):
        job, state, temporary = compiled(method, global_batch=config.batch, workers=2, fsdp=devices)
        of_workers.append(
            {
                "method": run_name(method),
                "devices": devices,
                "parameters": job.report.parameters,
                "state_mb": state,
                "step_mb": state + temporary,
                "received_over_workers": job.step.report(*job.inputs).received_over("data"),
            }
        )
    of_stages: list[Row] = []
    for count, schedule in itertools.product(config.micro_batches, ("gpipe", "1f1b")):
        split = {"stages": config.stages, "micro_batches": count}
        fields = {"workers": 1, "global_batch": count, "pipeline_schedule": schedule, **split}
        _, state, temporary = compiled(PlumpDp(), **fields)
        sizes = {"state_mb": state, "temporary_mb": temporary, "step_mb": state + temporary}
        of_stages.append({"schedule": schedule, **split, **sizes})
    harness.report(
        config.json,
        ("What a device of a worker holds (MB), and receives from other workers a step (bytes)", of_workers),
        ("What a device of a stage holds (MB), with micro-batches of one row", of_stages),
    )


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
