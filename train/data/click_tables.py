"""Maps the 32 bits of a category to a row of its embedding table."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from train.data.info import NUM_CATEGORIES
from train.data.seeds import mix

MAX_TABLE_SIZE = 2**31 - 1  # ids are int32
MERGE_AT = 1 << 20  # values waiting to be counted together


@dataclass(frozen=True)
class Hashed:
    """Tables of one given size; different categories may share a row. No pass over the data is needed.

    Attributes:
      table_size: rows of each of the 26 tables.
    """

    table_size: int

    def __post_init__(self):
        if not 1 <= self.table_size <= MAX_TABLE_SIZE:
            raise ValueError(f"The table size must be in [1, 2**31); got {self.table_size}.")


@dataclass(frozen=True)
class Indexed:
    """Tables of the categories that occur often enough in the training days; all others have id 0.

    Attributes:
      min_count: fewest occurrences in the training days for a category to have a row of its own.
    """

    min_count: int

    def __post_init__(self):
        if self.min_count < 1:
            raise ValueError(f"The minimum count must be at least 1; got {self.min_count}.")


def hash_categories(bits: np.ndarray, table_size: int) -> np.ndarray:
    """Returns ids in [0, table_size), the same on every machine.

    The 26 columns are hashed differently, so that two categories do not collide in all of them.

    Args:
      bits: (n, 26) int32, the bits of the file.
      table_size: rows of each table.

    Returns:
      (n, 26) int32.
    """
    columns = np.arange(1, bits.shape[1] + 1, dtype=np.uint64) << np.uint64(32)  # (26,)
    words = mix(bits.view(np.uint32).astype(np.uint64) | columns)
    return (words % np.uint64(table_size)).astype(np.int32)


class Vocabulary:
    """The categories that have rows of their own.

    Attributes:
      values: for each column, the bits of category 1, 2, ...: frequent ones first, ties by value; uint32.
    """

    def __init__(self, values: list[np.ndarray]):
        self.values = values
        self._order = [np.argsort(column) for column in values]

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Rows of each table, including the row of id 0."""
        return tuple(len(column) + 1 for column in self.values)

    def look_up(self, bits: np.ndarray) -> np.ndarray:
        """Returns the ids (n, columns) int32 of bits of that shape; 0 for what is not in the vocabulary."""
        ids = np.zeros(bits.shape, np.int32)
        for column, (values, order) in enumerate(zip(self.values, self._order, strict=True)):
            if not len(values):
                continue
            keys = bits[:, column].view(np.uint32)  # (n,)
            place = np.minimum(np.searchsorted(values, keys, sorter=order), len(values) - 1)
            index = order[place]  # (n,)
            ids[:, column] = np.where(values[index] == keys, index + 1, 0)
        return ids


def build_vocabulary(pieces: Iterable[np.ndarray], min_count: int, num_categories: int = NUM_CATEGORIES) -> Vocabulary:
    """Counts the categories of the training days, in one pass.

    Args:
      pieces: bits (n, num_categories) int32.
      min_count: fewest occurrences for a category to have a row.
      num_categories: columns.

    Returns:
      The vocabulary. Memory grows with the number of different values, 12 bytes each.
    """
    counters = [_Counter() for _ in range(num_categories)]
    for piece in pieces:
        for column, counter in enumerate(counters):
            counter.add(np.ascontiguousarray(piece[:, column]).view(np.uint32))
    values = []
    for counter in counters:
        categories, counts = counter.result()
        categories, counts = categories[counts >= min_count], counts[counts >= min_count]
        values.append(categories[np.lexsort((categories, -counts))])
    return Vocabulary(values)


class _Counter:
    """Counts 32-bit values. Pieces are merged only once many are waiting, so that merging takes little of the time."""

    def __init__(self):
        self._values, self._counts = np.zeros(0, np.uint32), np.zeros(0, np.int64)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_waiting = 0

    def add(self, values: np.ndarray) -> None:
        self._waiting.append(np.unique(values, return_counts=True))
        self._num_waiting += len(self._waiting[-1][0])
        if self._num_waiting > max(MERGE_AT, len(self._values)):
            self.result()

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        parts = [(self._values, self._counts), *self._waiting]
        values = np.concatenate([part[0] for part in parts])
        counts = np.concatenate([part[1] for part in parts])
        self._values, inverse = np.unique(values, return_inverse=True)
        self._counts = np.zeros(len(self._values), np.int64)
        np.add.at(self._counts, inverse, counts)
        self._waiting, self._num_waiting = [], 0
        return self._values, self._counts
