"""What the modules of importance weighted pruning share: settings, the paper's numbers, ratios, and tuning."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers import common
from configs.experiment import Architecture, Experiment
from configs.methods import Iwp, Trained
from jaxcomm import methods
from jaxcomm.collectives.sparse import Accumulated
from jaxcomm.exchange import Exchanged, ExchangeState, Gradient
from jaxcomm.layout import Layout
from train.records import Record

THRESHOLDS = (0.005, 0.01, 0.05, 0.1)
NODES = 96
WARM_UP = 4 / 90  # of the steps: Deep Gradient Compression's four epochs of 90
CLIP = 5.0  # the norm of `configs/resnet50_imagenet.py`; the paper gives none
ROOM = 2.0  # slots over the coordinates that the ratio leaves
TOLERANCE = 0.1  # of the ratio of values
TRIALS = 5  # of a threshold
STALE_STEPS, STALE_ALPHA = 1000, 100.0  # of the runs in which changes are counted
STALE_SPANS = (100, 300)  # steps for which masks are kept
FORGOTTEN = 1e-6  # a factor on what has waited
STALE = ("never_%", "over_300_%", "100_to_300_%", "under_100_%")  # parameters by the steps between two changes


@dataclass(frozen=True)
class Row:
    """A row of table I.

    Attributes:
      model: the paper's.
      twin: the experiment that trains.
      method: the paper's name for it.
      accuracy: the paper's top-1, in %.
      ratio: the paper's ratio.
      alpha: the threshold to try first with importance weighted pruning; None for other methods.
      beta: the factor of the layer-wise threshold; 0 for a fixed one.
    """

    model: str
    twin: str
    method: str
    accuracy: float
    ratio: float
    alpha: float | None = None
    beta: float = 0.0


_ALEXNET, _RESNET = ("AlexNet", "alexnet_digits"), ("ResNet-50", "resnet_digits")
TABLE = (
    Row(*_ALEXNET, "Baseline", 58.17, 1),
    Row(*_ALEXNET, "TernGrad", 57.28, 8),
    Row(*_ALEXNET, "Fix Threshold", 57.98, 64, 20.0),
    Row(*_ALEXNET, "Layerwise Threshold", 58.19, 53, 20.0, 0.01),
    Row(*_RESNET, "Baseline", 76.09, 1),
    Row(*_RESNET, "Fix Threshold", 76.26, 58.8, 20.0),
    Row(*_RESNET, "Layerwise Threshold", 76.31, 47.6, 20.0, 0.01),
)
# All layers of ResNet-101, a sixteenth of its width, in the stem for CIFAR-10: 0.17 million parameters of 42.5.
RESNET_101 = Architecture("resnet", {"layers": (3, 4, 23, 3), "width": 4, "stem": "cifar"})
STEPS_101, BATCH_101, EVERY_101 = 150, 64, 10  # steps, rows of a step, steps from one evaluation to the next


@dataclass(frozen=True)
class Config(common.Config):
    """Importance weighted pruning's table I, its thresholds, figures 2 to 8, and 96 nodes."""

    workers: int = 4  # Workers, except for the 96 of "nodes".
    dataset: str = "digits"  # Dataset of images that the twins are trained on.
    hosts: int = 4  # Hosts of figures 7 and 8.
    rate: str = "10mbit"
    """Speed of their links, which the dense exchange of the small twin saturates, as the paper's does its links."""

    SMALLEST: ClassVar = {"hosts": 2}

    def twin(self, name: str, **changes: Any) -> Experiment:
        """Returns a twin, trained as in the paper."""
        fields = {"dataset": self.dataset, "workers": self.workers, "nesterov": False, "decay": "l2"}
        return self.experiment("digits" if self.smoke else name, **fields | changes)


@dataclass(frozen=True, kw_only=True)
class Discounted(Trained, methods.Iwp):
    """Importance weighted pruning that multiplies what has waited by a factor in the first step of a new mask.

    The mask is chosen before. What waited is the residual: the sum of the momentum over the life of the last mask.

    Attributes:
      factor: above 0; a small one forgets what has waited.
    """

    factor: float = 1.0

    def _factor(self, step: jax.Array) -> jax.Array:
        return jnp.where((step % self.life_span == 0) & (step > self.warmup_steps), np.float32(self.factor), 1.0)

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        """Exchanges the gradient and what is left of the residual."""
        assert gradient.residual is not None
        return super().average(gradient._replace(residual=gradient.residual * self._factor(state.step)), state)

    def local_mask(self, vector: Accumulated, weights: jax.Array, step: jax.Array, layout: Layout) -> jax.Array:
        """Returns the mask for the whole residual."""
        return super().local_mask(vector._replace(residual=vector.residual / self._factor(step)), weights, step, layout)


def pruning(experiment: Experiment, alpha: float, beta: float = 0.0, density: float = 1.0, **fields: Any) -> Iwp:
    """Returns the method, with all tensors compressed and a warm-up of the paper's fraction of the steps."""
    warm = max(1, round(WARM_UP * experiment.steps))
    fields = {"clip": CLIP, "warmup_steps": warm, "dense_below": 0} | fields
    return Iwp(alpha=alpha, beta=beta, density=density, **fields)


def steady(run: Record, warm_up: int) -> tuple[float, float]:
    """Returns the ratios of a run after its warm-up, from its evaluations.

    Args:
      run: of `train_seeds`.
      warm_up: its number of steps; if no evaluation is that late, the last interval counts.

    Returns:
      How many times fewer values a worker sends than there are parameters, and how many times fewer bytes it receives
      than with a dense exchange.
    """
    marks = [0, *run["steps"]]
    first = min(sum(mark < warm_up for mark in marks), len(marks) - 2)
    steps = marks[-1] - marks[first]
    weights = [after - before for before, after in zip(marks[first:], marks[first + 1 :], strict=False)]
    n_sent = sum(count * weight for count, weight in zip(run["sent"][first:], weights, strict=True)) / steps
    totals = [0.0, *run["received"]]
    bytes_per_step = (totals[-1] - totals[first]) / steps
    values = run["parameters"] / n_sent if n_sent else math.inf
    return values, run["dense_bytes"] / bytes_per_step


def tune(ratio: Callable[[float], float], target: float, first: float, tolerance: float = TOLERANCE) -> float:
    """Tries a few thresholds, and returns the one whose ratio is nearest to the target.

    The ratio rises with the threshold. In logarithms, the next threshold is where a line through the last two would
    meet the target, at most a factor of ten away. Trials end within the tolerance, or after `TRIALS`.

    Args:
      ratio: (threshold) -> its ratio.
      target: the ratio to find.
      first: the threshold to begin with.
      tolerance: of the ratio, as a fraction.
    """
    tried: list[tuple[float, float]] = []
    while True:
        alpha = first if not tried else _next(tried, math.log(target))
        tried.append((math.log(alpha), math.log(ratio(alpha))))
        nearest = min(tried, key=lambda trial: abs(trial[1] - math.log(target)))
        if abs(math.exp(nearest[1]) / target - 1) <= tolerance or len(tried) == TRIALS:
            return math.exp(nearest[0])


def _next(tried: Sequence[tuple[float, float]], target: float) -> float:
    (a, ratio_a), (b, ratio_b) = tried[-2:] if len(tried) > 1 else (tried[0], tried[0])
    slope = (ratio_b - ratio_a) / (b - a) if a != b and ratio_a != ratio_b else 1.0
    step = (target - ratio_b) / max(slope, 0.1)
    return math.exp(b + min(max(step, -math.log(10)), math.log(10)))


def fixed_row(model: str) -> Row:
    """Returns a model's row with the fixed threshold."""
    return next(row for row in TABLE if (row.model, row.method) == (model, "Fix Threshold"))
