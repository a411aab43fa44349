"""Thresholds of dynamic communication thresholding while a model trains: of gradients, and of activations."""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.experiment import Experiment
from configs.methods import DctDp, Method
from jaxcomm.methods.dct_dp import Thresholds
from jaxcomm.selectors.topk import n_kept

CUT = 2  # the second block of a DLRM begins the second stage, as in the paper


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

    _train(experiment, method, seeds, begin)
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
    from models.functional import apply, cut
    from train.architectures import make_model
    from train.data import dataset_info

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

    _train(experiment, method, seeds, begin)
    return runs


def deviation(thresholds: Sequence[float], skipped: int) -> float:
    """Returns the largest deviation of a threshold from its running mean, in % of that mean.

    Args:
      thresholds: by step.
      skipped: steps at the start that do not count; the running mean is over all steps since.
    """
    values = np.asarray(thresholds[skipped:], np.float64)
    means = np.cumsum(values) / np.arange(1, 1 + len(values))
    return float(100 * np.max(np.abs(values / means - 1)))


def _train(experiment: Experiment, method: Method, seeds: int, begin: Callable[[Any], Any]) -> None:
    """Trains with the seeds 0, 1, ...; before each, `begin` gets the job and returns the `look` of its steps."""
    from train.job import make_job
    from train.loop import train
    from train.processes import Processes
    from train.seeds import Stopwatch

    job = make_job(experiment, method)
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as scratch:
            step: Any = Shown(job.step, begin(job))
            seeded = dataclasses.replace(experiment, seed=seed, out=Path(scratch))
            outcome = train(seeded, method, Processes(), Stopwatch(), dataclasses.replace(job, step=step))
        if not outcome.finished:
            raise SystemExit("Stopped by SIGTERM; what was recorded before is kept.")
