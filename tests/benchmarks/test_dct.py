"""The table of DCT is trained row by row: what was trained once is kept."""

import json

import pytest

from benchmarks import dct


@pytest.fixture
def trained(monkeypatch):
    """The settings that were trained, by a stand-in that takes no time."""
    settings = []

    def train(setting, config, dense):
        settings.append((setting.system, setting.stages, setting.sparsity))
        names = ("system", "stages", "sparsity")
        scores = {"test_loss": 0.5, "minus_dense": 0.0 if dense is None else 0.1, "accuracy": 76.0, "auc": 0.74}
        same = {"seeds": config.seeds, "steps": config.steps, "life_span": config.life_span}
        return {**dict(zip(names, settings[-1], strict=True)), **scores, "losses": [0.5], **same}

    monkeypatch.setattr(dct, "_train", train)
    monkeypatch.setattr("train.processes.prepare_jax", lambda devices: None)
    monkeypatch.setenv("PJRT_NPROC", "16")  # which the benchmark sets: back to what it was
    return settings


def test_a_table_goes_on_where_it_was_stopped_and_loses_no_row(trained, tmp_path):
    path, all_rows = tmp_path / "table.json", [(s.system, s.stages, s.sparsity) for s in dct.SETTINGS]

    def rows():
        return [(r["system"], r["stages"], r["sparsity"]) for r in json.loads(path.read_text())]

    dct.main(dct.Config(system="sketched activations", json=path))
    assert trained == rows() == [all_rows[0], *[row for row in all_rows if row[0] == "sketched activations"]]
    dct.main(dct.Config(system="DCT-DP", json=path))
    assert sorted(trained) == sorted(rows())
    assert len(trained) == 1 + 3 + 5 + 3  # dense once; with those of both together
    dct.main(dct.Config(json=path))
    assert rows() == all_rows
    assert sorted(trained) == sorted(all_rows)  # each once


def test_rows_of_other_settings_are_trained_anew(trained, tmp_path):
    path = tmp_path / "table.json"
    dct.main(dct.Config(system="DCT-MP", json=path))
    before = len(trained)
    dct.main(dct.Config(system="DCT-MP", steps=7, json=path))
    assert len(trained) == 2 * before
    assert {record["steps"] for record in json.loads(path.read_text())} == {7}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": 0}, "--seeds and --steps are at least 1, got 0 and 1000"),
        ({"system": "DCT"}, "--system is one of .*'DCT-DP and DCT-MP'.*, or all, got 'DCT'"),
    ],
)
def test_errors(trained, fields, message):
    with pytest.raises(SystemExit, match=message):
        dct.main(dct.Config(**fields))
    assert not trained
