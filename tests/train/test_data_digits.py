"""The digits: what is in them, and that they appear whole however their build went."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from sklearn import datasets

from train.data import digits, images


def read(builder, split):
    source = builder.as_data_source(split)
    examples = [source[i] for i in range(len(source))]
    return np.stack([e["image"] for e in examples]), np.array([e["label"] for e in examples])


def published():
    pixels, labels = datasets.load_digits(return_X_y=True)
    return pixels.reshape(-1, 8, 8, 1), labels


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    return digits.prepare_digits(tmp_path_factory.mktemp("tfds"))


def test_rows_of_sklearn(builder):
    pixels, labels = published()
    in_test = digits.is_test_image(labels)
    for split, rows in (("train", ~in_test), ("test", in_test)):
        split_pixels, split_labels = read(builder, split)
        assert split_pixels.dtype == np.uint8
        np.testing.assert_array_equal(split_pixels, pixels[rows])
        np.testing.assert_array_equal(split_labels, labels[rows])


def test_stratified_splits():
    _, labels = published()
    in_test = digits.is_test_image(labels)
    assert in_test.sum() == 450
    np.testing.assert_array_equal(np.bincount(labels[in_test]), np.full(10, 45))


def test_the_split_never_changes():
    # Results on another split are not comparable: a change needs a new version of the dataset.
    _, labels = published()
    rows = np.flatnonzero(digits.is_test_image(labels))
    assert digits.Digits.VERSION == "1.0.0"
    assert rows[:5].tolist() == [30, 31, 33, 38, 43]
    assert rows[-5:].tolist() == [1789, 1791, 1793, 1795, 1796]
    assert rows.sum() == 412_700


def test_images_without_tfds(builder):
    pixels, _ = read(builder, "test")
    raw = builder.as_data_source("test", decoders={"image": digits.tfds.decode.SkipDecoding()})
    np.testing.assert_array_equal(images.decode(raw[7]["image"]), pixels[7])


def test_a_quiet_build(tmp_path, capfd):
    digits.prepare_digits(tmp_path)
    assert capfd.readouterr().out == ""


PREPARE = """
import sys
from sklearn import datasets
from train.data import digits
print("ready", flush=True)
input()
assert len(digits.prepare_digits(sys.argv[1]).as_data_source("train")) == 1347
"""

DIE_WHILE_BUILDING = """
import os, sys
from train.data import digits

generate = digits.Digits._generate_examples

def interrupted(self, test):
    for number, example in enumerate(generate(self, test)):
        if number == 100:
            os._exit(9)
        yield example

digits.Digits._generate_examples = interrupted
digits.prepare_digits(sys.argv[1])
"""


def start(code, data_dir):
    return subprocess.Popen(
        [sys.executable, "-c", code, str(data_dir)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_processes_at_the_same_moment(tmp_path):
    processes = [start(PREPARE, tmp_path) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]
    assert [path.name for path in (tmp_path / "digits").iterdir()] == ["1.0.0"]


def test_another_process_is_first(tmp_path, monkeypatch):
    build = digits.Digits.download_and_prepare

    def overtaken(self):
        build(self)
        shutil.copytree(self.data_path, tmp_path / "digits" / "1.0.0")

    monkeypatch.setattr(digits.Digits, "download_and_prepare", overtaken)
    assert len(digits.prepare_digits(tmp_path).as_data_source("test")) == 450


def test_a_failed_rename(tmp_path, monkeypatch):
    rename = os.rename

    def fail_at_the_end(source, target):
        if os.fspath(target) == os.fspath(tmp_path / "digits" / "1.0.0"):
            raise PermissionError("read-only")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_at_the_end)
    with pytest.raises(PermissionError, match="read-only"):
        digits.prepare_digits(tmp_path)
    assert not list(tmp_path.glob(".digits-*"))


def test_a_killed_build(tmp_path):
    process = start(DIE_WHILE_BUILDING, tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == 9
    assert list(tmp_path.glob(".digits-*/digits/*"))  # it was in the middle
    assert not (tmp_path / "digits" / "1.0.0").exists()
    assert len(digits.prepare_digits(tmp_path).as_data_source("train")) == 1347


def test_half_of_a_copy(tmp_path):
    target = tmp_path / "digits" / "1.0.0"
    target.mkdir(parents=True)
    (target / "digits-train.array_record-00000-of-00001").write_bytes(b"half")
    assert len(digits.prepare_digits(tmp_path).as_data_source("train")) == 1347
