"""Text in windows: every byte is predicted once, no folder is in two splits, and what cannot be used is refused."""

from pathlib import Path

import numpy as np
import pytest

from train.data import corpus, corpus_store, dataset_info
from train.data.corpus_store import LINUX_FOLDER, Window, files_of, is_held_out, prepare_corpus, windows
from train.data.datasets import open_split

FOLDERS = [f"part{number}" for number in range(40)]
HELD_OUT = [name for name in FOLDERS if is_held_out(Path(name))]


@pytest.fixture
def source(tmp_path):
    """C files of known text in 40 folders, and other files."""
    root = tmp_path / "linux"
    for number, name in enumerate(FOLDERS):
        (root / name).mkdir(parents=True)
        (root / name / "a.c").write_bytes(bytes([65 + number % 26]) * (700 + number))
    (root / "b.h").write_bytes(b"b" * 300)
    (root / "part0" / "picture.png").write_bytes(b"\x89" * 5000)
    (root / "part1" / "link.c").symlink_to(root / "b.h")
    for name in ("part0", HELD_OUT[0]):
        (root / name / "asic_reg").mkdir()
        (root / name / "asic_reg" / "registers.h").write_bytes(b"\x89" * 5000)
    return root


def test_windows_overlap_by_a_byte():
    rows = windows(b"abcdefghij", 3)
    assert [row.tobytes() for row in rows] == [b"abcd", b"defg", b"ghij"]
    assert windows(b"abcdefghi", 3).shape == (2, 4)
    for short in (b"", b"a", b"abc"):
        assert windows(short, 3).shape == (0, 4)


def test_test_folders():
    assert not is_held_out(Path())
    names = [Path(f"drivers/part{number}") for number in range(4000)]
    assert 0.05 < np.mean([is_held_out(name) for name in names]) < 0.075


def test_texts_of_splits(source, tmp_path, capsys):
    assert 0 < len(HELD_OUT) < 10
    assert corpus.main(["prepare", "--input", str(source), "--out", str(tmp_path)]) == 0
    info = dataset_info("linux", tmp_path)
    sizes = {name: len((source / name / "a.c").read_bytes()) + 1 for name in FOLDERS}
    test = sum(sizes[name] for name in HELD_OUT)
    train = sum(sizes.values()) - test + 301
    assert (info.num_train, info.num_test) == ((train - 1) // 256, (test - 1) // 256)
    rows = {}
    for split, size in info.splits().items():
        rows[split] = open_split("linux", split, tmp_path).read(np.arange(size), None)["text"]
        assert (rows[split].shape, rows[split].dtype) == ((size, 257), np.uint8)
        np.testing.assert_array_equal(rows[split][1:, 0], rows[split][:-1, -1])
    assert 0x89 not in rows["train"]
    assert 0x89 not in rows["test"]
    # They are in the order of their paths, and a byte 0 ends each.
    text = b"".join((source / name / "a.c").read_bytes() + b"\0" for name in sorted(HELD_OUT))
    result = rows["test"][0].tobytes() + rows["test"][1:, 1:].tobytes()
    assert result == text[: len(result)]
    assert len(text) - len(result) < 256
    capsys.readouterr()
    assert corpus.main(["prepare", "--input", str(source), "--out", str(tmp_path)]) == 2
    assert "holds some already. Remove it, or pass another" in capsys.readouterr().err


def test_a_large_text(source, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_store, "TEST_WINDOWS", 3)
    files = files_of(source, (".c",))
    facts = prepare_corpus("linux", source, files, Window(16, 5000), tmp_path, LINUX_FOLDER, keep_first=False)
    assert facts["num_test"] == 3
    assert facts["bytes"]["train"] in range(5000 - 740, 5001)
    rows = open_split("linux", "train", tmp_path).read(np.arange(facts["num_train"]), None)["text"]
    assert 5 <= (rows[:, 1:] == 0).sum() <= 6  # the ends of files of 700 bytes, but for the last
    last = open_split("linux", "test", tmp_path).read(np.arange(3), None)["text"][-1]
    begin = (facts["bytes"]["test"] - 1) // 16 * 2 // 3 * 16  # of the window after two thirds
    text = b"".join((source / name / "a.c").read_bytes() + b"\0" for name in sorted(HELD_OUT))
    assert last.tobytes() == text[begin : begin + 17]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "nowhere"], "--input must be the folder of the unpacked sources; got nowhere, which is none"),
        (["--input", ".", "--megabytes", "0"], "--megabytes must be at least 1; got 0"),
    ],
)
def test_bad_options(options, message, tmp_path, capsys):
    assert corpus.main(["prepare", *options, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_too_little_text(tmp_path, capsys):
    source = tmp_path / "empty"
    source.mkdir()
    (source / "a.c").write_text("x" * 1000)
    assert corpus.main(["prepare", "--input", str(source), "--out", str(tmp_path / "out")]) == 2
    assert "got 0 bytes in test, of 0 files" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_standard_library(tmp_path):
    info = dataset_info("stdlib", tmp_path)
    assert info.num_train > 20_000
    assert info.num_test == 512
    text = open_split("stdlib", "train", tmp_path).read(np.arange(2000), None)["text"]
    assert b"import" in text.tobytes()
    assert (text < 128).mean() > 0.99


def test_no_preparation(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"python -m train\.data\.corpus prepare --input linux"):
        dataset_info("linux", tmp_path)
