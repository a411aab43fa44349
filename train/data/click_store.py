"""Click logs on disk: prepared once into rows of 160 bytes, then read at random through a memory map.

FOLDER/rows.bin          all rows, in the order of the log
FOLDER/prepared.json     what they are: counts, days, table sizes
FOLDER/vocabulary.npz    the categories of ids 1, 2, ..., where they are indexed
FOLDER/malformed.tsv     line number, reason and detail of every line that is no row
FOLDER/teacher.json      of a generated log: what its teacher reaches
"""

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from train.data.click_parser import DAYS, ROW, Counts, first_test_row, read_log
from train.data.click_tables import Hashed, Indexed, Vocabulary, build_vocabulary, hash_categories
from train.data.info import NUM_CATEGORIES, Batch, ClickInfo, check_split
from train.data.placing import move_into_place, private_folder

FORMAT = 1  # of the prepared folder
FACTS = "prepared.json"
SHOWN_LINES = 10
CHECKED_FROM = 100_000  # lines after which a log with too many malformed ones is given up

GENERATED_ROWS, GENERATED_SEED = 70_000, 0
GENERATED_VERSION = "1.0.0"
GENERATED_CATEGORIES = Indexed(min_count=3)


def prepare_log(
    name: str,
    log: Path,
    root: Path,
    categories: Hashed | Indexed,
    *,
    max_malformed: float = 1e-4,
    version: str = "",
    keep_first: bool = False,
    beside: dict[str, Path] | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Reads a log, line by line, into the folder `root/name`, which appears when it is whole.

    Args:
      name: of the dataset.
      log: the file, plain or gzip.
      root: the folder of all datasets.
      categories: how ids are given.
      max_malformed: the largest fraction of the lines that may be malformed.
      version: a folder below `root/name`, if not empty.
      keep_first: whether another process may prepare the same log at the same time; the first one's folder stays.
      beside: further files for the folder, by their names in it.
      say: takes the lines that tell what was found.

    Returns:
      What is in `prepared.json`.

    Raises:
      FileNotFoundError: if there is no log.
      ValueError: if the log is damaged or has fewer rows than days, if more than `max_malformed` of its lines are
        malformed (then `root/NAME.malformed.tsv` tells which), or if the folder is prepared already.
    """
    if not 0 <= max_malformed <= 1:
        raise ValueError(f"the fraction of malformed lines must be in [0, 1]; got {max_malformed}")
    target = root / name / version
    there = ValueError(f"a log is prepared into a new folder; {target} holds one already. Remove it, or pass another")
    if is_prepared(target) and not keep_first:
        raise there
    with private_folder(root, name) as private:
        built = private / "built"
        built.mkdir()
        counts = Counts()
        try:
            with (built / "rows.bin").open("wb") as rows_file, (built / "malformed.tsv").open("w") as malformed_file:
                crc32 = _read(log, categories, counts, max_malformed, rows_file, malformed_file, say)
        except _TooManyError as error:
            kept = root / f"{name}.malformed.tsv"
            shutil.move(built / "malformed.tsv", kept)
            raise ValueError(f"{error}. {kept} lists them; mend the log, or allow more by --max-malformed") from None
        if not counts.malformed:
            (built / "malformed.tsv").unlink()
        num_rows = (built / "rows.bin").stat().st_size // ROW.itemsize
        if num_rows < DAYS:
            raise ValueError(f"a log has at least {DAYS} rows, one for each day; {log} has {num_rows}")
        num_train = first_test_row(num_rows)
        if isinstance(categories, Hashed):
            table_sizes = (categories.table_size,) * NUM_CATEGORIES
        else:
            table_sizes = _index(built, num_train, categories)
        facts = {
            "format": FORMAT,
            "name": name,
            "version": version,
            "log": log.name,
            "crc32": crc32,
            "lines": counts.lines,
            "malformed": dict(counts.malformed),
            "num_train": num_train,
            "num_test": num_rows - num_train,
            "categories": {"kind": type(categories).__name__.lower(), **vars(categories)},
            "table_sizes": table_sizes,
        }
        for file_name, path in (beside or {}).items():
            shutil.copyfile(path, built / file_name)
        (built / FACTS).write_text(json.dumps(facts, indent=2) + "\n")  # last: it says that the rest is there
        if not move_into_place(built, target, private, is_prepared) and not keep_first:
            raise there
    return facts


class _TooManyError(Exception):
    pass


def _read(
    log: Path,
    categories: Hashed | Indexed,
    counts: Counts,
    max_malformed: float,
    rows_file: IO[bytes],
    malformed_file: IO[str],
    say: Callable[[str], None],
) -> int:
    """Writes the rows, with the bits of categories that are yet to be indexed; returns their CRC-32."""
    crc32 = 0
    for rows, malformed in read_log(log, counts):
        if isinstance(categories, Hashed):
            rows["categories"] = hash_categories(rows["categories"], categories.table_size)
        rows_file.write(rows.tobytes())
        crc32 = zlib.crc32(rows.tobytes(), crc32)
        before = counts.malformed.total() - len(malformed)
        for number, each in enumerate(malformed, before):
            malformed_file.write(f"{each.line}\t{each.reason}\t{each.detail}\n")
            if number < SHOWN_LINES:
                say(f"line {each.line}: {each.reason}: {each.detail}")
        if counts.lines >= CHECKED_FROM and counts.fraction > max_malformed:
            break
    if counts.fraction > max_malformed:
        raise _TooManyError(
            f"at most {max_malformed:g} of a log's lines may be malformed; {counts.malformed.total()} of the first "
            f"{counts.lines} of {log} are ({_list(counts)})"
        )
    if counts.malformed:
        say(f"{counts.malformed.total()} of {counts.lines} lines are malformed and left out: {_list(counts)}")
    return crc32


def _list(counts: Counts) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.malformed.most_common())


def _index(built: Path, num_train: int, categories: Indexed) -> tuple[int, ...]:
    """Replaces the bits of all categories by their ids; returns the table sizes."""
    rows = np.memmap(built / "rows.bin", ROW, "r+")

    def pieces(stop: int) -> Iterator[np.ndarray]:
        return (rows[start : min(start + (1 << 18), stop)]["categories"] for start in range(0, stop, 1 << 18))

    vocabulary: Vocabulary = build_vocabulary(pieces(num_train), categories.min_count)
    for piece in pieces(len(rows)):
        piece[:] = vocabulary.look_up(piece)
    rows.flush()
    names = {f"C{column}": values for column, values in enumerate(vocabulary.values, 1)}
    np.savez(built / "vocabulary.npz", **names)  # type: ignore
    return vocabulary.table_sizes


def prepare_generated(root: Path) -> None:
    """Generates and prepares the clicks that need no file, where they are missing: 70,000 rows, some seconds."""
    from train.data.click_teacher import generate  # here, because only the first use of the data needs it

    if is_prepared(root / "clicks" / GENERATED_VERSION):
        return
    with private_folder(root, "clicks-log") as private:
        log = private / "log.tsv"
        generate(GENERATED_ROWS, GENERATED_SEED, log)
        teacher = {"teacher.json": private / "log.tsv.teacher.json"}
        prepare_log(
            "clicks", log, root, GENERATED_CATEGORIES, version=GENERATED_VERSION, keep_first=True, beside=teacher
        )


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """Tells whether a folder holds a prepared log."""
    return Path(folder, FACTS).exists()


def click_info(name: str, root: Path) -> ClickInfo:
    """Returns what is known of a prepared log; generates that of "clicks" where it is missing.

    Raises:
      FileNotFoundError: if the user has yet to prepare it.
      ValueError: if it was prepared by another version of this file.
    """
    facts = _facts(name, root)
    return ClickInfo(name, facts["num_train"], facts["num_test"], tuple(facts["table_sizes"]))


def open_clicks(name: str, split: str, root: Path) -> "ClickSplit":
    """Opens a split of a prepared log: "train", six days, or "test", the seventh.

    Raises:
      FileNotFoundError: if the user has yet to prepare it.
      ValueError: if the split is unknown, or the folder is not whole.
    """
    check_split(split, ("train", "test"))
    facts = _facts(name, root)
    path = _folder(name, root) / "rows.bin"
    num_rows = facts["num_train"] + facts["num_test"]
    size = path.stat().st_size if path.exists() else 0
    if size != num_rows * ROW.itemsize:
        raise ValueError(
            f"{num_rows} rows of {ROW.itemsize} bytes make {num_rows * ROW.itemsize}; {path} has {size}. "
            f"Copy it again, or remove {path.parent} and prepare the log anew"
        )
    rows = np.memmap(path, ROW, "r")
    start, stop = (0, facts["num_train"]) if split == "train" else (facts["num_train"], num_rows)
    identity = {"crc32": f"{facts['crc32']:08x}", "categories": json.dumps(facts["categories"])}
    return ClickSplit(rows[start:stop], identity)


class ClickSplit:
    """Batches of one split; nothing is random about a click.

    Attributes:
      identity: a checksum of the log's rows, and how its categories became ids.
    """

    def __init__(self, rows: np.ndarray, identity: Mapping[str, str]):
        self._rows = rows
        self.identity = identity

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Reads rows (b,) as "dense" (b, 13) float32, "categories" (b, 26) int32 and "label" (b,) float32."""
        del seeds
        taken = self._rows[rows]  # (b,) of ROW
        return {name: np.ascontiguousarray(taken[name]) for name in ("dense", "categories", "label")}


def _folder(name: str, root: Path) -> Path:
    return root / name / (GENERATED_VERSION if name == "clicks" else "")


def _facts(name: str, root: Path) -> dict[str, Any]:
    if name == "clicks":
        prepare_generated(root)
    folder = _folder(name, root)
    if not is_prepared(folder):
        raise FileNotFoundError(
            f"{name} must be prepared before it is used; looked for {folder / FACTS}. Prepare it by the command below, "
            "from train.txt of Criteo's Display Advertising Challenge, plain or gzip:\n"
            f"  python -m train.data.clicks prepare --input train.txt --out {root}\n"
            "If it lies elsewhere, pass data_dir or set TFDS_DATA_DIR"
        )
    facts = json.loads((folder / FACTS).read_text())
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"{folder} must have format {FORMAT}; it has {facts.get('format')}. Remove it and prepare the log anew"
        )
    return facts
