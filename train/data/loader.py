"""Batches of NumPy arrays for one of `process_count` processes.

A global batch of `B` rows depends on the dataset, the seed and the step, never on the number of
processes: process `p` of `P` reads rows `[p * B / P, (p + 1) * B / P)` of it and decodes no others.
So a run can go on with another number of processes, and its position is one number, the step.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import grain
import numpy as np

from train.data.checks import check_rows
from train.data.datasets import DATASETS, dataset_info, open_split
from train.data.info import Batch, DatasetInfo, Split
from train.data.seeds import row_seeds
from train.data.sources import Mean


def train_batches(
    name: str,
    *,
    global_batch: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    data_dir: str | os.PathLike[str] | None = None,
    augment: bool = True,
    mean: Mean = "channel",
) -> "TrainBatches":
    """Endless training batches, shuffled anew each epoch.

    No example is dropped: a batch may hold the end of one epoch and the start of the next.

    Args:
      name: one of `DATASETS`; see `open_split` for the errors of missing data.
      global_batch: rows `B` of all processes together; at most the size of the split.
      seed: in [0, 2**32); fixes the order and the augmentation.
      augment: whether images are changed at random; if not, they are prepared as in evaluation.
      mean: of images; see `open_split`.
      process_index: this process, `p`, in [0, process_count).
      process_count: the number of processes, `P`; must divide `global_batch`.
      data_dir: TFDS's directory; default $TFDS_DATA_DIR, then ~/tensorflow_datasets.

    Returns:
      An iterator, with `state` and `restore`, over the arrays of `dataset_info(name).row_types()`, B / P rows each, and
      "seed", (B / P,) uint32: a random number for each row, by its place in the run, for dropout and the like.

    Raises:
      ValueError: if an argument breaks the rules above; from the iterator, for rows that no model can take (an id
        outside its table, a number that is not finite).
    """
    _check_layout(global_batch, process_index, process_count)
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32); got {seed}.")
    rows = open_split(name, "train", data_dir, mean)
    if global_batch > len(rows):
        raise ValueError(
            f"global_batch must be at most the {len(rows)} training examples of {name}, or a batch would hold examples "
            f"twice; got {global_batch}. Lower it."
        )
    return TrainBatches(dataset_info(name, data_dir), rows, global_batch, seed, process_index, process_count, augment)


def eval_batches(
    name: str,
    split: str = "test",
    *,
    global_batch: int,
    process_index: int = 0,
    process_count: int = 1,
    data_dir: str | os.PathLike[str] | None = None,
    mean: Mean = "channel",
) -> "EvalBatches":
    """One pass over a split in its stored order, without augmentation; each example counts once.

    Rows past the end of the split repeat its first row with mask 0, so that all processes get
    equally many batches of one shape, and every row is one that a model can take.

    Args:
      name: one of `DATASETS`; see `open_split` for the errors of missing data.
      split: "train" or "test"; "valid" where the dataset has one.
      global_batch: rows `B` of all processes together; may exceed the split.
      process_index: this process, `p`, in [0, process_count).
      process_count: the number of processes, `P`; must divide `global_batch`.
      data_dir: TFDS's directory; default $TFDS_DATA_DIR, then ~/tensorflow_datasets.
      mean: of images; see `open_split`.

    Returns:
      An iterable, with a length, of the arrays of `dataset_info(name).row_types()`, B / P rows each, and
      "mask", (B / P,) float32. Keep it for the next pass: it caches small images once decoded.

    Raises:
      ValueError: if an argument breaks the rules above.
    """
    _check_layout(global_batch, process_index, process_count)
    rows = open_split(name, split, data_dir, mean)
    return EvalBatches(dataset_info(name, data_dir), rows, global_batch, process_index, process_count)


class TrainBatches(Iterator[Batch]):
    """The iterator that `train_batches` returns.

    Attributes:
      num_examples: examples in the train split, which is one epoch.
      step: number of global batches delivered so far.
    """

    def __init__(
        self,
        info: DatasetInfo,
        rows: Split,
        global_batch: int,
        seed: int,
        process_index: int,
        process_count: int,
        augment: bool,
    ):
        self.num_examples = len(rows)
        self.step = 0
        self._identity = {
            **rows.identity,
            "dataset": info.name,
            "num_examples": len(rows),
            "global_batch": int(global_batch),
            "seed": int(seed),
        }
        self._threads = _threads(info.name)
        # Hashed, because grain's shuffle adds the epoch to its seed: with the plain seed, epoch 1
        # of seed 0 would have the order of epoch 0 of seed 1.
        order_seed = np.random.SeedSequence(seed).generate_state(1).item()
        local = global_batch // process_count

        def read(index: int, numbers: np.ndarray) -> Batch:
            seeds = row_seeds(seed, index * local + np.arange(local))  # by place: the same after a restore, for any P
            batch = rows.read(numbers, seeds if augment else None)
            check_rows(batch, info, numbers)
            return batch | {"seed": seeds}

        numbers = grain.MapDataset.range(len(rows)).shuffle(seed=order_seed).repeat()
        # There is no remainder to drop; but without dropping it, grain rounds the length of an endless
        # stream up past the largest length that Python allows.
        batches = numbers.batch(local, drop_remainder=True).map_with_index(read)
        self._batches = batches[process_index::process_count]
        self._iterator = None

    def __next__(self) -> Batch:
        if self._iterator is None:  # only now, so that no thread works before a restore
            self._iterator = _prefetch(self._batches[self.step :], self._threads)
        batch = next(self._iterator)
        self.step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Returns the position and what it belongs to, as JSON; the same on every process."""
        return {**self._identity, "step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to exactly where `state` was taken, also with another number of processes.

        Raises:
          ValueError: if the state is of another dataset, seed or batch size, or is not a state.
        """
        expected = {*self._identity, "step"}
        if set(state) != expected:
            raise ValueError(f"A state must have the keys {sorted(expected)}, as from `state()`; got {sorted(state)}.")
        different = [
            f"{key}: {state[key]!r} in the state, {value!r} here"
            for key, value in self._identity.items()
            if state[key] != value
        ]
        if different:
            raise ValueError(
                f"A state must be restored into the same order of examples; got {'; '.join(different)}. Use the "
                "arguments of the run that saved it."
            )
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"The step of a state must be an integer of at least 0; got {step!r}.")
        self.close()
        self.step = step

    def close(self) -> None:
        """Stops the prefetching; the next batch starts it again."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


class EvalBatches:
    """The iterable that `eval_batches` returns.

    Attributes:
      num_examples: examples in the split, the sum of all masks of all processes.
    """

    def __init__(
        self,
        info: DatasetInfo,
        rows: Split,
        global_batch: int,
        process_index: int,
        process_count: int,
    ):
        self.num_examples = len(rows)
        self._threads = _threads(info.name)
        local = global_batch // process_count

        def read(index: int) -> Batch:
            numbers = index * local + np.arange(local)
            is_row = numbers < len(rows)
            numbers = np.where(is_row, numbers, 0)
            batch = rows.read(numbers, None)
            check_rows(batch, info, numbers)
            return batch | {"mask": is_row.astype(np.float32)}

        count = -(-len(rows) // global_batch) * process_count  # local batches of all processes
        self._batches = grain.MapDataset.range(process_index, count, process_count).map(read)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        # `yield from` closes the iterator, and with it the threads, when a pass is left early.
        yield from _prefetch(self._batches, self._threads)


def _check_layout(global_batch: int, process_index: int, process_count: int) -> None:
    if process_count < 1:
        raise ValueError(f"process_count must be at least 1; got {process_count}.")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, process_count); got {process_index} of {process_count}.")
    if global_batch < 1:
        raise ValueError(f"global_batch must be at least 1; got {global_batch}.")
    if global_batch % process_count:
        raise ValueError(
            "global_batch must be divisible by process_count, as all processes take equally many rows; got "
            f"{global_batch} and {process_count}. Take a multiple of {process_count}."
        )


def _threads(name: str) -> int:
    return min(DATASETS[name].threads, os.cpu_count() or 1)


def _prefetch(batches: grain.MapDataset, threads: int) -> grain.DatasetIterator:
    """Prepares up to `threads + 1` batches ahead."""
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads + 1)
    return iter(batches.to_iter_dataset(options))
