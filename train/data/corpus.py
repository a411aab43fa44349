"""Prepares the C sources and documents of Linux, unpacked by you, as text in windows of 256 bytes.

python -m train.data.corpus prepare --input linux-source-6.1 --out FOLDER     # the unpacked sources
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from train.data.commands import run_command
from train.data.corpus_store import LINUX_FOLDER, LINUX_SUFFIXES, LINUX_WITHOUT, Window, files_of, prepare_corpus
from train.data.info import resolve_data_dir
from train.data.placing import check_new


@dataclass(frozen=True)
class Prepare:
    """Prepare the C sources and documents of Linux: one folder in 16 is the test split.

    Folders named asic_reg are left out: they hold tables of registers, a third of all bytes, but 3% of the test split.
    """

    input: Path
    """The folder of the unpacked sources."""
    out: Path | None = None
    """Folder of all datasets, the trainer's --data-dir; $TFDS_DATA_DIR or ~/tensorflow_datasets if not given."""
    megabytes: int = 64
    """Megabytes of text in the train split, at most."""

    def run(self) -> dict[str, Any]:
        """Prepares the text; returns what it holds."""
        root = resolve_data_dir(self.out)
        check_new(root / LINUX_FOLDER)
        if not self.input.is_dir():
            raise ValueError(f"--input must be the folder of the unpacked sources; got {self.input}, which is none.")
        if self.megabytes < 1:
            raise ValueError(f"--megabytes must be at least 1; got {self.megabytes}.")
        files, window = files_of(self.input, LINUX_SUFFIXES, LINUX_WITHOUT), Window(256, self.megabytes * 10**6)
        return prepare_corpus("linux", self.input, files, window, root, LINUX_FOLDER, keep_first=False)


main = partial(run_command, "corpus", {"prepare": Prepare})

if __name__ == "__main__":
    sys.exit(main())
