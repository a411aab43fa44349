"""Translations: pairs as they were found, subwords that give the text back, and every dropped pair reported."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.refusals import refused
from train.data import (
    dataset_info,
    eval_batches,
    open_text,
    text_catalogs,
    train_batches,
    translation,
)
from train.data.text_pairs import Pair, read_parallel
from train.data.text_store import BEGIN, END, PADDING, UNKNOWN, Lengths, Subwords, prepare_pairs, train_subwords

GERMAN = [
    "Das Haus ist groß.",
    "Die Katze schläft — heute.",
    "Wir gehen, wenn es ½ Stunde regnet!",
    "Es\u2028regnet  nicht.",
]
ENGLISH = ["The house is big.", "The cat sleeps — today.", "We go if it rains!", "It does not rain."]
LENGTHS = Lengths(vocabulary_size=60, source=40, target=24)


def write(folder, train=(GERMAN, ENGLISH), valid=(GERMAN[:2], ENGLISH[:2]), test=(GERMAN[2:], ENGLISH[2:])):
    folder.mkdir(exist_ok=True)
    for split, texts in (("train", train), ("valid", valid), ("test", test)):
        for language, lines in zip(("de", "en"), texts, strict=True):
            (folder / f"{split}.{language}").write_bytes("".join(f"{text}\n" for text in lines).encode())
    return folder


def prepare(tmp_path, lengths=LENGTHS, **texts):
    messages = []
    pairs = read_parallel(write(tmp_path / "text", **texts), ("de", "en"))
    facts = prepare_pairs("iwslt14", pairs, ("de", "en"), lengths, tmp_path / "data", say=messages.append)
    return facts, messages


def test_pairs(tmp_path):
    pairs = read_parallel(write(tmp_path / "text"), ("de", "en"))
    assert pairs["train"] == [Pair(GERMAN[i], ENGLISH[i], f"train.de:{i + 1}") for i in range(4)]
    assert {split: len(lines) for split, lines in pairs.items()} == {"train": 4, "valid": 2, "test": 2}
    assert read_parallel(tmp_path / "text", ("en", "de"))["test"][0].source == ENGLISH[2]


def test_last_and_empty_lines(tmp_path):
    write(tmp_path, train=(["a", "", "c"], ["x", "y", ""]))
    (tmp_path / "train.de").write_bytes(b"a\n\nc")
    pairs = read_parallel(tmp_path, ("de", "en"))["train"]
    assert [(pair.source, pair.target) for pair in pairs] == [("a", "x"), ("", "y"), ("c", "")]


def test_errors_of_files(tmp_path):
    write(tmp_path, valid=(GERMAN[:2], ENGLISH[:1]))
    with pytest.raises(ValueError, match=r"got 2 lines in .*valid.de and 1 in .*valid.en. Align them"):
        read_parallel(tmp_path, ("de", "en"))
    (tmp_path / "train.en").write_bytes(b"fine\n\xffnot\n")
    with pytest.raises(ValueError, match=r"UTF-8; got line 2 of .*train.en, which is not \(invalid start byte at"):
        read_parallel(tmp_path, ("de", "en"))
    (tmp_path / "test.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"got no [^,]*test.de\. Pass the folder"):
        read_parallel(tmp_path, ("de", "en"))


def test_texts(tmp_path):
    facts, messages = prepare(tmp_path)
    assert not messages
    info = dataset_info("iwslt14", tmp_path / "data")
    assert (info.num_train, info.num_valid, info.num_test) == (4, 2, 2)
    assert (info.languages, info.vocabulary_size, info.source_length, info.target_length) == (("de", "en"), 60, 40, 24)
    for split, first in (("train", 0), ("valid", 0), ("test", 2)):
        (batch,) = eval_batches("iwslt14", split, global_batch=4, data_dir=tmp_path / "data")
        text = open_text("iwslt14", split, tmp_path / "data")
        rows = int(batch["mask"].sum())
        source, target = batch["source"][:rows], batch["target"][:rows]
        assert text.sources == GERMAN[first : first + rows]
        assert text.references == ENGLISH[first : first + rows]
        assert text.subwords.decode(target) == text.references
        assert text.subwords.decode(source) == [line.replace("  ", " ") for line in text.sources]
        for row in target.tolist():
            end = row.index(END)
            assert row[0] == BEGIN
            assert row.count(BEGIN) == row.count(END) == 1
            assert set(row[end + 1 :]) <= {PADDING}
            assert PADDING not in row[:end]
        assert not np.isin(source, (BEGIN, END, UNKNOWN)).any()
        assert facts["splits"][split]["source_padding"] == (source == PADDING).mean()
        assert facts["splits"][split]["target_padding"] == (target == PADDING).mean()


def test_the_first_end():
    subwords = Subwords(train_subwords(GERMAN + ENGLISH, 60))
    (numbers,) = subwords.encode(["The cat"])
    rows = [[BEGIN, *numbers, END, *numbers], [*numbers, PADDING, PADDING, *[PADDING] * len(numbers), PADDING]]
    rows = [row + [PADDING] * (40 - len(row)) for row in rows]
    assert subwords.decode(np.array(rows, np.int32)) == ["The cat"] * 2
    assert subwords.decode(np.array([[BEGIN, END, 5], [0, 0, 0]])) == ["", ""]


def test_an_unknown_character(tmp_path):
    facts, _ = prepare(tmp_path, test=(["Das Haus", "Katze"], ["The Ω", "cat"]))
    (batch,) = eval_batches("iwslt14", global_batch=2, data_dir=tmp_path / "data")
    assert (batch["target"] == UNKNOWN).sum() == 1
    assert facts["splits"]["test"]["unknown"] == 0.5
    assert facts["splits"]["train"]["unknown"] == 0


def test_listed_losses(tmp_path):
    letters = list("DasHuitgroKzechläfW")  # in an order of which no subword is made
    long = ["".join(np.random.default_rng(seed).choice(letters, 150)) for seed in range(2)]
    train = ([*GERMAN, "", "Haus", long[0], "Haus"], [*ENGLISH, "house", "", "The cat", long[1]])
    facts, messages = prepare(tmp_path, Lengths(60, 50, 52), train=train)
    counts = {"empty": 2, "source longer than 50": 1, "target longer than 52": 1}
    assert facts["splits"]["train"]["dropped"] == counts
    assert facts["splits"]["train"]["rows"] == 4
    listing = (tmp_path / "data" / "iwslt14" / "1.0.0" / "dropped.tsv").read_text().splitlines()
    assert listing == [
        "train\ttrain.de:5\tempty",
        "train\ttrain.de:6\tempty",
        "train\ttrain.de:7\tsource longer than 50",
        "train\ttrain.de:8\ttarget longer than 52",
    ]
    assert len(messages) == 1
    assert messages[0].startswith("train: 4 of 8 pairs are dropped: 2 empty")
    assert open_text("iwslt14", "train", tmp_path / "data").references == ENGLISH


def test_begin_and_end(tmp_path):
    subwords = Subwords(train_subwords(GERMAN + ENGLISH, 60))
    longest = max(len(numbers) for numbers in subwords.encode(ENGLISH))
    for target, rows in ((longest + 2, 4), (longest + 1, 3)):
        (tmp_path / str(target)).mkdir()
        facts, _ = prepare(tmp_path / str(target), Lengths(60, 32, target))
        assert facts["splits"]["train"]["rows"] == rows


def test_bad_vocabularies(tmp_path):
    with pytest.raises(ValueError, match=r"vocabulary of 5000, .* too high \(5000\)"):
        prepare(tmp_path, Lengths(5000, 32, 24))
    with pytest.raises(ValueError, match="vocabulary of 10, and no more"):
        prepare(tmp_path, Lengths(10, 32, 24))
    assert not list((tmp_path / "data").iterdir())


def test_a_split_without_pairs(tmp_path):
    with pytest.raises(ValueError, match=r"must have a pair; got all of the 1 of valid dropped \(1 empty\)"):
        prepare(tmp_path, valid=([""], ["a"]))
    refused(lambda: Lengths(60, 5, 2), "A source", "got 5 and 2")


TRAIN = """
import sys, hashlib
from train.data.text_store import train_subwords
from train.data.text_catalogs import catalog_pairs
from train.data.text_pairs import texts_of
print(hashlib.md5(train_subwords(texts_of(catalog_pairs()[0]["train"]), 700)).hexdigest())
"""


def test_subwords_of_processes():
    digests = {
        subprocess.run(
            [sys.executable, "-c", TRAIN],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_missing_file(tmp_path):
    prepare(tmp_path)
    (tmp_path / "data" / "iwslt14" / "1.0.0" / "iwslt14-test.array_record-00000").unlink()
    for read in (lambda: eval_batches("iwslt14", global_batch=4, data_dir=tmp_path / "data"), lambda: text(tmp_path)):
        with pytest.raises(FileNotFoundError, match=r"1 of the test split missing, such as .*iwslt14-test"):
            read()


@pytest.mark.parametrize("content", [None, b"", b"other"])
def test_subwords_that_cannot_be_read(content, tmp_path):
    prepare(tmp_path)
    path = tmp_path / "data" / "iwslt14" / "1.0.0" / "subwords.model"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    refused(lambda: text(tmp_path), f"{path} must hold the subwords of iwslt14", "prepare it anew")


def text(tmp_path):
    return open_text("iwslt14", "test", tmp_path / "data")


def test_no_preparation(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        dataset_info("iwslt14", tmp_path)
    assert f"got no {tmp_path}/iwslt14/1.0.0/dataset_info.json" in str(error.value)
    assert f"python -m train.data.translation prepare --input FOLDER --out {tmp_path}\n" in str(error.value)


def test_only_translations_have_text(tmp_path):
    refused(lambda: open_text("digits", "test", tmp_path), "A dataset", "got 'digits'")


def test_states_of_other_rows(tmp_path):
    states = []
    for number, lengths in enumerate([Lengths(60, 50, 50), Lengths(61, 50, 50), Lengths(60, 50, 51)]):
        pairs = read_parallel(write(tmp_path / "text"), ("de", "en"))
        prepare_pairs("iwslt14", pairs, ("de", "en"), lengths, tmp_path / str(number))
        states.append(train_batches("iwslt14", global_batch=2, seed=0, data_dir=tmp_path / str(number)))
    for one, second in ((0, 1), (0, 2)):
        with pytest.raises(ValueError, match=r"crc32: .* in the state"):
            states[one].restore(states[second].state())


def test_command_prepares(tmp_path, capsys):
    options = ["--input", str(write(tmp_path / "text")), "--out", str(tmp_path / "data"), "--vocabulary-size", "60"]
    assert translation.main(["prepare", *options, "--source", "en", "--target", "de"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["languages"], facts["vocabulary_size"], facts["source_length"]) == (["en", "de"], 60, 128)
    assert open_text("iwslt14", "test", tmp_path / "data").references[0] == GERMAN[2]
    assert translation.main(["prepare", *options[:2], "--out", str(tmp_path / "text" / "train.de")]) == 2  # a file
    assert capsys.readouterr().err.startswith("translation: [Errno 17] File exists")
    (tmp_path / "text" / "train.de").unlink()  # it says that it is prepared before it reads anything
    assert translation.main(["prepare", *options]) == 2
    assert capsys.readouterr().err.startswith("translation: Data must be prepared into a new folder")


def test_languages_of_catalogs():
    pairs, left_out = text_catalogs.catalog_pairs()
    by_source = {pair.source: pair.target for split in pairs.values() for pair in split}
    assert by_source["Arabisch"] == "Arabic"
    assert by_source["Januar"] == "January"
    assert len(pairs["train"]) > 400 > len(pairs["test"]) > 20 < len(pairs["valid"])
    english = [pair.target for split in pairs.values() for pair in split]
    assert len(set(english)) == len(english)
    assert all("\x04" not in text and "\n" not in text for text in english)
    assert left_out["seen before"] > 0


def test_catalogs_are_prepared_once(tmp_path):
    info = dataset_info("catalogs", tmp_path)
    assert info.languages == ("de", "en")
    (folder,) = (tmp_path / "catalogs").iterdir()
    assert folder.name == f"django-{text_catalogs.catalog_version()}"
    text = open_text("catalogs", "test", tmp_path)
    (batch,) = eval_batches("catalogs", global_batch=info.num_test, data_dir=tmp_path)
    assert text.subwords.decode(batch["target"]) == text.references
    assert text.subwords.decode(batch["source"]) == text.sources


def test_catalogs_need_django(tmp_path, monkeypatch):
    monkeypatch.setattr(text_catalogs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"Django must be installed .*; got none. Run `pip install django`"):
        dataset_info("catalogs", tmp_path)
