"""Rows of numbers as TFDS datasets in ArrayRecord. A record is a block of 512 rows, as each record costs 0.1 ms.

Records are written by TFDS's `SequentialWriter`, one shard after another: a `GeneratorBasedBuilder` holds a whole split
in memory, and needs TensorFlow for a split of more than 1000 MiB, such as that of Criteo's log.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.dataset_info import DatasetIdentity

from train.data.info import Batch, DatasetInfo, RowTypes
from train.data.placing import check_files, is_complete, readable

BLOCK = 512  # rows of a record: another number needs another version of every dataset
SHARD = 1024  # records of a file: of clicks, some 60 MB

Columns = Mapping[str, np.ndarray]


def write_rows(
    root: Path,
    folder: Path,
    splits: Mapping[str, Columns],
    info: DatasetInfo,
    identity: Mapping[str, str],
    extra_facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Writes a dataset.

    Args:
      root: the folder of all datasets.
      folder: of this one, below `root`: NAME/VERSION or NAME/CONFIG/VERSION; other files in it are kept.
      splits: arrays (n, ...) of each split of n rows; numbers, or objects for text.
      info: of the dataset.
      identity: distinguishes its rows from others of the same name and number.
      extra_facts: further facts, as JSON.

    Returns:
      All facts: the metadata of the dataset.
    """
    facts = {**asdict(info), "identity": dict(identity), **extra_facts}
    features = {
        column: tfds.features.Tensor(shape=(None,), dtype=np.str_)
        if array.dtype == object
        else tfds.features.Tensor(shape=(None, *array.shape[1:]), dtype=array.dtype.type, encoding="bytes")
        for column, array in next(iter(splits.values())).items()
    }
    records = {split: _blocks(columns) for split, columns in splits.items()}
    write_records(root, folder, features, records, f"Blocks of up to {BLOCK} rows.", facts, SHARD)
    return facts


def write_records(
    root: Path,
    folder: Path,
    features: Mapping[str, Any],
    splits: Mapping[str, Iterable[Mapping[str, Any]]],
    description: str,
    facts: Mapping[str, Any],
    shard: int,
) -> None:
    """Writes the records of each split in their order, `shard` of them per file; see `write_rows`."""
    name, *config, version = folder.parts
    (root / folder).mkdir(parents=True, exist_ok=True)
    identity = DatasetIdentity(
        name, tfds.core.Version(version), str(root / folder), __name__, config_name=config[0] if config else None
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        features=tfds.features.FeaturesDict(dict(features)),
        description=description,
        disable_shuffling=True,
        metadata=tfds.core.MetadataDict(facts),
    )
    writer = tfds.core.SequentialWriter(info, shard, file_format="array_record")
    writer.initialize_splits(list(splits))
    writer.add_examples(splits)
    writer.close_all()


def _blocks(columns: Columns) -> Iterator[Columns]:
    for start in range(0, len(next(iter(columns.values()))), BLOCK):
        yield {name: array[start : start + BLOCK] for name, array in columns.items()}


@dataclass(frozen=True)
class Prepared:
    """A dataset that `write_rows` has written, or is to write.

    Attributes:
      kind: the class of its info.
      folder: () -> where it is, below the folder of all datasets.
      how: how to prepare it from files of the user's; {root} stands for the folder of all datasets.
      build: (folder of all datasets) -> None, which prepares it; None if that needs files of the user's.
    """

    kind: type[DatasetInfo]
    folder: Callable[[], Path]
    how: str = ""
    build: Callable[[Path], object] | None = None

    def info(self, root: Path) -> DatasetInfo:
        """Returns its info; first prepares the dataset if that needs no file of the user's.

        Raises:
          FileNotFoundError: if the user has yet to prepare it.
          ValueError: if its description cannot be read.
        """
        facts = self._facts(root)
        values = {field.name: facts[field.name] for field in fields(self.kind) if field.name in facts}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        with readable(root / self.folder(), TypeError, KeyError):
            info = self.kind(**values)
            for shape, dtype in info.row_types().values():
                np.empty((0, *shape), dtype)
        return info

    def open(self, split: str, root: Path, types: RowTypes | None = None) -> "RowSplit":
        """Opens a split, to read the arrays of a batch, or those in `types`; see `info` and `RowSplit` for errors."""
        info = self.info(root)
        with readable(root / self.folder(), TypeError, KeyError):
            identity = self._facts(root)["identity"]
            return RowSplit(root / self.folder(), split, info.num_examples(split), types or info.row_types(), identity)

    def _facts(self, root: Path) -> Mapping[str, Any]:
        folder = root / self.folder()
        if self.build and not is_complete(folder):
            self.build(root)
        if not is_complete(folder):
            raise FileNotFoundError(
                f"{self.folder().parts[0]} must be prepared before it is used; got no {folder}/dataset_info.json. "
                f"{self.how.format(root=root)}\nIf it is elsewhere, pass data_dir or set TFDS_DATA_DIR."
            )
        with readable(folder):
            facts = tfds.builder_from_directory(folder).info.metadata
            names = {field.name for field in fields(self.kind) if field.default is MISSING}
            if gaps := names - set(facts or {}):
                raise KeyError(f"metadata.json has no {', '.join(sorted(gaps))}")
        return facts  # type: ignore[return-value]


class RowSplit:
    """Batches of one split, without random changes. Blocks are kept after first use, as decoded images are.

    Memory grows to one copy of the split: 6.3 GB for Criteo's six days, 10 MB for the generated clicks.

    Attributes:
      identity: distinguishes these rows from others of the same name and number.
    """

    def __init__(self, folder: Path, split: str, num_rows: int, types: RowTypes, identity: Mapping[str, str]):
        """Opens a split.

        Args:
          folder: of the dataset.
          split: one of its splits.
          num_rows: rows in the split.
          types: shape and type of a row of each array that is read; objects for text, which is read as bytes.
          identity: see above.

        Raises:
          FileNotFoundError: if a file is missing.
          ValueError: if one is cut off, or not of this dataset; from `read`, if one is damaged within.
        """
        builder = tfds.builder_from_directory(folder)
        check_files(builder, split)
        self.identity = identity
        self._folder, self._split = folder, split
        self._blocks = builder.as_data_source(split)
        self._columns = {name: np.empty((num_rows, *shape), dtype) for name, (shape, dtype) in types.items()}
        self._is_read = np.zeros(-(-num_rows // BLOCK), bool)
        shards = builder.info.splits[split].shard_lengths
        # A block of every file, as none can be read of one that is cut off; and the last, which has the number of rows.
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
                f"Rows must be as they were prepared; got block {number} of {self._split} in {self._folder}, which is "
                f"not: {error}. Copy the folder again, or remove it and prepare it anew."
            ) from None
