"""Runs that are stopped and resumed: bit for bit, with another number of workers, or refused."""

import dataclasses
import json
import shutil
import signal

import jax
import numpy as np
import pytest

import jaxcomm as jc
from configs.methods import PlumpDp
from jaxcomm.state import is_per_worker
from tests.train.runs import DCT_DP, METHODS, Told, assert_same_bits, files, metrics, run
from train.checkpoints import Checkpoints
from train.methods import run_name
from train.tables import display_name


@pytest.fixture(scope="module")
def stopped_at_5(tmp_path_factory):
    """The folder of a run of 4 workers that was stopped after step 5, and the run; copy it before going on."""
    out = tmp_path_factory.mktemp("stopped")
    return out, run(out, stop_after=5)


@pytest.fixture
def stopped(stopped_at_5, tmp_path):
    """A copy of the folder of `stopped_at_5`."""
    return shutil.copytree(stopped_at_5[0], tmp_path / "copy")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])  # SIGTERM: tests/train/test_main.py
def test_signals(number, tmp_path, capfd):
    class Signalled(Told):
        def update(self, step, *values):
            if step == 3:
                signal.raise_signal(number)
            if step == at_once:
                signal.raise_signal(number)

    before, at_once = signal.getsignal(number), None
    assert run(tmp_path, told=Signalled()).finished is False
    assert len(metrics(tmp_path)) == 4 == Checkpoints(tmp_path / "dct_dp" / "checkpoints").last()
    assert signal.getsignal(number) is before
    if number == signal.SIGINT:
        assert capfd.readouterr().err == "train: saves after this step, and ends; another Ctrl-C ends at once\n"
        at_once = 3
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "again", told=Signalled())
        assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("case", "stops"),
    [
        ("dct_dp", [1]),
        ("dct_dp", [11]),
        ("dct_dp", [3, 8]),
        ("dct_dp, drained", [7]),
        ("dct_dp, all dense", [5]),
        ("topk", [7]),
        ("plump_dp", [1, 6]),
        ("dgc", [2]),  # in its warm-up
        ("slim_dp", [5]),  # between two exchanges
        ("local_sgd", [6]),
        ("local_sgd, streaming", [6]),  # a fragment was exchanged, and is not merged yet
    ],
)
def test_bit_for_bit(case, stops, uninterrupted, tmp_path):
    method, (folder, whole) = METHODS[case], uninterrupted(case)
    for stop in stops:
        part = run(tmp_path, method, stop_after=stop, resume=stop != stops[0])
        assert (part.finished, part.summary.steps) == (False, stop)
        assert [line["step"] for line in metrics(tmp_path, method)] == list(range(1, stop + 1))
    progress = Told()
    resumed = run(tmp_path, method, progress, resume=True)
    assert resumed.finished
    assert_same_bits(resumed.state, whole.state)
    assert resumed.losses == whole.losses[stops[-1] :]
    assert resumed.evaluations == whole.evaluations
    assert metrics(tmp_path, method) == metrics(folder, method)
    assert progress.messages == [f"{display_name(run_name(method))}: resumed after step {stops[-1]}."]


def test_a_delayed_run(tmp_path):
    """Those of the last step, of every worker. A run without the delay is another run."""
    whole = run(tmp_path / "whole", METHODS["topk"], delay=1)
    run(tmp_path / "part", METHODS["topk"], delay=1, stop_after=5)
    with pytest.raises(ValueError, match=r"settings that it began with.*delay 1 \(now None\)"):
        run(tmp_path / "part", METHODS["topk"])
    resumed = run(tmp_path / "part", METHODS["topk"], delay=1)
    assert_same_bits(resumed.state, whole.state)
    assert any(np.any(rows) for rows in jax.tree.leaves(resumed.state.opt_state.gradients))


@pytest.mark.slow
def test_residuals_and_thresholds_matter(uninterrupted, stopped_at_5):
    """So that the tests of resumed runs could fail: there are residuals and old thresholds to lose."""
    _, whole = uninterrupted("dct_dp")
    _, early = stopped_at_5
    current, early_state = whole.state.opt_state[0], early.state.opt_state[0]
    for state in (current, early_state):
        residual, threshold = np.asarray(state.residual.rows), np.asarray(state.memory.threshold.rows)
        assert residual.shape[0] == threshold.shape[0] == 4
        assert np.all(np.any(residual != 0, axis=1))
        assert np.all(threshold > 0)
        assert len({row.tobytes() for row in residual}) == 4
    lines = metrics(uninterrupted("dct_dp, drained")[0])
    assert {line["step"] <= 7 for line in lines if line["drained"]} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["slim_dp", "local_sgd"])
def test_local_state_matters(case, uninterrupted):
    """Parameters, momentum and residual have a row per worker, and all rows differ."""
    _, whole = uninterrupted(case)
    for part in (whole.state.params, whole.state.opt_state[0], whole.state.opt_state[-1]):
        nodes = [node for node in jax.tree.leaves(part, is_leaf=is_per_worker) if is_per_worker(node)]
        rows = [np.asarray(row) for node in nodes for row in jax.tree.leaves(node)]
        assert rows
        assert all(len(row) == 4 for row in rows)
    # In step 12 all have pulled the core, or the whole model: other parameters and the momentum differ.
    momentum = np.asarray(whole.state.opt_state[0].trace[1]["dense1"]["kernel"].rows)
    assert len({row.tobytes() for row in momentum}) == 4


@pytest.mark.parametrize("lines", [[6, 7, 8], [6, 6]])
def test_later_metrics_are_dropped(lines, stopped, uninterrupted):
    path, wrong = stopped / "dct_dp" / "metrics.jsonl", {"loss": -1.0, "test_loss": 0.0, "test_accuracy": 1.0}
    last = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:
        for step in lines:
            file.write(json.dumps(last | wrong | {"step": step}) + "\n")
    resumed = run(stopped, resume=True)
    assert metrics(stopped) == metrics(uninterrupted("dct_dp")[0])
    assert resumed.evaluations == uninterrupted("dct_dp")[1].evaluations


@pytest.mark.parametrize(("kept", "got"), [([], "its end in the place of step 1"), ([1, 2, 4, 5], "step 4 in")])
def test_steps_that_are_gone(kept, got, stopped):
    """The bytes of a run are those of all its steps."""
    path = stopped / "dct_dp" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[step - 1] for step in kept))
    with pytest.raises(ValueError, match=f"metrics.jsonl must have a line for every step until 5; got {got}"):
        run(stopped, resume=True)
    assert path.read_text().count("\n") == len(kept)


def test_a_partial_line_is_dropped(stopped, uninterrupted):
    """A process that is killed may leave half a line."""
    with (stopped / "dct_dp" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    run(stopped, resume=True)
    assert metrics(stopped) == metrics(uninterrupted("dct_dp")[0])


def test_checkpoints_follow_metrics(monkeypatch, tmp_path):
    """Otherwise a run that is killed, and resumed from it, would lack lines for good."""
    saved, save = {}, Checkpoints.save

    def spy(self, step, *arguments):
        saved[step] = [line["step"] for line in metrics(tmp_path, PlumpDp())]
        save(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", spy)
    run(tmp_path, PlumpDp(), checkpoint_every=4, eval_every=4)
    assert saved == {step: list(range(1, step + 1)) for step in (4, 8, 12)}


@pytest.mark.slow
def test_a_checkpoint_in_the_middle(tmp_path, uninterrupted):
    """The step that follows a save reuses the state's memory."""
    run(tmp_path, checkpoint_every=1)
    folder = tmp_path / "dct_dp" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"11", "12"}
    shutil.rmtree(folder / "12")
    resumed = run(tmp_path)
    assert len(resumed.losses) == 1
    assert_same_bits(resumed.state, uninterrupted("dct_dp")[1].state)


def test_a_finished_run(tmp_path, uninterrupted):
    folder, whole = uninterrupted("dct_dp")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    before = files(tmp_path)
    progress = Told()
    rerun = run(tmp_path, told=progress, resume=True)
    assert rerun.finished
    assert progress.messages[1] == "dct_dp: nothing is left to do; --steps 24 goes on from here."
    assert progress.updates[0][:2] == (12, whole.losses[-1])
    assert rerun.losses == []
    assert rerun.evaluations == whole.evaluations
    assert (rerun.summary.steps, rerun.summary.accuracy) == (12, whole.summary.accuracy)
    assert_same_bits(rerun.state, whole.state)
    assert files(tmp_path) == before


def test_a_stop_in_the_past(stopped, stopped_at_5):
    part = run(stopped, stop_after=3, resume=True)
    assert (part.finished, part.summary.steps, part.losses) == (False, 5, [])
    assert_same_bits(part.state, stopped_at_5[1].state)
    assert len(metrics(stopped)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dct_dp", "topk"])
def test_summaries(case, uninterrupted, tmp_path):
    run(tmp_path, METHODS[case], stop_after=7)
    summary = run(tmp_path, METHODS[case], resume=True).summary
    expected = uninterrupted(case)[1].summary
    timeless = {"seconds": 0.0, "seconds_per_step": None}
    assert dataclasses.replace(summary, **timeless) == dataclasses.replace(expected, **timeless)


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (4, 3)])
def test_another_number_of_workers(old, new, stopped_at_5, stopped, uninterrupted, tmp_path):
    out, before = (stopped, stopped_at_5[1]) if old == 4 else (tmp_path, run(tmp_path, workers=old, stop_after=5))
    progress = Told()
    resized = run(out, told=progress, workers=new, stop_after=5)  # no step: as the checkpoint was read
    early_state, current = (np.asarray(state.opt_state[0].residual.rows) for state in (before.state, resized.state))
    assert (early_state.shape[0], current.shape[0]) == (old, new)
    np.testing.assert_allclose(
        current.mean(axis=0), early_state.mean(axis=0), rtol=1e-5, atol=1e-6 * np.abs(early_state).max()
    )
    assert bool(resized.state.opt_state[0].memory.due)
    assert_same_bits(resized.state.params, before.state.params)
    assert_same_bits(resized.state.opt_state[1:], before.state.opt_state[1:])
    (message,) = progress.messages
    assert message.startswith("dct_dp: resumed after step 5. ")
    assert f"{old} workers and the run {new}" in message
    assert "residuals were averaged" in message
    assert "thresholds are refreshed" in message
    ended = run(out, workers=new)
    assert ended.finished
    assert not ended.state.opt_state[0].memory.due
    # The rows are the same in every step: only what each worker sent of them differs.
    whole = uninterrupted("dct_dp")[1].losses
    assert np.abs(np.subtract(ended.losses, whole[5:])).max() < (max(whole) - min(whole)) / 4
    assert [line["step"] for line in metrics(out)] == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["slim_dp", "local_sgd"])
def test_local_runs_on_other_workers(case, tmp_path):
    method, progress = METHODS[case], Told()
    before = run(tmp_path, method, stop_after=6)
    resized = run(tmp_path, method, progress, workers=2, stop_after=6)  # no step: as the checkpoint was read
    early_state, current = (state.params.rows[1]["dense1"]["kernel"] for state in (before.state, resized.state))
    assert (len(early_state), len(current)) == (4, 2)
    np.testing.assert_allclose(np.mean(current, axis=0), np.mean(early_state, axis=0), rtol=1e-5, atol=1e-7)
    assert_same_bits(jc.state.global_params(resized.state), jc.state.global_params(before.state))
    (message,) = progress.messages
    assert "4 workers and the run 2" in message
    assert message.endswith("The workers' own parameters and optimizers were averaged as well.")
    ended = run(tmp_path, method, workers=2)
    assert ended.finished
    assert ended.losses[-1] < before.losses[0] - 0.05


@pytest.mark.slow
def test_empty_residuals(tmp_path):
    method = METHODS["dct_dp, all dense"]
    before = run(tmp_path, method, stop_after=2)
    resized = run(tmp_path, method, workers=2, stop_after=3)
    assert resized.state.opt_state[0].residual.rows.shape == (2, 0)
    assert before.state.opt_state[0].residual.rows.shape == (4, 0)
    assert np.isfinite(resized.losses[0])


def test_a_longer_run(tmp_path):
    run(tmp_path, stop_after=5)
    progress = Told()
    longer = run(tmp_path, told=progress, steps=15)
    assert (longer.finished, longer.summary.steps) == (True, 15)
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 16))
    (message,) = progress.messages
    assert "The run of 12 steps is now one of 15, and so is its schedule." in message


def test_a_damaged_checkpoint(tmp_path):
    """And writes the damaged checkpoint's step again."""
    whole = run(tmp_path / "whole")
    run(tmp_path / "run", stop_after=9, checkpoint_every=4)
    folder = tmp_path / "run" / "dct_dp" / "checkpoints"
    steps = sorted(int(path.name) for path in folder.iterdir())
    (folder / str(steps[-1]) / "data" / "metadata").write_text('{"step": 1}')
    progress = Told()
    result = run(tmp_path / "run", told=progress, checkpoint_every=4)
    assert_same_bits(result.state, whole.state)
    first, second = progress.messages
    message = (
        f"dct_dp: the checkpoint of step {steps[-1]} is passed over, ValueError: data/metadata is not what was saved"
    )
    assert first.startswith(message)
    assert second == f"dct_dp: resumed after step {steps[-2]}."
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (DCT_DP, {"learning_rate": 0.2}, "learning_rate 0.1 (now 0.2)"),
        (DCT_DP, {"seed": 1}, "seed 0 (now 1)"),
        (DCT_DP, {"steps": 10}, "steps 12 (now 10)"),
        (DCT_DP, {"global_batch": 48, "workers": 2}, "global_batch 24 (now 48)"),
        (dataclasses.replace(DCT_DP, sparsity=0.8), {}, "method.sparsity 0.9 (now 0.8)"),
        (
            dataclasses.replace(DCT_DP, drain_every=9),
            {"momentum": 0.5},
            "momentum 0.9 (now 0.5), method.drain_every None",
        ),
    ],
)
def test_other_settings(method, changes, message, stopped):
    before = files(stopped)
    with pytest.raises(ValueError, match="A run must go on with the settings that it began with") as raised:
        run(stopped, method, **changes)
    assert message in str(raised.value)
    assert "--out" in str(raised.value)
    assert files(stopped) == before
