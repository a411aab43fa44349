"""A host that trains with this library: `python -m benchmarks.peers.jax_host JOB`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks.peers.job import MOMENTUM, Job, train
from train.processes import connect, prepare_jax

METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "dense": jc.plump_dp,
    "bfloat16": lambda: jc.plump_dp(value_dtype="bfloat16"),
    "float16": lambda: jc.plump_dp(value_dtype="float16"),
    "powersgd_1": lambda: jc.powersgd(rank=1),
    "powersgd_4": lambda: jc.powersgd(rank=4),
    "topk": lambda: jc.topk(0.99),
    "dct_dp": lambda: jc.dct_dp(0.99),
    "quant_dp_16": lambda: jc.quant_dp(16),
    "quant_dp": lambda: jc.quant_dp(8),
    "sign": jc.sign,
}


def loss_fn(params: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy of images (b, 1024) and labels (b,)."""
    x, labels = batch
    for index in range(0, len(params), 2):
        x = x @ params[index] + params[index + 1]
        if index + 2 < len(params):
            x = jax.nn.relu(x)
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()


def main(path: Path) -> None:
    """Trains this host's part of a job."""
    prepare_jax()
    processes = connect(None, None, None)
    job = Job.load(path)
    mesh = jc.make_mesh(data=processes.count)
    tx = jc.chain(METHODS[job.method](), optax.sgd(job.learning_rate, momentum=MOMENTUM))
    train_step = jc.make_train_step(loss_fn, tx, mesh)
    state = train_step.init([jnp.asarray(array) for array in job.weights])
    by_rows = NamedSharding(mesh, P("data"))

    def step(x: np.ndarray, labels: np.ndarray) -> Any:
        nonlocal state
        batch = (x, labels.astype(np.int32))
        state, metrics = train_step(
            state, tuple(jax.make_array_from_process_local_data(by_rows, array) for array in batch)
        )
        return metrics["loss"]

    train(
        job,
        processes.index,
        processes.count,
        step=step,
        loss_of=float,
        weights=lambda: [np.asarray(array.addressable_data(0)) for array in train_step.params(state)],
        barrier=lambda: multihost_utils.sync_global_devices("segment"),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
