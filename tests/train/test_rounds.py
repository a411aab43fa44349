"""The trainer as one worker of rounds."""

import json
import os
import signal
import threading
import time

import jax
import numpy as np
import optax
import pytest

from configs.experiment import check
from train.__main__ import main, parse
from train.data.loader import TrainBatches
from train.rounds import InnerStep, _at_step

OPTIONS = ["--steps", "6", "--warmup-steps", "1", "--global-batch", "24", "--workers", "3", "--quorum", "1"]
METHOD = ["method:sparse-loco", "--method.steps", "3", "--method.overlap", "1"]


def start(tmp_path, name, *more, overlap="1"):
    options = [*OPTIONS, "--rounds", str(tmp_path / "store"), "--worker", name, "--out", str(tmp_path / "out"), *more]
    return main(["digits", *options, "--json", str(tmp_path / f"{name}.json"), *METHOD[:-1], overlap])


def test_a_worker_leaves_and_another_ends_the_run(tmp_path, started, capsys):
    assert start(tmp_path, "a", "--stop-after", "4") == 0
    assert "a began at the start, took 4 local steps" in (said := capsys.readouterr().out)
    assert "go on with --worker a" in said
    assert (tmp_path / "store" / "workers" / "a").exists()
    assert start(tmp_path, "b") == 0
    assert "worker b joins in round 1" in (said := capsys.readouterr().out)
    assert "all rounds are over" in said
    records = [json.loads((tmp_path / f"{name}.json").read_text())[0] for name in "ab"]
    assert [record["rounds"] for record in records] == [1, 2]
    assert [record["counted"] for record in records] == [1, 1]
    assert 0 <= records[1]["accuracy"] <= 1
    lines = (tmp_path / "out" / "digits" / "sparse_loco" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    manifest = json.loads((tmp_path / "store" / "manifests" / "00000001").read_text())
    assert [(member["header"]["worker"], member["header"]["rows"]) for member in manifest["members"]] == [("b", 24)]


def test_a_worker_that_returns_goes_on_with_its_data(tmp_path, started, monkeypatch):
    read, next_batch = [], TrainBatches.__next__

    def recording(batches):
        read.append(batches.step)
        return next_batch(batches)

    monkeypatch.setattr(TrainBatches, "__next__", recording)
    assert start(tmp_path, "a", "--stop-after", "4") == 0
    assert start(tmp_path, "a", "--stop-after", "1") == 0
    assert read == [0, 1, 2, 3, 3]  # three steps a round, and the second life begins in the second


@pytest.mark.parametrize(
    ("other", "setting"),
    [
        (["--learning-rate", "0.7"], "learning_rate"),
        (["--label-smoothing", "0.1"], "label_smoothing"),
        (["--global-batch", "48"], "global_batch"),
    ],
)
def test_workers_that_have_other_settings(tmp_path, started, capsys, other, setting):
    assert start(tmp_path, "a", "--stop-after", "1") == 0
    assert start(tmp_path, "b", "--seed", "7", "--stop-after", "1") == 0
    assert start(tmp_path, "c", *other) == 2
    assert f"settings['{setting}'] must be that of the run in the store" in capsys.readouterr().err
    settings = json.loads((tmp_path / "store" / "settings").read_text())
    assert settings["settings['dataset']"] == "digits"
    assert settings["settings['architecture']"] == "cnn {}"


@pytest.mark.slow
def test_accuracy_needs_running_statistics(tmp_path, started, capsys):
    """They are a worker's own: a life without steps has none."""
    options = ["--steps", "4", "--warmup-steps", "0", "--global-batch", "32", "--workers", "2", "--quorum", "1"]
    options += ["--rounds", str(tmp_path / "store"), "--out", str(tmp_path), "--worker", "a"]
    options += ["--json", str(tmp_path / "a.json"), "method:local-sgd", "--method.steps", "2", "--method.overlap", "0"]
    assert main(["resnet_digits", *options]) == 0
    assert "(with the running statistics of these 4 steps)" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())[0]["accuracy"] >= 0
    assert main(["resnet_digits", *options]) == 0
    assert "took 0 local steps" in (said := capsys.readouterr().out)
    assert "Accuracy of the global model: not known, as its running statistics are of a worker's own steps" in said
    assert "accuracy" not in json.loads((tmp_path / "a.json").read_text())[0]


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_a_signal_ends_a_worker_that_waits_for_its_round(tmp_path, started, capsys, monkeypatch, overlap):
    """Alone, without a quorum; what it has done waits in the store."""
    monkeypatch.setattr("train.rounds.SHORT_WAIT", 0.2)

    def end():
        payload = tmp_path / "store" / "rounds" / "00000000" / "payload" / "a"
        while not payload.exists():
            time.sleep(0.05)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    assert start(tmp_path, "a", "--quorum", "2", overlap=overlap) == 0
    assert f"took {3 + int(overlap)} local steps" in (said := capsys.readouterr().out)
    assert "left in round 0; go on with --worker a" in said
    assert (tmp_path / "store" / "workers" / "a").exists()


def test_a_worker_that_diverges_stops(tmp_path, started, capsys):
    assert start(tmp_path, "a", "--learning-rate", "1e37", "--warmup-steps", "0", "--max-skipped", "2") == 2
    assert "--max-skipped 2; got steps " in capsys.readouterr().err


def test_the_learning_rate_falls_in_every_step(tmp_path, started, monkeypatch):
    """Also where steps of the next round are taken while a round is under way."""
    counts, call = [], InnerStep.__call__

    def counting(step, params, state, batch):
        result = call(step, params, state, batch)
        nodes = jax.tree.leaves(result[1].opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState))
        counts.append(next(int(node.count) for node in nodes if isinstance(node, optax.ScaleByScheduleState)))
        return result

    monkeypatch.setattr(InnerStep, "__call__", counting)
    assert start(tmp_path, "a", "--steps", "12", overlap="2") == 0
    assert counts == sorted(set(counts))
    assert counts[:3] == [1, 2, 3]


def test_the_learning_rate_is_that_of_the_round():
    """A joiner's schedule comes to the run's step; Adam's own count does not."""
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(optax.linear_schedule(1.0, 0.0, 10)))
    state = _at_step(tx.init({"w": np.zeros(3)}), 5)
    assert [int(leaf) for leaf in jax.tree.leaves(state) if np.ndim(leaf) == 0] == [0, 5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stages", "2"], "--stages 2"),
        (["--slices", "2"], "--slices 2"),
        (["--model-parallel", "2"], "--model-parallel 2"),
        (["--delay", "1"], "--delay 1"),
        (["--resume"], "--resume True"),
        (["--restarts", "1"], "--restarts 1"),
        (["--steps", "7"], "--steps 7"),
    ],
)
def test_options_that_do_not_go_with_rounds(options, said):
    experiment = parse(["digits", "--rounds", "store", *OPTIONS, *options, *METHOD])
    with pytest.raises(ValueError, match=f"--rounds must .*{said}"):
        check(experiment, 1)


@pytest.mark.parametrize(
    "option", ["--eval-every", "--checkpoint-every", "--connect-timeout", "--peer-timeout", "--beam"]
)
def test_options_that_a_worker_would_ignore(option):
    with pytest.raises(ValueError, match=f"--rounds must go without .*{option} 7"):
        parse(["digits", "--rounds", "store", option, "7", *OPTIONS, *METHOD])
    parse(["digits", option, "7"])


def test_rounds_have_no_baseline():
    with pytest.raises(ValueError, match=r"--rounds must go without .*; got --no-baseline. Leave"):
        parse(["digits", "--rounds", "store", "--no-baseline", *OPTIONS, *METHOD])


def test_methods_without_local_steps():
    with pytest.raises(ValueError, match="--rounds must have local steps; got method:topk"):
        check(parse(["digits", "--rounds", "store", "method:topk"]), 1)
    with pytest.raises(ValueError, match="--worker must go with --rounds; got 'a'"):
        check(parse(["digits", "--worker", "a"]), 1)
    with pytest.raises(ValueError, match="--quorum must go with --rounds; got -3"):
        check(parse(["digits", "--quorum", "-3"]), 1)
    with pytest.raises(ValueError, match=r"--rounds must .*2 processes"):
        check(parse(["digits", "--rounds", "store", *OPTIONS, *METHOD]), 2)
