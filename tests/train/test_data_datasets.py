"""Datasets of every kind under the laws of the loader: one order for any number of processes, exact continuation."""

import itertools
import json
import shutil

import numpy as np
import pytest

from tests.refusals import refused
from train.data import (
    DATASETS,
    ClickInfo,
    ImageInfo,
    TextInfo,
    TranslationInfo,
    click_store,
    dataset_info,
    eval_batches,
    rows,
    text_store,
    train_batches,
)

KINDS = {
    "digits": ImageInfo,
    "clicks": ClickInfo,
    "catalogs": TranslationInfo,
    "stdlib": TextInfo,
}  # one of each kind that needs no file
B = 24


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def take(name, data_dir, steps, start=0, seed=0, **kwargs):
    batches = train_batches(name, global_batch=B, seed=seed, data_dir=data_dir, **kwargs)
    batches.restore(json.loads(json.dumps({**batches.state(), "step": start})))
    samples = list(itertools.islice(batches, steps))
    batches.close()
    return {key: np.stack([batch[key] for batch in samples]) for key in samples[0]}  # (steps, rows, ...)


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for key in actual:
        assert actual[key].dtype == expected[key].dtype
        np.testing.assert_array_equal(actual[key], expected[key])


@pytest.mark.parametrize("name", KINDS)
def test_info_of_batches(name, data_dir):
    info = dataset_info(name, data_dir)
    assert type(info) is KINDS[name]
    assert info.name == name
    trained = take(name, data_dir, 1)
    assert (trained.pop("seed").shape, info.num_train) == ((1, B), info.num_examples("train"))
    evaluated = next(iter(eval_batches(name, global_batch=B, data_dir=data_dir)))
    assert evaluated.pop("mask").dtype == np.float32
    for key, (shape, dtype) in info.row_types().items():
        assert (trained[key].shape, trained[key].dtype) == ((1, B, *shape), dtype)
        assert (evaluated[key].shape, evaluated[key].dtype) == ((B, *shape), dtype)
        assert evaluated[key].flags.c_contiguous
    assert trained.keys() == evaluated.keys() == info.row_types().keys()


@pytest.mark.parametrize("name", KINDS)
def test_any_number_of_processes(name, data_dir):
    """Also where they go on after a restore."""
    steps = dataset_info(name, data_dir).num_train // B // (100 if name == "clicks" else 1) + 2  # beyond an epoch
    whole = take(name, data_dir, steps)
    parts = [take(name, data_dir, steps - 1, start=1, process_index=p, process_count=4) for p in range(4)]
    whole_again = {key: np.concatenate([part[key] for part in parts], axis=1) for key in whole}
    assert_equal(whole_again, {key: rows[1:] for key, rows in whole.items()})
    variant = take(name, data_dir, 6, seed=1)
    assert all((variant[key] != whole[key][:6]).any() for key in whole)


@pytest.mark.parametrize("name", KINDS)
def test_an_epoch(name, data_dir):
    size = dataset_info(name, data_dir).num_train
    stored = next(iter(eval_batches(name, "train", global_batch=size, data_dir=data_dir)))
    assert stored.pop("mask").all()
    batches = train_batches(name, global_batch=size, seed=0, data_dir=data_dir)
    shuffled = next(batches)
    del shuffled["seed"]
    batches.close()

    def rows(batch):
        columns = [[row.tobytes() for row in batch[key]] for key in stored]
        return [b"".join(row) for row in zip(*columns, strict=True)]

    assert rows(shuffled) != rows(stored)
    assert sorted(rows(shuffled)) == sorted(rows(stored))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("processes", [1, 3])
def test_evaluation(name, processes, data_dir):
    info = dataset_info(name, data_dir)
    for split in info.splits():
        count = info.num_examples(split)
        size = -(-count // 2 // 3) * 3 + 3  # two batches, the second not full
        where = {"global_batch": size, "process_count": processes, "data_dir": data_dir}
        parts = [list(eval_batches(name, split, process_index=p, **where)) for p in range(processes)]
        mask = np.concatenate([np.concatenate([part[step]["mask"] for part in parts]) for step in range(2)])
        np.testing.assert_array_equal(mask, np.arange(2 * size) < count)


def test_state_of_another_dataset(data_dir):
    batches = train_batches("clicks", global_batch=B, seed=0, data_dir=data_dir)
    with pytest.raises(ValueError, match="must have the keys"):
        batches.restore(train_batches("digits", global_batch=B, seed=0, data_dir=data_dir).state())


def test_splits(data_dir):
    assert set(dataset_info("catalogs", data_dir).splits()) == {"train", "valid", "test"}
    for name, splits in (("digits", "train, test"), ("clicks", "train, test"), ("catalogs", "train, valid, test")):
        with pytest.raises(ValueError, match=f"split must be one of {splits}; got 'dev'"):
            eval_batches(name, "dev", global_batch=B, data_dir=data_dir)
    refused(lambda: dataset_info("digits").num_examples("valid"), "split", "got 'valid'")


def test_clicks(data_dir):
    info = dataset_info("clicks", data_dir)
    assert (info.num_train, info.num_test) == (60_000, 10_000)
    folder = data_dir / "clicks" / "1.0.0"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    dataset_info("clicks", data_dir)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not list(data_dir.glob(".*"))
    labels = next(iter(eval_batches("clicks", global_batch=10_000, data_dir=data_dir)))["label"]
    teacher = json.loads((folder / "metadata.json").read_text())["teacher"]
    rate = labels.mean(dtype=np.float64)
    assert teacher["test"]["log_loss"] < -rate * np.log(rate) - (1 - rate) * np.log1p(-rate) - 0.1
    assert teacher["test"]["auc"] > 0.8


@pytest.mark.parametrize("name", ["clicks", "catalogs"])
def test_another_process_is_first(name, data_dir, tmp_path, monkeypatch):
    info = dataset_info(name, data_dir)
    store = {"clicks": click_store, "catalogs": text_store}[name]

    def overtaken(*args):
        shutil.copytree(data_dir / name, tmp_path / name)
        return rows.write_rows(*args)

    monkeypatch.setattr(store, "write_rows", overtaken)
    assert dataset_info(name, tmp_path) == info
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["clicks", "catalogs"])
def test_half_of_a_copy(name, data_dir, tmp_path):
    info = dataset_info(name, data_dir)
    shutil.copytree(data_dir / name, tmp_path / name)
    for path in tmp_path.rglob("dataset_info.json"):
        path.unlink()
    assert dataset_info(name, tmp_path) == info
    batches = [next(iter(eval_batches(name, global_batch=B, data_dir=root))) for root in (data_dir, tmp_path)]
    assert_equal(*batches)


@pytest.mark.parametrize("call", [dataset_info, lambda name: train_batches(name, global_batch=4, seed=0)])
def test_names(call):
    with pytest.raises(ValueError, match=f"one of {', '.join(DATASETS)}; got 'imdb'"):
        call("imdb")
