"""Text as bytes, in windows: the source files of a folder, such as those of Linux, or of Python's standard library.

A file's folder decides its split: the files of a folder are similar, so a split by files would test on what it had
trained on. A token is a byte, one of 256; a byte 0 follows each file.
"""

import platform
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from train.data.info import TextInfo
from train.data.placing import preparing
from train.data.rows import Prepared, write_rows

VERSION = "2.0.0"  # of the prepared data: must change when the same files give other windows
HELD_OUT = 16  # one folder in 16 is in the test split
TEST_WINDOWS = 512  # at most, evenly spread over the held-out text
LINUX_SUFFIXES = (".c", ".h", ".rst")
LINUX_WITHOUT = ("asic_reg",)  # tables of registers that a program wrote: a third of all bytes
END = b"\0"  # after a file


@dataclass(frozen=True)
class Window:
    """How text becomes rows.

    Attributes:
      length: L, bytes that a row predicts; a row has L + 1, as its first byte is not predicted.
      train_bytes: bytes of text in the train split, at most.
    """

    length: int
    train_bytes: int


def prepare_corpus(
    name: str, source: Path, files: Sequence[Path], window: Window, root: Path, folder: Path, *, keep_first: bool
) -> dict[str, Any]:
    """Writes the text of files as `folder`, which appears when it is whole.

    A row is L + 1 bytes, and begins with the last byte of the row before it; what is left at the end is dropped. If
    there is more text than asked for, the train split takes files in the order of a hash of their paths, if they fit.

    Args:
      name: of the dataset.
      source: the folder that the files are in.
      files: of the dataset.
      window: how their text becomes rows.
      root: the folder of all datasets.
      folder: of this one, below `root`.
      keep_first: see `preparing`.

    Returns:
      The facts in `metadata.json`.

    Raises:
      ValueError: if a split has no row, or the folder is prepared already, and not `keep_first`.
    """
    names: dict[str, list[Path]] = {"train": [], "test": []}
    for path in files:
        names["test" if is_held_out(path.relative_to(source).parent) else "train"].append(path)
    texts = {
        "train": _read_text(source, names["train"], window.train_bytes),
        "test": _read_text(source, names["test"], sys.maxsize),
    }
    columns, checksum = {}, 0
    for split, text in texts.items():
        rows = windows(text, window.length)
        if split == "test":
            rows = rows[np.arange(min(TEST_WINDOWS, len(rows))) * len(rows) // min(TEST_WINDOWS, max(len(rows), 1))]
        if not len(rows):
            raise ValueError(
                f"Every split must have a row of {window.length + 1} bytes; got {len(text)} bytes in {split}, of "
                f"{len(names[split])} files in {source}. Pass a folder with more text, in more folders."
            )
        checksum = crc32(rows.tobytes(), checksum)
        columns[split] = {"text": rows}
    info = TextInfo(name, len(columns["train"]["text"]), len(columns["test"]["text"]), window.length)
    extra_facts = {
        "files": {split: len(paths) for split, paths in names.items()},
        "bytes": {split: len(text) for split, text in texts.items()},
    }
    with preparing(root, folder, keep_first=keep_first) as private:
        return write_rows(private, folder, columns, info, {"crc32": f"{checksum:08x}"}, extra_facts)


def is_held_out(folder: Path) -> bool:
    """Returns whether a folder's files are in the test split. Files directly in the source folder never are."""
    return folder != Path() and crc32(folder.as_posix().encode()) % HELD_OUT == 0


def windows(text: bytes, length: int) -> np.ndarray:
    """Returns rows (n, length + 1), uint8, of which each begins with the last byte of the one before."""
    numbers = np.frombuffer(text, np.uint8)
    count = max(len(numbers) - 1, 0) // length
    return numbers[np.arange(count)[:, None] * length + np.arange(length + 1)]


def _read_text(source: Path, files: Sequence[Path], limit: int) -> bytes:
    """Returns the text of files in the order of their paths; of only some if all exceed `limit` bytes."""
    sizes = {path: path.stat().st_size + len(END) for path in files}
    selected, total = [], 0
    for path in sorted(files, key=lambda path: crc32(path.relative_to(source).as_posix().encode())):
        if total + sizes[path] <= limit:
            selected.append(path)
            total += sizes[path]
    return b"".join(path.read_bytes() + END for path in sorted(selected))


def files_of(source: Path, suffixes: Sequence[str], excluded: Sequence[str] = ()) -> list[Path]:
    """Returns the files below a folder with one of the suffixes, except links and those in folders named `excluded`."""
    paths = (path for path in source.rglob("*") if path.suffix in suffixes and path.is_file() and not path.is_symlink())
    return sorted(path for path in paths if not set(path.relative_to(source).parts[:-1]) & set(excluded))


def prepare_stdlib(root: Path) -> None:
    """Prepares the standard library of this Python without its tests: 10 MB, a second."""
    source = Path(sysconfig.get_path("stdlib"))
    files = files_of(source, (".py",), ("site-packages", "dist-packages", "test", "tests", "idle_test"))
    prepare_corpus("stdlib", source, files, Window(128, 1 << 24), root, stdlib_folder(), keep_first=True)


def stdlib_folder() -> Path:
    """Returns the folder of this Python's standard library, below the folder of all datasets."""
    return Path("stdlib", f"python-{platform.python_version()}", VERSION)


LINUX_FOLDER = Path("linux", VERSION)
HOW = (
    "Prepare it by the commands below:\n"
    "  apt-get download linux-source-6.1 && dpkg -x linux-source-6.1_*.deb .\n"
    "  tar -xf usr/src/linux-source-6.1.tar.xz\n"
    "  python -m train.data.corpus prepare --input linux-source-6.1 --out {root}"
)
CORPORA = {
    "stdlib": Prepared(TextInfo, stdlib_folder, build=prepare_stdlib),
    "linux": Prepared(TextInfo, lambda: LINUX_FOLDER, HOW),
}
