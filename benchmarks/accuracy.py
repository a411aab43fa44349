"""Test accuracy of every method over several seeds, against the dense exchange.

    python -m benchmarks.accuracy

trains the small convolutional network on scikit-learn's digits, 5 seeds each of dense, DCT-DP at 98% and at 99%
sparsity, and top-k at 99%: about four minutes on 2 cores.
"""

import dataclasses
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from configs import CONFIGS
from configs.experiment import DctDp, Method, PlumpDp, TopK
from train.processes import Processes, prepare_jax
from train.tables import print_table, write_records


@dataclass(frozen=True)
class Config:
    """Compare test accuracy over several seeds."""

    experiment: str = "digits"
    """Name of the experiment."""
    seeds: int = 5
    """Seeds, from 0."""
    life_span: int = 10
    """Steps between refreshes of DCT-DP's thresholds."""
    steps: int | None = None
    """Training steps; those of the experiment if not given."""
    json: Path | None = None
    """File for the table, as a list of records."""


def main(config: Config) -> None:
    """Trains every method with every seed, and prints the table."""
    if config.experiment not in CONFIGS or config.seeds < 1:
        raise SystemExit(
            f"--experiment is one of {', '.join(CONFIGS)} and --seeds at least 1, got {config.experiment!r} and "
            f"{config.seeds}."
        )
    experiment = CONFIGS[config.experiment]
    steps = config.steps or experiment.steps
    experiment = dataclasses.replace(experiment, steps=steps, eval_every=steps, checkpoint_every=steps)
    prepare_jax(experiment.workers)
    from train.loop import train

    methods: dict[str, Method] = {
        "plump_dp": PlumpDp(),
        "dct_dp 98%": DctDp(sparsity=0.98, life_span=config.life_span),
        "dct_dp 99%": DctDp(sparsity=0.99, life_span=config.life_span),
        "topk 99%": TopK(sparsity=0.99),
    }
    records = []
    for label, method in methods.items():
        summaries = []
        for seed in range(config.seeds):
            with tempfile.TemporaryDirectory() as folder:
                seeded = dataclasses.replace(experiment, seed=seed, out=Path(folder))
                summaries.append(train(seeded, method, Processes(), Silent()).summary)
        accuracies = [100 * summary.accuracy for summary in summaries]
        print(f"{label}: {', '.join(f'{accuracy:.2f}' for accuracy in accuracies)}", flush=True)
        mean = statistics.fmean(accuracies)
        dense = records[0]["accuracy_mean"] if records else mean
        records.append(
            {
                "method": label,
                "workers": experiment.workers,
                "seeds": config.seeds,
                "steps": steps,
                "accuracy_mean": mean,
                "accuracy_stdev": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "accuracy_min": min(accuracies),
                "accuracy_max": max(accuracies),
                "points_below_dense": dense - mean,
                "bytes_per_step": summaries[0].bytes_per_step,
                "ratio_to_dense": summaries[0].ratio_to_dense,
                "overflow_per_step": statistics.fmean(summary.overflow_per_step for summary in summaries),
            }
        )
    print_table(f"{config.experiment}: test accuracy in %, {config.seeds} seeds", records)
    write_records(config.json, records)


class Silent:
    """Progress that nobody looks at."""

    def say(self, message: str) -> None:
        """Shows nothing."""

    def update(self, step: int, loss: float, accuracy: float, bytes_per_step: float) -> None:
        """Shows nothing."""


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
