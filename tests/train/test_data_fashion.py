"""Fashion-MNIST from its files: every pixel comes back, and any other file is refused before anything is made."""

import gzip
import struct

import numpy as np
import pytest

from train.data import fashion
from train.data.datasets import open_split

COUNTS = {"train": 5, "t10k": 3}


def made(prefix):
    rng = np.random.default_rng(COUNTS[prefix])
    return rng.integers(0, 256, (COUNTS[prefix], 28, 28), np.uint8), rng.integers(0, 10, COUNTS[prefix], np.uint8)


def idx(array, magic=None):
    start = struct.pack(">I", 0x0800 + array.ndim if magic is None else magic)
    return start + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for prefix in COUNTS:
        for array, name in zip(made(prefix), ("images-idx3", "labels-idx1"), strict=True):
            (folder / f"{prefix}-{name}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
    return folder


def test_images(source, tmp_path, capsys):
    assert fashion.main(["prepare", "--input", str(source), "--out", str(tmp_path)]) == 0
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images, labels = made(prefix)
        with pytest.warns(UserWarning, match=f"the {split} split of fashion has .* but .* holds {len(labels)}"):
            batch = open_split("fashion", split, tmp_path).read(np.arange(len(labels)), None)
        np.testing.assert_allclose(batch["image"][..., 0], (images / 255 - 0.2860) / 0.3530, atol=1e-5)
        np.testing.assert_array_equal(batch["label"], labels)
    capsys.readouterr()
    assert fashion.main(["prepare", "--input", str(source), "--out", str(tmp_path)]) == 2
    assert "holds some already. Remove it, or pass another" in capsys.readouterr().err


IMAGES, LABELS = made("train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("images-idx3", idx(IMAGES, 0x0801), "must begin with the magic number 00000803 and 3 sizes; got .* in"),
        ("labels-idx1", idx(LABELS, 0x0D01), "must begin with the magic number 00000801 and 1 sizes"),
        ("labels-idx1", b"\0\0\x08\x01\0", "must begin with the magic number 00000801"),
        ("images-idx3", idx(IMAGES)[:-1], r"its sizes \(5, 28, 28\) say, 3920; got 3919. Copy it again"),
        ("labels-idx1", idx(LABELS) + b"\0", r"its sizes \(5,\) say, 5; got 6"),
        ("labels-idx1", idx(LABELS[:4]), "got 5 images and 4 labels"),
        (
            "labels-idx1",
            idx(np.arange(8, 13, dtype=np.uint8)),
            r"Labels must be in \[0, 10\); got 12 as label 4 of train",
        ),
        ("images-idx3", idx(IMAGES[:, :, 1:]), r"have \(28, 28\) pixels; got \(28, 27\) in those of train"),
        ("images-idx3", None, "got no .*train-images-idx3-ubyte.gz. Pass their folder by --input"),
    ],
)
def test_another_file(source, tmp_path, name, content, message):
    path = source / f"train-{name}-ubyte.gz"
    path.unlink() if content is None else path.write_bytes(gzip.compress(content))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        fashion.prepare_fashion(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_short_file(source, tmp_path):
    path = source / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"A compressed file must be whole; got .*t10k-images-idx3-ubyte.gz, which"):
        fashion.prepare_fashion(source, tmp_path / "out")
