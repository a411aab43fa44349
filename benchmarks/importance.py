"""The importance of gradients while a model trains by importance weighted pruning: its distribution, layer by layer.

Importance is what `iwp` compares with its threshold, (|v| / K) / |w|: here for the accumulated gradient v of worker 0,
before a mask is chosen.
"""

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from tyro.conf import Suppress

from configs.experiment import Experiment
from configs.methods import Trained
from jaxcomm import methods
from jaxcomm.collectives import axis_size
from jaxcomm.collectives.sparse import Accumulated
from jaxcomm.layout import Layout
from jaxcomm.selectors.importance import importance

EDGES = np.linspace(-8, 4, 49)  # of the histograms, decimal logarithms; values beyond count in the outermost bins


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
    from train.job import make_job
    from train.loop import train
    from train.processes import Processes
    from train.seeds import Stopwatch

    watchers: list[Watcher] = []
    settings = {attribute.name: getattr(method, attribute.name) for attribute in dataclasses.fields(methods.Iwp)}
    watched: Any = Watched(**settings | {"dense_below": 0, "show": lambda *args: watchers[-1].show(*args)})
    job = make_job(experiment, watched)
    for seed in seeds:
        watchers.append(Watcher(interval, marks))
        with tempfile.TemporaryDirectory() as scratch:
            seeded = dataclasses.replace(experiment, seed=seed, out=Path(scratch))
            outcome = train(seeded, watched, Processes(), Stopwatch(), job)
        if not outcome.finished:
            raise SystemExit("Stopped by SIGTERM; what was recorded before is kept.")
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
