"""Bytes, launches and memory of every method's step as XLA compiles it for NVIDIA GPUs. No GPU is needed.

    python3.12 -m venv gpu && gpu/bin/pip install -e '.[data]' jax-cuda12-plugin jax-cuda12-pjrt
    gpu/bin/python -m benchmarks.gpu --methods topk,dct_dp --n 25e6 --gpu h100 --topology 4x1

The compiler comes with two wheels, and compiles for machines that are described to it; neither a driver nor any other
library of CUDA is needed. This shows what it makes of a step, and that `step.verify` holds for it; it does not measure
time. The topology is HOSTS x GPUS: with several hosts of several GPUs, each method is inside `hierarchical`: dense in a
host, the method between hosts; methods that average models are left out.

bytes is what a device receives in a step, between_hosts the part by collectives that cross hosts, and collectives lists
those of at least 256 bytes with their types. launches counts the kernels, copies and collectives of a usual step,
in_graphs those of them in CUDA graphs, of which the step launches graphs. The host waits host_waits times for a number,
before a conditional or a turn of a loop of unknown length. atomics counts the launches of kernels that add by atomic
operations, swap_loops those that do so by loops of compare-and-swap. bytes_touched is what kernels read and write of
memory a parameter, touched_in_exchange that without the loss and the optimizer. sizes_temporary is the memory of
temporaries, in sizes of the gradient (4 bytes a parameter). overlap is the share of products that can be computed while
collectives are on their way. What a step does only rarely does not count, and a loop of unknown length counts as one
turn.

    gpu/bin/python -m benchmarks.gpu --layouts --topology 2x8

compiles the trainer's steps for workers of several GPUs, for sharded layers and tables, and for pipelines. With --json,
each row is saved as soon as it is made; rows that the file has already are not made again.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh
from tyro.conf import arg

import jaxcomm as jc
from benchmarks import exchange, harness
from benchmarks.compiled import CompiledStep, Layout, compile_layout, compile_method, layouts
from benchmarks.harness import Options, Row
from benchmarks.launches import DUMP, read_dump
from benchmarks.memory_traffic import read_memory_traffic
from benchmarks.shapes import count, shapes_of
from configs.methods import DctDp
from jaxcomm.accounting.hlo import read_overlap
from jaxcomm.exchange import is_local
from train.tables import check_file, write_records

_SMALL = 256  # bytes of a collective's operand: losses, metrics and counts are below

# Those of `exchange`, and more: of local methods, one with an exchange in every step, and one of a fragment in each.
METHODS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    **{name: make for name, make in exchange.METHODS.items() if name != "naive"},
    "plump_dp_bfloat16_all_reduce": lambda _: jc.plump_dp(value_dtype="bfloat16", collective="all_reduce"),
    "ef21": jc.ef21,
    "pulse": lambda sparsity: jc.pulse(sparsity, learning_rate=0.1),
    "local_sgd": lambda _: jc.local_sgd(1, exchange=jc.plump_dp()),
    "local_sgd_4_fragments": lambda _: jc.local_sgd(4, exchange=jc.plump_dp(), fragments=4, overlap=1, mix=0.5),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU, as its maker describes it: sizes in bytes, frequency in GHz, bandwidth in bytes a second."""

    name: str
    capability: int
    cores: int
    units: int  # float32 units a core
    shared: int  # memory of a core that its threads share
    bandwidth: int
    cache: int
    memory: int
    clock: float

    @property
    def config(self) -> str:
        """The description that XLA takes, in the text format of its protocol buffer GpuTargetConfigProto."""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared}
              shared_memory_per_block_optin: {self.shared - 1024}
              threads_per_core_limit: 2048
              core_count: {self.cores}
              fpus_per_core: {self.units}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              cuda_compute_capability {{ major: {self.capability} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            runtime_version {{ major: 12 minor: 8 patch: 0 }}
            device_description_str: "{self.name}"
        """


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 233472, 3352320000000, 52428800, 84942979072, 1.98),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167936, 2039040000000, 41943040, 85100068864, 1.41),
}


@dataclass(frozen=True)
class Config(Options):
    """Compile a step of every method for NVIDIA GPUs."""

    gpu: str = "h100"  # h100 or a100.
    topology: str = "4x1"  # HOSTS x GPUS.
    shapes: Annotated[str, arg(aliases=["--n"])] = "resnet50"
    """Shapes of the gradient: a model's name, or a number of parameters in one tensor."""
    method: Annotated[str, arg(aliases=["--methods"])] = "all"  # Methods, separated by commas, or all.
    sparsity: float = 0.99  # Fraction of coordinates that sparse methods do not send.
    layouts: bool = False  # Compile the trainer's steps instead, one for every layout of a model.
    only: str = ""  # Of the layouts, those with these names, separated by semicolons.


def main(config: Config) -> None:
    """Compiles what the file does not have yet, saving each row, and prints the table."""
    check_file("--json", config.json)
    saved: list[Row] = json.loads(config.json.read_text()) if config.json and config.json.exists() else []
    rows = []
    for key, make in planned(config):
        row = next((row for row in saved if key.items() <= row.items()), None)
        if row is None:
            row = key | make()
            saved.append(row)
            write_records(config.json, saved)
            print(f"{key['program']}, {key['method']}: {row['compile_s']:.1f} s", flush=True)
        rows.append(row)
    harness.report(None, (f"Compiled for {config.gpu}, {config.topology}", rows))


def planned(config: Config) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yields what tells a row from others, and what makes the rest of it.

    Raises:
      ValueError: for an unknown method or layout, or a GPU or a topology that cannot be described.
    """
    mesh = described(config.gpu, config.topology)
    inside = mesh.shape.get("inside", 1)
    key = {"gpu": config.gpu, "topology": config.topology, "jax": jax.__version__, "flags": _flags()}
    if config.layouts:
        named = layouts(mesh.size, inside if inside > 1 else 2)
        if inside > 1:
            named["groups"] = Layout("digits", DctDp(), {"workers": mesh.size, "slices": mesh.size // inside})
        names = config.only.split(";") if config.only else [*named]
        for name, layout in harness.choose(named, names, "--only").items():
            yield key | {"program": name, "method": layout.method.name}, partial(_of_layout, layout, mesh)
        return
    shapes = shapes_of(config.shapes)
    for name in exchange.selected_methods(config.method, config.sparsity, METHODS):
        tx = METHODS[name](config.sparsity)
        if config.method == "all" and not _is_possible(tx, shapes, inside > 1):
            continue
        method = f"hierarchical({name})" if inside > 1 else name
        about = {"program": config.shapes, "method": method, "sparsity": config.sparsity}
        yield key | about, partial(_of_method, tx, shapes, mesh)


def _flags() -> str:
    """Returns what XLA_FLAGS tell the compiler for GPUs."""
    return " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith("--xla_gpu"))


def _is_possible(tx: optax.GradientTransformation, shapes: list[tuple[int, ...]], in_groups: bool) -> bool:
    """Whether a method takes these shapes (fragments need several tensors), and goes into groups of workers."""
    try:
        jax.eval_shape(tx.init, [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes])
    except ValueError:
        return False
    return not (in_groups and is_local(tx))


def described(gpu: str, topology: str) -> Mesh:
    """Returns a mesh of GPUs that need not be here: ("data",), or ("data", "inside") if hosts have several.

    Raises:
      ValueError: without the compiler, or for an unknown GPU or topology.
    """
    (device,) = harness.choose(GPUS, [gpu], "--gpu").values()
    sizes = topology.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--topology must be HOSTS x GPUS; got {topology!r}. Try 4x1.")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])  # else the wheel looks for a driver
    try:
        devices = topologies.get_topology_desc(
            platform="cuda", target_config=device.config, topology=f"1x{topology}"
        ).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"GPUs must be known to the compiler for CUDA; got {str(error).strip().splitlines()[-1]}. Install it in an "
            "environment of its own, pip install jax-cuda12-plugin jax-cuda12-pjrt, of JAX's version."
        ) from error
    hosts, gpus = map(int, sizes)
    array = np.array(sorted(devices, key=lambda device: device.id))
    return Mesh(array, ("data",)) if 1 in (hosts, gpus) else Mesh(array.reshape(hosts, gpus), ("data", "inside"))


def _of_method(tx: optax.GradientTransformation, shapes: list[tuple[int, ...]], mesh: Mesh) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        step = compile_method(tx, shapes, mesh, DUMP | {"xla_dump_to": folder})
        return _row(step, count(shapes), Path(folder))


def _of_layout(layout: Layout, mesh: Mesh) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        job, step = compile_layout(layout, list(mesh.devices.flat), DUMP | {"xla_dump_to": folder})
        return _row(step, job.report.parameters, Path(folder))


def _row(step: CompiledStep, n: int, dump: Path) -> Row:
    """Returns the columns of a compiled step with n parameters."""
    between = axes_between_hosts(step.mesh)
    kinds = Counter(
        f"{traffic.op} {traffic.dtype} {'between' if set(between) & set(traffic.axes) else 'inside'}"
        for _, traffic in step.program.operations()
        if traffic.operand_bytes >= _SMALL
    )
    launches = asdict(read_dump(dump, step.text))
    return {
        "bytes": float(step.program.received),
        "bytes_traced": step.bytes_traced,
        "between_hosts": float(step.program.over(*between).received),
        "collectives": ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())),
        "launches": launches.pop("total"),
        **launches,
        "bytes_touched": read_memory_traffic(step.text) / n,
        "touched_in_exchange": read_memory_traffic(step.text, "jaxcomm") / n,
        "sizes_temporary": step.memory.temp_size_in_bytes / (4 * n),
        "overlap": read_overlap(step.text),
        "compile_s": step.compile_s,
        "verified": step.verified,
    }


def axes_between_hosts(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of a mesh along which devices are on several hosts."""
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    return tuple(name for axis, name in enumerate(mesh.axis_names) if (hosts != hosts.take([0], axis)).any())


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
