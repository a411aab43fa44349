"""Click logs: what a line means, malformed lines, how categories become ids, and the split by days."""

import gzip
import json
import math

import numpy as np
import pytest

from tests.refusals import refused
from train.data import click_parser, click_store, click_tables, clicks, dataset_info, eval_batches, train_batches
from train.data.click_parser import Counts, explain, first_test_row, parse, read_log
from train.data.click_tables import Hashed, Indexed, build_vocabulary, hash_categories
from train.data.rows import write_rows
from train.data.seeds import mix

RNG = np.random.default_rng(0)


def line(label=b"0", integers=(), categories=()):
    """A line of a log; fields that are not given are empty."""
    fields = [label, *integers, *[b""] * (13 - len(integers)), *categories, *[b""] * (26 - len(categories))]
    return b"\t".join(fields)


def some_lines(count, rng=RNG, values=50):
    """Random lines; some fields are empty."""

    def empty_or(field):
        return b"" if rng.random() < 0.1 else field

    return [
        line(
            b"%d" % rng.integers(2),
            [empty_or(b"%d" % rng.integers(-2, 500)) for _ in range(13)],
            [empty_or(b"%08x" % (int(rng.integers(values)) * 0x9E3779B1 % 2**32)) for _ in range(26)],
        )
        for _ in range(count)
    ]


def write(path, lines, compressed=False):
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if compressed else content)
    return path


def prepare(tmp_path, lines, categories=Hashed(1000), **kwargs):  # noqa: B008
    log = write(tmp_path / "train.txt", lines)
    messages = []
    facts = click_store.prepare_log("criteo", log, tmp_path / "data", categories, say=messages.append, **kwargs)
    return facts, messages


def test_a_line():
    rows, malformed = parse([line(b"1", [b"0", b"7", b"", b"-2", b"99999999"], [b"0000000a", b"", b"ffffffff", b"1F"])])
    assert not malformed
    assert rows["label"].tolist() == [1]
    expected = [0, math.log(8), 0, 0, math.log(100_000_000)] + [0] * 8
    np.testing.assert_allclose(rows["dense"][0], expected, rtol=1e-6)
    assert rows["categories"][0].view(np.uint32).tolist() == [10, 0, 2**32 - 1, 31] + [0] * 22
    assert rows["dense"].dtype == np.float32


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_ends_of_lines(end):
    rows, malformed = parse([line(b"1", categories=[b"ab"] * 26) + end])
    assert not malformed
    assert rows["categories"][0].tolist() == [0xAB] * 26


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        (b"", "wrong number of fields", "1 instead of 40: ''"),
        (line()[2:], "wrong number of fields", "39 instead of 40"),  # as the challenge's test.txt, without labels
        (line() + b"\t", "wrong number of fields", "41 instead of 40"),
        (b"x" * 500, "wrong number of fields", "1 instead of 40: '" + "x" * 120 + "'..."),
        (line(b"2"), "label is not 0 or 1", "'2'"),
        (line(b""), "label is not 0 or 1", "''"),
        (line(b"1.0"), "label is not 0 or 1", "'1.0'"),
        (line(b"0", [b"1", b"2.5"]), "not an integer of at most 18 digits", "I2 is '2.5'"),
        (line(b"0", [b"1_0"]), "not an integer of at most 18 digits", "I1 is '1_0'"),
        (line(b"0", [b"9" * 19]), "not an integer of at most 18 digits", f"I1 is '{'9' * 19}'"),
        (line(b"0", [b" 1"]), "not an integer of at most 18 digits", "I1 is ' 1'"),
        (line(b"0", [b"-"]), "not an integer of at most 18 digits", "I1 is '-'"),
        (line(b"0", [b""] * 13, [b"a", b"xyz"]), "not a hexadecimal number of at most 8 digits", "C2 is 'xyz'"),
        (line(b"0", [b""] * 13, [b"123456789"]), "not a hexadecimal number of at most 8 digits", "C1 is '123456789'"),
        (line(b"0", [b""] * 13, [b"0x1f"]), "not a hexadecimal number of at most 8 digits", "C1 is '0x1f'"),
        (line(b"0", [b""] * 13, [b"\xff\xfe"]), "not a hexadecimal number of at most 8 digits", r"C1 is '\xff\xfe'"),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_explanations(text, reason, detail):
    rows, (malformed,) = parse([line(), text, line()], first=11)
    assert len(rows) == 2
    assert (malformed.line, malformed.reason) == (12, reason)
    assert malformed.detail.startswith(detail)


def test_an_explanation_for_every_fault():
    """The fast pattern and the explanation of single fields implement one rule twice."""
    rng = np.random.default_rng(1)
    alphabet = np.frombuffer(b"01\t-afz9. \xff", np.uint8)
    for text in some_lines(300, rng):
        variant = bytearray(text)
        variant[rng.integers(len(variant))] = rng.choice(alphabet)
        rows, malformed = parse([bytes(variant)])
        assert len(rows) + len(malformed) == 1
        if rows.size:
            with pytest.raises(AssertionError, match="must be a row"):
                explain(bytes(variant))


@pytest.mark.parametrize("compressed", [False, True])
def test_pieces(tmp_path, monkeypatch, compressed):
    monkeypatch.setattr(click_parser, "LINES_AT_ONCE", 4)
    lines = some_lines(10)
    lines[5] = b"no row"
    counts = Counts()
    pieces = list(read_log(write(tmp_path / "log", lines, compressed), counts))
    assert [len(rows) for rows, _ in pieces] == [4, 3, 2]
    assert [line.line for _, malformed in pieces for line in malformed] == [6]
    assert (counts.lines, dict(counts.malformed)) == (10, {"wrong number of fields": 1})
    assert counts.fraction == 0.1
    expected, _ = parse(lines)
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in pieces]), expected)


def shorten(content):
    del content[-500:]


def overwrite(content):
    content[2000:2100] = bytes(100)


@pytest.mark.parametrize(
    ("damage", "message"), [(shorten, "whole; .* damaged after line 0 or within"), (overwrite, "log must be whole")]
)
def test_damaged_logs(tmp_path, damage, message):
    path = write(tmp_path / "train.txt.gz", some_lines(500), compressed=True)
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_log(path, Counts()))


def test_spread_of_hashed_ids():
    bits = np.arange(20_000, dtype=np.int32)[:, None].repeat(26, 1)
    ids = hash_categories(bits, 100)
    assert ids.dtype == np.int32
    for column in range(26):
        counts = np.bincount(ids[:, column], minlength=100)
        assert len(counts) == 100
        assert ((counts - 200) ** 2 / 200).sum() < 99 + 6 * math.sqrt(2 * 99)  # chi-squared, six deviations
    collisions = (ids[:, 0] == ids[0, 0]) & (ids[:, 1] == ids[0, 1])
    assert collisions.sum() < 20  # of 200 that share a row in the first column, two are expected


def test_hashed_ids():
    # A trained table is worthless under another hash: a change needs a new version.
    bits = np.array([[0, 1, -1], [0x68FD1E64, 5, 5]], np.int32)
    assert click_store.VERSION == "1.0.0"
    words = [[(column + 1) << 32 | bit % 2**32 for column, bit in enumerate(row)] for row in bits.tolist()]
    assert hash_categories(bits, 1000).tolist() == (mix(np.array(words, np.uint64)) % 1000).tolist()


def test_vocabulary(monkeypatch):
    monkeypatch.setattr(click_tables, "MERGE_AT", 3)  # several merges
    column = np.repeat(np.array([7, -1, 3, 9], np.int32), [5, 5, 2, 1])
    pieces = np.array_split(np.random.default_rng(0).permutation(column)[:, None].repeat(26, 1), 5)
    vocabulary = build_vocabulary(pieces, min_count=2)
    for values in vocabulary.values:
        assert values.tolist() == [7, 2**32 - 1, 3]  # by count, then by value
    assert vocabulary.table_sizes == (4,) * 26
    bits = np.array([[3], [7], [-1], [9], [8]], np.int32).repeat(26, 1)
    assert vocabulary.look_up(bits).tolist() == [[i] * 26 for i in (3, 1, 2, 0, 0)]


def test_an_empty_vocabulary():
    vocabulary = build_vocabulary([np.arange(26, dtype=np.int32)[None]], min_count=2)
    assert vocabulary.table_sizes == (1,) * 26
    assert vocabulary.look_up(np.zeros((2, 26), np.int32)).tolist() == [[0] * 26] * 2


@pytest.mark.parametrize("rows", [*range(7, 22), 45_840_617])
def test_days(rows):
    days = np.full(7, rows // 7)
    days[: rows % 7] += 1  # as facebookresearch/dlrm deals out the rest
    assert first_test_row(rows) == days[:6].sum()


@pytest.mark.parametrize("categories", [Hashed(1000), Indexed(3)])
def test_rows_of_the_log(tmp_path, categories):
    lines = some_lines(300)
    lines[100] = lines[100][:-9]
    facts, messages = prepare(tmp_path, lines, categories, max_malformed=0.01)
    assert messages[0].startswith("line 101: wrong number of fields: 39 instead of 40: '")
    assert messages[1:] == ["1 of 300 lines are malformed and left out: 1 wrong number of fields"]
    folder = tmp_path / "data" / "criteo" / "1.0.0"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["criteo"]
    assert (folder / "malformed.tsv").read_text().startswith("101\twrong number of fields\t39 instead of 40")
    assert json.loads((folder / "metadata.json").read_text()) == json.loads(json.dumps(facts))
    assert (facts["lines"], facts["malformed"]) == (300, {"wrong number of fields": 1})
    info = dataset_info("criteo", tmp_path / "data")
    assert (info.num_train, info.num_test) == (257, 42)  # 299 rows
    read = [
        next(iter(eval_batches("criteo", split, global_batch=size, data_dir=tmp_path / "data")))
        for split, size in (("train", 257), ("test", 42))
    ]
    expected, _ = parse(lines)
    for name in ("dense", "label"):
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch in read]), expected[name])
    ids = np.concatenate([batch["categories"] for batch in read])
    if isinstance(categories, Hashed):
        np.testing.assert_array_equal(ids, hash_categories(expected["categories"], 1000))
        assert info.table_sizes == (1000,) * 26
    else:
        vocabulary = np.load(folder / "vocabulary.npz")
        for column in range(26):
            bits, entries = expected["categories"][:, column].view(np.uint32), vocabulary[f"C{column + 1}"]
            values, counts = np.unique(bits[:257], return_counts=True)
            assert sorted(entries) == values[counts >= 3].tolist()  # of the training days alone
            assert info.table_sizes[column] == len(entries) + 1
            assert [entries[i - 1] if i else None for i in ids[:, column]] == [
                b if b in entries else None for b in bits
            ]


def test_compressed_logs(tmp_path):
    lines = some_lines(30)
    for name, compressed in (("a", False), ("b", True)):
        log = write(tmp_path / f"log-{name}", lines, compressed)
        click_store.prepare_log("criteo", log, tmp_path / name, Hashed(50))
    first, second = (list(eval_batches("criteo", "train", global_batch=26, data_dir=tmp_path / name)) for name in "ab")
    for name, array in first[0].items():
        np.testing.assert_array_equal(array, second[0][name])
    assert not list(tmp_path.rglob("malformed.tsv"))


def test_too_many_malformed_lines(tmp_path):
    lines = [*some_lines(98), b"nothing", line(b"7")]
    with pytest.raises(
        ValueError, match=r"At most 0.01 of a log's lines .*; got 2 of the first 100 of .* \(1 wr"
    ) as error:
        prepare(tmp_path, lines, max_malformed=0.01)
    listing = tmp_path / "data" / "criteo.malformed.tsv"
    assert str(listing) in str(error.value)
    assert [row.split("\t")[:2] for row in listing.read_text().splitlines()] == [
        ["99", "wrong number of fields"],
        ["100", "label is not 0 or 1"],
    ]
    assert [path.name for path in (tmp_path / "data").iterdir()] == [listing.name]
    facts, _ = prepare(tmp_path, lines, max_malformed=0.02)  # exactly as many as allowed
    assert facts["malformed"] == {"wrong number of fields": 1, "label is not 0 or 1": 1}


def test_a_wrong_file_ends_early(tmp_path, monkeypatch):
    monkeypatch.setattr(click_parser, "LINES_AT_ONCE", 10)
    monkeypatch.setattr(click_store, "CHECKED_FROM", 20)
    with pytest.raises(ValueError, match="20 of the first 20 of "):
        prepare(tmp_path, [b"wrong"] * 1000)


def test_ten_malformed_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(click_parser, "LINES_AT_ONCE", 8)
    _, messages = prepare(tmp_path, [*some_lines(10), *[b"wrong"] * 25], max_malformed=1.0)
    assert [text.split(":")[0] for text in messages] == [
        *(f"line {number}" for number in range(11, 21)),
        "25 of 35 lines are malformed and left out",
    ]
    assert len((tmp_path / "data" / "criteo" / "1.0.0" / "malformed.tsv").read_text().splitlines()) == 25


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"at least 7 rows, one for each day; got 6 in"):
        prepare(tmp_path, some_lines(6))
    with pytest.raises(FileNotFoundError, match="A click log must be a file; got none at"):
        click_store.prepare_log("criteo", tmp_path / "no", tmp_path, Hashed(5))
    with pytest.raises(ValueError, match=r"in \[0, 1\]; got 2"):
        prepare(tmp_path, some_lines(7), max_malformed=2)
    for size in (0, 2**31):
        with pytest.raises(ValueError, match=f"table size must be in .*; got {size}"):
            Hashed(size)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        Indexed(0)
    prepare(tmp_path, some_lines(7))
    with pytest.raises(ValueError, match=r"criteo/1.0.0, which holds some already\. Remove it"):
        prepare(tmp_path, some_lines(7))
    refused(lambda: eval_batches("criteo", "valid", global_batch=4, data_dir=tmp_path / "data"), "split", "got 'valid'")


def test_no_preparation(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        dataset_info("criteo", tmp_path)
    with pytest.raises(FileNotFoundError, match="criteo must be prepared"):
        train_batches("criteo", global_batch=4, seed=0, data_dir=tmp_path)
    assert f"got no {tmp_path}/criteo/1.0.0/dataset_info.json" in str(error.value)
    assert f"\n  python -m train.data.clicks prepare --input train.txt --out {tmp_path}\n" in str(error.value)


def test_a_log_of_another_command(tmp_path, monkeypatch):
    prepare(tmp_path, some_lines(8))
    (tmp_path / "data" / "criteo").rename(tmp_path / "other")

    def overtaken(*args):
        (tmp_path / "other").rename(tmp_path / "data" / "criteo")
        return write_rows(*args)

    monkeypatch.setattr(click_store, "write_rows", overtaken)
    with pytest.raises(ValueError, match=r"criteo/1.0.0, which holds some already"):
        prepare(tmp_path, some_lines(9))
    assert dataset_info("criteo", tmp_path / "data").num_train == 7
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["criteo"]


def test_an_interruption(tmp_path, monkeypatch):
    def interrupted(*args):
        write_rows(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(click_store, "write_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, some_lines(8))
    assert not list((tmp_path / "data").iterdir())
    monkeypatch.setattr(click_store, "write_rows", write_rows)
    prepare(tmp_path, some_lines(8))
    assert dataset_info("criteo", tmp_path / "data").num_train == 7


def test_state_of_another_log(tmp_path):
    states = []
    for number, categories in enumerate([Hashed(1000), Hashed(1001), Hashed(1000)]):
        lines = some_lines(20, np.random.default_rng(number // 2))
        log = write(tmp_path / "log", lines)
        click_store.prepare_log("criteo", log, tmp_path / str(number), categories)
        batches = train_batches("criteo", global_batch=4, seed=0, data_dir=tmp_path / str(number))
        states.append(batches.state())
    with pytest.raises(ValueError, match=r"categories: .* in the state"):
        batches.restore(states[1] | {"crc32": states[2]["crc32"]})
    with pytest.raises(ValueError, match=r"crc32: .* in the state"):
        batches.restore(states[0])


def test_command_prepares(tmp_path, capsys):
    log = write(tmp_path / "train.txt", some_lines(20))
    options = ["--input", str(log), "--out", str(tmp_path / "a"), "--categories", "hashed", "--table-size", "77"]
    assert clicks.main(["prepare", *options]) == 0
    assert json.loads(capsys.readouterr().out)["categories"] == {"kind": "hashed", "table_size": 77}
    assert dataset_info("criteo", tmp_path / "a").table_sizes == (77,) * 26
    assert clicks.main(["prepare", *options]) == 2
    assert capsys.readouterr().err.startswith("clicks: Data must be prepared into a new folder")
    assert clicks.main(["prepare", "--input", str(log), "--out", str(log)]) == 2  # a file
    assert capsys.readouterr().err.startswith("clicks: [Errno 17] File exists")


def test_options_of_another_kind(tmp_path, capsys):
    log = write(tmp_path / "train.txt", some_lines(20))
    options = ["prepare", "--input", str(log), "--out", str(tmp_path / "a")]
    assert clicks.main([*options, "--min-count", "3"]) == 2
    assert "--min-count must go with indexed categories; got 3" in capsys.readouterr().err
    assert clicks.main([*options, "--categories", "indexed", "--table-size", "9"]) == 2
    assert "--table-size must go with hashed categories; got 9" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
