"""Bytes, collectives and memory of every method's step as XLA compiles it for TPUs. No TPU is needed.

    python -m venv tpu && tpu/bin/pip install -e '.[tpu,data]'
    tpu/bin/python -m benchmarks.tpu --shapes resnet50 --slices 2

The compiler comes with the extra tpu, and compiles for machines that are described to it. This shows which collectives
it makes of a step, over which links, and that `step.verify` holds for them; it does not measure time. With several
slices, each method is inside `hierarchical`: dense within a slice, the method between slices; methods that average
models are left out. bytes is what a chip receives in a step, between_slices the part of it that crosses slices.
sizes_temporary is the memory of temporaries, in sizes of the gradient (4 bytes a parameter).

    tpu/bin/python -m benchmarks.tpu --layouts

compiles the trainer's steps for workers of several chips, for sharded layers and tables, and for pipelines.
"""

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks import harness
from benchmarks.compiled import compile_layout, compile_method, layouts
from benchmarks.exchange import METHODS, selected_methods
from benchmarks.harness import Options
from benchmarks.shapes import count, shapes_of
from jaxcomm.accounting.hlo import read_overlap
from jaxcomm.exchange import is_local

# What the compiler would otherwise ask the machine that it runs on.
_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
}

_APART = {"xla_jf_crs_combiner_threshold_in_bytes": 32 << 20}  # else XLA for TPUs makes one all-reduce of the buckets


@dataclass(frozen=True)
class Config(Options):
    """Compile a step of every method for TPUs."""

    topology: str = "v5e:2x2"  # Chips of a slice, as JAX names them (v4:2x2x1, v5e:4x4, v6e:2x2).
    slices: int = 1  # Slices.
    shapes: str = "resnet50"  # Shapes of the gradient: a model's name, or a number of parameters in one tensor.
    method: str = "all"  # Methods, separated by commas, or all.
    sparsity: float = 0.99  # Fraction of coordinates that sparse methods do not send.
    layouts: bool = False  # Compile the trainer's steps instead, one for every layout of a model.


def main(config: Config) -> None:
    """Compiles, prints the table, and writes it where asked."""
    if config.layouts:
        rows = compile_layouts(config.topology)
        return harness.report(config.json, (f"The trainer's steps on {config.topology}", rows))
    methods = selected_methods(config.method, config.sparsity)
    harness.check_least(config, 1, "slices")
    shapes = shapes_of(config.shapes)
    mesh = described(config.topology, config.slices)
    records = []
    for method in methods:
        if config.slices == 1 or not is_local(METHODS[method](config.sparsity)):
            records.append(compile_step(method, config.sparsity, shapes, mesh))
            print(f"{method}: {records[-1]['compile_s']:.1f} s", flush=True)
    title = f"A step of {count(shapes):,} parameters on {config.slices} slices of {config.topology}"
    return harness.report(config.json, (title, records))


def described(topology: str, slices: int) -> Any:
    """Returns a mesh of TPUs that need not be here: ("data",), or ("data", "inside") for several slices.

    Raises:
      ValueError: without the compiler, or for a topology that it does not know.
    """
    for name, value in _MACHINE.items():
        os.environ.setdefault(name, value)
    options = {"num_slices": slices} if slices > 1 else {}
    try:
        devices = topologies.get_topology_desc(topology_name=topology, platform="tpu", **options).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"TPUs must be known to the compiler of the extra tpu; got {topology!r}: {reason}. Install the extra, pip "
            "install 'jaxcomm[tpu]', and name a topology such as v5e:2x2."
        ) from error
    devices = np.array(sorted(devices, key=lambda device: (getattr(device, "slice_index", 0), device.id)))
    if slices == 1:
        return Mesh(devices, ("data",))
    return Mesh(devices.reshape(slices, -1), ("data", "inside"))


def compile_step(method: str, sparsity: float, shapes: list[tuple[int, ...]], mesh: Any) -> dict[str, Any]:
    """Compiles and verifies the step of one method; returns its record."""
    step = compile_method(METHODS[method](sparsity), shapes, mesh)
    kinds = Counter(traffic.op for _, traffic in step.program.operations() if traffic.operand_bytes >= 4096)
    return {
        "method": method,
        "chips": mesh.size,
        "bytes": float(step.program.received),
        "bytes_traced": step.bytes_traced,
        "between_slices": float(step.program.over("data").received) if "inside" in mesh.shape else None,
        "collectives": ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())),
        "sizes_temporary": step.memory.temp_size_in_bytes / (4 * count(shapes)),
        "compile_s": step.compile_s,
        "verified": step.verified,
    }


def compile_layouts(topology: str) -> list[dict[str, Any]]:
    """Compiles and verifies the trainer's steps of small models on four chips; returns a record for each layout."""
    devices = described(topology, 1).devices.reshape(-1)[:4]
    records = []
    for name, layout in layouts(len(devices), inside=2).items():
        job, step = compile_layout(layout, devices, _APART if name == "whole, dense" else None)
        axis = (job.axis,) if isinstance(job.axis, str) else job.axis
        axes = [*axis, *(["stage"] if "stages" in layout.options else [])]
        records.append(
            {
                "layout": name,
                "model": layout.config,
                "method": layout.method.name,
                "bytes": float(step.program.over(*axes).received),
                "bytes_traced": step.bytes_traced,
                "overlap": read_overlap(step.text),
                "megabytes_temporary": step.memory.temp_size_in_bytes / 1e6,
                "compile_s": step.compile_s,
                "verified": step.verified,
            }
        )
        print(f"{name}: {step.compile_s:.1f} s", flush=True)
    return records


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
