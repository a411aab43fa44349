"""Several seeds of one setting: those that are recorded are not trained again."""

import dataclasses
import json
from types import MappingProxyType

import pytest

from configs.methods import PlumpDp, TopK
from tests.train.runs import EXPERIMENT
from train import seeds
from train.records import Records
from train.seeds import Stopwatch, train_seeds


@pytest.fixture
def trained(monkeypatch):
    """The seeds and methods that were trained, in a stand-in for training."""
    runs = []

    def train(experiment, method, job):
        runs.append((experiment.seed, method.options()))
        return {"steps": [2, 4], "accuracies": [10.0, 50.0 + experiment.seed], "bytes_per_step": 8.0}

    monkeypatch.setattr(seeds, "_train", train)
    monkeypatch.setattr("train.job.make_job", lambda experiment, method: None)
    set_rows(monkeypatch, "1.0.0")
    return runs


def set_rows(monkeypatch, version):
    """Puts 6 rows of a version in place of those of every dataset."""

    class Rows(list):
        identity = MappingProxyType({"version": version})

    monkeypatch.setattr("train.data.datasets.open_split", lambda name, split, data_dir: Rows(range(6)))


def test_recorded_seeds(trained, tmp_path):
    path = tmp_path / "records.json"
    assert [run["accuracies"][-1] for run in train_seeds(Records(path), EXPERIMENT, PlumpDp(), 2)] == [50.0, 51.0]
    assert len(train_seeds(Records(path), EXPERIMENT, PlumpDp(), 3)) == 3
    assert [seed for seed, _ in trained] == [0, 1, 2]
    train_seeds(Records(path), EXPERIMENT, TopK(sparsity=0.9), 1)
    train_seeds(Records(path), EXPERIMENT, TopK(sparsity=0.8), 1)
    train_seeds(Records(path), dataclasses.replace(EXPERIMENT, steps=8), PlumpDp(), 1)
    train_seeds(Records(path), dataclasses.replace(EXPERIMENT, eval_every=4), PlumpDp(), 1)  # another curve
    assert len(trained) == 7


def test_other_rows(trained, tmp_path, monkeypatch):
    path = tmp_path / "records.json"
    (first,) = train_seeds(Records(path), EXPERIMENT, PlumpDp(), 1)
    assert first["rows"] == {"examples": 6, "version": "1.0.0"}
    set_rows(monkeypatch, "2.0.0")
    assert train_seeds(Records(path), EXPERIMENT, PlumpDp(), 1) == [first]  # a table needs no data
    with pytest.raises(
        ValueError, match=r"records\.json, where rows is \{.*'1\.0\.0'\} and not \{.*'2\.0\.0'\}\. Name"
    ):
        train_seeds(Records(path), EXPERIMENT, PlumpDp(), 2)
    assert [seed for seed, _ in trained] == [0]
    train_seeds(Records(path), dataclasses.replace(EXPERIMENT, dataset="mnist"), PlumpDp(), 1)  # other data
    path.write_text(json.dumps([{name: value for name, value in first.items() if name != "rows"}]))
    train_seeds(Records(path), EXPERIMENT, PlumpDp(), 2)  # an early record
    assert len(trained) == 3


def test_the_first_step_has_no_time(monkeypatch):
    times = iter([100.0, 101.0, 103.0, 104.0])
    monkeypatch.setattr(seeds.time, "perf_counter", lambda: next(times))
    stopwatch = Stopwatch()
    assert stopwatch.seconds_per_step == 0
    for step in range(4):
        stopwatch.update(step, 0.0, 0.0, 0.0)
    assert stopwatch.seconds_per_step == 1.0  # the median of 1, 2 and 1
