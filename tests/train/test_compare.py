"""Several seeds of several methods: what is trained, what the table says, what is drawn and refused."""

import dataclasses
import json
import statistics
import warnings

import matplotlib.image
import matplotlib.pyplot as plt
import pytest
from matplotlib.text import Text

import train.__main__
import train.compare
import train.job
import train.seeds
from configs import CONFIGS
from configs.comparison import DENSE, SETTINGS, Comparison
from configs.methods import PlumpDp, TopK
from tests.train.runs import EXPERIMENT, Told
from train.compare import bits_per_second, choose, compare, summarise
from train.figures import draw_comparison, label_points
from train.loop import train as train_one
from train.processes import Processes

FEW = dataclasses.replace(EXPERIMENT, name="few", steps=3)
TOPK = TopK(sparsity=0.9)


@pytest.mark.slow
def test_every_setting_and_seed(tmp_path, capsys):
    config = Comparison(seeds=2, rate="1mbit", out=tmp_path, json=tmp_path / "new" / "runs.json")
    compare(FEW, config, [("90%", TOPK), ("", DENSE)])
    runs = json.loads((tmp_path / "new" / "runs.json").read_text())
    assert [(run["about"]["method"], run["about"]["seed"]) for run in runs] == [
        (method, seed) for method in ("plump_dp", "topk") for seed in (0, 1)
    ]
    folder = tmp_path / "few-compare"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["few-compare", "new"]
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    dense, sparse = rows = json.loads((folder / "comparison.json").read_text())
    assert (dense["method"], dense["setting"]) == ("plump_dp", "")
    assert (sparse["method"], sparse["setting"], sparse["fields"]["sparsity"]) == ("topk", "90%", 0.9)
    for seed in (0, 1):
        experiment = dataclasses.replace(FEW, seed=seed, out=tmp_path / f"alone-{seed}")
        summary = train_one(experiment, TOPK, Processes(), Told()).summary
        assert sparse["accuracies"][seed] == 100 * summary.accuracy
        assert sparse["bytes_per_step"] == summary.bytes_per_step
        assert sparse["ratio_to_dense"] == summary.ratio_to_dense
    assert sparse["accuracy_mean"] == statistics.fmean(sparse["accuracies"])
    assert sparse["points_below_dense"] == dense["accuracy_mean"] - sparse["accuracy_mean"]
    compute = dense["compute_seconds_per_step"]
    assert 0 < compute == sparse["compute_seconds_per_step"] == dense["measured_seconds_per_step"]
    for row in rows:
        assert (row["workers"], row["steps"]) == (FEW.workers, 3)
        assert row["seconds_to_finish"] == pytest.approx(3 * (compute + 8 * row["bytes_per_step"] / 1e6))
    message = capsys.readouterr().out
    assert max(len(line) for line in message.splitlines() if tmp_path.name not in line) <= 80
    message = " ".join(message.split())
    assert message.startswith("2 settings with 2 seeds each; --methods")
    assert message.count("topk 90%") == 2  # while it trains, and in the table
    assert "dense (plump_dp): " in message
    assert "test accuracy in % over 2 seeds" in message
    assert "at 1mbit, modelled as steps * (" in message
    assert "2/2 topk 90%: " in message


@pytest.fixture
def trained(monkeypatch):
    """The methods and seeds that were trained, in a stand-in for training."""
    runs = []

    def train_one_seed(experiment, method, job):
        runs.append((method, experiment.seed))
        return run(0.5 + experiment.seed / 10)

    monkeypatch.setattr(train.seeds, "_train", train_one_seed)
    monkeypatch.setattr(train.job, "make_job", lambda *_: None)
    return runs


def test_a_stop_and_a_resume(trained, tmp_path, monkeypatch):
    path, half = tmp_path / "runs.json", TopK(sparsity=0.5)
    settings = [("", DENSE), ("90%", TOPK), ("50%", half)]
    config = Comparison(seeds=2, out=tmp_path, json=path)
    stand_in = train.seeds._train

    def stopped(experiment, method, job):
        if (method, experiment.seed) == (TOPK, 1):
            raise SystemExit("Stopped by SIGTERM")
        return stand_in(experiment, method, job)

    monkeypatch.setattr(train.seeds, "_train", stopped)
    with pytest.raises(SystemExit, match="Stopped by SIGTERM"):
        compare(FEW, config, settings)
    assert trained == [(DENSE, 0), (DENSE, 1), (TOPK, 0)]
    assert len(json.loads(path.read_text())) == 3
    assert [row["method"] for row in json.loads((tmp_path / "few-compare" / "comparison.json").read_text())] == [
        "plump_dp"
    ]

    monkeypatch.setattr(train.seeds, "_train", stand_in)
    compare(FEW, dataclasses.replace(config, seeds=3), settings)
    runs = [(DENSE, 2), (TOPK, 1), (TOPK, 2), (half, 0), (half, 1), (half, 2)]
    assert trained[3:] == runs  # what was done is not done again
    rows = json.loads((tmp_path / "few-compare-2" / "comparison.json").read_text())
    assert [row["accuracies"] for row in rows] == [[pytest.approx(x) for x in (50.0, 60.0, 70.0)]] * 3


def test_delayed_methods(trained, tmp_path):
    config = Comparison(seeds=1, delay=1, out=tmp_path, json=tmp_path / "runs.json")
    compare(FEW, config, [("", DENSE), ("90%", TOPK), ("p=2", PlumpDp(p=2))])
    assert trained == [(DENSE, 0), (DENSE, 0), (TOPK, 0)]
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert [run["about"].get("delay", 0) for run in runs] == [0, 1, 1]
    rows = json.loads((tmp_path / "few-compare" / "comparison.json").read_text())
    assert [(row["method"], row["setting"], row["delay"]) for row in rows] == [
        ("plump_dp", "at once", 0),
        ("plump_dp", "", 1),
        ("topk", "90%", 1),
    ]


@pytest.mark.parametrize(
    ("changes", "name"), [({"steps": 7}, "steps is 3 and not 7"), ({"name": "other"}, "experiment is 'few' and not 'o")]
)
def test_another_comparison(changes, name, trained, tmp_path):
    config = Comparison(seeds=1, out=tmp_path, json=tmp_path / "runs.json")
    compare(FEW, config, [("", DENSE)])
    with pytest.raises(ValueError, match=f"--json must be a file of the same settings.*where {name}"):
        compare(dataclasses.replace(FEW, **changes), config, [("", DENSE)])
    assert trained == [(DENSE, 0)]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["few-compare"]


def test_the_command_line(monkeypatch, tmp_path):
    calls, devices = [], []
    monkeypatch.setattr(train.compare, "compare", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(train.compare, "prepare_jax", devices.append)
    argv = ["compare", "digits", "--seeds", "3", "--methods", "slim-dp,topk", "--rate", "1gbit", "--workers", "2"]
    assert train.__main__.main([*argv, "--steps", "70", "--out", str(tmp_path)]) == 0
    ((experiment, config),) = calls
    assert experiment == dataclasses.replace(CONFIGS["digits"], steps=70, workers=2)
    assert config == Comparison("slim-dp,topk", 3, "1gbit", 70, 2, tmp_path)
    assert devices == [2]
    assert train.__main__.main(["compare"]) == 0
    assert calls[1] == (CONFIGS["digits"], Comparison())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1; got 0"),
        (["--rate", "fast"], "--rate must be a positive number with its unit; got 'fast'"),
        (["--margin", "nan"], "--margin must be at least 0 and finite; got nan. 0.5 is half"),
        (["--workers", "1" + "0" * 20], "--workers must be at least 1 and below 2**31; got 1"),
        (["--methods", "topk,none"], "got 'none'. Name those to train"),
        (["--steps", "10"], "--warmup-steps"),
        (["--steps", "0"], "--steps must be at least 1 and below 2**31; got 0"),
        (["--delay", "2"], "--delay must be at least 0 and below 2; got 2"),
        (["--workers", "3"], "--global-batch must be a multiple of --workers"),
        (["mnits"], f"An experiment must be one of {', '.join(CONFIGS)}; got 'mnits'"),
    ],
)
def test_bad_values(argv, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(train.compare, "prepare_jax", lambda devices: None)
    name = [] if argv[0].startswith("--") else [argv.pop(0)]
    assert train.__main__.main(["compare", *name, "--out", str(tmp_path / "runs"), *argv]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_choice_of_methods():
    settings = {(method.name, label): method for label, method in SETTINGS}
    full = choose("all", settings)
    assert full == settings
    assert next(iter(full.values())) == DENSE
    subset = choose("top-k, slim_dp,slim-dp", settings)
    assert next(iter(subset)) == ("plump_dp", "")
    assert [name for name, _ in subset] == ["plump_dp"] + ["topk"] * 4 + ["slim_dp"] * 4
    assert {name for name, _ in choose("plump-dp", settings)} == {"plump_dp"}
    assert any(method == PlumpDp(p=10) for method in choose("plump-dp", settings).values())


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3)])
def test_rates(rate, bits):
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "100", "0mbit", "-1mbit", "mbit", "100 mbit", "1tbit", "1e3mbit"])
def test_bad_rates(rate):
    with pytest.raises(ValueError, match="Write 100mbit, say"):
        bits_per_second(rate)


def run(accuracy):
    """A record of `train_seeds`."""
    of_run = {"bytes_per_step": 10.0, "dense_bytes": 50.0, "overflow_per_step": 0.0, "skipped": 1}
    curve = {"accuracies": [100 * accuracy]}
    return {"scores": {"loss": 0.1, "accuracy": accuracy}, "seconds_per_step": 0.5} | of_run | curve


def test_differences_by_seed():
    """Differences of 0.9, 1.1 and 1.0 points: mean 1, deviation 0.1, Student's t of 2 degrees 4.3027."""
    dense = [98.9, 97.1, 99.0]
    record = summarise([run(0.98), run(0.96), run(0.98)], dense=dense, margin=0.3)
    assert (record["accuracy_min"], record["accuracy_max"]) == (96.0, 98.0)
    assert record["accuracy_mean"] == pytest.approx(292 / 3)
    assert record["points_below_dense"] == pytest.approx(1.0)
    half = 4.30265 * 0.1 / 3**0.5
    assert (record["below_low"], record["below_high"]) == pytest.approx((1 - half, 1 + half), rel=1e-4)
    assert (record["loss_mean"], record["loss_stdev"]) == (pytest.approx(0.1), pytest.approx(0.0))
    assert (record["skipped"], record["seeds"]) == (3, 3)


@pytest.mark.parametrize(("margin", "verdict"), [(0.7, "worse"), (0.8, "not told apart"), (1.2, "not told apart")])
def test_verdicts(margin, verdict):
    """From 0.75 to 1.25."""
    runs, dense = [run(0.98), run(0.96), run(0.98)], [98.9, 97.1, 99.0]
    assert summarise(runs, dense=dense, margin=margin)["verdict"] == verdict
    assert summarise(runs, dense=dense, margin=1.3)["verdict"] == "not worse"


def test_one_seed():
    for dense in (None, [99.0]):
        record = summarise([run(0.97)], dense=dense, margin=0.3)
        assert (record["below_low"], record["below_high"], record["verdict"]) == (None, None, "")
        assert record["points_below_dense"] == pytest.approx(0.0 if dense is None else 2.0)
        assert (record["accuracy_stdev"], record["loss_stdev"]) == (None, None)


def records(count):
    """Points close together, like those of good methods; the last has no traffic."""
    figures = []
    for index in range(count):
        received = 0.0 if index == count - 1 else 2e4 * (1 + index % 3)
        point = {"bytes_per_step": received, "seconds_to_finish": 3 + received / 1e5, "rate": "100mbit", "seeds": 5}
        point |= {"accuracy_mean": 98.9 - index % 4 / 10, "accuracy_stdev": 0.3 if index else None}
        figures.append({"method": f"method_{index}", "setting": "(0.3, 0.15)"} | point)
    return figures


@pytest.mark.parametrize("count", [2, 20])
def test_the_figure(count, tmp_path):
    path = tmp_path / "new" / "figure.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_comparison(path, records(count))
    assert matplotlib.image.imread(path).shape[2] in (3, 4)


def test_labels():
    figure, axes = plt.subplots(figsize=(8, 8))
    points = [(1 + index % 3 / 100, 1 + index % 5 / 100) for index in range(12)]  # in the right upper corner
    axes.plot(*zip(*points, strict=True), "o")
    axes.set(xlim=(0, 1.04), ylim=(0, 1.06))
    figure.canvas.draw()
    label_points(axes, points, [f"label {index}" for index in range(12)], ["black"] * 12)
    figure.canvas.draw()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # an annotation's own has its line in it
    frame = axes.get_window_extent()
    assert len(boxes) == 12
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(neighbour) for neighbour in boxes[index + 1 :])
        assert not any(box.contains(*place) for place in axes.transData.transform(points))
        assert frame.contains(*box.min)
        assert frame.contains(*box.max)
    plt.close(figure)
