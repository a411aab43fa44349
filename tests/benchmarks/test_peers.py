"""The comparison with PyTorch: its job, and this library's side of it in the lab. PyTorch is not installed here."""

import subprocess
import sys

import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest

from benchmarks import rounds
from benchmarks.peers import torchft_diloco
from benchmarks.peers.__main__ import Config, check, draw, main, seconds_to, segments_of, summary
from benchmarks.peers.job import Job, accuracy, initial_weights


def small_job(steps=3, rows=4):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (20, 1024), np.uint8)
    return Job(
        method="dense",
        learning_rate=0.01,
        segment=2,
        weights=initial_weights(0),
        images=images,
        labels=rng.integers(0, 10, 20),
        test_images=images[:7],
        test_labels=np.arange(7),
        order=rng.integers(0, 20, (steps, 2 * rows)),
    )


def reference(job):
    """SGD with momentum on all rows of each step, in float64: the losses before each step, and the weights."""
    weights = [array.astype(np.float64) for array in job.weights]
    traces = [np.zeros_like(array) for array in weights]
    losses = []
    for rows in job.order:
        outputs = [job.images[rows] / 255]
        for index in range(0, len(weights), 2):
            z = outputs[-1] @ weights[index] + weights[index + 1]
            outputs.append(z if index + 2 == len(weights) else np.maximum(z, 0))
        shares = np.exp(outputs[-1] - outputs[-1].max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        labels = np.eye(10)[job.labels[rows]]
        losses.append(-np.log((shares * labels).sum(axis=1)).mean())
        flow = (shares - labels) / len(rows)
        gradients = [np.zeros(0)] * len(weights)
        for index in reversed(range(0, len(weights), 2)):
            gradients[index], gradients[index + 1] = outputs[index // 2].T @ flow, flow.sum(axis=0)
            flow = (flow @ weights[index].T) * (outputs[index // 2] > 0)
        for index, gradient in enumerate(gradients):
            traces[index] = 0.9 * traces[index] + gradient
            weights[index] = weights[index] - job.learning_rate * traces[index]
    return losses, weights


def test_jobs_return(tmp_path):
    job = small_job()
    job.save(tmp_path / "job.npz")
    copy = Job.load(tmp_path / "job.npz")
    assert (copy.method, copy.learning_rate, copy.segment) == ("dense", 0.01, 2)
    for name in ("images", "labels", "test_images", "test_labels", "order"):
        np.testing.assert_array_equal(getattr(copy, name), getattr(job, name))
    assert len(copy.weights) == 8
    for array, array_of_job in zip(copy.weights, job.weights, strict=True):
        np.testing.assert_array_equal(array, array_of_job)


def test_parameters():
    assert sum(array.size for array in initial_weights(0)) == 3 * (1024 * 1024 + 1024) + 1024 * 10 + 10 == 3_159_050


def test_accuracy():
    weights = initial_weights(3)
    images = np.random.default_rng(0).integers(0, 256, (50, 1024), np.uint8)
    x = images / 255
    for index in (0, 2, 4):
        x = np.maximum(x @ weights[index] + weights[index + 1], 0)
    labels = (x @ weights[6] + weights[7]).argmax(axis=1)
    labels[:20] = (labels[:20] + 1) % 10
    assert accuracy(weights, images, labels) == pytest.approx(0.6)


@pytest.mark.slow
def test_two_hosts(tmp_path):
    from benchmarks.netlab import Lab

    job = small_job(steps=4)
    job.save(tmp_path / "job.npz")
    with Lab(2, "none") as lab:
        results = lab.run([sys.executable, "-m", "benchmarks.peers.jax_host", str(tmp_path / "job.npz")])
        isolated = lab.isolated
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    hosts = [segments_of(result.stdout) for result in results]
    losses, weights = reference(job)
    for segments in hosts:
        assert [segment["steps"] for segment in segments] == [1, 2, 1]
        np.testing.assert_allclose([segment["loss"] for segment in segments], np.take(losses, [0, 2, 3]), rtol=1e-4)
    assert hosts[0][-1]["accuracy"] == accuracy(
        [array.astype(np.float32) for array in weights], job.test_images, job.test_labels
    )
    assert "accuracy" not in hosts[1][-1]
    if isolated:  # the dense all-reduce of two hosts brings each host one gradient a step
        assert hosts[0][1]["received"] == pytest.approx(2 * 3_159_050 * 4, rel=0.03)


def test_bars(tmp_path, monkeypatch):
    figures, savefig = [], matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda f, *a, **k: (figures.append(f), savefig(f, *a, **k))
    )
    rounds = {"torch:dense": [9.0, 7.0, 8.0], "jaxcomm:topk": [3.0, None, 4.0], "jaxcomm:sign": [None, None, 5.0]}
    draw(tmp_path / "new" / "figure.png", {"2 hosts": rounds}, 84.0)
    ((axes,),) = [figure.axes for figure in figures]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["jaxcomm, sign", "DDP, dense", "jaxcomm, topk"]
    assert [bar.get_width() for bar in axes.patches] == [0.0, 8.0, 4.0]  # a median that is not known is no bar
    assert [line.get_xdata().tolist() for line in axes.lines] == [[5.0], [9.0, 7.0, 8.0], [3.0, 4.0]]
    assert [text.get_text().strip() for text in axes.texts] == ["not reached", "8.0 s", "4.0 s"]
    assert axes.get_title() == "84% in 4.0 s with jaxcomm, topk, 8.0 s with DDP, dense (2 hosts)"
    assert matplotlib.image.imread(tmp_path / "new" / "figure.png").std() > 0.05


def test_refusals(tmp_path):
    def message(**changes):
        config = Config(**changes)
        with pytest.raises(ValueError, match="--") as error:
            check(config, config.methods.split(","))
        return str(error.value)

    assert "got 'dense'" in message(methods="dense")
    assert "--torch must name the Python of an environment with torch for torch:dense; got None" in message(
        methods="torch:dense"
    )
    assert "got 'mnist'" in message(methods="jaxcomm:dense", data="mnist")
    assert "--figure must have test accuracies" in message(methods="jaxcomm:dense", figure=tmp_path / "figure.png")
    assert "--steps at least 2" in message(methods="jaxcomm:dense", steps=1)
    assert "jaxcomm:sgd" in message(methods="jaxcomm:sgd")
    command = [sys.executable, "-m", "benchmarks.peers", "--methods", "torch:dense", "--torch", str(tmp_path / "none")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr.startswith("peers: --torch must name the Python")


def segment(seconds, accuracy, steps=10, loss=1.0, received=5000.0):
    return {"steps": steps, "seconds": seconds, "loss": loss, "received": received, "accuracy": accuracy}


def test_records_of_another_congestion_control(tmp_path, monkeypatch, capsys):
    """What is there is used; what is missing is run, and refused if the lab has another control than the records."""
    path, control = tmp_path / "peers.json", []

    def run(*_):
        segment = {"seconds": 1.0, "steps": 10, "received": None, "loss": 1.0}
        return {**control[0], "segments": [segment, segment], "aborts": 0}

    monkeypatch.setattr("benchmarks.peers.__main__.run", run)
    options = {"rounds": 1, "steps": 11, "json": path}
    for about, methods in (({}, "jaxcomm:dense"), ({"control": "bbr"}, "jaxcomm:dense")):
        control[:] = [about]
        main(Config(methods=methods, **options))
    assert "1gbit" in capsys.readouterr().out
    before = path.read_text()
    with pytest.raises(ValueError, match="one congestion control; got bbr and unknown"):
        main(Config(methods="jaxcomm:dense,jaxcomm:topk", **options))
    assert path.read_text() == before
    main(Config(methods="jaxcomm:dense,jaxcomm:topk", delay="50ms", **options))  # of other links, and so other records
    out = capsys.readouterr().out
    assert "1gbit, delay 50ms" in out
    assert "control bbr" in out


def test_ratios_and_missed_targets():
    def run(method, seed, seconds, target):
        segments = [segment(9.0, 0.1, steps=1), segment(seconds, 0.5), segment(seconds, target)]
        return {"method": method, "seed": seed, "segments": segments, "aborts": seed}

    runs = [
        run("torch:dense", 0, 2.0, 0.9),
        run("torch:dense", 1, 4.0, 0.9),
        run("jaxcomm:sign", 0, 1.0, 0.9),
        run("jaxcomm:sign", 1, 1.0, 0.6),
    ]
    dense, sign = (summary(method, runs, 85.0) for method in ("torch:dense", "jaxcomm:sign"))
    assert (dense["ms"], dense["ms_min"], dense["ms_max"]) == (300.0, 200.0, 400.0)
    assert sign["times_faster"] == 3.0  # of 2 and 4
    assert (dense["s_to_85%"], sign["s_to_85%"]) == (6.0, None)
    assert sign["kB_received"] == 0.5
    assert (sign["first_s"], sign["aborts"]) == (9.0, 1)
    assert sign["accuracy_%"] == pytest.approx(75.0)
    assert seconds_to(runs[2], 85.0) == 2.0


def test_rounds_of_torchft_that_counted(tmp_path):
    def sync(committed, healed):
        return {"committed": committed, "healed": healed}

    # A worker that took another's state sends that one's change, and one whose round was not committed loses its own.
    syncs = [sync(True, False), sync(True, True), sync(False, False), sync(True, False)]
    row = torchft_diloco.row_of({"worker": "c"}, syncs, alive=12.0, counted_seconds=3.0)
    assert row == {"worker": "c", "rounds": 2, "healed": 1, "failed": 1, "seconds": 12.0, "goodput": 0.5}
    config = torchft_diloco.Config(seconds=0.5)
    paces = [torchft_diloco.pace(config, kind, "b") for kind in torchft_diloco.KINDS]
    assert paces == [(0.1, 30), (pytest.approx(0.3), 30), (pytest.approx(0.3), 10)]
    torchft_diloco.write_jobs(config, "faults", tmp_path)
    with np.load(tmp_path / "d.npz") as job:
        assert job["x"].shape == (5, rounds.ROWS, 64)
        np.testing.assert_array_equal(job["y"][0], next(rounds.batches("d"))["y"])
        np.testing.assert_array_equal(job["w2"], rounds.params0()["w2"])


def test_torchft_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match="--torch must name the Python of an environment with torchft; got None"):
        torchft_diloco.main(torchft_diloco.Config())
    (tmp_path / "torchft_lighthouse").touch()
    with pytest.raises(ValueError, match="--runs must be some of undisturbed, faults, tuned; got often"):
        torchft_diloco.main(torchft_diloco.Config(torch=tmp_path / "python", runs="often"))
