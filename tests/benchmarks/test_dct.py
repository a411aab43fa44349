"""The table of DCT: the paper's figures, the train columns, and rows that are trained once and kept."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import dct

# A second copy of tables 1, 2, 3, 6 and 7 of Gupta et al.: sparsity, train loss, train accuracy, test loss, accuracy.
DATA = Path(__file__).parents[2] / "docs" / "data" / "dct.json"
DENSE = "0 .4477 79.23 .4538 78.78"
TABLES = {
    ("dense", 1): DENSE,
    ("DCT-MP", 2): "75 .4473 79.29 .4532 78.81; 90 .4472 79.28 .4530 78.81; 95 .4473 79.24 .4534 78.80; "
    "98 .4505 79.07 .4562 78.61",
    ("DCT-MP", 3): "75 .4482 79.19 .4536 78.79; 90 .4479 79.24 .4537 78.78; 95 .4495 79.18 .4546 78.72",
    ("DCT-DP", 1): "75 .4478 79.23 .4534 78.81; 90 .4478 79.22 .4536 78.79; 95 .4479 79.25 .4538 78.79; "
    "98 .4478 79.23 .4537 78.80; 99.5 .4482 79.20 .4547 78.75",
    ("DCT-DP and DCT-MP", 3): "75 .4480 79.23 .4535 78.81; 90 .4481 79.26 .4537 78.78; 95 .4492 79.19 .4548 78.70",
    ("sketched activations", 2): "50 .4569 78.72 .4618 78.37; 75 .4610 78.53 .4656 78.12; 90 .4685 77.95 .4721 77.78",
    ("top-k activation gradients", 2): "50 .4495 79.07 .4561 78.62; 75 .4516 78.95 .4588 78.48; "
    "90 .4701 77.76 .4789 77.13",
}


def test_figures_of_the_paper():
    typed = {
        (*system, float(row.split()[0])): [float(word) for word in row.split()[1:]]
        for system, rows in TABLES.items()
        for row in rows.split(";")
    }
    settings = {(s.system, s.stages, 100 * s.sparsity): list(s.paper) for s in dct.SETTINGS}
    assert settings == typed


@pytest.fixture
def trained(monkeypatch):
    """The settings that were trained, in a stand-in for training."""
    settings = []

    def train(setting, config, dense):
        settings.append((setting.system, setting.stages, setting.sparsity))
        names = ("system", "stages", "sparsity")
        scores = {
            "train_loss": 0.4,
            "train_accuracy": 77.0,
            "test_loss": 0.5,
            "minus_dense": 0.0 if dense is None else 0.1,
            "accuracy": 76.0,
            "auc": 0.74,
        }
        fields = {name: getattr(config, name) for name in ("experiment", "seeds", "steps", "life_span")}
        return {**dict(zip(names, settings[-1], strict=True)), **scores, "losses": [0.5], **fields}

    monkeypatch.setattr(dct, "train_setting", train)
    monkeypatch.setattr(dct, "embeddings_note", lambda: "embeddings too")
    monkeypatch.setattr(dct, "prepare_jax", lambda devices: None)
    return settings


def test_a_table_goes_on(trained, tmp_path):
    path, all_rows = tmp_path / "table.json", [(s.system, s.stages, s.sparsity) for s in dct.SETTINGS]

    def rows():
        return [(r["system"], r["stages"], r["sparsity"]) for r in json.loads(path.read_text())]

    dct.main(dct.Config(system="sketched activations", json=path))
    assert trained == rows() == [all_rows[0], *[row for row in all_rows if row[0] == "sketched activations"]]
    dct.main(dct.Config(system="DCT-DP", json=path))
    assert sorted(trained) == sorted(rows())
    assert len(trained) == 1 + 3 + 5 + 3  # dense once; includes those of both together
    dct.main(dct.Config(json=path))
    assert sorted(rows()) == sorted(all_rows)
    assert sorted(trained) == sorted(all_rows)  # each once


def test_sparsities(trained):
    dct.main(dct.Config(system="DCT-MP", sparsities=(0.9, 0.98)))
    names = ("DCT-MP", "DCT-DP and DCT-MP")
    assert trained[0] == ("dense", 1, 0.0)
    assert set(trained[1:]) == {(names[0], 2, 0.9), (names[0], 2, 0.98), (names[0], 3, 0.9), (names[1], 3, 0.9)}
    with pytest.raises(ValueError, match=r"--sparsities those of its settings, or none; got 'DCT-MP' and \(0\.5,\)"):
        dct.main(dct.Config(system="DCT-MP", sparsities=(0.5,)))


def test_rates_of_real_rows():
    clicks, flights = (
        dct.experiment_of(dct.SETTINGS[3], dct.Config(experiment=name))[0] for name in ("dlrm_clicks", "dlrm_flights")
    )
    assert (clicks.dataset, clicks.learning_rate, clicks.stages) == ("clicks", 1.0, 2)
    assert (flights.dataset, flights.learning_rate, flights.stages) == ("flights", 0.1, 2)
    assert flights.boundary.sparsity == 0.95


def test_other_settings(trained, tmp_path):
    with_rows = tmp_path / "rows.json"
    dct.main(dct.Config(system="DCT-MP", json=with_rows))
    with pytest.raises(ValueError, match=r"where experiment is 'dlrm_clicks' and not 'dlrm_flights'"):
        dct.main(dct.Config(system="DCT-MP", experiment="dlrm_flights", json=with_rows))
    path = tmp_path / "table.json"
    dct.main(dct.Config(system="DCT-MP", json=path))
    before, text = len(trained), path.read_text()
    with pytest.raises(ValueError, match=r"--json must be a file of the same settings.*where steps is 1000 and not 7"):
        dct.main(dct.Config(system="DCT-MP", steps=7, json=path))
    assert (len(trained), path.read_text()) == (before, text)


def test_old_records(trained, capsys):
    """The rows in docs/data also contain the paper's numbers; the table takes those of SETTINGS."""
    dct.main(dct.Config(seeds=5, json=DATA))
    assert not trained
    assert "22/22 top-k activation gradients 2 0.9" in capsys.readouterr().out


def test_columns_of_the_paper(trained, capsys):
    dct.main(dct.Config(system="DCT-DP"))
    lines = capsys.readouterr().out.splitlines()
    (head,) = [line for line in lines if "paper_train_accuracy" in line]
    names = [cell.strip() for cell in re.split("[┃│]", head)[1:-1]]
    for settings, paper_column in (("train_loss", "paper_train_loss"), ("train_accuracy", "paper_train_accuracy")):
        assert names.index(paper_column) == names.index(settings) + 1
    (row,) = [line for line in lines if "│ DCT-DP " in line and " 0.995 " in line]
    cells = dict(zip(names, (cell.strip() for cell in re.split("[┃│]", row)[1:-1]), strict=True))
    assert {name: cells[name] for name in cells if "train" in name} == {
        "train_loss": "0.4",
        "paper_train_loss": "0.4482",
        "train_accuracy": "77",
        "paper_train_accuracy": "79.2",
    }
    assert (cells["paper_loss"], cells["paper_accuracy"]) == ("0.4547", "78.75")
    assert "embeddings too" in lines


def test_means_of_last_steps():
    curve = dct.TrainCurve()
    for step in range(1, 151):
        curve.update(step, float(step), 1.0 if step > 75 else 0.0, 0.0)
    assert curve.means() == (100.5, 0.75)  # of the steps 51 to 150
    short = dct.TrainCurve()
    short.update(1, 2.0, 0.5, 0.0)
    assert short.means() == (2.0, 0.5)


def test_figures_of_a_record(monkeypatch):
    """Means over the seeds; the training reports 0.1, 0.2, ... in its steps, and scores of a test split."""

    def train(experiment, method, processes, progress, job):
        for step in range(1, 1 + experiment.steps):
            progress.update(step, step / 10 + experiment.seed, 0.5 + experiment.seed / 4, 8.0)
        scores = {"loss": 0.25, "auc": 0.75}
        summary = SimpleNamespace(scores=scores, accuracy=0.875, bytes_per_step=8.0, ratio_to_dense=2.0)
        return SimpleNamespace(finished=True, summary=summary)

    monkeypatch.setattr(dct, "make_job", lambda experiment, method: None)
    monkeypatch.setattr(dct, "train", train)
    record = dct.train_setting(dct.SETTINGS[0], dct.Config(seeds=2, steps=3), None)
    assert (record["train_loss"], record["train_accuracy"]) == (pytest.approx(0.2 + 0.5), 62.5)
    assert (record["test_loss"], record["accuracy"]) == (0.25, 87.5)


def test_costs_of_embeddings():
    """To 0.1%: the paper's fraction of Criteo's 33.8M rows of 16, at a little more than three bytes a number."""
    numbers = [int(word.replace(",", "")) for word in re.findall(r"\d[\d,]*\d", dct.embeddings_note())]
    total, rows, dense = numbers
    assert rows == 33_762_577
    assert total == pytest.approx(100_019_538, rel=1e-3)
    assert dense == pytest.approx(99_186, rel=1e-2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": 0}, "--seeds must be at least 1; got 0"),
        (
            {"system": "DCT"},
            r"--system must be one of .*'DCT-DP and DCT-MP'.*, or all, and --sparsities those of its settings, or "
            r"none; got 'DCT' and \(\)",
        ),
    ],
)
def test_errors(trained, fields, message):
    with pytest.raises(ValueError, match=message):
        dct.main(dct.Config(**fields))
    assert not trained
