"""Records: made once, found by a later run, and refused if they are of other settings."""

import json
import math

import pytest

from train.records import Records


def test_once_and_again(tmp_path):
    path, calls = tmp_path / "new" / "records.json", []

    def make():
        calls.append(1)
        return {"ms": 2.5, "loss": math.nan, "pair": (1, 2)}

    key = {"of": "step", "marks": (1, 2)}
    first = Records(path).get(key, make)
    assert first == {"of": "step", "marks": [1, 2], "ms": 2.5, "loss": None, "pair": [1, 2]}
    later = Records(path)
    assert later.get(key, make) == first
    assert len(calls) == 1
    assert later.find({"of": "step", "marks": (1, 3)}) is None
    later.get({"of": "step", "marks": (1, 3)}, make)
    assert [record["marks"] for record in json.loads(path.read_text())] == [[1, 2], [1, 3]]  # nothing is dropped
    with pytest.raises(ValueError, match=r"--json must be a file; got the folder"):
        Records(tmp_path)
    for text in ("{", "5", "[1]", '{"a": 1}', "[" * 9999):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"records.json must hold a list of records, since .* Name another file"):
            Records(path)


def test_two_at_once(tmp_path):
    """What another process has added stays."""
    path = tmp_path / "records.json"
    first, second = Records(path), Records(path)
    for number in range(3):
        first.add({"of": "first", "number": number})
    second.add({"of": "second"})
    assert first.add({"of": "last"}) == {"of": "last"}
    assert [record["of"] for record in json.loads(path.read_text())] == ["first"] * 3 + ["second", "last"]
    assert first.find({"of": "second"}) is not None


def test_other_settings(tmp_path):
    path = tmp_path / "records.json"
    records = Records(path)
    records.add({"about": {"steps": 400, "pair": (1, 2)}, "seed": 0})
    records.check_same({"steps": 400, "pair": (1, 2)}, lambda record: record["about"])
    Records(path).check_same({"steps": 400, "pair": (1, 2)}, lambda record: record["about"])
    message = r"--json must be a file of the same settings, .* got .*records.json, where steps is 400 and not 7. Name"
    with pytest.raises(ValueError, match=message):
        Records(path).check_same({"pair": (1, 2), "steps": 7}, lambda record: record["about"])
    with pytest.raises(ValueError, match="where workers is None and not 4"):
        records.check_same({"workers": 4}, lambda record: record)
    records.add({"about": {"steps": 8}})
    with pytest.raises(ValueError, match="where steps is 8 and not 400"):  # of any record
        records.check_same({"steps": 400}, lambda record: record["about"])
