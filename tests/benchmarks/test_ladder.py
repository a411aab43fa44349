"""The order of the ladder, what it refuses, its prediction and its page, with a stand-in for training."""

import json
import math
import subprocess

import matplotlib.image
import pytest

from benchmarks import gpt, ladder, power_law
from benchmarks.ladder import BOUNDARIES, MARKS, METHODS, Config, Ladder, markdown
from benchmarks.mup import Text, Trainer
from tests.benchmarks.places import ROOT
from train.records import Records

PAGE, DATA = ROOT / "docs" / "measurements" / "ladder.md", ROOT / "docs" / "data" / "ladder.json"
SMALL = {"experiment": "gpt_stdlib", "widths": "26,35,52,70", "layers": 1, "rates": "0.004,0.008", "hours": 9}
LATER = [name for name in METHODS if not name.endswith("_start")]  # on the third and fourth rung
TRIALS = [(0.008, 0), (0.004, 0), (0.008, 1), (0.008, 2)]  # of a method


class StopError(Exception):
    """As if the process was killed."""


@pytest.fixture
def trained(monkeypatch):
    """The runs that were trained: width, method, rate, seed. Losses follow laws with E = 1; 0.008 is best by 0.1."""
    runs, noise = [], {"dense": 0.01, "stop": 10**9, "near": True}

    class Trainer:
        def __init__(
            self,
            text,
            layers,
            width,
            method,
            optimizer,
            *,
            workers,
            steps,
            warm_up,
            start,
            near,
            boundary=None,
            stages=1,
        ):
            assert near == noise["near"]
            self.width, self.size, self.workers = width, 12 * width**2 + 15 * width, workers
            entries, self.all_workers = METHODS.items(), 4
            made = method, optimizer, start / steps > 0.05  # a tenth, rounded to steps
            self.name = next(n for n, e in entries if (e.method, e.optimizer, e.start > 0) == made)
            if stages > 1:
                assert (stages, method) == (5, METHODS["dense"].method)
                known = {(entry.boundary, entry.optimizer): name for name, entry in BOUNDARIES.items()}
                crossing = next(n for n, same in gpt.boundaries(width).items() if same == boundary)
                self.name = known[crossing, optimizer]
                self.all_workers = 1

        def run(self, rate, seed, evaluations):
            assert self.workers == self.all_workers
            if len(runs) == noise["stop"]:
                raise StopError
            runs.append((self.width, self.name, rate, seed))
            A = 30 + 5 * list(METHODS if self.all_workers == 4 else BOUNDARIES).index(self.name)
            loss = 1 + A * self.size**-0.3 + 0.1 * (rate == 0.004) + noise["dense"] * seed / 2
            sent = {"received": [5e5, 1e6], "bytes_per_step": 5e5}
            return {"loss": loss, "losses": [4.0, loss], "steps": [1, 2], "seconds": 1.0} | sent

        def time(self, steps):
            assert self.workers == 1
            return {"seconds": 0.25}

    monkeypatch.setattr(ladder, "Trainer", Trainer)
    monkeypatch.setattr(ladder, "prepare_jax", lambda: None)
    monkeypatch.setattr(power_law, "DRAWS", 100)
    return runs, noise


@pytest.fixture
def config(tmp_path):
    """In a repository of its own."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return Config(**SMALL, json=tmp_path / "ladder.json")


def commit(config):
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "add", "."], cwd=config.json.parent, check=True)
    subprocess.run(["git", *names, "commit", "-qm", "Predicted"], cwd=config.json.parent, check=True)


def test_rung_by_rung_and_resumed(trained, config):
    runs, noise = trained
    noise["stop"] = 37
    with pytest.raises(StopError):
        ladder.main(config)
    noise["stop"] = 10**9
    ladder.main(config)
    carried = [(0.008, 0), (0.008, 1), (0.008, 2)]
    rungs = {26: (METHODS, TRIALS), 35: (METHODS, TRIALS), 52: (LATER, carried)}
    assert runs == [
        (width, name, *trial) for width, (names, trials) in rungs.items() for name in names for trial in trials
    ]
    assert [record["of"] for record in json.loads(config.json.read_text())][-1] == "prediction"


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.008, [0.008, 0.004, 0.016]),  # worse on both sides
        (0.001, [0.008, 0.004, 0.002, 0.001]),  # the first that may be tried
        (0.032, [0.008, 0.004, 0.016, 0.032]),
    ],
)
def test_the_search_of_a_rate(trained, config, monkeypatch, best, tried):
    """From the middle to the best, past which it goes; the next rung begins there."""
    runs, _ = trained
    run = ladder.Trainer.run

    def lossy(self, rate, seed, evaluations):
        record = run(self, rate, seed, evaluations)
        loss = 1 + abs(math.log2(rate / best)) + 0.001 * seed
        return record | {"loss": loss, "losses": [4.0, loss]}

    monkeypatch.setattr(ladder.Trainer, "run", lossy)
    ladder.main(Config(**vars(config) | {"rates": "0.001,0.002,0.004,0.008,0.016,0.032"}))
    assert [trial[2:] for trial in runs[: len(tried) + 2]] == [*((rate, 0) for rate in tried), (best, 1), (best, 2)]
    second = [trial[2:] for trial in runs if trial[:2] == (35, "dense")]
    assert second[0] == (best, 0)
    assert second[-1] == (best, 2)


def test_of_rates_that_are_as_good_the_lowest_is_taken(trained, config, monkeypatch):
    """The best is 0.008 by 0.004 nats, within the noise of a seed."""
    runs, _ = trained
    losses = {0.002: 1.1, 0.004: 1.004, 0.008: 1.0, 0.016: 1.1}

    def lossy(self, rate, seed, evaluations):
        runs.append((rate, seed))
        return {"loss": losses[rate], "losses": [4.0, losses[rate]], "steps": [1, 2], "received": [5e5, 1e6]}

    monkeypatch.setattr(ladder.Trainer, "run", lambda *args: lossy(*args) | {"seconds": 1.0, "bytes_per_step": 5e5})
    ladder.main(Config(**vars(config) | {"rates": "0.002,0.004,0.008,0.016,0.032"}))
    assert runs[:5] == [(0.008, 0), (0.004, 0), (0.016, 0), (0.004, 1), (0.004, 2)]


def test_rates_are_refused():
    with pytest.raises(ValueError, match=r"--rates must rise; got 0\.004,0\.002"):
        ladder.main(Config(rates="0.004,0.002"))


def test_boundaries_are_compared_alike(trained, config, tmp_path):
    runs, _ = trained
    options = {"compare": "boundaries", "widths": "32,64,96,130", "searches": 3, "stages": 5}
    options |= {"figure": tmp_path / "ladder.png"}
    ladder.main(Config(**vars(config) | options))
    assert runs == [(width, name, *trial) for width in (32, 64, 96) for name in BOUNDARIES for trial in TRIALS]
    about = json.loads(config.json.read_text())[0]["about"]
    assert (about["workers"], about["stages"]) == (1, 5)
    assert matplotlib.image.imread(options["figure"]).std() > 0.05
    with pytest.raises(ValueError, match="file of the same settings"):
        ladder.main(config)


def test_some_methods_beside_the_baseline(trained, config):
    ladder.main(Config(**vars(config) | {"methods": "powersgd,muon", "hours": 1}))
    assert list(dict.fromkeys(run[1] for run in trained[0])) == ["dense", "powersgd", "muon"]
    with pytest.raises(ValueError, match=r"--methods must be some of dense, muon, .*; got d/9\."):
        ladder.main(Config(**vars(config) | {"methods": "muon,d/9"}))


def test_no_run_starts_late(trained, config, capsys):
    ladder.main(Config(**vars(config) | {"hours": 0}))
    assert not trained[0]
    assert "Stopped after 0 hours" in capsys.readouterr().out


def test_a_noisy_baseline_is_refused(trained, config):
    trained[1]["dense"] = 0.06
    with pytest.raises(ValueError, match=r"within 0\.02 nats .* got 0\.060 with 8,528 parameters .* of 0\.008\. L"):
        ladder.main(config)
    assert {run[1] for run in trained[0]} == {"dense"}


def test_the_last_rung_waits_for_the_commit(trained, config, tmp_path, capsys):
    runs, _ = trained
    config.json.write_text("[]")
    commit(config)  # of a file that does not have the prediction yet
    ladder.main(config)
    assert "Commit the file of records" in capsys.readouterr().out
    count = len(runs)
    with pytest.raises(ValueError, match="must be committed before it is trained; got none in the last commit"):
        ladder.main(config)
    commit(config)
    figure = tmp_path / "ladder.png"
    ladder.main(Config(**vars(config) | {"figure": figure}))
    assert runs[count:] == [(70, name, 0.008, seed) for name in LATER for seed in (0, 1, 2)]
    assert "The ladder is complete." in capsys.readouterr().out
    assert matplotlib.image.imread(figure).std() > 0.05
    ladder.main(config)
    assert len(runs) == count + 3 * len(LATER)


def test_the_prediction(trained, config):
    """Of laws without noise that differs between methods, gaps are those of the laws, and the intervals narrow."""
    ladder.main(config)
    prediction = json.loads(config.json.read_text())[-1]
    size = 12 * 70**2 + 15 * 70
    assert prediction["rates"] == dict.fromkeys(LATER, 0.008)
    assert prediction["E"] == pytest.approx(1.005, abs=0.01)  # the mean over the seeds
    assert prediction["gaps"]["powersgd"] == pytest.approx(10 * size**-0.3, rel=0.02)
    assert prediction["gaps"]["muloco"] == pytest.approx((85 - 30) * size**-0.3, rel=0.02)
    low, high = prediction["gap_intervals"]["powersgd"]
    gap, rounding = prediction["gaps"]["powersgd"], 1e-3  # the law is not linear in the losses
    assert low - rounding <= gap <= high + rounding


def test_a_method_that_is_not_timed_yet_is_shown(trained, config, monkeypatch, capsys):
    time = ladder.Trainer.time

    def killed(self, steps):
        if self.name != "dense":
            raise StopError
        return time(self, steps)

    monkeypatch.setattr(ladder.Trainer, "time", killed)
    with pytest.raises(StopError):
        ladder.main(config)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "dense, Muon" in line and "500,000" in line]
    assert [cell.strip() for cell in row.split("│")[-3:-1]] == ["-", "-"]


def test_places_as_sines(trained, config):
    trained[1]["near"] = False
    ladder.main(Config(**vars(config) | {"near": False}))
    assert trained[0]
    with pytest.raises(ValueError, match="where near is False and not True"):
        ladder.main(config)


def test_another_text_or_option_is_refused(trained, config):
    ladder.main(Config(**vars(config) | {"hours": 1}))
    with pytest.raises(ValueError, match="where warm_up is"):
        ladder.main(Config(**vars(config) | {"warm_up": 0.2}))


def test_a_row_read_twice_is_refused(config):
    with pytest.raises(ValueError, match="must read no row twice"):
        ladder.main(Config(**vars(config) | {"bytes_per_parameter": 1e6}))


@pytest.mark.parametrize("widths", ["48,64,96", "48,32,64,96"])
def test_widths_are_refused(widths):
    with pytest.raises(ValueError, match="must rise, and be at least 4"):
        ladder.main(Config(widths=widths))


def test_tables_of_a_page(trained, config, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n")
    with pytest.raises(ValueError, match="must have the lines <!-- records --> and"):
        ladder.main(Config(**vars(config) | {"page": page}))
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    ladder.main(Config(**vars(config) | {"page": page}))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| dense, Adam | " in text
    gap = 10 * 8_528**-0.3
    assert f" {gap:+.3f} (0.000) |" in text


def test_the_page_shows_the_records():
    records = json.loads(DATA.read_text())
    tables = Ladder(Config(), Records(DATA), records[0]["about"]).tables()
    assert markdown(tables) in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains(name):
    """In 60 steps, two exchanges of the local methods, to less than a uniform guess (5.5 nats)."""
    text = Text("stdlib", None, 8)
    entry = METHODS[name]
    trainer = Trainer(text, 1, 16, entry.method, entry.optimizer, workers=2, steps=60, warm_up=6)
    run = trainer.run(0.016, 0, 2)
    assert run["loss"] < run["losses"][0]
    assert run["loss"] < 5
    assert run["received"][-1] == pytest.approx(60 * run["bytes_per_step"])
    assert trainer._step._cache_size() == 1
