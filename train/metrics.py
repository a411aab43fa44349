"""What a run leaves behind: metrics as JSON lines, a table, a figure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jaxcomm as jc


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


class Log:
    """The metrics of a run, step by step, in memory and as JSON lines; a resumed run continues a stopped one's file.

    Attributes:
      evaluations: on the test split, those of before the resume included.
      losses: of every step since the resume.
      overflow: coordinates that did not fit, all steps and all workers together.
      skipped: steps skipped.
    """

    def __init__(self, path: Path, report: jc.WireReport, *, after: int, writes: bool):
        """Opens the file.

        Args:
          path: where; its folder is made.
          report: the bytes of a step.
          after: the step of the checkpoint that the run goes on from, 0 at the start. Lines of later steps are dropped.
          writes: False for all processes but one.
        """
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]  # a killed run may leave half a line
        records = [record for record in records if record["step"] <= after]
        self.evaluations = [_evaluation(record) for record in records if "test_accuracy" in record]
        self.losses: list[float] = []
        self.overflow = sum(record["overflow"] for record in records)
        self.skipped = sum(record["skipped"] for record in records)
        self._report = report
        self._bytes = records[-1]["bytes_received"] if records else 0.0
        self._file: IO[str] | None = None
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            draft.write_text("".join(json.dumps(record) + "\n" for record in records))
            draft.replace(path)  # at once: other processes may be reading it
            self._file = path.open("a")

    def record(self, step: int, metrics: dict[str, Any], test: tuple[float, float] | None) -> dict[str, Any]:
        """Adds a step.

        Args:
          step: from 1.
          metrics: of the train step, on the host.
          test: loss and accuracy on the test split, if it was evaluated after this step.

        Returns:
          The line that was written.
        """
        values = {name: value.item() for name, value in metrics.items()}
        self.losses.append(values["loss"])
        self.overflow += values["overflow"]
        self.skipped += values["skipped"]
        self._bytes += self._report.received_at_most if values["drained"] else self._report.received
        line = {"step": step, **values, "bytes_received": self._bytes}
        if test is not None:
            line |= {"test_loss": test[0], "test_accuracy": test[1]}
            self.evaluations.append(_evaluation(line))
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        return line

    def close(self) -> None:
        """Writes what is left."""
        if self._file is not None:
            self._file.close()


def _evaluation(record: dict[str, Any]) -> Evaluation:
    return Evaluation(record["step"], record["bytes_received"], record["test_loss"], record["test_accuracy"])


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
