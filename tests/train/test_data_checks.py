"""Rows that no model can take are refused, with a name, before a device clamps them or turns them into NaN."""

import itertools
import time

import numpy as np
import pytest

from tests.train.runs import CLICKS, IMAGES, TRANSLATIONS
from train.data import loader, train_batches
from train.data.checks import check_rows


def good(info, rows=6):
    return {name: np.ones((rows, *shape), dtype) for name, (shape, dtype) in info.row_types().items()}


@pytest.mark.parametrize(
    ("info", "name", "place", "value", "message"),
    [
        (
            CLICKS,
            "categories",
            (4, 2),
            5,
            r"categories\[2\] of clicks must be in \[0, 5\), the rows of its table; got 5 in",
        ),
        (
            CLICKS,
            "categories",
            (0, 25),
            -5,
            r"categories\[25\] of clicks must be in \[0, 28\), .*; got -5 in row 100 of",
        ),
        (CLICKS, "categories", (5, 0), 2_000_000_000, r"got 2000000000 in row 105 of the split. The files are damaged"),
        (CLICKS, "dense", (1, 12), np.nan, r"dense\[12\] of clicks must be finite; got nan in row 101"),
        (CLICKS, "dense", (1, 0), -np.inf, r"dense\[0\] of clicks must be finite; got -inf"),
        (CLICKS, "label", (3,), 7, r"label of clicks must be in \[0, 2\), not clicked or clicked; got 7.0 in row 103"),
        (CLICKS, "label", (3,), np.nan, r"label of clicks must be in \[0, 2\), .*; got nan"),
        (
            TRANSLATIONS,
            "source",
            (0, 3),
            40,
            r"source\[3\] of catalogs must be in \[0, 40\), the vocabulary; got 40 in",
        ),
        (TRANSLATIONS, "target", (0, 13), -1, r"target\[13\] of catalogs must be in \[0, 40\), the vocabulary; got -1"),
        (IMAGES, "label", (2,), 10, r"label of digits must be in \[0, 10\), the classes; got 10 in row 102"),
    ],
)
def test_bad_batches(info, name, place, value, message):
    batch, numbers = good(info), np.arange(100, 106)
    check_rows(batch, info, numbers)
    batch[name][place] = value
    with pytest.raises(ValueError, match=message):
        check_rows(batch, info, numbers)


def test_the_largest_ids():
    batch = good(CLICKS)
    batch["categories"][:] = np.array(CLICKS.table_sizes) - 1
    check_rows(batch, CLICKS, np.arange(6))


def test_loaders_refuse_them(monkeypatch, tmp_path):
    """Its threads prepare batches ahead; the error comes with the batch that has the row."""

    class Rows:
        identity = {"crc32": "0"}  # noqa: RUF012

        def __len__(self):
            return 12

        def read(self, rows, seeds):
            batch = good(CLICKS, len(rows))
            batch["categories"][rows == 7, 1] = 4
            return batch

    monkeypatch.setattr(loader, "open_split", lambda *_: Rows())
    monkeypatch.setattr(loader, "dataset_info", lambda *_: CLICKS)
    batches = train_batches("clicks", global_batch=1, seed=0, data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"categories\[1\] of clicks .* got 4 in row 7 of the split"):
        list(itertools.islice(batches, 12))
    batches.close()
    with pytest.raises(ValueError, match="got 4 in row 7 of the split"):
        list(loader.eval_batches("clicks", global_batch=5, data_dir=tmp_path))


def test_time_of_checking():
    batch, numbers = good(CLICKS, 128), np.arange(128)
    begin = time.process_time()
    for _ in range(100):
        check_rows(batch, CLICKS, numbers)
    assert time.process_time() - begin < 0.5  # 5 ms a batch, where it takes some 30 us
