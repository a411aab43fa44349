"""Thresholds of dynamic communication thresholding while a model trains: of gradients, and of activations.

Also what the paper's theorem on DCT-MP assumes about them.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from configs.experiment import Experiment
from configs.methods import DctDp, Method
from jaxcomm.methods.dct_dp import Thresholds
from jaxcomm.selectors.topk import n_kept
from models.functional import apply, cut
from train.architectures import make_model
from train.data import dataset_info, train_batches
from train.job import make_job
from train.loop import train
from train.processes import Processes
from train.seeds import Stopwatch
from train.tasks import make_task

CUT = 2  # the second block of a DLRM begins the second stage, as in the paper
ROWS = 10_000  # of the training split at once, which has a multiple of it


@dataclass(frozen=True)
class Shown:
    """A train step that shows the new state and the batch after every step.

    Attributes:
      step: the train step.
      look: called with (new state, batch).
    """

    step: Any
    look: Callable[[Any, Any], None]

    def __call__(self, state: Any, batch: Any) -> Any:
        """Does the step."""
        state, metrics = self.step(state, batch)
        self.look(state, batch)
        return state, metrics

    def resize(self, state: Any, workers: int) -> Any:
        """Calls the step's `resize`."""
        return self.step.resize(state, workers)


def of_gradients(experiment: Experiment, sparsity: float, seeds: int) -> list[dict[str, Any]]:
    """Trains by DCT-DP with thresholds that are exact in every step, with the seeds 0, 1, ...

    Returns:
      A record for each seed: "thresholds", worker 0's for gradient plus residual, one per step, by dense kernel (the
      name of its block).
    """
    method = DctDp(sparsity=sparsity, life_span=1, dense_below=0)
    runs: list[dict[str, Any]] = []

    def begin(job: Any) -> Callable[[Any, Any], None]:
        shapes = jax.eval_shape(lambda: job.model(job.start(0))[0])
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
        places = {name.removesuffix(".linear.kernel"): i for i, name in enumerate(names) if name.endswith("kernel")}
        series: dict[str, list[float]] = {name: [] for name in places}
        runs.append({"thresholds": series})

        def look(state: Any, batch: Any) -> None:
            del batch
            (memory,) = (x for x in jax.tree.leaves(state, is_leaf=_is_memory) if _is_memory(x))
            row = np.asarray(memory.threshold.rows)[0]  # (S,)
            for name, place in places.items():
                series[name].append(float(row[place]))

        return look

    for _ in train_all(experiment, method, range(seeds), begin):
        pass
    return runs


def _is_memory(node: Any) -> bool:
    return isinstance(node, Thresholds)


def of_activations(
    experiment: Experiment, method: Method, sparsities: Sequence[float], interval: int, seeds: int
) -> list[dict[str, Any]]:
    """Trains with the seeds 0, 1, ..., and measures thresholds of the first two blocks' output, before it is sparse.

    Args:
      experiment: of a model without running statistics; its stages and boundary say what is dropped in training.
      method: the exchange.
      sparsities: for which thresholds are taken: the smallest of a sample's d activations that DCT-MP would send.
      interval: steps between two measurements.
      seeds: how many.

    Returns:
      A record for each seed: "steps", and "thresholds", a list for each sparsity of their means over the samples.
    """
    info = dataset_info(experiment.dataset, experiment.data_dir)
    bottom, _ = cut(make_model(experiment.architecture, info, "float32", 0), (CUT,))
    runs: list[dict[str, Any]] = []

    @jax.jit
    def measure(params: Any, batch: Any) -> jax.Array:
        x, _ = apply(bottom.graph, params, {}, batch, training=False)  # (B, d)
        d = x.shape[1]
        ordered = jnp.sort(jnp.abs(x), axis=1)
        return jnp.stack([ordered[:, d - n_kept(d, sparsity)].mean() for sparsity in sparsities])

    def begin(job: Any) -> Callable[[Any, Any], None]:
        steps: list[int] = []
        series: list[list[float]] = [[] for _ in sparsities]
        runs.append({"steps": steps, "thresholds": series})
        n_steps = 0

        def look(state: Any, batch: Any) -> None:
            nonlocal n_steps
            n_steps += 1
            if n_steps % interval == 0:
                params, _ = job.model(state)
                means = measure({index: params[index] for index in bottom.params}, batch)
                steps.append(n_steps)
                for series_of_sparsity, mean in zip(series, np.asarray(means).tolist(), strict=True):
                    series_of_sparsity.append(mean)

        return look

    for _ in train_all(experiment, method, range(seeds), begin):
        pass
    return runs


def of_theorem(experiment: Experiment, method: Method, sparsity: float, seeds: int) -> list[dict[str, float]]:
    """Trains with the seeds 0, 1, ..., and measures what the paper's theorem 1 on DCT-MP assumes, and what it says.

    With X_i the activations of row i at the cut, and tau_i its threshold, the theorem assumes that the means over the
    training rows of X_i * (|X_i| >= tau_i) and of X_i * (|X_i| >= tau) are equal, where tau is the mean of all tau_i;
    and it says that then the mean gradients with both thresholds are equal, to first order.

    Args:
      experiment: of a DLRM in two stages, without running statistics.
      method: the exchange.
      sparsity: of the thresholds, as of the experiment's boundary.
      seeds: how many.

    Returns:
      A record for each seed, of the model at its end, over all training rows, in %: "spread" of the thresholds
      (standard deviation over mean); "activations", how far the second mean is from the first, by the norm of the
      difference; "gradient", the same of the mean gradients; and "without", of the gradient without a threshold.
    """
    info = dataset_info(experiment.dataset, experiment.data_dir)
    bottom, top = cut(make_model(experiment.architecture, info, "float32", 0), (CUT,))
    task = make_task(info, experiment.label_smoothing)

    def cross(params: Any, batch: Any) -> jax.Array:
        return apply(bottom.graph, {index: params[index] for index in bottom.params}, {}, batch, training=True)[0]

    @jax.jit
    def of_rows(params: Any, batch: Any) -> jax.Array:
        magnitudes = jnp.sort(jnp.abs(cross(params, batch)), axis=1)  # (B, d)
        return magnitudes[:, -n_kept(magnitudes.shape[1], sparsity)]

    @jax.jit
    def means(params: Any, batch: Any, mean: jax.Array) -> tuple[list[jax.Array], list[Any]]:
        def loss(params: Any, least: Any) -> tuple[jax.Array, jax.Array]:
            x = cross(params, batch)
            x = jnp.where(jnp.abs(x) >= least, x, 0.0)
            after = {index: params[index] for index in top.params}
            output, _ = apply(top.graph, after, {}, batch, x, training=True)
            return task.loss(output, batch)[0], x.mean(0)

        least = (of_rows(params, batch)[:, None], mean, jnp.zeros(()))
        gradients, activations = zip(*(jax.grad(loss, has_aux=True)(params, each) for each in least), strict=True)
        return list(activations), list(gradients)

    records = []
    for job, ended in train_all(experiment, method, range(seeds)):
        params = job.model(ended.state)[0]
        where = {"global_batch": ROWS, "seed": 0, "augment": False, "data_dir": experiment.data_dir}
        stream = train_batches(experiment.dataset, **where)
        batches = [next(stream) for _ in range(info.num_train // ROWS)]
        taus = np.concatenate([np.asarray(of_rows(params, batch)) for batch in batches]).astype(np.float64)
        sums = None
        for batch in batches:
            now = means(params, batch, np.float32(taus.mean()))
            sums = now if sums is None else jax.tree.map(jnp.add, sums, now)
        assert sums is not None
        (own, one, _), (with_own, with_one, without) = sums
        records.append(
            {
                "spread": float(100 * taus.std() / taus.mean()),
                "activations": _host_overlap(one, own),
                "gradient": _host_overlap(with_one, with_own),
                "without": _host_overlap(without, with_own),
            }
        )
    return records


def _host_overlap(ours: Any, to: Any) -> float:
    """Returns the norm of the difference of two trees, in % of the norm of the second."""
    norms = [
        np.sqrt(sum(float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in jax.tree.leaves(tree)))
        for tree in (jax.tree.map(jnp.subtract, ours, to), to)
    ]
    return float(100 * norms[0] / norms[1])


def deviation(thresholds: Sequence[float], skipped: int) -> float:
    """Returns the largest deviation of a threshold from its running mean, in % of that mean.

    Args:
      thresholds: by step.
      skipped: steps at the start that do not count; the running mean is over all steps since.
    """
    values = np.asarray(thresholds[skipped:], np.float64)
    means = np.cumsum(values) / np.arange(1, 1 + len(values))
    return float(100 * np.max(np.abs(values / means - 1)))


def train_all(
    experiment: Experiment, method: Method, seeds: Iterable[int], begin: Callable[[Any], Any] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Trains with several seeds, and yields the job, and how each run ended.

    Args:
      experiment: what is trained.
      method: the exchange.
      seeds: of the parameters and of the order of the data.
      begin: gets the job before each run, and returns the `look` of its steps.
    """
    job = make_job(experiment, method)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as scratch:
            shown = job if begin is None else dataclasses.replace(job, step=cast(Any, Shown(job.step, begin(job))))
            seeded = dataclasses.replace(experiment, seed=seed, out=Path(scratch))
            ended = train(seeded, method, Processes(), Stopwatch(), shown)
        if not ended.finished:
            raise SystemExit("Stopped by SIGTERM; what was recorded before is kept.")
        yield job, ended
