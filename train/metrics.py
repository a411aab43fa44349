"""What a run leaves behind: metrics as JSON lines, a table, a figure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on the test split at some point of a run.

    Attributes:
      step: steps done.
      bytes_received: bytes that each worker has received by then.
      loss: mean loss.
      accuracy: fraction of the images told right.
    """

    step: int
    bytes_received: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Summary:
    """One row of the final table.

    Attributes:
      method: its name.
      workers: K.
      seed: of the parameters and the data's order.
      accuracy: on the test split at the end.
      steps: steps done.
      bytes_per_step: bytes that each worker receives in a usual step, loss and metrics included.
      ratio_to_dense: how many times fewer than a dense float32 exchange; None where nothing is received.
      ratio_to_bfloat16: how many times fewer than a dense exchange of two bytes a parameter.
      overflow_per_step: mean of the selected coordinates that did not fit, all workers together.
      skipped: steps skipped for a non-finite gradient.
      seconds: of this process, compilation included.
    """

    method: str
    workers: int
    seed: int
    accuracy: float
    steps: int
    bytes_per_step: float
    ratio_to_dense: float | None
    ratio_to_bfloat16: float | None
    overflow_per_step: float
    skipped: int
    seconds: float


class MetricsFile:
    """Metrics as JSON lines, one a step; a resumed run continues the file of the stopped one."""

    def __init__(self, path: Path, *, after: int, writes: bool):
        """Opens the file.

        Args:
          path: where; its folder is made.
          after: lines of later steps are dropped: they were not part of the checkpoint.
          writes: False for all processes but one.
        """
        self._file: IO[str] | None = None
        if not writes:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= after]
        path.write_text("".join(f"{line}\n" for line in kept))
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        """Adds one line."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Writes what is left."""
        if self._file is not None:
            self._file.close()


def read_evaluations(path: Path, last_step: int) -> list[Evaluation]:
    """Reads back the evaluations of a stopped run, up to a step."""
    records = [json.loads(line) for line in _lines(path)]
    fields = Evaluation.__dataclass_fields__
    return [
        Evaluation(
            **{name: record[f"test_{name}"] if name in ("loss", "accuracy") else record[name] for name in fields}
        )
        for record in records
        if "test_accuracy" in record and record["step"] <= last_step
    ]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def draw_accuracy(path: Path, curves: dict[str, Sequence[Evaluation]]) -> None:
    """Draws test accuracy against bytes received per worker, one curve a method, as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for label, evaluations in curves.items():
        points = [e for e in evaluations if e.bytes_received > 0]
        axes.plot([e.bytes_received for e in points], [100 * e.accuracy for e in points], marker=".", label=label)
    axes.set(xlabel="bytes received per worker", ylabel="test accuracy, %", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
