"""Losses as a power law of the number of parameters, with intervals, and what they predict for a larger model.

L(N) = E + A N^-a for each method. E, the loss that no size goes below, belongs to the text and is the same for all
methods; A and a are each method's own.

Intervals are of a bootstrap over the seeds. A seed's losses differ from the means over the seeds by a vector, with an
entry for each method; every seed of every size is drawn anew from all of these vectors, so that what methods have in
common at a seed stays together. Vectors are widened by sqrt(n / (n - 1)), as n seeds lie closer to their own mean.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 1000
POINTS = 50  # values of E that are compared at once
CONFIDENCE = 0.9
Losses = Mapping[str, Sequence[Sequence[float]]]  # by method: of every size, of every seed


@dataclass(frozen=True)
class PowerLaw:
    """Laws that share E.

    Attributes:
      E: the least loss.
      A: of every method.
      a: of every method, the exponent.
    """

    E: float
    A: dict[str, float]
    a: dict[str, float]

    @classmethod
    def fit(cls, sizes: Sequence[float], losses: Mapping[str, Sequence[float]]) -> "PowerLaw":
        """Fits by least squares: for a given E, log(L - E) is a line in log N.

        Args:
          sizes: N, at least three of them.
          losses: of every method, one for each size.

        Raises:
          ValueError: for fewer sizes, with which E could be anything.
        """
        if len(sizes) < 3:
            raise ValueError(f"A power law must be fitted to at least 3 sizes; got {len(sizes)}. Train more of them.")
        x, y = np.log(sizes), np.array(list(losses.values()), np.float64)  # (sizes,), (methods, sizes)
        line = np.linalg.pinv(np.stack([x, np.ones_like(x)], 1))  # (2, sizes): logs -> slope, height

        def lines(E: np.ndarray) -> np.ndarray:
            return np.log(y - E[:, None, None]) @ line.T  # (E, methods, 2)

        def errors(E: np.ndarray) -> np.ndarray:
            slopes, heights = np.moveaxis(lines(E), 2, 0)[..., None]  # (E, methods, 1)
            return np.sum((E[:, None, None] + np.exp(slopes * x + heights) - y) ** 2, axis=(1, 2))

        low, high = 0.0, float(y.min())
        for _ in range(8):  # ever narrower, as the error may have several minima
            grid = np.linspace(low, high, POINTS, endpoint=False)
            best, width = grid[np.argmin(errors(grid))], (high - low) / POINTS
            low, high = max(best - width, 0.0), min(best + width, high)
        E = float(best)
        slopes, heights = lines(np.array([E]))[0].T
        return cls(
            E,
            {name: math.exp(height) for name, height in zip(losses, heights, strict=True)},
            {name: -float(slope) for name, slope in zip(losses, slopes, strict=True)},
        )

    def loss(self, name: str, size: float) -> float:
        """Returns a method's loss at a size."""
        return self.E + self.A[name] * size ** -self.a[name]


def redraw(losses: Losses, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the mean over the seeds of every method and size, of seeds drawn anew."""
    y = np.array(list(losses.values()), np.float64)  # (methods, sizes, seeds)
    means, seeds = y.mean(axis=2), y.shape[2]
    if seeds < 2:
        raise ValueError(f"Intervals must be over at least 2 seeds; got {seeds}. Train another.")
    vectors = (y - means[..., None]).reshape(len(y), -1) * math.sqrt(seeds / (seeds - 1))  # (methods, sizes * seeds)
    drawn = vectors[:, rng.integers(vectors.shape[1], size=(y.shape[1], seeds))]  # (methods, sizes, seeds)
    return dict(zip(losses, means + drawn.mean(axis=2), strict=True))


def draws(losses: Losses) -> Iterator[dict[str, np.ndarray]]:
    """Returns `DRAWS` results of `redraw`, the same at every call."""
    rng = np.random.default_rng(0)
    return (redraw(losses, rng) for _ in range(DRAWS))


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Returns the ends between which `CONFIDENCE` of the values lie."""
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
