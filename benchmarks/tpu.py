"""Bytes, collectives and memory of every method's step as XLA compiles it for TPUs. No TPU is needed.

    python -m venv tpu && tpu/bin/pip install -e '.[tpu]'
    tpu/bin/python -m benchmarks.tpu --shapes resnet50 --slices 2

The compiler comes with the extra tpu, and compiles for machines that are described to it. This shows which collectives
it makes of a step, over which links, and that `step.verify` holds for them; it does not measure time. With several
slices, each method is inside `hierarchical`: dense within a slice, the method between slices; methods that average
models are left out. bytes is what a chip receives in a step, between_slices the part of it that crosses slices.
sizes_temporary is the memory of temporaries, in sizes of the gradient (4 bytes a parameter).

    tpu/bin/pip install -e '.[tpu,data]'
    tpu/bin/python -m benchmarks.tpu --layouts

compiles the trainer's steps for workers of several chips, for sharded layers and tables, and for pipelines.
"""

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks import harness
from benchmarks.exchange import METHODS, selected_methods
from benchmarks.harness import Options
from benchmarks.shapes import count, shapes_of
from configs import CONFIGS
from configs.experiment import Architecture, BoundaryFields
from configs.methods import DctDp, PlumpDp, SparseLoco, TopK
from jaxcomm.accounting.hlo import read_overlap, read_program
from jaxcomm.exchange import is_local
from train.data.info import ClickInfo
from train.job import make_job

# What the compiler would otherwise ask the machine that it runs on.
_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
}

_LARGE = {"layers": 4, "width": 768, "heads": 12}  # 29M parameters: dense gradients in four buckets
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
    exchange = METHODS[method](sparsity)
    tx = jc.chain(optax.sgd(0.1), exchange) if is_local(exchange) else jc.chain(exchange, optax.sgd(0.1))
    if "inside" in mesh.shape:
        tx = jc.chain(jc.hierarchical(exchange, inside="inside", across="data"), optax.sgd(0.1))

    def loss_fn(params: Any, batch: Any) -> Any:  # its gradient has the shapes, with hardly any arithmetic
        return sum(jnp.sum(param**2) for param in params) * batch.mean()

    axes = tuple(mesh.axis_names) if "inside" in mesh.shape else "data"
    step = jc.make_train_step(loss_fn, tx, mesh, axis_name=axes)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    state = step.shapes(params)
    batch = jax.ShapeDtypeStruct((8 * mesh.size,), jnp.float32, sharding=NamedSharding(mesh, P(axes)))
    begin = time.perf_counter()
    compiled = step.compile(state, batch)
    compile_s, text = time.perf_counter() - begin, compiled.as_text()
    about = {"tx": tx, "params": params, "workers": step.sizes, "axis_name": axes, "text": text}
    program, memory = read_program(text, mesh), compiled.memory_analysis()
    kinds = Counter(traffic.op for _, traffic in program.operations() if traffic.operand_bytes >= 4096)
    return {
        "method": method,
        "chips": mesh.size,
        "bytes": float(program.received),
        "bytes_traced": step.report(state, batch).received,
        "between_slices": float(program.over("data").received) if "inside" in mesh.shape else None,
        "collectives": ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())),
        "sizes_temporary": memory.temp_size_in_bytes / (4 * count(shapes)),
        "compile_s": compile_s,
        "verified": _verified(partial(jc.verify, step, state, batch, **about)),
    }


def _verified(verify: Callable[[], Any]) -> str:
    """Returns "yes", or the first line of what `verify` raises."""
    try:
        verify()
    except ValueError as error:
        return str(error).splitlines()[0]
    return "yes"


def compile_layouts(topology: str) -> list[dict[str, Any]]:
    """Compiles and verifies the trainer's steps of small models on four chips; returns a record for each layout."""
    devices = described(topology, 1).devices.reshape(-1)[:4]
    stages = {"workers": 2, "stages": 2, "micro_batches": 2}
    sparse, quarter = BoundaryFields(0.9), BoundaryFields(value_dtype="int4")
    layouts = {
        "whole": ("digits", DctDp(), {}),
        "whole, dense": ("gpt_stdlib", PlumpDp(), {"architecture": Architecture("gpt", _LARGE)}),
        "FSDP": ("gpt_stdlib", DctDp(), {"workers": 2, "fsdp": 2}),
        "FSDP, local steps": ("gpt_stdlib", SparseLoco(), {"workers": 2, "fsdp": 2}),
        "tensor parallel": ("gpt_stdlib", TopK(), {"workers": 2, "model_parallel": 2}),
        "split layers": ("alexnet_digits", PlumpDp(), {"dense_layers": "split"}),
        "late layers": ("alexnet_digits", PlumpDp(), {"dense_layers": "late"}),
        "tables by rows": ("dlrm_flights", DctDp(), {"embeddings": "rows"}),
        "tables by columns": ("dlrm_flights", DctDp(), {"embeddings": "columns"}),
        "late tables": ("dlrm_flights", PlumpDp(), {"embeddings": "late"}),
        "stages": ("gpt_stdlib", PlumpDp(), stages),
        "stages, DCT-MP": ("gpt_stdlib", DctDp(), stages | {"boundary": sparse}),
        "stages, 4 bits": ("gpt_stdlib", PlumpDp(), stages | {"boundary": quarter}),
        "stages, 1F1B": ("gpt_stdlib", PlumpDp(), stages | {"boundary": quarter, "pipeline_schedule": "1f1b"}),
    }
    records = []
    for name, (config_name, method, options) in layouts.items():
        experiment = dataclasses.replace(CONFIGS[config_name], **({"workers": 4} | options))
        info = ClickInfo("flights", 1000, 100, (5000, 300, 40)) if config_name == "dlrm_flights" else None
        job = make_job(experiment, method, info=info, devices=devices)
        begin = time.perf_counter()
        compiled = job.step.lower(*job.inputs).compile(_APART if name == "whole, dense" else None)
        compile_s, memory, text = time.perf_counter() - begin, compiled.memory_analysis(), compiled.as_text()
        axis = (job.axis,) if isinstance(job.axis, str) else job.axis
        axes = [*axis, *(["stage"] if experiment.stages > 1 else [])]
        records.append(
            {
                "layout": name,
                "model": config_name,
                "method": method.name,
                "bytes": float(read_program(text, job.mesh).over(*axes).received),
                "bytes_traced": job.report.received_in_exchange,
                "overlap": read_overlap(text),
                "megabytes_temporary": memory.temp_size_in_bytes / 1e6,
                "compile_s": compile_s,
                "verified": _verified(partial(job.verify, *job.inputs)),
            }
        )
        print(f"{name}: {compile_s:.1f} s", flush=True)
    return records


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
