"""How to lay a model over 2 to 64 devices, from shapes alone: workers, stages, and an exchange for every tensor.

    python -m benchmarks.placement --rate 1gbit --devices 2,4,8,16,32,64

For every model and number of devices: the number of stages, the exchanges, the predicted step, that of data-parallel
workers alone with dense in bfloat16, and the seconds that the plan took, given earlier plans: estimates for K workers
are computed once. Computing takes 2 floating-point operations per weight and position forward, and twice that backward,
at the given speed; the global batch is the same for all.
"""

import itertools
import math
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomm as jc
from benchmarks import harness
from benchmarks.conditions import machine
from benchmarks.harness import Options, Row
from benchmarks.shapes import shapes_of
from jaxcomm.planner.advice import DENSE
from jaxcomm.planner.links import bits_per_second

BLOCKS = 18  # of a model, at most: plans for this many are found in time with up to 8 stages
BYTES, TRAINED = 4, 3  # bytes of a number; a training step's computing over forward's, as backward costs twice as much
TOKENS = 32  # of a sentence
# Positions that a kernel is applied to, in the order of the kernels; a dense layer is applied once.
_VGG = [224**2] * 2 + [112**2] * 2 + [56**2] * 3 + [28**2] * 3 + [14**2] * 3
POSITIONS: dict[str, list[int]] = {
    "alexnet": [55**2, 27**2, *[13**2] * 3],
    "vgg16": _VGG,
    "resnet50": [112**2, *[56**2] * 10, *[28**2] * 13, *[14**2] * 19, *[7**2] * 10],
}


@dataclass(frozen=True)
class Config(Options):
    """Plan the placement of models on equal devices."""

    models: str = "alexnet,vgg16,resnet50,dlrm,transformer"  # Models, separated by commas.
    devices: str = "2,4,8,16,32,64"  # Numbers of devices, separated by commas.
    rate: str = "1gbit"  # Speed of a device's link.
    latency_ms: float = 0.1  # Latency of a message.
    batch: int = 256  # Rows per step, over all workers.
    tflops: float = 10.0  # Speed of a device.
    copy_gbyte: float = 100.0  # Speed of a copy in a device's memory, GB/s.
    memory_gbyte: float | None = None  # Memory of a device; no limit if not given.
    micro_batches: int = 4  # Micro-batches of a pipeline.


def main(config: Config) -> None:
    """Prints the table."""
    rate, counts, conditions = bits_per_second(config.rate), harness.numbers("--devices", config.devices), machine()
    rows = [row | conditions for model in config.models.split(",") for row in plans(config, model, counts, rate)]
    title = f"Placement at {config.rate}, batch {config.batch}, {config.tflops:g} Tflop/s a device"
    harness.report(config.json, (title, rows))


def plans(config: Config, model: str, counts: list[int], rate: float) -> list[Row]:
    """Plans one model on some numbers of devices. Estimates for K workers are computed once for all of them."""
    shapes = shapes_of(model)
    params = {f"{i:03}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}

    @cache
    def blocks_of(workers: int) -> list[Any]:
        return blocks(config, model, shapes, workers)

    @cache
    def advice_of(workers: int) -> Any:
        return jc.planner.estimate(
            params,
            workers,
            rate,
            latency=config.latency_ms / 1e3,
            compute=sum(block.seconds for block in blocks_of(workers)),
            copy=1 / (1e9 * config.copy_gbyte),
            methods=jc.planner.candidates(local=False),
        )

    def plan(devices: int) -> Row:
        begin = time.perf_counter()
        placement = jc.placement.place(
            devices,
            params,
            advice_of,
            blocks_of,
            seconds_per_byte=8 / rate,
            latency=config.latency_ms / 1e3,
            micro_batches=config.micro_batches,
            memory=None if config.memory_gbyte is None else int(1e9 * config.memory_gbyte),
        )
        return {
            "model": model,
            "devices": devices,
            "workers": placement.workers,
            "stages": len(placement.cuts) + 1,
            "exchanges": ", ".join(f"{name} {len(paths)}" for name, paths in placement.used.items()),
            "ms_step": 1e3 * placement.step,
            "ms_dense": 1e3 * advice_of(devices)[DENSE].step,
            "optimal": placement.optimal,
            "seconds": time.perf_counter() - begin,
        }

    return [plan(count) for count in counts]


def blocks(config: Config, model: str, shapes: list[tuple[int, ...]], workers: int) -> list[Any]:
    """Cuts a model into blocks of a kernel and what follows it, or of several of these if the model has many."""
    kernels = [at for at, shape in enumerate(shapes) if len(shape) > 1]
    starts = [0, *kernels[1:], len(shapes)]
    positions = POSITIONS.get(model, [])
    usual = TOKENS if model == "transformer" else 1
    rows, parts = config.batch / workers, []
    for order, (first, last) in enumerate(itertools.pairwise(starts)):
        shape = shapes[first]
        is_table = model in ("dlrm", "transformer") and shape[0] > 4096 and shape[1] < 1024
        at = positions[order] if order < len(positions) else usual
        weights = 0 if is_table else math.prod(shape)  # a table is looked up
        seconds = 2 * TRAINED * weights * at * rows / (1e12 * config.tflops)
        parts.append((range(first, last), seconds, shape[-1] * at * rows))
    size = -(-len(parts) // BLOCKS)
    groups = [parts[start : start + size] for start in range(0, len(parts), size)]
    return [
        jc.placement.ModelBlock(
            name=f"block {number}",
            leaves=tuple(f"{leaf:03}" for leaves, _, _ in group for leaf in leaves),
            seconds=sum(seconds for _, seconds, _ in group),
            memory=int(BYTES * sum(numbers for _, _, numbers in group)),
            boundary_bytes=2 * BYTES * group[-1][2],
        )
        for number, group in enumerate(groups)
    ]


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
