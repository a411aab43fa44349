"""Steps compiled for machines that are only described to XLA: what `tpu` and `gpu` share."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from configs import CONFIGS
from configs.experiment import Architecture, BoundaryFields
from configs.methods import DctDp, Method, PlumpDp, SparseLoco, TopK
from jaxcomm.accounting.hlo import read_program
from jaxcomm.exchange import is_local
from jaxcomm.traffic import Program
from train.data.info import ClickInfo
from train.job import Job, make_job

_LARGE = {"layers": 4, "width": 768, "heads": 12}  # 29M parameters: dense gradients in four buckets


@dataclass(frozen=True)
class CompiledStep:
    """A step as XLA compiled it.

    Attributes:
      text: of the program.
      memory: its `memory_analysis()`.
      mesh: the mesh that it was compiled for.
      compile_s: seconds that it took.
      bytes_traced: bytes that a device receives, from the traced step.
      verified: "yes", or the first line of what `verify` raises.
    """

    text: str
    memory: Any
    mesh: Any
    compile_s: float
    bytes_traced: float
    verified: str

    @cached_property
    def program(self) -> Program:
        """Its collectives."""
        return read_program(self.text, self.mesh)


class Layout(NamedTuple):
    """A model of the trainer that is divided among devices: a configuration, a method, and changes of the former."""

    config: str
    method: Method
    options: Mapping[str, Any]


def compile_method(
    exchange: optax.GradientTransformation,
    shapes: Sequence[tuple[int, ...]],
    mesh: Any,
    options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """Compiles and verifies a step whose gradient has these shapes, with hardly any arithmetic of its own.

    Args:
      exchange: a method; with an axis "inside" in the mesh, for the exchange across groups in `hierarchical`.
      shapes: of the gradient.
      mesh: ("data",) or ("data", "inside").
      options: of the compiler.
    """
    axes = tuple(mesh.axis_names) if "inside" in mesh.shape else "data"
    if "inside" in mesh.shape:
        exchange = jc.hierarchical(exchange, inside="inside", across="data")
    tx = jc.chain(optax.sgd(0.1), exchange) if is_local(exchange) else jc.chain(exchange, optax.sgd(0.1))

    def loss_fn(params: Any, batch: Any) -> Any:
        return sum(jnp.sum(param**2) for param in params) * batch.mean()

    step = jc.make_train_step(loss_fn, tx, mesh, axis_name=axes)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    state = step.shapes(params)
    batch = jax.ShapeDtypeStruct((8 * mesh.size,), jnp.float32, sharding=NamedSharding(mesh, P(axes)))
    compiled, compile_s = _compile(step, state, batch, options)
    text = compiled.as_text()
    about = {"tx": tx, "params": params, "workers": step.sizes, "axis_name": axes, "text": text}
    return CompiledStep(
        text=text,
        memory=compiled.memory_analysis(),
        mesh=mesh,
        compile_s=compile_s,
        bytes_traced=step.report(state, batch).received,
        verified=_verified(partial(jc.verify, step, state, batch, **about)),
    )


def layouts(devices: int, inside: int) -> dict[str, Layout]:
    """Returns the layouts of the trainer's models; tables have eight columns, for as many workers.

    Args:
      devices: their number.
      inside: how many a worker has, where it has several.
    """
    workers = {"workers": devices}
    several = {"workers": devices // inside}
    stages = {"workers": devices // 2, "stages": 2, "micro_batches": 2}
    sparse, quarter = BoundaryFields(0.9), BoundaryFields(value_dtype="int4")
    return {
        "whole": Layout("digits", DctDp(), workers),
        "whole, dense": Layout("gpt_stdlib", PlumpDp(), workers | {"architecture": Architecture("gpt", _LARGE)}),
        "FSDP": Layout("gpt_stdlib", DctDp(), several | {"fsdp": inside}),
        "FSDP, local steps": Layout("gpt_stdlib", SparseLoco(), several | {"fsdp": inside}),
        "tensor parallel": Layout("gpt_stdlib", TopK(), several | {"model_parallel": inside}),
        "split layers": Layout("alexnet_digits", PlumpDp(), workers | {"dense_layers": "split"}),
        "late layers": Layout("alexnet_digits", PlumpDp(), workers | {"dense_layers": "late"}),
        "tables by rows": Layout("dlrm_flights", DctDp(), workers | {"embeddings": "rows"}),
        "tables by columns": Layout("dlrm_flights", DctDp(), {"workers": min(devices, 8), "embeddings": "columns"}),
        "late tables": Layout("dlrm_flights", PlumpDp(), workers | {"embeddings": "late"}),
        "stages": Layout("gpt_stdlib", PlumpDp(), stages),
        "stages, DCT-MP": Layout("gpt_stdlib", DctDp(), stages | {"boundary": sparse}),
        "stages, 4 bits": Layout("gpt_stdlib", PlumpDp(), stages | {"boundary": quarter}),
        "stages, 1F1B": Layout("gpt_stdlib", PlumpDp(), stages | {"boundary": quarter, "pipeline_schedule": "1f1b"}),
    }


def compile_layout(
    layout: Layout, devices: Sequence[Any], options: Mapping[str, Any] | None = None
) -> tuple[Job, CompiledStep]:
    """Compiles and verifies the trainer's step of a layout on described devices, with options of the compiler."""
    experiment = replace(CONFIGS[layout.config], **layout.options)
    info = ClickInfo("flights", 1000, 100, (5000, 300, 40)) if layout.config == "dlrm_flights" else None
    job = make_job(experiment, layout.method, info=info, devices=devices[: experiment.devices])
    compiled, compile_s = _compile(job.step, *job.inputs, options)
    with mock.patch.object(job.step, "compile", return_value=compiled):  # which takes minutes, and verify asks for it
        verified = _verified(partial(job.verify, *job.inputs))
    return job, CompiledStep(
        text=compiled.as_text(),
        memory=compiled.memory_analysis(),
        mesh=job.mesh,
        compile_s=compile_s,
        bytes_traced=job.report.received_in_exchange,
        verified=verified,
    )


def _compile(step: jc.steps.TrainStep, state: Any, batch: Any, options: Mapping[str, Any] | None) -> tuple[Any, float]:
    lowered, begin = step.lower(state, batch), time.perf_counter()
    compiled = lowered.compile(None if options is None else dict(options))
    return compiled, time.perf_counter() - begin


def _verified(verify: Callable[[], Any]) -> str:
    try:
        verify()
    except ValueError as error:
        return str(error).splitlines()[0]
    return "yes"
