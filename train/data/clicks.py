"""Prepares click logs, and generates one.

python -m train.data.clicks prepare --input train.txt --out FOLDER --categories hashed --table-size 100000
python -m train.data.clicks generate --rows 200000 --seed 0 --out FILE
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from train.data.click_store import prepare_log
from train.data.click_tables import Hashed, Indexed
from train.data.click_teacher import generate
from train.data.commands import run_command
from train.data.info import resolve_data_dir


@dataclass(frozen=True)
class Prepare:
    """Prepare Criteo's log as the dataset "criteo": 6 days to train on, the 7th to test on, by row count."""

    input: Path
    """train.txt of Criteo's Display Advertising Challenge, or a file in its format; plain or gzip."""
    out: Path | None = None
    """Folder of all datasets, the trainer's --data-dir; $TFDS_DATA_DIR or ~/tensorflow_datasets if not given."""
    categories: Literal["hashed", "indexed"] = "hashed"
    """hashed: a row by hash, in tables of given size. indexed: a row for each frequent category, row 0 for others."""
    table_size: int | None = None
    """Rows of each of the 26 tables, for hashed categories; 100,000 if not given."""
    min_count: int | None = None
    """Fewest occurrences in the training days for an indexed category to have its own row; 10 if not given."""
    max_malformed: float = 1e-4
    """Largest fraction of lines that may be malformed; they are left out, and listed in malformed.tsv."""

    def run(self) -> dict[str, Any]:
        """Prepares the log; returns what it holds."""
        root = resolve_data_dir(self.out)
        return prepare_log("criteo", self.input, root, self.kind(), max_malformed=self.max_malformed)

    def kind(self) -> Hashed | Indexed:
        """Returns how categories become ids.

        Raises:
          ValueError: for an option of the other kind.
        """
        if self.categories == "hashed":
            if self.min_count is not None:
                raise ValueError(
                    f"--min-count must go with indexed categories; got {self.min_count} for hashed ones. Omit it."
                )
            return Hashed(100_000 if self.table_size is None else self.table_size)
        if self.table_size is not None:
            raise ValueError(
                f"--table-size must go with hashed categories; got {self.table_size} for indexed ones. Omit it."
            )
        return Indexed(10 if self.min_count is None else self.min_count)


@dataclass(frozen=True)
class Generate:
    """Write a log in Criteo's format, drawn from a known model, and the scores that this model reaches."""

    out: Path
    """The file; OUT.teacher.json gets log loss and AUC of the teacher, which no model can be expected to beat."""
    rows: int = 200_000
    """Rows of the log."""
    seed: int = 0
    """Seed of the teacher and of the rows."""

    def run(self) -> dict[str, object]:
        """Writes the log; returns what the teacher reaches."""
        return generate(self.rows, self.seed, self.out)


main = partial(run_command, "clicks", {"prepare": Prepare, "generate": Generate})

if __name__ == "__main__":
    sys.exit(main())
