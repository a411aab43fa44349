"""Rows in blocks: written and read like any TFDS dataset, and refused, with a name, if they are damaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.refusals import refused
from train.data import rows
from train.data.info import ClickInfo
from train.data.rows import Prepared, RowSplit, write_rows

FOLDER = Path("sample", "small", "1.2.3")
TYPES = {"x": ((3,), np.dtype(np.float32)), "id": ((), np.dtype(np.int32)), "text": ((), np.dtype(object))}
INFO, IDENTITY = ClickInfo("sample", 2100, 5, (1, 2)), {"crc32": "ab"}
SAMPLE = Prepared(ClickInfo, lambda: FOLDER, "Do it in {root}")
N = 2100  # rows of the train split: five blocks, in three files


def columns(count):
    rng = np.random.default_rng(count)
    return {
        "x": rng.standard_normal((count, 3)).astype(np.float32),
        "id": rng.integers(-(2**31), 2**31, count).astype(np.int32),
        "text": np.array([f"{number} ½\n" * (number % 3) for number in range(count)], object),
    }


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "SHARD", 2)
        write_rows(root, FOLDER, {"train": columns(N), "test": columns(5)}, INFO, IDENTITY, {"made": 1})
    return root


def open_train(root):
    return SAMPLE.open("train", root, TYPES)


def test_any_order(data_dir):
    split, expected = open_train(data_dir), columns(N)
    assert len(split) == N
    assert len(list((data_dir / FOLDER).glob("sample-train*"))) == 3
    for numbers in (np.array([N - 1, 511, 512, 0, 511]), np.random.default_rng(0).permutation(N)):
        read = split.read(numbers, None)
        assert read.keys() == TYPES.keys()
        for name in ("x", "id"):
            assert read[name].dtype == TYPES[name][1]
            np.testing.assert_array_equal(read[name], expected[name][numbers])
        assert [text.decode() for text in read["text"]] == expected["text"][numbers].tolist()
    assert len(SAMPLE.open("test", data_dir, TYPES)) == 5
    assert (SAMPLE.info(data_dir), split.identity) == (INFO, IDENTITY)


def test_readers_of_tfds(data_dir):
    builder = tfds.builder("sample/small", data_dir=data_dir)
    source = builder.as_data_source("train")
    assert [len(block["id"]) for block in source] == [512] * 4 + [52]
    np.testing.assert_array_equal(source[1]["x"], columns(N)["x"][512:1024])
    assert builder.info.metadata["made"] == 1


def test_a_block_is_decoded_once(data_dir, monkeypatch):
    split, decoded = open_train(data_dir), []
    blocks = split._blocks
    monkeypatch.setattr(split, "_blocks", type("", (), {"__getitem__": lambda _, n: decoded.append(n) or blocks[n]})())
    for _ in range(2):
        split.read(np.arange(N), None)
    assert decoded == [1, 3]  # the others when it was opened


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    "change", [lambda path: cut(path, -100), lambda path: cut(path, 0), lambda path: path.write_bytes(bytes(1 << 17))]
)
def test_a_short_file(data_dir, tmp_path, number, change):
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    change(tmp_path / FOLDER / f"sample-train.array_record-0000{number}")
    message = f"block {2 * number} of train in {tmp_path / FOLDER}, which is not: .*. Copy the folder again"
    with pytest.raises(ValueError, match=message):
        open_train(tmp_path)


def test_a_damaged_block(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    path = tmp_path / FOLDER / "sample-train.array_record-00000"
    content = bytearray(path.read_bytes())
    content[14_000] ^= 255  # in the second block: one has 8 KB of random numbers
    path.write_bytes(content)
    split = open_train(tmp_path)
    split.read(np.arange(512), None)
    with pytest.raises(ValueError, match=r"block 1 of train in .* is not"):
        split.read(np.array([600]), None)


def test_a_missing_file(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    path = tmp_path / FOLDER / "sample-train.array_record-00001"
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"1 of the train split missing, such as {path}. Copy them again"):
        open_train(tmp_path)


@pytest.mark.parametrize("num_rows", [N - 1, N + 1, 52, 3000])
def test_another_number_of_rows(data_dir, num_rows):
    refused(lambda: RowSplit(data_dir / FOLDER, "train", num_rows, TYPES, {}), "Rows", "got block")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset_info.json", "{}"),
        ("dataset_info.json", ""),
        ("features.json", None),
        ("metadata.json", None),
        ("metadata.json", '{"name": "sample"}'),
    ],
)
def test_a_partial_folder(data_dir, tmp_path, name, content):
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    path = tmp_path / FOLDER / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=f"{path.parent} must hold a dataset as it was prepared; got .*. Copy it"):
        SAMPLE.info(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("num_train", "many"), ("table_sizes", -1), ("num_dense", None)])
def test_edited_metadata(data_dir, tmp_path, name, value):
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    path = tmp_path / FOLDER / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=f"{path.parent} must hold a dataset as it was prepared; got .*. Copy it"):
        SAMPLE.open("train", tmp_path)


def test_old_folders(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    path = tmp_path / FOLDER / "metadata.json"
    facts = json.loads(path.read_text())
    assert facts.pop("num_dense") == 13
    path.write_text(json.dumps(facts))
    assert SAMPLE.info(tmp_path) == INFO


def test_no_preparation(tmp_path):
    message = f"sample must be prepared before it is used; got no {tmp_path / FOLDER}/.*. Do it in {tmp_path}\n"
    with pytest.raises(FileNotFoundError, match=message):
        SAMPLE.info(tmp_path)
