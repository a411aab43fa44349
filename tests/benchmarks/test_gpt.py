"""The comparison on text: every method is trained and timed once, with the same settings."""

import dataclasses
import json
import re

import matplotlib.image
import pytest

from benchmarks import gpt
from benchmarks.gpt import METHODS, Config
from tests.benchmarks.places import run
from train import seeds

SMALL = Config(experiment="gpt_stdlib", layers=1, width=8, steps=4, evaluations=2, batch=4, workers=2, seeds=2)


@pytest.fixture
def trained(monkeypatch):
    """The runs that were trained, in a stand-in for training: method, seed, optimizer. The loss is 2 or more."""
    runs = []

    def train(experiment, method, job):
        runs.append((method, experiment.seed, experiment.optimizer))
        loss = 2.0 + 0.25 * experiment.seed + 0.125 * (method != METHODS["dense"])
        scores = {"loss": loss, "bits_per_byte": loss / 0.5, "accuracy": 0.5}
        curve = {"steps": [2, 4], "losses": [3.0, loss], "accuracies": [40.0, 50.0], "received": [2e6, 4e6]}
        return {"scores": scores, "bytes_per_step": 8.0, "dense_bytes": 32.0, "parameters": 1234} | curve

    monkeypatch.setattr(seeds, "_train", train)
    monkeypatch.setattr("train.job.make_job", lambda experiment, method: None)
    monkeypatch.setattr(gpt, "prepare_jax", lambda devices: None)
    return runs


def rows_of(out):
    """The cells of the last printed table, by method."""
    lines = out[out.rindex("┏") :].splitlines()
    rows = [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines if line[:1] in ("┃", "│")]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}


def test_every_method_by_seed(trained, tmp_path, capsys):
    config = Config(**vars(SMALL) | {"json": tmp_path / "gpt.json", "figure": tmp_path / "gpt.png"})
    gpt.main(config)
    assert [run[:2] for run in trained] == [(method, seed) for method in METHODS.values() for seed in (0, 1)]
    expected = {"muon": "muon", "muloco": "muon", "demo": "sgd"}
    assert [run[2] for run in trained[::2]] == [expected.get(name, "adam") for name in METHODS]
    gpt.main(config)
    assert len(trained) == 2 * len(METHODS)
    rows = rows_of(capsys.readouterr().out)
    assert rows.keys() == METHODS.keys()
    assert [rows["dense"][name] for name in ("loss", "minus_dense", "bits_per_byte")] == ["2.125", "0", "4.25"]
    cells = [rows["dct_dp"][name] for name in ("loss", "minus_dense", "standard_error", "fewer_than_dense")]
    assert cells == ["2.25", "0.125", "0", "4"]
    assert rows["dense"]["seconds"] == "-"
    assert matplotlib.image.imread(config.figure).std() > 0.05


def test_choice_of_methods(trained, capsys):
    gpt.main(Config(**vars(SMALL) | {"methods": "powersgd,topk"}))
    assert [run[0] for run in trained[::2]] == [METHODS[name] for name in ("dense", "powersgd", "topk")]
    assert list(rows_of(capsys.readouterr().out)) == ["dense", "powersgd", "topk"]


def test_seconds(trained, tmp_path, capsys, monkeypatch):
    """For 4 steps, timed on as many hosts as there are workers."""
    path, ran = tmp_path / "gpt.json", []

    def on_hosts(hosts, rate, options):
        ran.append(hosts)
        times = {"ms_mean": 500.0, "ms_min": 1.0, "ms_max": 2.0, "bytes_kernel": 3.0}
        return [{"method": name, **times} for name in METHODS]

    monkeypatch.setattr(gpt.harness, "on_hosts", on_hosts)
    for _ in range(2):
        gpt.main(Config(**vars(SMALL) | {"json": path, "hosts": 2}))
    assert ran == [2]
    assert not trained
    gpt.main(Config(**vars(SMALL) | {"json": path, "workers": 4}))
    assert rows_of(capsys.readouterr().out)["dense"]["seconds"] == "-"
    gpt.main(Config(**vars(SMALL) | {"json": path}))
    assert rows_of(capsys.readouterr().out)["dense"]["seconds"] == "2"


@pytest.mark.parametrize("stages", [2, 3])
def test_boundaries_of_stages(stages):
    config = Config(**vars(SMALL) | {"stages": stages, "micro_batches": 2, "width": 32})
    runs = {name: gpt.experiment_of(config, name) for name in gpt.compared(config)}
    assert {(run.workers, run.stages, run.micro_batches) for run in runs.values()} == {(1, stages, 2)}
    width = config.width
    assert {name: dataclasses.astuple(run.boundary) for name, run in runs.items()} == {
        "dense": (0, None, 0),
        "dct_mp(0.9)": (0.9, None, 0),
        "dct_mp(0.95)": (0.95, None, 0),
        "int8": (0, "int8", 0),
        "int4": (0, "int4", 0),
        "d": (0, None, width),
        "d int4": (0, "int4", width),
        "d/2": (0, None, width / 2),
        "d/2 int4": (0, "int4", width / 2),
        "d/4": (0, None, width / 4),
        "d/4 int4": (0, "int4", width / 4),
        "d/8": (0, None, width / 8),
        "d/16": (0, None, width / 16),
        "d/128": (0, None, 1),
        "d/8 int4": (0, "int4", width / 8),
    }
    assert set(gpt.compared(config).values()) == {METHODS["dense"]}


@pytest.mark.slow
def test_stages(tmp_path):
    sizes = "--experiment gpt_stdlib --layers 1 --width 8 --steps 4 --evaluations 1 --batch 32 --stages 2 --seeds 1"
    options = ["--methods", "int4,d/8", "--rate", "none", "--timed-steps", "2", "--json", str(tmp_path / "gpt.json")]
    rows = rows_of(run("gpt", *sizes.split(), *options, timeout=600)[0])
    assert list(rows) == ["dense", "int4", "d/8"]
    whole, bits, rank = (float(row["bytes_per_step"].replace(",", "")) for row in rows.values())
    assert whole > 5 * bits
    assert whole > 7 * rank
    assert all(float(row["ms_per_step"].replace(",", "")) > 0 for row in rows.values())


@pytest.mark.slow
def test_a_small_model(tmp_path):
    sizes = "--experiment gpt_stdlib --layers 1 --width 8 --steps 4 --evaluations 1 --batch 32 --workers 2 --seeds 1"
    names, path = ["dense", "bfloat16", "dct_dp", "muloco"], tmp_path / "gpt.json"
    options = ["--methods", ",".join(names), "--rate", "none", "--timed-steps", "2"]
    for hosts in (["--hosts", "2"], []):
        out, _ = run("gpt", *sizes.split(), "--json", str(path), *options, *hosts, timeout=600)
    records = json.loads(path.read_text())
    assert [record["of"] for record in records] == ["gpt step"] * len(names) + ["run"] * len(names)
    rows = rows_of(out)
    assert list(rows) == names
    dense, half = (float(rows[name]["bytes_per_step"].replace(",", "")) for name in ("dense", "bfloat16"))
    assert half == pytest.approx(dense / 2, rel=0.02)
    assert all(float(row["seconds"]) > 0 for row in rows.values())
