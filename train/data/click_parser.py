"""Parses lines of a click log in Criteo's format as rows of numbers, and says what is wrong with malformed lines.

A line holds a label (0 or 1), 13 integers and 26 hexadecimal numbers of 32 bits, separated by tabs; every field but the
label may be empty. This is the format of `train.txt` of Criteo's Display Advertising Challenge.
"""

import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from train.data.info import NUM_CATEGORIES, NUM_DENSE

NUM_FIELDS = 1 + NUM_DENSE + NUM_CATEGORIES
# One row as it is stored: 160 bytes, read by one access. Until they have ids, categories are the bits of the file.
ROW = np.dtype([("dense", "<f4", (NUM_DENSE,)), ("categories", "<i4", (NUM_CATEGORIES,)), ("label", "<f4")])
DAYS = 7  # days that the log is said to span; its lines carry no date
LINES_AT_ONCE = 16_384
SHOWN = 120  # bytes of a malformed line that are shown

LABEL = re.compile(rb"[01]")
INTEGER = re.compile(rb"(-?[0-9]{1,18})?")
CATEGORY = re.compile(rb"([0-9a-fA-F]{1,8})?")
LINE = re.compile(rb"[01](?:\t(?:-?[0-9]{1,18})?){%d}(?:\t(?:[0-9a-fA-F]{1,8})?){%d}" % (NUM_DENSE, NUM_CATEGORIES))


def first_test_row(rows: int) -> int:
    """Returns the first row of the last of seven days. Days have equally many rows, or earlier ones have one more.

    facebookresearch/dlrm splits the log in the same way, but tests on the first half of the last day and validates on
    the second. Here the whole day is the test split.
    """
    return rows - rows // DAYS


@dataclass(frozen=True)
class Malformed:
    """A line that is not a row.

    Attributes:
      line: its number, from 1.
      reason: one of a few, so that lines can be counted by reason.
      detail: which field, and what it holds.
    """

    line: int
    reason: str
    detail: str


@dataclass
class Counts:
    """What has been read.

    Attributes:
      lines: lines of the file.
      malformed: malformed lines, by reason.
    """

    lines: int = 0
    malformed: Counter[str] = field(default_factory=Counter)

    @property
    def fraction(self) -> float:
        """Malformed lines over lines."""
        return self.malformed.total() / max(self.lines, 1)


def open_log(path: Path) -> IO[bytes]:
    """Opens a click log, plain or compressed by gzip, whatever its name."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    return io.BufferedReader(gzip.open(path, "rb"), 1 << 20) if is_compressed else path.open("rb", 1 << 20)  # type: ignore


def read_log(path: Path, counts: Counts) -> Iterator[tuple[np.ndarray, list[Malformed]]]:
    """Reads a log in pieces of 16,384 lines.

    Args:
      path: the log.
      counts: updated with every piece.

    Yields:
      The piece's rows (n,) of `ROW`, in the order of the file, and its malformed lines.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if a compressed file is damaged or cut off.
    """
    if not path.is_file():
        raise FileNotFoundError(f"A click log must be a file; got none at {path}. Pass the path of Criteo's train.txt.")
    with open_log(path) as file:
        while True:
            try:
                lines = list(islice(file, LINES_AT_ONCE))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(
                    f"A compressed log must be whole; got {path}, damaged after line {counts.lines} or within "
                    f"{LINES_AT_ONCE} lines of it ({error}). Copy it again, or pass it uncompressed."
                ) from error
            if not lines:
                return
            rows, malformed = parse(lines, counts.lines + 1)
            counts.lines += len(lines)
            counts.malformed.update(line_error.reason for line_error in malformed)
            yield rows, malformed


def parse(lines: Iterable[bytes], first: int = 1) -> tuple[np.ndarray, list[Malformed]]:
    """Parses lines.

    As in DLRM, numbers become log(1 + max(x, 0)), categories keep their 32 bits, and empty fields become 0.

    Args:
      lines: with or without line ends.
      first: the number of the first line.

    Returns:
      The rows (n,) of `ROW`, and the malformed lines.
    """
    labels, integers, categories, malformed = [], [], [], []
    for number, line in enumerate(lines, first):
        line = line.rstrip(b"\r\n")
        if not LINE.fullmatch(line):
            malformed.append(Malformed(number, *explain(line)))
            continue
        fields = line.split(b"\t")
        labels.append(line[0] - ord("0"))
        integers += fields[1 : 1 + NUM_DENSE]
        categories += fields[1 + NUM_DENSE :]
    rows = np.empty(len(labels), ROW)
    rows["label"] = labels
    dense = np.array([int(x or 0) for x in integers], np.int64).reshape(-1, NUM_DENSE)
    rows["dense"] = np.log1p(np.maximum(dense, 0))
    bits = np.array([int(x or b"0", 16) for x in categories], np.uint32).reshape(-1, NUM_CATEGORIES)
    rows["categories"] = bits.view(np.int32)
    return rows, malformed


def explain(line: bytes) -> tuple[str, str]:
    """Returns the reason why a line is malformed, and the detail."""
    fields = line.split(b"\t")
    if len(fields) != NUM_FIELDS:
        return "wrong number of fields", f"{len(fields)} instead of {NUM_FIELDS}: {_show(line)}"
    if not LABEL.fullmatch(fields[0]):
        return "label is not 0 or 1", _show(fields[0])
    for column, value in enumerate(fields[1 : 1 + NUM_DENSE], 1):
        if not INTEGER.fullmatch(value):
            return "not an integer of at most 18 digits", f"I{column} is {_show(value)}"
    for column, value in enumerate(fields[1 + NUM_DENSE :], 1):
        if not CATEGORY.fullmatch(value):
            return "not a hexadecimal number of at most 8 digits", f"C{column} is {_show(value)}"
    raise AssertionError(f"A line of fields that are right each must be a row; got {line!r}.")


def _show(value: bytes) -> str:
    return repr(value[:SHOWN])[1:] + ("..." if len(value) > SHOWN else "")
