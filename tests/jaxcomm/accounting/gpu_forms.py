"""Collectives and steps as XLA compiles them for four described H100s: what `test_gpu_texts.py` reads.

    PYTHON -m tests.jaxcomm.accounting.gpu_forms

with JAX and its wheels jax-cuda12-plugin and jax-cuda12-pjrt writes the lines that the reader looks at into
`gpu_texts/VERSION.txt`.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc

TEXTS = Path(__file__).parent / "gpu_texts"
K, N = 4, 1 << 20
_RING = [(source, (source + 1) % K) for source in range(K)]
_HEADING = "== "
_LINE = re.compile(r" (?:all-|reduce-scatter|collective-permute)[a-z\-]*\(")


class Form(NamedTuple):
    """A collective: a function of N numbers of a type, and by hand its operation, the bytes put in, and their types."""

    function: Callable
    dtype: type
    op: str
    operand_bytes: int
    types: str


def halves(x):
    """Two arrays, so that XLA combines their collectives: N numbers, and half as many."""
    return x, x[: N // 2] * 2


FORMS = {
    "sum f32": Form(lambda x: lax.psum(x, "data"), jnp.float32, "all_reduce", 4 * N, "f32"),
    "sum bf16": Form(lambda x: lax.psum(x, "data"), jnp.bfloat16, "all_reduce", 2 * N, "bf16"),
    "sum s8": Form(lambda x: lax.psum(x, "data"), jnp.int8, "all_reduce", N, "s8"),
    "sums f32": Form(lambda x: lax.psum(halves(x), "data"), jnp.float32, "all_reduce", 6 * N, "f32"),
    "gather u32": Form(lambda x: lax.all_gather(x, "data"), jnp.uint32, "all_gather", 4 * N, "u32"),
    "gather bf16": Form(lambda x: lax.all_gather(x, "data"), jnp.bfloat16, "all_gather", 2 * N, "bf16"),
    "gathers u32": Form(
        lambda x: [lax.all_gather(part, "data") for part in halves(x)], jnp.uint32, "all_gather", 6 * N, "u32"
    ),
    "scatter f32": Form(lambda x: lax.psum_scatter(x, "data", tiled=True), jnp.float32, "reduce_scatter", 4 * N, "f32"),
    "scatter bf16": Form(
        lambda x: lax.psum_scatter(x, "data", tiled=True), jnp.bfloat16, "reduce_scatter", 2 * N, "bf16"
    ),
    "scatters f32": Form(
        lambda x: [lax.psum_scatter(part, "data", tiled=True) for part in halves(x)],
        jnp.float32,
        "reduce_scatter",
        6 * N,
        "f32",
    ),
    "exchange u32": Form(
        lambda x: lax.all_to_all(x.reshape(K, -1), "data", 0, 0), jnp.uint32, "all_to_all", 4 * N, "u32"
    ),
    "shift u32": Form(lambda x: lax.ppermute(x, "data", _RING), jnp.uint32, "permute", 4 * N, "u32"),
    "shifts u32": Form(
        lambda x: [lax.ppermute(part, "data", _RING) for part in halves(x)], jnp.uint32, "permute", 6 * N, "u32"
    ),
}


def compiled_form(form, mesh, is_async):
    """Returns the text of a form; asynchronous if there is something that it can overlap with."""

    def function(x, a):
        result, product = form.function(x[0] + x[0]), a[0]  # computed, so that it is no argument of the program
        for _ in range(3 if is_async else 0):
            product = product @ product
        return jax.tree.map(lambda y: y[None], (result, product))

    rows = NamedSharding(mesh, P("data"))
    step = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    x = jax.ShapeDtypeStruct((K, N), form.dtype, sharding=rows)
    a = jax.ShapeDtypeStruct((K, 2048, 2048), jnp.float32, sharding=rows)
    return jax.jit(step).lower(x, a).compile().as_text()


STEPS = {
    "step of plump_dp": jc.plump_dp(),
    "step of quant_dp": jc.quant_dp(),
    "step of dct_dp": jc.dct_dp(0.95),
    "step of powersgd": jc.powersgd(2),
}


def make_step(exchange, mesh):
    """Returns a step as the trainer's, of a network of two layers; its chain, and the shapes of its arguments."""

    def loss_fn(params, batch):
        hidden = jax.nn.relu(batch["x"] @ params["kernel"] + params["bias"])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], batch["y"]).mean()

    tx = jc.chain(exchange, optax.adam(1e-3))
    step = jc.make_train_step(loss_fn, tx, mesh)
    shapes = {"kernel": (300, 400), "bias": (400,), "head": (400, 10)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    rows = NamedSharding(mesh, P("data"))
    batch = {
        "x": jax.ShapeDtypeStruct((64, 300), jnp.float32, sharding=rows),
        "y": jax.ShapeDtypeStruct((64,), np.int32, sharding=rows),
    }
    return step, tx, params, (step.shapes(params), batch)


def trimmed(text):
    """Returns a program of the collectives alone; those of these programs are all outside of loops and branches."""
    lines = [re.sub(r", (?:metadata|backend_config)=.*", "", line) for line in text.splitlines() if _LINE.search(line)]
    partitions = re.findall(r", num_partitions=\d+", text)[0]
    return "\n".join([f"HloModule step, is_scheduled=true{partitions}", "ENTRY %main () -> f32[] {", *lines, "}"])


def texts() -> Iterator[tuple[str, str]]:
    """Compiles; yields a name and the text for every form, asynchronous and not, and for every step."""
    from benchmarks.gpu import described

    mesh = described("h100", "4x1")
    for name, form in FORMS.items():
        for is_async in (True, False):
            yield f"{name}, {'asynchronous' if is_async else 'alone'}", compiled_form(form, mesh, is_async)
    for name, exchange in STEPS.items():
        step, _, _, arguments = make_step(exchange, mesh)
        yield name, step.lower(*arguments).compile().as_text()


def stored(version: str) -> dict[str, str]:
    """Returns the stored texts of a version of JAX by their names."""
    parts = (TEXTS / f"{version}.txt").read_text().split(_HEADING)[1:]
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def main() -> None:
    """Writes the texts of this JAX."""
    written = [f"{_HEADING}{name}\n{trimmed(text)}\n" for name, text in texts()]
    (TEXTS / f"{jax.__version__}.txt").write_text("".join(written))


if __name__ == "__main__":
    main()
