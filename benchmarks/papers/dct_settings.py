"""What the modules of dynamic communication thresholding share: options, the paper's numbers, and trained rows."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import dct
from benchmarks.activation_ablations import topk_gradient
from benchmarks.papers import common
from benchmarks.papers.report import Difference
from configs.experiment import Experiment
from configs.methods import DctDp
from train.data.click_store import GENERATED_ROWS, prepare_generated
from train.records import Record, Records

STEPS = 1000  # of a DLRM, unless --steps says otherwise
SYSTEMS = {  # by table
    "1": "DCT-MP",
    "2": "DCT-DP",
    "3": "DCT-DP and DCT-MP",
    "6": "sketched activations",
    "7": "top-k activation gradients",
}
NO_FEEDBACK = "top-k activation gradients without error feedback"
START = math.log(2)  # the loss of guessing, where training begins
CUTS = (2, 3, 4, 6)  # workers of a model; the paper has 2 and 3, and 12 splits of its large model
FIG_2 = (0.75, 0.9, 0.95, 0.99)  # sparsities; the paper's text names only 95%
DEVIATION = 26.0  # % of the running mean, at most, at 95%
FIG_5 = (0.75, 0.9, 0.95)
LIFE_SPANS = (1, 10, 100, 1000, 10_000)  # figure 7a and b, at 95%
SAME = 1.0  # % of a loss, or BLEU, up to which two runs have the same
LIFE_SPAN = 1000  # of figure 7c and d
SPARSITIES = (0.75, 0.9, 0.95, 0.98, 0.995)
# Only the text has numbers for figure 7: training time saved over the baseline, in %, by life-span.
PAPER_TIME_SAVED = {1: -11.0, 1000: 23.0}


class Translation(NamedTuple):
    """A row of table 4."""

    sparsity: float
    stages: int
    train_loss: float
    test_loss: float
    bleu: float


TABLE_4 = (
    Translation(0.0, 1, 3.150, 3.883, 35.17),
    Translation(0.9, 2, 3.159, 3.879, 35.23),
    Translation(0.95, 2, 3.157, 3.882, 35.18),
    Translation(0.9, 3, 3.151, 3.881, 35.22),
    Translation(0.95, 3, 3.148, 3.882, 35.19),
    Translation(0.9, 5, 3.157, 3.882, 35.20),
    Translation(0.95, 5, 3.188, 3.890, 35.15),
)
# Table 5: by sparsity, train loss and test loss improved, and time saved, in %.
TABLE_5 = {0.75: (-0.006, 0.023, 7.04), 0.9: (-0.021, 0.016, 13.95), 0.95: (-0.070, -0.121, 14.43)}


class Hybrid(NamedTuple):
    """The text's numbers for the large model with both methods, at 90% for DCT-MP and 99% for DCT-DP, in %."""

    time_saved: float = 37.1
    network: tuple[float, float] = (94.2, 49.3)
    cpu: tuple[float, float] = (48.7, 91.1)


@dataclass(frozen=True)
class Config(common.Config):
    """Dynamic communication thresholding's tables 1 to 7, figures 2, 5 and 7, and the timed hybrid run."""

    life_span: int = 10
    """Steps between two refreshes of DCT-DP's thresholds in tables 2 and 3; the paper's 1000 suits its 300,000."""
    rate: str = "100mbit"  # Speed of the hosts' links in timed runs.
    hosts: int = 4  # Hosts of figure 7.
    timed_steps: int = 7  # Timed steps of each setting.
    rows: int = 2048  # Samples per timed step of a pipeline.

    SMALLEST: ClassVar = {"rate": "none", "hosts": 2, "timed_steps": 1, "rows": 64}

    def dlrm(self, **changes: Any) -> Experiment:
        """Returns the twin of the DLRM, with the steps of `benchmarks.dct`."""
        return self.experiment("dlrm_clicks", **({} if self.steps else {"steps": STEPS}) | changes)


def topk_alone(x: jax.Array, residual: jax.Array, *more: Any) -> jax.Array:
    """Does `topk_gradient` without error feedback: what is not sent is forgotten."""
    return topk_gradient(x, jnp.zeros_like(residual), *more)


def trained(config: Config, records: Records, setting: dct.Setting, times_rows: int = 1) -> Record:
    """Returns a row of `benchmarks.dct`, which is trained with all seeds if it is missing.

    Args:
      config: of the run.
      records: of all runs.
      setting: the row.
      times_rows: how many times as many clicks are generated, for train and test.
    """
    steps = config.steps or STEPS
    key = {
        "of": "dct" if times_rows == 1 else f"dct, {times_rows} times the rows",
        "system": setting.system,
        "stages": setting.stages,
        "sparsity": setting.sparsity,
        "learning_rate": setting.learning_rate,
        "seeds": config.seeds,
        "steps": steps,
        "life_span": config.life_span,
    }

    def make() -> Record:
        dense = None if setting.system == "dense" else trained(config, records, dct.SETTINGS[0], times_rows)
        with tempfile.TemporaryDirectory() as folder:
            data_dir = config.data_dir
            if times_rows > 1:
                data_dir = Path(folder)
                prepare_generated(data_dir, times_rows * GENERATED_ROWS)
            dct_config = dct.Config(seeds=config.seeds, steps=steps, life_span=config.life_span, data_dir=data_dir)
            row = dct.train_setting(setting, dct_config, dense)
        print(f"{setting.system} {setting.stages} {setting.sparsity}: test loss {row['test_loss']:.4f}", flush=True)
        return row

    return records.get(key, make)


def percent_of(losses: Sequence[float | None], dense: Sequence[float]) -> Difference:
    """Returns how much larger losses are than those of the dense runs with the same seeds, in %.

    If a loss is not finite (None in records), the difference is infinite.
    """
    finite = [mine for mine in losses if mine is not None and math.isfinite(mine)]
    if len(finite) < len(losses):
        return Difference(math.inf, 0.0)
    percents = [100 * (mine / dense_loss - 1) for mine, dense_loss in zip(finite, dense, strict=True)]
    return Difference.of(percents, [0.0] * len(percents))


def methods_of_figure_7() -> dict[tuple[int, float], DctDp]:
    """Returns the methods by life-span and sparsity: one refresh in each life-span, as in Algorithm 1."""
    settings = [(span, 0.95) for span in LIFE_SPANS] + [(LIFE_SPAN, sparsity) for sparsity in SPARSITIES]
    return {key: DctDp(life_span=key[0], sparsity=key[1], early=False) for key in dict.fromkeys(settings)}
