"""Bytes of a lossless patch from one step's weights to the next, against a copy of them in bfloat16.

    python -m benchmarks.patches

The data are synthetic: normal weights, and steps of Adam on independent normal gradients. So this shows what the coding
makes of a given fraction of changed weights; a real run has its own fraction. Columns are how many times fewer bytes a
patch takes than the copy (fewer), and the same changes as positions of 32 bits and values of 16 bits (plain).
"""

from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np
import optax

from benchmarks import harness
from benchmarks.harness import Options, Row
from jaxcomm.patches import apply_patch, pack_patch


@dataclass(frozen=True)
class Config(Options):
    """Count the bytes of patches between steps of Adam."""

    n: int = 4_000_000  # Weights.
    deviation: float = 0.02  # Standard deviation of the weights at the start.
    learning_rate: float = 1e-6  # Learning rate.
    steps: str = "1,2,5,20"  # Steps whose patches are shown, separated by commas; each patch is from the step before.
    seed: int = 0  # Seed of the weights and of the gradients.


def main(config: Config) -> None:
    """Prints the table."""
    harness.check_least(config, 1, "n")
    steps = harness.numbers("--steps", config.steps, least=1)
    rows = [row for row in measure(config, max(steps)) if row["step"] in steps]
    title = f"{config.n:,} weights, Adam with {config.learning_rate:g}: a patch from the step before"
    harness.report(config.json, (title, rows))


def measure(config: Config, steps: int) -> list[Row]:
    """Trains, and packs and applies the patch of every step: records of step, changed, bytes, fewer, plain."""
    rng = np.random.default_rng(config.seed)
    weights = (config.deviation * rng.standard_normal(config.n)).astype(np.float32)
    optimizer = optax.adam(config.learning_rate)
    state, update = optimizer.init(weights), jax.jit(optimizer.update)
    copy, rows = weights.astype(ml_dtypes.bfloat16), []
    for step in range(1, steps + 1):
        change, state = update(rng.standard_normal(config.n, np.float32), state)
        weights = weights + np.asarray(change)
        new = weights.astype(ml_dtypes.bfloat16)
        patch, n_changed = pack_patch(copy, weights), int((copy.view(np.uint16) != new.view(np.uint16)).sum())
        copy = apply_patch(copy, patch)
        if not np.array_equal(copy.view(np.uint16), new.view(np.uint16)):
            raise RuntimeError(f"The patch of step {step} must turn the old weights into the new ones; got others.")
        rows.append(
            {
                "step": step,
                "changed": f"{n_changed / config.n:.2%}",
                "bytes": len(patch),
                "fewer": f"{new.nbytes / len(patch):.1f}x",
                "plain": f"{new.nbytes / (6 * n_changed):.1f}x" if n_changed else "-",
            }
        )
    return rows


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
