"""The importance of gradients while a model trains by importance weighted pruning: its distribution, layer by layer.

Also how often a parameter changes.

Importance is what `iwp` compares with its threshold, (|v| / K) / |w|: here for the accumulated gradient v of worker 0,
before a mask is chosen.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from tyro.conf import Suppress

from benchmarks.thresholds import train_all
from configs.experiment import Experiment
from configs.methods import Method, Trained
from jaxcomm import methods
from jaxcomm.collectives import axis_size
from jaxcomm.collectives.sparse import Accumulated
from jaxcomm.layout import Layout
from jaxcomm.selectors.importance import importance

EDGES = np.linspace(-8, 4, 49)  # of the histograms, decimal logarithms; values beyond count in the outermost bins

WAITS = (300, 100)  # steps between two changes of a parameter, on average


@dataclass(frozen=True, kw_only=True)
class Watched(Trained, methods.Iwp):
    """Importance weighted pruning that shows the importance of every coordinate, before the mask is chosen.

    Attributes:
      show: called on the host with (worker, step from 0, importance in the shapes of the tensors).
    """

    show: Suppress[Any] = field(default=None, compare=False)

    def local_mask(self, vector: Accumulated, weights: jax.Array, step: jax.Array, layout: Layout) -> jax.Array:
        """Returns the mask that this worker would publish."""
        values = importance(vector.sum() / axis_size(self.axis_name), weights, self.eps)
        jax.debug.callback(self.show, lax.axis_index(self.axis_name), step, layout.unflatten(values))
        return super().local_mask(vector, weights, step, layout)


class Watcher:
    """Keeps moments of every tensor's importance in some steps, and histograms in a few.

    Attributes:
      moments: (mean, variance) of every tensor, by step from 1.
      histograms: counts of every tensor, (len(EDGES) - 1,), by step from 1.
    """

    def __init__(self, interval: int, marks: tuple[int, ...]):
        """Takes moments in the steps that `interval` divides, and histograms in the steps `marks`."""
        self._every, self._marks = interval, marks
        self.moments: dict[int, list[tuple[float, float]]] = {}
        self.histograms: dict[int, list[list[int]]] = {}

    def show(self, worker: Any, step: Any, tensors: Any) -> None:
        """Notes worker 0's importance."""
        n_steps = int(step) + 1
        if int(worker) != 0:
            return
        if n_steps % self._every == 0:
            self.moments[n_steps] = [(float(np.mean(tensor)), float(np.var(tensor))) for tensor in tensors]
        if n_steps in self._marks:
            self.histograms[n_steps] = [histogram(np.asarray(tensor)) for tensor in tensors]


def updates(experiment: Experiment, method: Method, seeds: int, begin: int) -> list[dict[str, Any]]:
    """Trains with the seeds 0, 1, ..., and counts how often each parameter changes.

    Args:
      experiment: what is trained.
      method: the exchange.
      seeds: how many.
      begin: steps at the start that do not count.

    Returns:
      A record for each seed: "accuracy" in % at the end, "steps" that count, "changes" of all parameters, and
      "tensors", each with "name", "n", and "counts", parameters by how often they changed: never; less than once in 300
      steps; less than once in 100; and more often.
    """
    found: list[dict[str, Any]] = []
    counts: list[np.ndarray] = []

    def start(job: Any) -> Any:
        counts[:] = [np.zeros(leaf.shape, np.int32) for leaf in jax.tree.leaves(job.model(job.start(0))[0])]
        before: list[np.ndarray] = []
        done = 0

        def look(state: Any, batch: Any) -> None:
            nonlocal before, done
            del batch
            now = [np.array(leaf) for leaf in jax.tree.leaves(job.model(state)[0])]
            done += 1
            if done > begin:
                for count, one, other in zip(counts, now, before, strict=True):
                    count += one != other
            before = now

        return look

    for job, ended in train_all(experiment, method, range(seeds), start):
        steps, tensors = experiment.steps - begin, []
        edges = [0, 1, *(math.ceil(steps / wait) for wait in WAITS), steps + 1]
        paths = jax.tree_util.tree_leaves_with_path(job.model(ended.state)[0])
        for (path, _), count in zip(paths, counts, strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            tensors.append({"name": name, "n": count.size, "counts": np.histogram(count, edges)[0].tolist()})
        changes = sum(int(count.sum()) for count in counts)
        accuracy = 100 * ended.summary.accuracy
        found.append({"accuracy": accuracy, "steps": steps, "changes": changes, "tensors": tensors})
    return found


def histogram(values: np.ndarray) -> list[int]:
    """Counts the values in bins of their decimal logarithm; zeros go into the first."""
    with np.errstate(divide="ignore"):
        logs = np.clip(np.log10(values), EDGES[0], EDGES[-1])
    return np.histogram(logs, EDGES)[0].tolist()


def measure(
    experiment: Experiment, method: methods.Iwp, interval: int, marks: tuple[int, ...], seeds: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Trains with several seeds, and yields the importance of each run's tensors.

    Args:
      experiment: what is trained.
      method: its fields; every tensor is compressed, however small.
      interval: steps between two moments.
      marks: steps of the histograms, from 1.
      seeds: of the parameters and of the order of the data.

    Yields:
      A record for each seed: "steps" (those of the moments), "marks", and "tensors", each with "name", "kind"
      ("convolution", "normalisation", "dense"), "n", "means" and "spreads" (variance over mean) by step, to four
      digits, and "histograms" by mark.
    """
    watchers: list[Watcher] = []
    settings = {attribute.name: getattr(method, attribute.name) for attribute in dataclasses.fields(methods.Iwp)}
    watched: Any = Watched(**settings | {"dense_below": 0, "show": lambda *args: watchers[-1].show(*args)})

    def begin(job: Any) -> Any:
        del job
        watchers.append(Watcher(interval, marks))
        return lambda state, batch: None

    for job, outcome in train_all(experiment, watched, seeds, begin):
        jax.effects_barrier()
        yield _record(watchers[-1], job.model(outcome.state)[0])


def _record(watcher: Watcher, params: Any) -> dict[str, Any]:
    steps, marks = sorted(watcher.moments), sorted(watcher.histograms)
    tensors = []
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        moments = [watcher.moments[step][index] for step in steps]
        tensors.append(
            {
                "name": name,
                "kind": "convolution" if leaf.ndim == 4 else "normalisation" if "norm" in name else "dense",
                "n": math.prod(leaf.shape),
                "means": [_rounded(mean) for mean, _ in moments],
                "spreads": [_rounded(variance / mean if mean else 0.0) for mean, variance in moments],
                "histograms": [watcher.histograms[mark][index] for mark in marks],
            }
        )
    return {"steps": steps, "marks": marks, "tensors": tensors}


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
