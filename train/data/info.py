"""What all kinds of datasets share: the info that is known before one is read, and how its rows are read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]
RowTypes = dict[str, tuple[tuple[int, ...], np.dtype]]

DEFAULT_DATA_DIR = "~/tensorflow_datasets"  # TFDS's own default
NUM_DENSE = 13  # integers of a click
NUM_CATEGORIES = 26  # categories of a click


@dataclass(frozen=True)
class Limit:
    """What an array of a batch may hold: [0, below).

    Attributes:
      below: one number, or one for each entry of a row.
      what: what has so many members, for the error message.
    """

    below: int | tuple[int, ...]
    what: str


@dataclass(frozen=True)
class DatasetInfo:
    """What a model and a schedule need to know of a dataset.

    Attributes:
      name: of the dataset.
      num_train: rows in the train split.
      num_test: rows in the test split.
    """

    name: str
    num_train: int
    num_test: int

    def splits(self) -> dict[str, int]:
        """Returns the number of rows in each split."""
        return {"train": self.num_train, "test": self.num_test}

    def num_examples(self, split: str) -> int:
        """Returns the number of rows in one split."""
        check_split(split, tuple(self.splits()))
        return self.splits()[split]

    def row_types(self) -> RowTypes:
        """Returns the shape and type of one row of each array in a batch, except "seed" and "mask"."""
        raise NotImplementedError

    def limits(self) -> dict[str, Limit | None]:
        """Returns limits for the arrays of a batch in which a file could break them; None: any finite number."""
        raise NotImplementedError


@dataclass(frozen=True)
class ImageInfo(DatasetInfo):
    """Images with one label each.

    Attributes:
      image_shape: (H, W, C) of the model's input.
      num_classes: labels are 0..num_classes - 1.
      num_train: published number of examples in the train split.
      num_test: the same of the test split; for imagenet2012 of TFDS's "validation" split, because its "test" split has
        no labels.
    """

    image_shape: tuple[int, int, int]
    num_classes: int

    def row_types(self) -> RowTypes:
        """Returns the types of "image" (H, W, C) and "label" ()."""
        return {"image": (self.image_shape, np.dtype(np.float32)), "label": ((), np.dtype(np.int32))}

    def limits(self) -> dict[str, Limit | None]:
        """Returns the limit of "label"; pixels come from bytes, which are all in range."""
        return {"label": Limit(self.num_classes, "the classes")}


@dataclass(frozen=True)
class ClickInfo(DatasetInfo):
    """Clicks, and other data that are learned in the same way: numbers, categories and a label of 0 or 1.

    Attributes:
      table_sizes: rows of the embedding table of each category; ids are 0..size - 1. Criteo's format has 26 tables.
      num_dense: numbers in a row.
    """

    table_sizes: tuple[int, ...]
    num_dense: int = NUM_DENSE

    def row_types(self) -> RowTypes:
        """Returns the types of "dense" (num_dense,), "categories" (number of tables,) and "label" ()."""
        return {
            "dense": ((self.num_dense,), np.dtype(np.float32)),
            "categories": ((len(self.table_sizes),), np.dtype(np.int32)),
            "label": ((), np.dtype(np.float32)),
        }

    def limits(self) -> dict[str, Limit | None]:
        """Returns the limits of "dense", "categories" and "label"."""
        tables = Limit(self.table_sizes, "the rows of its table")
        return {"dense": None, "categories": tables, "label": Limit(2, "not clicked or clicked")}


@dataclass(frozen=True)
class TranslationInfo(DatasetInfo):
    """Pairs of sentences as numbers of subwords; 0 is padding, 1 begin, 2 end, 3 an unknown character.

    Attributes:
      num_valid: rows in the valid split.
      languages: of source and target, such as ("de", "en").
      vocabulary_size: subwords of both languages together, including these four.
      source_length: S, numbers in a row of the source, padding included.
      target_length: T, numbers in a row of the target; begin, end and padding included.
    """

    num_valid: int
    languages: tuple[str, str]
    vocabulary_size: int
    source_length: int
    target_length: int

    def splits(self) -> dict[str, int]:
        """Returns the number of rows in each split."""
        return {"train": self.num_train, "valid": self.num_valid, "test": self.num_test}

    def row_types(self) -> RowTypes:
        """Returns the types of "source" (S,) and "target" (T,)."""
        int32 = np.dtype(np.int32)
        return {"source": ((self.source_length,), int32), "target": ((self.target_length,), int32)}

    def limits(self) -> dict[str, Limit | None]:
        """Returns the limits of "source" and "target"."""
        return dict.fromkeys(("source", "target"), Limit(self.vocabulary_size, "the vocabulary"))


@dataclass(frozen=True)
class TextInfo(DatasetInfo):
    """Windows of a text; a token is a byte.

    Attributes:
      length: L, bytes that a row predicts; a row has L + 1, as its first byte is not predicted.
    """

    length: int

    vocabulary_size = 256

    def row_types(self) -> RowTypes:
        """Returns the type of "text" (L + 1,)."""
        return {"text": ((self.length + 1,), np.dtype(np.uint8))}

    def limits(self) -> dict[str, Limit | None]:
        """Returns no limits: bytes are all in range."""
        return {}


class Split(Protocol):
    """The rows of one split, read by their numbers."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Distinguishes these rows from others of the same name and number; part of the loader's state."""
        ...

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Reads rows; threads may call it at the same time.

        Args:
          rows: their numbers, (b,) int64.
          seeds: (b,) uint32, from which each row draws its random changes; None for no changes, as in evaluation.

        Returns:
          One array with b rows for each name in `row_types`.
        """
        ...


def check_split(split: str, splits: tuple[str, ...]) -> None:
    """Refuses a split that the dataset does not have."""
    if split not in splits:
        raise ValueError(f"split must be one of {', '.join(splits)}; got {split!r}.")


def resolve_data_dir(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Directory of all datasets: the argument, else $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    return Path(data_dir or os.environ.get("TFDS_DATA_DIR") or DEFAULT_DATA_DIR).expanduser()
