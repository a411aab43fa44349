import json
import os
from pathlib import Path

import pytest

from train.tables import format_cell, print_table, write_records, write_whole

RECORDS = [
    {"method": "plump_dp", "bytes_per_step": 907_848.0, "ratio": None, "steps": 4000},
    {"method": "dct_dp", "bytes_per_step": 128_136.5, "ratio": 7.08512, "steps": 12},
]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (7.08512, "7.085"), (0.000123456, "0.0001235"), (128_136.5, "128,136"), (4000, "4,000"), ("x", "x")],
)
def test_cells(value, text):
    assert format_cell(value) == text


def test_narrow_terminals(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    print_table("title", RECORDS)
    lines = capsys.readouterr().out.splitlines()
    for record in RECORDS:
        (line,) = [line for line in lines if record["method"] in line]
        assert [cell.strip() for cell in line.split("│")[1:-1]] == [format_cell(value) for value in record.values()]


def test_empty_tables():
    with pytest.raises(ValueError, match="at least one record"):
        print_table("title", [])


def test_json(tmp_path):
    path = tmp_path / "new" / "table.json"
    write_records(path, RECORDS)
    assert json.loads(path.read_text()) == RECORDS
    write_records(None, RECORDS)


def test_a_file_is_the_old_or_the_new_one(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError("No space left on device")

    path, link = tmp_path / "table.json", tmp_path / "link.json"
    link.symlink_to(path)
    write_whole(link, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    write_whole(path, "old")  # is there already
    assert (path.read_text(), link.is_symlink()) == ("old", True)
    assert sorted(tmp_path.iterdir()) == [link, path]
    write_whole(Path("/dev/null"), "new")
    assert not Path("/dev/null").is_file()
