"""A GPT on real text with weights sharded over the workers, gathered and reduced in 32, 8 or 4 bits.

    python -m benchmarks.gpt_fsdp --experiment gpt_stdlib --width 64 --steps 300 --json docs/data/gpt_fsdp.json

The model, the rows, the seeds and the optimizer are those of `benchmarks.gpt`; each of the simulated workers holds a
shard of every weight and of the optimizer's state. With 32 bits, weights are gathered and gradients scattered
uncompressed; with fewer, by `jaxcomm.layers.quantized_gather`. Bytes are those of the compiled step.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks import gpt, harness
from benchmarks.papers.report import Difference, columns, or_infinite
from configs.experiment import Experiment
from configs.methods import PlumpDp
from jaxcomm.accounting.hlo import read_program
from models.functional import apply, split
from train.architectures import make_model
from train.data import eval_batches, train_batches
from train.job import make_job
from train.loop import test_scores, to_mesh
from train.methods import make_optimizer
from train.processes import prepare_jax
from train.records import Record, Records
from train.seeds import settings_of
from train.tables import print_table

BITS = (32, 8, 4)


@dataclass(frozen=True)
class Config:
    """Train a GPT on real text with weights sharded over the workers, in 32, 8 and 4 bits."""

    experiment: str = "gpt_linux"  # The text: gpt_linux, which you prepare, or gpt_stdlib.
    layers: int = 2  # Layers of the model.
    width: int = 128  # Features of a token.
    steps: int = 700  # Training steps.
    learning_rate: float = 3e-3  # Peak for Adam: it rises over a tenth of the steps, then falls by a cosine.
    batch: int = 16  # Rows per step, over all workers.
    workers: int = 4  # Simulated workers, over which the weights are sharded.
    seeds: int = 3  # Runs of each number of bits, with the seeds 0, 1, ...
    json: Path | None = None  # File for the records; those that it has with the same settings are not made again.
    data_dir: Path | None = None  # Folder of prepared datasets.


def main(config: Config) -> None:
    """Trains, and prints the table."""
    gpt_config = gpt.Config(evaluations=1, **{name: getattr(config, name) for name in vars(config)})
    gpt.check(gpt_config)
    experiment, records = gpt.experiment_of(gpt_config), Records(config.json)
    prepare_jax(config.workers)
    runs = {bits: [train(records, experiment, bits, seed) for seed in range(config.seeds)] for bits in BITS}
    dense, rows = runs[BITS[0]], []
    for bits, runs_of_bits in runs.items():
        losses = [run["loss"] for run in runs_of_bits]
        gain = Difference.of(losses, [run["loss"] for run in dense])
        rows.append(
            {
                "bits": bits,
                **columns("loss", losses, gain, "minus_32_bits"),
                "bits_per_byte": statistics.fmean(or_infinite([run["bits_per_byte"] for run in runs_of_bits])),
                "bytes_per_step": runs_of_bits[0]["bytes_per_step"],
                "fewer_than_32_bits": dense[0]["bytes_per_step"] / runs_of_bits[0]["bytes_per_step"],
            }
        )
    print_table(
        f"GPT of {dense[0]['parameters']:,} parameters on {experiment.dataset}, sharded over K={config.workers}, "
        f"{config.steps} steps of {config.batch} rows, mean over {config.seeds} seeds: validation loss (nats a byte), "
        "bytes that a device receives a step",
        rows,
    )


def train(records: Records, experiment: Experiment, bits: int, seed: int) -> Record:
    """Returns the record of one run, which is trained if it is missing."""
    seeded = dataclasses.replace(experiment, seed=seed)
    key = {"of": "sharded run", "bits": bits, "about": settings_of(seeded, PlumpDp())}
    return records.get(key, lambda: _train(seeded, bits))


def _train(experiment: Experiment, bits: int) -> Record:
    """Trains with weights that are gathered in `bits` bits."""
    job = make_job(experiment, PlumpDp())
    params, stats = job.model(job.start(experiment.seed))
    graph = split(nnx.eval_shape(lambda: make_model(experiment.architecture, job.info, experiment.dtype, 0))).graph

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        output, _ = apply(graph, params, stats, batch, training=True, rows_per_group=experiment.rows_per_group)
        return job.task.loss(output, batch)[0]

    step, state = make_step(loss_fn, params, make_optimizer(experiment), job.mesh, bits)
    where = {"global_batch": experiment.global_batch, "data_dir": experiment.data_dir, "mean": experiment.mean}
    batches = train_batches(experiment.dataset, seed=experiment.seed, augment=experiment.augment, **where)
    compiled = step.lower(state, job.inputs[1]).compile()
    for _ in range(experiment.steps):
        state, _ = compiled(state, to_mesh(next(batches), job))
    batches.close()
    model = jax.device_put((state[0], stats), NamedSharding(job.mesh, P()))
    rows = [job.evaluate(model, to_mesh(rows, job)) for rows in eval_batches(experiment.dataset, **where)]
    scores = test_scores(experiment, job, jax.device_get(rows), [])
    return {
        "loss": scores["loss"],
        "bits_per_byte": scores["bits_per_byte"],
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "bytes_per_step": float(read_program(compiled.as_text(), job.mesh).received),
    }


def make_step(loss_fn: Any, params: Any, optimizer: Any, mesh: Any, bits: int) -> tuple[Any, Any]:
    """Makes the step for weights sharded over the workers, and its state: shards, copies, residuals, optimizer state.

    Args:
      loss_fn: (params, batch) -> the loss.
      params: the initial weights, unsharded; the first dimension of each is a multiple of the number of workers.
      optimizer: each worker has the state for its shards.
      mesh: its axis is "data".
      bits: per number of gathered weights and of scattered gradients; 32 for uncompressed.

    Returns:
      (state, batch) -> (state, the loss over all rows); and the first state.
    """
    workers = mesh.size

    def gather(shards: Any, copies: Any, residual: Any) -> tuple[Any, Any]:
        if bits < 32:
            return jc.layers.quantized_gather(shards, copies, residual, bits=bits)
        return jax.tree.map(lambda shard: lax.all_gather(shard, "data", tiled=True), shards), copies

    def on_worker(state: Any, batch: Any) -> Any:
        shards, copies, residual, optimizer_state = state
        residual = jax.tree.map(lambda row: row[0], residual)

        def of_shards(shards: Any, residual: Any) -> Any:
            weights, new = gather(shards, copies, residual)
            return loss_fn(weights, batch) / workers, new

        of_both = jax.value_and_grad(of_shards, argnums=(0, 1), has_aux=True)
        (loss, new), (gradients, residual) = of_both(shards, residual)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, shards)
        shards = optax.apply_updates(shards, updates)
        residual = jax.tree.map(lambda leaf: leaf[None], residual)
        return (shards, new, residual, optimizer_state), lax.psum(loss, "data")

    copies = params if bits < 32 else ()
    residual = jax.tree.map(lambda leaf: jnp.zeros((workers, *leaf.shape)), copies)
    start, by_rows, replicated = optimizer.init(params), P("data"), P()
    specs = (by_rows, replicated, by_rows, jax.tree.map(lambda leaf: by_rows if leaf.ndim else replicated, start))
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P))
    step = jax.shard_map(on_worker, mesh=mesh, in_specs=(specs, by_rows), out_specs=(specs, replicated))
    return jax.jit(step, donate_argnums=0), jax.device_put((params, copies, residual, start), places)


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
