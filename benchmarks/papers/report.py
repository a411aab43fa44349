"""Verdicts on the papers' claims and on what they depend on, and figures."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import harness
from train.figures import label_ends
from train.tables import stdev


@dataclass(frozen=True)
class Difference:
    """Differences of pairs, such as accuracies of the same seed.

    Attributes:
      mean: of the differences; infinite, or NaN, if a run has diverged.
      error: the standard error of the mean; None for a single pair, or if a run has diverged.
    """

    mean: float
    error: float | None

    @classmethod
    def of(cls, ours: Sequence[float | None], theirs: Sequence[float | None]) -> "Difference":
        """Subtracts `theirs` from `ours`, pair by pair; None is the loss of a run that has diverged."""
        pairs = [mine - yours for mine, yours in zip(or_infinite(ours), or_infinite(theirs), strict=True)]
        error = stdev(pairs) if all(map(math.isfinite, pairs)) else None
        return cls(statistics.fmean(pairs), None if error is None else error / math.sqrt(len(pairs)))

    def exceeds(self, bound: float = 0.0) -> bool | None:
        """Returns whether the mean is above `bound`; None if that is at most two standard errors away, or unknown."""
        if self.error is None or abs(self.mean - bound) <= 2 * self.error:
            return None
        return self.mean > bound

    def agrees(self, paper: float, slack: float = 0.0, *, or_more: bool = False) -> bool | None:
        """Returns whether the difference has the size of the paper's: its sign, and half to one and a half times it.

        Args:
          paper: the paper's difference.
          slack: what counts as no difference; if more than half of the paper's, ours may be off by as much.
          or_more: whether more than the paper's, in its direction, counts as well, as with a gain in time.

        Returns:
          True if all within two standard errors of the mean has that size; False if nothing has; None if only some has,
          so that the measurements do not tell, or for a single pair.
        """
        if self.error is None:
            return None
        room = max(slack, abs(paper) / 2)
        low_bound, high_bound = paper - room, paper + room
        if or_more:
            low_bound, high_bound = (low_bound, math.inf) if paper > 0 else (-math.inf, high_bound)
        low, high = self.mean - 2 * self.error, self.mean + 2 * self.error
        if high < low_bound or low > high_bound:
            return False
        return True if low_bound <= low and high <= high_bound else None

    def __str__(self) -> str:
        return f"{self.mean:+.2f}" + ("" if self.error is None else f" (standard error {self.error:.2f})")


def or_infinite(losses: Sequence[float | None]) -> list[float]:
    """Returns losses with infinity for None: a record has no number for a run that has diverged."""
    return [math.inf if loss is None else loss for loss in losses]


def columns(name: str, values: Sequence[float | None], difference: Difference, label: str) -> dict[str, float | None]:
    """Returns columns of a table: the mean of values, their deviation, and the mean of a difference and its error."""
    numbers = or_infinite(values)
    deviation = stdev(numbers) if all(map(math.isfinite, numbers)) else None
    own = {name: statistics.fmean(numbers), "stdev": deviation}
    return own | {label: difference.mean, "standard_error": difference.error}


_VERDICTS = {True: "holds here", False: "does NOT hold here", None: "is not told apart here"}


def all_hold(*verdicts: bool | None) -> bool | None:
    """Returns the verdict on a claim of several parts: False if one does not hold, None if one is not told apart."""
    return False if False in verdicts else None if None in verdicts else True


def print_claim(claim: str, holds: bool | None, result: str) -> None:
    """Prints whether a claim of the paper holds at our size.

    Args:
      claim: what the paper says.
      holds: whether it was shown: by `Difference.agrees` if the claim has a size, by `Difference.exceeds` if it is an
        order alone; None if the measurements do not tell.
      result: what was measured.
    """
    print(f"The paper: {claim}. That {_VERDICTS[holds]}: {result}.")


def print_cause(cause: str, differences: Mapping[str, Difference], base: str = "dense") -> None:
    """Prints what an experiment says about why a claim does not hold here: a cause explains more than half of it.

    Args:
      cause: what is supposed, and varied.
      differences: by what was varied; the first is the one to explain.
      base: what they are differences to.
    """
    (first, before), *_, (last, after) = differences.items()
    explained = abs(before.mean) / 2 - abs(after.mean)
    error = None if before.error is None or after.error is None else math.hypot(before.error / 2, after.error)
    holds = Difference(explained, error).exceeds()
    print(
        f"Supposed: {cause}. That {_VERDICTS[holds]}: the difference to {base} is {before} with {first}, and {after} "
        f"with {last}."
    )


Lines = Mapping[str, tuple[Sequence[float], Sequence[Sequence[float | None]]]]


def draw(
    path: Path,
    panels: Mapping[str, Lines],
    x: str | Sequence[str],
    y: str,
    *,
    scale: str = "linear",
    x_scale: str = "linear",
    columns: int = 2,
) -> None:
    """Draws lines in panels, as a PNG file: the mean over the seeds, and a band from their minimum to their maximum.

    Args:
      path: of the file.
      panels: by title, lines by label: x, and y for each seed (None is no point).
      x: what the x axis shows, or that of each panel.
      y: what the y axis shows.
      scale: of the y axis, "log" or "linear".
      x_scale: of the x axis.
      columns: of panels.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    names = [x] * len(panels) if isinstance(x, str) else x
    with harness.figure(path, rows, columns, (1 + 5 * columns, 3.5 * rows)) as (_, grid):
        for axes, (title, lines), name in zip(grid.flat, panels.items(), names, strict=False):
            for text, (xs, seeds) in lines.items():
                ys = np.asarray(seeds, np.float64)
                (line,) = axes.plot(xs, ys.mean(0), label=text)
                if len(ys) > 1:
                    axes.fill_between(xs, ys.min(0), ys.max(0), alpha=0.15, color=line.get_color())
            axes.set(title=title, xlabel=name, ylabel=y, yscale=scale, xscale=x_scale)
            axes.grid(alpha=0.3)
            label_ends(axes)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
