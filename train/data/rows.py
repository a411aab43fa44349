"""Rows of numbers as datasets of TFDS in ArrayRecord. A record is a block of 512 rows, as each record costs 0.1 ms.

They are written by TFDS's `SequentialWriter`, one shard after the other: a `GeneratorBasedBuilder` holds a whole split
in memory, and needs TensorFlow for one of more than 1000 MiB, which Criteo's log has.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.dataset_info import DatasetIdentity

from train.data.info import Batch, RowTypes
from train.data.placing import check_files, is_complete

BLOCK = 512  # rows of a record: another number needs another version of every dataset
SHARD = 1024  # records of a file: of clicks, some 60 MB

Columns = Mapping[str, np.ndarray]


def write_rows(root: Path, folder: Path, splits: Mapping[str, Columns], facts: dict[str, Any]) -> None:
    """Writes a dataset.

    Args:
      root: the folder of all datasets.
      folder: of this one, below `root`: NAME/VERSION or NAME/CONFIG/VERSION; what else it holds stays.
      splits: arrays (n, ...) of each, one row for each of its n; of numbers, or of objects for text.
      facts: the dataset's metadata, as JSON can hold it.
    """
    name, *config, version = folder.parts
    (root / folder).mkdir(parents=True, exist_ok=True)
    features = {
        column: tfds.features.Tensor(shape=(None,), dtype=np.str_)
        if array.dtype == object
        else tfds.features.Tensor(shape=(None, *array.shape[1:]), dtype=array.dtype.type, encoding="bytes")
        for column, array in next(iter(splits.values())).items()
    }
    identity = DatasetIdentity(
        name, tfds.core.Version(version), str(root / folder), __name__, config_name=config[0] if config else None
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        features=tfds.features.FeaturesDict(features),
        description=f"Blocks of up to {BLOCK} rows.",
        disable_shuffling=True,
        metadata=tfds.core.MetadataDict(facts),
    )
    writer = tfds.core.SequentialWriter(info, SHARD, file_format="array_record")
    writer.initialize_splits(list(splits))
    writer.add_examples({split: _blocks(columns) for split, columns in splits.items()})
    writer.close_all()


def _blocks(columns: Columns) -> Iterator[Columns]:
    for start in range(0, len(next(iter(columns.values()))), BLOCK):
        yield {name: array[start : start + BLOCK] for name, array in columns.items()}


def read_facts(name: str, folder: Path, how_to_prepare: str) -> Mapping[str, Any]:
    """Returns what `write_rows` was told of a dataset.

    Raises:
      FileNotFoundError: if it is not there; with `how_to_prepare`.
      ValueError: if the folder is not whole.
    """
    if not is_complete(folder):
        raise FileNotFoundError(
            f"{name} must be prepared before it is used; looked for {folder}/dataset_info.json. {how_to_prepare}\n"
            "If it lies elsewhere, pass data_dir or set TFDS_DATA_DIR"
        )
    try:
        facts = tfds.builder_from_directory(folder).info.metadata
        if not facts:
            raise FileNotFoundError(f"there is nothing in {folder}/metadata.json")
    except Exception as error:  # of TFDS, of many kinds
        raise ValueError(
            f"{folder} must hold a dataset as it was prepared; got {error!r}. Copy it again, or remove it and prepare "
            "it anew"
        ) from error
    return facts  # type: ignore[return-value]


class RowSplit:
    """Batches of one split; nothing is random about a row. Blocks are kept after first use, as decoded images are.

    Memory grows to one copy of the split: 6.3 GB for Criteo's six days, 10 MB for the generated clicks.

    Attributes:
      identity: tells these rows from others of the same name and number.
    """

    def __init__(
        self, folder: Path, split: str, num_rows: int, types: RowTypes, identity: Mapping[str, str] | None = None
    ):
        """Opens a split.

        Args:
          folder: of the dataset.
          split: one of its splits.
          num_rows: that it holds.
          types: shape and type of a row of each array that is read; objects for text, which is read as bytes.
          identity: see above.

        Raises:
          FileNotFoundError: if a file is missing.
          ValueError: if one is cut off, or not of this dataset; from `read`, if one is damaged within.
        """
        builder = tfds.builder_from_directory(folder)
        check_files(builder, split)
        self.identity = identity or {}
        self._folder, self._split = folder, split
        self._blocks = builder.as_data_source(split)
        self._columns = {name: np.empty((num_rows, *shape), dtype) for name, (shape, dtype) in types.items()}
        self._is_read = np.zeros(-(-num_rows // BLOCK), bool)
        shards = builder.info.splits[split].shard_lengths
        # Of a file that is cut off no block can be read; the last block tells the number of rows.
        for number in (*np.cumsum([0, *shards[:-1]]).tolist(), len(self._is_read) - 1):
            self._load(number)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Reads rows (b,) as b rows of each array."""
        del seeds
        blocks = rows // BLOCK
        for block in np.unique(blocks[~self._is_read[blocks]]).tolist():
            self._load(block)
        return {name: column[rows] for name, column in self._columns.items()}

    def _load(self, number: int) -> None:
        try:
            block = self._blocks[number]
            for name, column in self._columns.items():
                place = column[number * BLOCK :][:BLOCK]
                place[:] = block[name].reshape(place.shape)
            self._is_read[number] = True  # last, so that no other thread reads an unfinished block
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f"rows must be as they were prepared; block {number} of {self._split} in {self._folder} is not: "
                f"{error}. Copy the folder again, or remove it and prepare it anew"
            ) from None
