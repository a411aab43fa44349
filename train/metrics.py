"""What a run leaves behind: metrics as JSON lines, and a row of the table."""

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jaxcomm as jc
from train.folders import check_steps, read_lines
from train.tables import plain, write_whole

EXCHANGE = ("sent", "overflow", "skipped", "drained", "bytes_received")  # metrics that are not the loss function's


@dataclass(frozen=True)
class Evaluation:
    """Scores on the test split at some point of a run.

    Attributes:
      step: steps done.
      bytes_received: bytes that each worker has received by then.
      scores: by name, "loss" and "accuracy" among them; see `train.tasks`.
    """

    step: int
    bytes_received: float
    scores: dict[str, float]

    @property
    def accuracy(self) -> float:
        """Fraction of the images, clicks or tokens predicted correctly."""
        return self.scores["accuracy"]


@dataclass(frozen=True)
class Summary:
    """One row of the final table.

    Attributes:
      method: its name.
      workers: K.
      seed: of the parameters and the data's order.
      scores: on the test split at the end, by name.
      steps: steps done.
      bytes_per_step: bytes that each worker receives, loss and metrics included: the mean over the steps done, by the
        report of the traced step.
      ratio_to_dense: how many times fewer bytes than a dense float32 exchange; None where nothing is received.
      ratio_to_bfloat16: how many times fewer bytes than a dense exchange of two bytes a parameter.
      overflow_per_step: mean number of selected coordinates that did not fit, all workers together.
      skipped: steps skipped for a non-finite gradient.
      seconds_per_step: the median of all steps; None for a single step.
      seconds: of this process, compilation included.
    """

    method: str
    workers: int
    seed: int
    scores: dict[str, float]
    steps: int
    bytes_per_step: float
    ratio_to_dense: float | None
    ratio_to_bfloat16: float | None
    overflow_per_step: float
    skipped: int
    seconds_per_step: float | None
    seconds: float

    @property
    def accuracy(self) -> float:
        """Accuracy on the test split at the end."""
        return self.scores["accuracy"]

    def record(self) -> dict[str, Any]:
        """Returns the row, every score a column."""
        columns: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            columns |= {"accuracy": self.accuracy, **value} if name == "scores" else {name: value}
        return columns


class Log:
    """The metrics of a run, step by step, in memory and as JSON lines; a resumed run continues a stopped one's file.

    In the file, a number that is not finite is null.

    Attributes:
      evaluations: on the test split, including those before the resume.
      losses: of every step since the resume.
      overflow: coordinates that did not fit, all steps and all workers together.
      skipped: steps skipped.
      streak: steps skipped in a row until now; steps of local methods without an exchange do not count.
      last_step: of the last line, 0 if there is none.
      last_loss: of the last step that was not skipped, NaN if there is none.
      dropped: steps of the file that were done after the checkpoint, and are dropped.
      bytes_received: of all steps, including those before the resume.
      last: the last line, empty if there is none.
    """

    def __init__(
        self,
        path: Path,
        report: jc.accounting.WireReport,
        is_rare: Callable[[int], bool],
        *,
        after: int,
        writes: bool,
        tensorboard: bool = False,
        schedule: Callable[[int], Any] | None = None,
    ):
        """Opens the file.

        Args:
          path: where; its folder is made.
          report: the bytes of a step.
          is_rare: whether a step, from 1, is known to cost the most. Steps that drain say so in their metrics.
          after: the step of the checkpoint that the run goes on from, 0 at the start. Lines of later steps are dropped.
          writes: False for all processes but one.
          tensorboard: whether to write scalars for TensorBoard as well, in the same folder.
          schedule: steps done -> the learning rate, which TensorBoard shows.
        """
        records = read_lines(path) if path.exists() else []
        earlier_records = [record for record in records if record["step"] <= after]
        self.dropped, records = len(records) - len(earlier_records), earlier_records
        if writes:
            check_steps(path, records, after)
        self.evaluations = [_evaluation(record) for record in records if "test_accuracy" in record]
        self.losses: list[float] = []
        self.overflow = sum(record["overflow"] for record in records)
        self.skipped = sum(record["skipped"] for record in records)
        self.streak, self.last_step, self.last_loss = 0, 0, math.nan
        self._report, self._is_rare, self._schedule = report, is_rare, schedule
        self.last: Mapping[str, Any] = {}
        self._times: list[float] = []  # between one line and the next
        for record in records:
            self._count(record)
        self.bytes_received = records[-1]["bytes_received"] if records else 0.0
        # Seconds count from the start of the run, without the time between a stop and a resume.
        self._began = time.perf_counter() - (records[-1].get("seconds", 0.0) if records else 0.0)
        self._file: IO[str] | None = None
        self._board = Board(path.parent, after) if writes and tensorboard else None
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, "".join(json.dumps(plain(record)) + "\n" for record in records))
            self._file = path.open("a")

    def record(self, step: int, metrics: dict[str, Any], test: dict[str, float] | None) -> dict[str, Any]:
        """Adds a step.

        Args:
          step: from 1.
          metrics: of the train step, on the host.
          test: scores on the test split, if it was evaluated after this step.

        Returns:
          The line that was written.
        """
        values = {name: value.item() for name, value in metrics.items()}
        self.losses.append(values["loss"])
        self.overflow += values["overflow"]
        self.skipped += values["skipped"]
        self.bytes_received += self._bytes_of(step, is_rare=bool(values["drained"]) or self._is_rare(step))
        seconds = round(time.perf_counter() - self._began, 4)
        line = {"step": step, **values, "bytes_received": self.bytes_received, "seconds": seconds}
        if test is not None:
            line |= {f"test_{name}": value for name, value in test.items()}
            self.evaluations.append(_evaluation(line))
        if self._file is not None:
            self._file.write(json.dumps(plain(line)) + "\n")
            self._file.flush()
        if self._board is not None:
            extra_values = {} if self._schedule is None else {"learning_rate": float(self._schedule(step - 1))}
            if "seconds" in self.last:
                extra_values["seconds_per_step"] = seconds - self.last["seconds"]
            self._board.write(line | extra_values)
        self._count(line)
        return line

    @property
    def seconds_per_step(self) -> float | None:
        """Median time between two lines, including those before the resume; None if there is at most one line."""
        return statistics.median(self._times) if self._times else None

    def _count(self, line: dict[str, Any]) -> None:
        if "seconds" in self.last and "seconds" in line:
            self._times.append(line["seconds"] - self.last["seconds"])
        self.last, self.last_step = line, line["step"]
        if line["skipped"]:
            self.streak += 1
        elif line["step"] % self._report.every == 0:
            self.streak, self.last_loss = 0, line["loss"]

    def _bytes_of(self, step: int, *, is_rare: bool) -> float:
        program = self._report.of_step(step)  # between two exchanges of a local method: nothing
        return float(program.received_at_most if is_rare else program.received)

    def sync(self) -> None:
        """Puts the lines on the disk, so that no checkpoint is ahead of them after a power failure."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Writes what is left."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


class Board:
    """Scalars for TensorBoard, one per number of `Log`'s lines; `tensorboard --logdir runs` shows a run per method.

    TensorBoard groups names by the part before the slash: "train/loss", "test/loss", "exchange/sent".
    """

    def __init__(self, folder: Path, after: int):
        """Opens a file in the folder.

        Args:
          folder: of one method.
          after: the last step that counts; TensorBoard drops what an earlier start wrote for later steps.

        Raises:
          ValueError: if tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ValueError(
                "tensorboardX must be installed for --tensorboard; got none. Run `pip install tensorboardX`."
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=after + 1 if after else None)

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line; NaN and infinity as they are, which TensorBoard marks."""
        for name, value in line.items():
            if name not in ("step", "seconds"):
                self._writer.add_scalar(_tag(name), value, line["step"])

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


def _tag(name: str) -> str:
    if name.startswith("test_"):
        return f"test/{name.removeprefix('test_')}"
    return f"{'exchange' if name in EXCHANGE else 'train'}/{name}"


def _evaluation(record: dict[str, Any]) -> Evaluation:
    scores = {name.removeprefix("test_"): value for name, value in record.items() if name.startswith("test_")}
    return Evaluation(record["step"], record["bytes_received"], scores)
