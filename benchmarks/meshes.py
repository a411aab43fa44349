"""One table: the losses of ten steps of every model on every kind of mesh, against one device.

    python -m benchmarks.meshes

The small twin of every model is trained on real batches of its dataset, dense, with momentum, weight decay and dropout:
by data-parallel workers, in pipelines, both together, with tensor parallelism left to the compiler, and with the dense
layers (or the embedding tables) sharded over the workers. The table shows the largest relative difference between a
loss and that of one device. Batch normalisation takes its statistics over groups of 8 rows. The learning rate is low,
because an unstable network amplifies differences in the last bit: with 0.02 the residual network's losses agree to 2e-7
for four steps, and to 6e-3 after ten.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks import harness
from benchmarks.harness import Options
from configs import CONFIGS
from models.dlrm import Dlrm
from models.functional import apply, cut, split
from models.split_linear import SplitLinear
from train.architectures import choose_cuts, make_model
from train.data import dataset_info, train_batches
from train.dense_layers import shards_of, takes_dense
from train.processes import prepare_jax
from train.tasks import make_task

MESHES: dict[str, dict[str, int]] = {
    "1 device": {"data": 1},
    "data 4": {"data": 4},
    "stage 2": {"data": 1, "stage": 2},
    "stage 3": {"data": 1, "stage": 3},
    "stage 4": {"data": 1, "stage": 4},
    "data 2 x stage 2": {"data": 2, "stage": 2},
    "data 2 x model 2": {"data": 2, "model": 2},
    "hybrid 2": {"data": 2},
}
TWINS = (
    "digits",
    "alexnet_digits",
    "vgg_digits",
    "googlenet_digits",
    "resnet_digits",
    "dlrm_clicks",
    "transformer_catalogs",
)
ROWS_PER_GROUP = 8  # rows of a micro-batch on the largest mesh


@dataclass(frozen=True)
class Config(Options):
    """Compare every mesh with one device."""

    twins: str = ",".join(TWINS)  # Experiments, separated by commas.
    meshes: str = ",".join(MESHES)  # Meshes, separated by commas.
    rows: int = 32  # Rows of a batch.
    steps: int = 10  # Training steps.
    learning_rate: float = 0.002  # Learning rate of SGD with momentum 0.9.
    data_dir: Path | None = None  # Folder of prepared datasets.


def main(config: Config) -> None:
    """Trains every twin on every mesh, and prints the table."""
    twins, records = harness.choose(dict.fromkeys(TWINS), config.twins.split(","), "--twins"), []
    prepare_jax(8)
    for twin in twins:
        records.append({"model": twin} | compare(twin, config))
        print(records[-1], file=sys.stderr, flush=True)
    title = f"Largest difference of a loss from one device, {config.steps} steps of {config.rows} rows"
    harness.report(config.json, (title, records))


def compare(twin: str, config: Config) -> dict[str, float | None]:
    """Returns the largest relative difference of a loss, by mesh; None where the model cannot use the mesh."""
    experiment = CONFIGS[twin]
    info = dataset_info(experiment.dataset, config.data_dir)
    task = make_task(info, experiment.label_smoothing)
    stream = train_batches(experiment.dataset, global_batch=config.rows, seed=0, data_dir=config.data_dir)
    batches = list(itertools.islice(stream, config.steps))
    stream.close()

    def make(**options: Any) -> Any:
        architecture = experiment.architecture
        merged = {**architecture.options, **options}
        return make_model(dataclasses.replace(architecture, options=merged), info, "float32", 0)

    expected = train_losses(make, task.loss, batches, "1 device", config.learning_rate)
    errors: dict[str, float | None] = {}
    for mesh in config.meshes.split(","):
        losses = train_losses(make, task.loss, batches, mesh, config.learning_rate)
        pairs = None if losses is None else zip(losses, expected or [], strict=True)
        errors[mesh] = None if pairs is None else max(abs(a - b) / abs(b) for a, b in pairs)
    return errors


def train_losses(
    make: Callable[..., Any], loss_fn: Callable[..., Any], batches: Sequence[Any], mesh_name: str, learning_rate: float
) -> list[float] | None:
    """Trains a model on a mesh.

    Args:
      make: (options) -> the model, with the same initial parameters every time.
      loss_fn: (output, batch) -> (mean loss, scalars).
      batches: one a step.
      mesh_name: one of `MESHES`.
      learning_rate: of SGD.

    Returns:
      The loss of every step; None for a model with fewer blocks than stages, or with nothing to shard.
    """
    mesh = jc.make_mesh(**MESHES[mesh_name])
    tx = jc.chain(jc.plump_dp(), optax.add_decayed_weights(1e-4), optax.sgd(learning_rate, momentum=0.9))
    if "stage" in mesh.shape:
        model: Any = make()
        if len(model.blocks) < mesh.shape["stage"]:
            return None
        steps = _pipeline(model, choose_cuts(model, mesh.shape["stage"], None), loss_fn, tx, mesh)
    elif "model" in mesh.shape:
        steps = _partitioned(make(), loss_fn, tx, mesh)
    elif mesh_name.startswith("hybrid"):
        steps = _hybrid(make, loss_fn, tx, mesh)
    else:
        steps = _whole(make(), loss_fn, tx, mesh)
    if steps is None:
        return None
    state, step = steps
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def _run(graph: Any, params: Any, stats: Any, x: Any, batch: Any) -> Any:
    return apply(graph, params, stats, batch, x, training=True, rows_per_group=ROWS_PER_GROUP if stats else None)


def _whole(model: Any, loss_fn: Any, tx: Any, mesh: Any, **options: Any) -> Any:
    parts = split(model)

    def loss(params: Any, stats: Any, batch: Any) -> Any:
        output, stats = _run(parts.graph, params, stats, None, batch)
        value, scalars = loss_fn(output, batch)
        return value, (scalars, stats)

    step = jc.make_train_step(loss, tx, mesh, has_state=True, **options)
    return step.init(parts.params, model_state=parts.stats), step


def _pipeline(model: Any, cuts: Any, loss_fn: Any, tx: Any, mesh: Any) -> Any:
    stages = cut(model, cuts)
    params, stats = [stage.params for stage in stages], [stage.stats for stage in stages]
    pipeline = jc.Pipeline(
        stages=[partial(_run, stage.graph) for stage in stages],
        loss_fn=loss_fn,
        params=params,
        model_state=stats,
        micro_batches=2,
    )
    step = jc.make_train_step(pipeline, tx, mesh)
    return step.init(params, model_state=stats), step


def _partitioned(model: Any, loss_fn: Any, tx: Any, mesh: Any) -> Any:
    """Shards every matrix with divisible outputs over the model axis; XLA finds the collectives."""
    ways = mesh.shape["model"]

    def spec(leaf: Any) -> P:
        return P(None, "model") if leaf.ndim == 2 and leaf.shape[1] % ways == 0 else P()

    return _whole(model, loss_fn, tx, mesh, specs=jax.tree.map(spec, split(model).params), auto=("model",))


def _hybrid(make: Callable[..., Any], loss_fn: Any, tx: Any, mesh: Any) -> Any:
    """Shards the dense layers of convolutional models, or the tables of DLRM, over the workers."""
    kind = type(make())
    if kind is Dlrm:
        model = make(embeddings="columns")
    elif takes_dense(kind):
        model = make(dense=SplitLinear)
    else:
        return None

    def columns(path: Any, spec: P) -> P:
        return P(None, "data") if path[-1].key == "table" else spec

    specs = jax.tree_util.tree_map_with_path(columns, shards_of(model))
    return _whole(model, loss_fn, tx, mesh, specs=specs)


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
