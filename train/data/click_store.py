"""Click logs as TFDS datasets: prepared once, in the order of the log; six days to train on, the seventh to test on.

Alongside the records are `metadata.json`, with counts, table sizes and how ids are assigned; `vocabulary.npz`, the
categories of ids 1, 2, ..., if they are indexed; and `malformed.tsv`, with the number, reason and detail of every
malformed line, if there are any.
"""

import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from train.data.click_parser import DAYS, ROW, Counts, first_test_row, read_log
from train.data.click_tables import Hashed, Indexed, build_vocabulary, hash_categories
from train.data.info import NUM_CATEGORIES, ClickInfo
from train.data.placing import preparing
from train.data.rows import Prepared, write_rows

VERSION = "1.0.0"  # of the prepared data: must change when the same lines get other numbers or ids
SHOWN_LINES = 10
CHECKED_FROM = 100_000  # lines after which a log with too many malformed ones is given up
AT_ONCE = 1 << 18  # rows that are indexed together

GENERATED_ROWS, GENERATED_SEED = 70_000, 0
GENERATED_CATEGORIES = Indexed(min_count=3)


def prepare_log(
    name: str,
    log: Path,
    root: Path,
    categories: Hashed | Indexed,
    *,
    max_malformed: float = 1e-4,
    keep_first: bool = False,
    extra_facts: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Reads a log, line by line, into the dataset `root/name/VERSION`, which appears when it is whole.

    Until then the rows are in a scratch file, 160 bytes each: only at the end of the log is it known which rows are of
    the last day, and which categories are frequent.

    Args:
      name: of the dataset.
      log: the file, plain or gzip.
      root: the folder of all datasets.
      categories: how ids are assigned.
      max_malformed: the largest fraction of the lines that may be malformed.
      keep_first: whether another process may prepare the same log at the same time; the first one's folder is kept.
      extra_facts: further facts of the dataset.
      say: called with each line of output.

    Returns:
      The facts in `metadata.json`.

    Raises:
      FileNotFoundError: if there is no log.
      ValueError: if the log is damaged or has fewer rows than days, if more than `max_malformed` of its lines are
        malformed (`root/NAME.malformed.tsv` then lists them), or if the folder is prepared already.
    """
    if not 0 <= max_malformed <= 1:
        raise ValueError(f"The fraction of malformed lines must be in [0, 1]; got {max_malformed}.")
    folder = Path(name, VERSION)
    with preparing(root, folder, keep_first=keep_first) as private:
        scratch, malformed, counts = private / "rows", private / "malformed.tsv", Counts()
        crc32 = _read(log, categories, counts, max_malformed, scratch, malformed, say)
        if counts.fraction > max_malformed:
            report = shutil.move(malformed, root / f"{name}.malformed.tsv")
            raise ValueError(
                f"At most {max_malformed:g} of a log's lines must be malformed; got {counts.malformed.total()} of the "
                f"first {counts.lines} of {log} ({_list(counts)}). {report} lists them: mend the log, or allow more by "
                "--max-malformed."
            )
        num_rows = scratch.stat().st_size // ROW.itemsize
        if num_rows < DAYS:
            raise ValueError(f"A log must have at least {DAYS} rows, one for each day; got {num_rows} in {log}.")
        (private / folder).mkdir(parents=True)
        if counts.malformed:
            say(f"{counts.malformed.total()} of {counts.lines} lines are malformed and left out: {_list(counts)}")
            malformed.rename(private / folder / malformed.name)
        rows, num_train = np.memmap(scratch, ROW, "r+"), first_test_row(num_rows)
        if isinstance(categories, Hashed):
            table_sizes = (categories.table_size,) * NUM_CATEGORIES
        else:
            table_sizes = _index(rows, num_train, categories, private / folder / "vocabulary.npz")
        kind = {"kind": type(categories).__name__.lower(), **vars(categories)}
        identity = {"crc32": f"{crc32:08x}", "categories": json.dumps(kind)}  # of the log, and how it became ids
        facts = {"log": log.name, "lines": counts.lines, "malformed": dict(counts.malformed), "categories": kind}
        splits = {"train": rows[:num_train], "test": rows[num_train:]}
        columns = {split: {column: part[column] for column in ROW.names} for split, part in splits.items()}
        info = ClickInfo(name, num_train, num_rows - num_train, table_sizes)
        return write_rows(private, folder, columns, info, identity, {**facts, **(extra_facts or {})})


def _read(
    log: Path,
    categories: Hashed | Indexed,
    counts: Counts,
    max_malformed: float,
    scratch: Path,
    listed: Path,
    say: Callable[[str], None],
) -> int:
    """Writes the rows to `scratch`, and returns their CRC-32. Categories keep their bits until they are indexed.

    Stops early if too many lines are malformed.
    """
    crc32 = 0
    with scratch.open("wb") as rows_file, listed.open("w") as malformed_file:
        for rows, malformed in read_log(log, counts):
            if isinstance(categories, Hashed):
                rows["categories"] = hash_categories(rows["categories"], categories.table_size)
            rows_file.write(rows.tobytes())
            crc32 = zlib.crc32(rows.tobytes(), crc32)
            before = counts.malformed.total() - len(malformed)
            for number, line_error in enumerate(malformed, before):
                malformed_file.write(f"{line_error.line}\t{line_error.reason}\t{line_error.detail}\n")
                if number < SHOWN_LINES:
                    say(f"line {line_error.line}: {line_error.reason}: {line_error.detail}")
            if counts.lines >= CHECKED_FROM and counts.fraction > max_malformed:
                break
    return crc32


def _list(counts: Counts) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.malformed.most_common())


def _index(rows: np.ndarray, num_train: int, categories: Indexed, path: Path) -> tuple[int, ...]:
    """Replaces the bits of all categories with ids, and saves the vocabulary at `path`; returns the table sizes."""

    def pieces(stop: int) -> Iterator[np.ndarray]:
        return (rows[start : min(start + AT_ONCE, stop)]["categories"] for start in range(0, stop, AT_ONCE))

    vocabulary = build_vocabulary(pieces(num_train), categories.min_count)
    for piece in pieces(len(rows)):
        piece[:] = vocabulary.look_up(piece)
    names = {f"C{column}": values for column, values in enumerate(vocabulary.values, 1)}
    np.savez(path, **names)  # type: ignore
    return vocabulary.table_sizes


def prepare_generated(root: Path, rows: int = GENERATED_ROWS) -> None:
    """Generates and prepares the dataset "clicks", which needs no file: 70,000 rows, in some seconds.

    With another number of `rows`, of which the last seventh is the test split, use a folder of their own.
    """
    from train.data.click_teacher import generate  # here, because only the first use of the data needs it

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.tsv")
        teacher = generate(rows, GENERATED_SEED, log)
        prepare_log("clicks", log, root, GENERATED_CATEGORIES, keep_first=True, extra_facts={"teacher": teacher})


HOW = (
    "Prepare it by the command below, from train.txt of Criteo's Display Advertising Challenge, plain or gzip:\n"
    "  python -m train.data.clicks prepare --input train.txt --out {root}"
)
CLICKS = {
    "clicks": Prepared(ClickInfo, lambda: Path("clicks", VERSION), build=prepare_generated),
    "criteo": Prepared(ClickInfo, lambda: Path("criteo", VERSION), HOW),
}
