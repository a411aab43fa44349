"""Runs of a few steps in this process: resumed, resized, refused, skipped."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import jaxcomm as jc
import train.loop
from configs.experiment import DctDp, Experiment, PlumpDp, TopK, check
from models.cnn import Cnn
from train.checkpoints import Checkpoints
from train.data import eval_batches
from train.methods import make_exchange, method_name
from train.processes import Processes

# 12 steps with refreshes after 0, 5 and 10: in between, a run lives on thresholds and residuals of earlier steps. The
# batch divides by 2, 3 and 4 workers. Some of the tensors are smaller than dense_below.
EXPERIMENT = Experiment(
    name="few",
    dataset="digits",
    steps=12,
    learning_rate=0.1,
    warmup_steps=2,
    weight_decay=1e-3,
    global_batch=24,
    eval_every=6,
    checkpoint_every=100,
)
DCT_DP = DctDp(sparsity=0.9, life_span=5, dense_below=512)
METHODS = {
    "dct_dp": DCT_DP,
    "dct_dp, drained": dataclasses.replace(DCT_DP, drain_every=3),
    "dct_dp, all dense": dataclasses.replace(DCT_DP, dense_below=10**6),  # its residual and thresholds are empty
    "topk": TopK(sparsity=0.9),
    "plump_dp": PlumpDp(),
}


class Told:
    """Progress that keeps what it is told."""

    def __init__(self):
        self.messages, self.updates = [], []

    def say(self, message):
        self.messages.append(message)

    def update(self, step, loss, accuracy, bytes_per_step):
        self.updates.append((step, loss, accuracy, bytes_per_step))


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Every run compiles the same step, which takes longer than the run itself."""
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def run(out, method=DCT_DP, told=None, **changes):
    experiment = dataclasses.replace(EXPERIMENT, out=out, **changes)
    return train.loop.train(experiment, method, Processes(), told or Told())


def metrics(out, method=DCT_DP):
    path = out / method_name(method) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same_bits(state, expected):
    pairs = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True)
    for (path, leaf), other in pairs:
        leaf, other = np.asarray(leaf), np.asarray(other)
        name = jax.tree_util.keystr(path)
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype), name
        assert leaf.tobytes() == other.tobytes(), name


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A function from a case of METHODS to its folder and its run, made once."""
    runs = {}

    def get(case):
        if case not in runs:
            out = tmp_path_factory.mktemp("uninterrupted")
            runs[case] = out, run(out, METHODS[case])
        return runs[case]

    return get


@pytest.fixture(scope="module")
def stopped_at_5(tmp_path_factory):
    """The folder of a run of 4 workers that was stopped after step 5, and the run; copy it before going on."""
    out = tmp_path_factory.mktemp("stopped")
    return out, run(out, stop_after=5)


@pytest.fixture
def stopped(stopped_at_5, tmp_path):
    """A copy of the folder of `stopped_at_5`."""
    return shutil.copytree(stopped_at_5[0], tmp_path / "copy")


@pytest.mark.parametrize(
    ("case", "stops"),
    [
        ("dct_dp", [1]),
        ("dct_dp", [5]),
        ("dct_dp", [7]),
        ("dct_dp", [11]),
        ("dct_dp", [3, 8]),
        ("dct_dp, drained", [7]),
        ("dct_dp, all dense", [5]),
        ("topk", [7]),
        ("plump_dp", [1, 6]),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(case, stops, uninterrupted, tmp_path):
    method, (folder, whole) = METHODS[case], uninterrupted(case)
    for stop in stops:
        part = run(tmp_path, method, stop_after=stop, resume=stop != stops[0])
        assert (part.finished, part.summary.steps) == (False, stop)
        assert [line["step"] for line in metrics(tmp_path, method)] == list(range(1, stop + 1))
    told = Told()
    resumed = run(tmp_path, method, told, resume=True)
    assert resumed.finished
    assert_same_bits(resumed.state, whole.state)
    assert resumed.losses == whole.losses[stops[-1] :]
    assert resumed.evaluations == whole.evaluations
    assert metrics(tmp_path, method) == metrics(folder, method)
    assert told.messages == [f"{method_name(method)}: resumed after step {stops[-1]}."]


def test_a_run_depends_on_residuals_and_stale_thresholds(uninterrupted, stopped_at_5):
    """What the resumed runs are compared on is there to be lost."""
    _, whole = uninterrupted("dct_dp")
    _, early = stopped_at_5
    now, then = whole.state.opt_state[0], early.state.opt_state[0]
    for state in (now, then):
        residual, threshold = np.asarray(state.residual.rows), np.asarray(state.threshold.rows)
        assert residual.shape[0] == threshold.shape[0] == 4
        assert np.all(np.any(residual != 0, axis=1))
        assert np.all(threshold > 0)
        assert len({row.tobytes() for row in residual}) == 4
    lines = metrics(uninterrupted("dct_dp, drained")[0])
    assert {line["step"] <= 7 for line in lines if line["drained"]} == {True, False}


@pytest.mark.parametrize("case", ["dct_dp", "topk", "plump_dp"])
def test_training_learns(case, uninterrupted):
    losses = uninterrupted(case)[1].losses
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("lines", [[6, 7, 8], [6, 6]])
def test_metrics_after_the_checkpoint_are_dropped(lines, stopped, uninterrupted):
    with (stopped / "dct_dp" / "metrics.jsonl").open("a") as file:
        for step in lines:
            file.write(json.dumps({"step": step, "loss": -1.0, "test_loss": 0.0, "test_accuracy": 1.0}) + "\n")
    resumed = run(stopped, resume=True)
    assert metrics(stopped) == metrics(uninterrupted("dct_dp")[0])
    assert resumed.evaluations == uninterrupted("dct_dp")[1].evaluations


def test_a_line_that_was_cut_short_is_dropped(stopped, uninterrupted):
    """A process that is killed may leave half a line."""
    with (stopped / "dct_dp" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    run(stopped, resume=True)
    assert metrics(stopped) == metrics(uninterrupted("dct_dp")[0])


def test_no_checkpoint_is_ahead_of_the_metrics(monkeypatch, tmp_path):
    """Or a run that is killed, and resumed from it, would lack lines for good."""
    written, save = {}, Checkpoints.save

    def spy(self, step, *arguments):
        written[step] = [line["step"] for line in metrics(tmp_path, PlumpDp())]
        save(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", spy)
    run(tmp_path, PlumpDp(), checkpoint_every=4, eval_every=4)
    assert written == {step: list(range(1, step + 1)) for step in (4, 8, 12)}


def test_a_checkpoint_in_the_middle_outlives_the_steps_after_it(tmp_path, uninterrupted):
    """The step that follows a save reuses the state's memory."""
    run(tmp_path, checkpoint_every=1)
    folder = tmp_path / "dct_dp" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"11", "12"}
    shutil.rmtree(folder / "12")
    resumed = run(tmp_path)
    assert len(resumed.losses) == 1
    assert_same_bits(resumed.state, uninterrupted("dct_dp")[1].state)


def test_a_finished_run_is_only_read(tmp_path, uninterrupted):
    folder, whole = uninterrupted("dct_dp")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    before = files(tmp_path)
    again = run(tmp_path, resume=True)
    assert again.finished
    assert again.losses == []
    assert again.evaluations == whole.evaluations
    assert (again.summary.steps, again.summary.accuracy) == (12, whole.summary.accuracy)
    assert_same_bits(again.state, whole.state)
    assert files(tmp_path) == before


def test_a_stop_that_is_past_stays_where_the_run_is(stopped, stopped_at_5):
    part = run(stopped, stop_after=3, resume=True)
    assert (part.finished, part.summary.steps, part.losses) == (False, 5, [])
    assert_same_bits(part.state, stopped_at_5[1].state)
    assert len(metrics(stopped)) == 5


@pytest.mark.parametrize("case", ["dct_dp", "topk"])
def test_the_summary_of_a_resumed_run_is_that_of_the_whole_run(case, uninterrupted, tmp_path):
    run(tmp_path, METHODS[case], stop_after=7)
    summary = run(tmp_path, METHODS[case], resume=True).summary
    expected = uninterrupted(case)[1].summary
    assert dataclasses.replace(summary, seconds=0.0) == dataclasses.replace(expected, seconds=0.0)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (4, 3)])
def test_another_number_of_workers_keeps_the_update_that_is_owed(old, new, stopped_at_5, stopped, tmp_path):
    out, before = (stopped, stopped_at_5[1]) if old == 4 else (tmp_path, run(tmp_path, workers=old, stop_after=5))
    told = Told()
    resized = run(out, told=told, workers=new, stop_after=5)  # no step: as the checkpoint was read
    then, now = (np.asarray(state.opt_state[0].residual.rows) for state in (before.state, resized.state))
    assert (then.shape[0], now.shape[0]) == (old, new)
    np.testing.assert_allclose(now.mean(axis=0), then.mean(axis=0), rtol=1e-5, atol=1e-6 * np.abs(then).max())
    assert bool(resized.state.opt_state[0].due)
    assert_same_bits(resized.state.params, before.state.params)
    assert_same_bits(resized.state.opt_state[1:], before.state.opt_state[1:])
    (message,) = told.messages
    assert message.startswith("dct_dp: resumed after step 5. ")
    assert f"{old} workers and the run {new}" in message
    assert "residuals were averaged" in message
    assert "thresholds are renewed" in message
    ended = run(out, workers=new)
    assert ended.finished
    assert not ended.state.opt_state[0].due
    assert np.all(np.isfinite(ended.losses))
    assert ended.losses[-1] < before.losses[0] - 0.3
    assert [line["step"] for line in metrics(out)] == list(range(1, 13))


def test_empty_residuals_survive_another_number_of_workers(tmp_path):
    method = METHODS["dct_dp, all dense"]
    before = run(tmp_path, method, stop_after=2)
    resized = run(tmp_path, method, workers=2, stop_after=3)
    assert resized.state.opt_state[0].residual.rows.shape == (2, 0)
    assert before.state.opt_state[0].residual.rows.shape == (4, 0)
    assert np.isfinite(resized.losses[0])


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        (DCT_DP, {"learning_rate": 0.2}, "learning_rate 0.1 (now 0.2)"),
        (DCT_DP, {"seed": 1}, "seed 0 (now 1)"),
        (DCT_DP, {"steps": 20}, "steps 12 (now 20)"),
        (DCT_DP, {"global_batch": 48, "workers": 2}, "global_batch 24 (now 48)"),
        (dataclasses.replace(DCT_DP, sparsity=0.8), {}, "sparsity 0.9 (now 0.8)"),
        (dataclasses.replace(DCT_DP, drain_every=9), {"momentum": 0.5}, "momentum 0.9 (now 0.5), drain_every None"),
    ],
)
def test_other_settings_are_refused_by_both_values(method, changes, said, stopped):
    before = files(stopped)
    with pytest.raises(ValueError, match="A run goes on with the settings that it began with") as raised:
        run(stopped, method, **changes)
    assert said in str(raised.value)
    assert "--out" in str(raised.value)
    assert files(stopped) == before


class WithNan:
    """Training batches with one NaN, in worker 1's rows of the third batch."""

    def __init__(self, batches):
        self._batches = batches

    def __next__(self):
        batch = next(self._batches)
        if self._batches.step == 3:
            batch["image"][7, 4, 4, 0] = np.nan
        return batch

    def __getattr__(self, name):
        return getattr(self._batches, name)


@pytest.mark.parametrize("method", [DCT_DP, PlumpDp()], ids=method_name)
def test_a_nan_skips_its_step_and_the_run_goes_on(method, monkeypatch, tmp_path):
    make = train.loop.train_batches
    monkeypatch.setattr(train.loop, "train_batches", lambda *args, **kwargs: WithNan(make(*args, **kwargs)))
    before, after, part = (run(tmp_path, method, stop_after=stop) for stop in (2, 3, 4))
    assert_same_bits(after.state.params, before.state.params)
    assert_same_bits(after.state.opt_state[1:], before.state.opt_state[1:])
    assert (after.summary.skipped, part.summary.skipped) == (1, 1)
    assert int(after.state.step) == 3
    resumed = run(tmp_path, method)
    assert resumed.finished
    assert [line["skipped"] for line in metrics(tmp_path, method)] == [0, 0, 1] + [0] * 9
    losses = [line["loss"] for line in metrics(tmp_path, method)]
    assert [np.isfinite(loss) for loss in losses] == [True, True, False] + [True] * 9
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(resumed.state))
    assert int(resumed.state.step) == 12


@pytest.mark.parametrize("case", ["dct_dp", "dct_dp, drained", "topk", "plump_dp"])
def test_bytes_are_those_of_the_exchange_and_two_scalars(case, uninterrupted):
    folder, whole = uninterrupted(case)
    model = Cnn((8, 8, 1), 10, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    report = jc.wire_report(optax.chain(make_exchange(METHODS[case]), optax.sgd(0.1)), params, 4)
    scalars = 2 * 3 / 4 * 2 * 4  # loss and accuracy
    usual, most = report.received + scalars, report.received_at_most + scalars
    expected, total = [], 0
    for line in metrics(folder, METHODS[case]):
        total += most if line["drained"] else usual
        expected.append((line["step"], total))
    assert [(line["step"], line["bytes_received"]) for line in metrics(folder, METHODS[case])] == expected
    assert [(e.step, e.bytes_received) for e in whole.evaluations] == [expected[5], expected[11]]
    assert whole.summary.bytes_per_step == usual
    if case == "plump_dp":
        assert usual == 2 * 3 / 4 * 4 * 151_306 + scalars
    else:
        assert whole.summary.ratio_to_dense > 7
    assert whole.summary.ratio_to_dense == pytest.approx(2 * 3 / 4 * 4 * 151_306 / usual)
    assert whole.summary.ratio_to_bfloat16 == pytest.approx(whole.summary.ratio_to_dense / 2)
    assert (expected[-1][1] > 12 * usual) == (case == "dct_dp, drained")


def test_test_accuracy_is_the_models_on_the_test_split(uninterrupted):
    """The evaluation pads the last batch, and is spread over the workers."""
    _, whole = uninterrupted("dct_dp")
    model = Cnn((8, 8, 1), 10, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_get(whole.state.params))
    batches = eval_batches("digits", global_batch=360)
    loss = right = 0
    for batch in batches:
        logits = model(batch["image"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        loss += float((each * batch["mask"]).sum())
        right += int(((logits.argmax(-1) == batch["label"]) * batch["mask"]).sum())
    last = whole.evaluations[-1]
    assert last.accuracy == whole.summary.accuracy == right / batches.num_examples
    np.testing.assert_allclose(last.loss, loss / batches.num_examples, rtol=1e-5)


def test_progress_is_told_of_every_step(tmp_path):
    told = Told()
    ended = run(tmp_path, PlumpDp(), told, stop_after=3)
    assert told.messages == []
    assert told.updates == [
        (line["step"], line["loss"], line["accuracy"], ended.summary.bytes_per_step)
        for line in metrics(tmp_path, PlumpDp())
    ]


def test_one_worker_trains_without_traffic(tmp_path):
    ended = run(tmp_path, workers=1, stop_after=2)
    assert ended.summary.bytes_per_step == 0
    assert ended.summary.ratio_to_dense is None
    assert [line["bytes_received"] for line in metrics(tmp_path)] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "processes", "said"),
    [
        ({"workers": 0}, 1, "--workers is at least 1, got 0"),
        ({"steps": 0}, 1, "--steps is at least 1, got 0"),
        ({"eval_every": 0}, 1, "--eval-every is at least 1"),
        ({"checkpoint_every": -1}, 1, "--checkpoint-every is at least 1, got -1"),
        ({"global_batch": 26}, 1, "--global-batch is a multiple of --workers, got 26 for 4: try 28"),
        ({}, 3, "--workers is a multiple of the number of processes, got 4 for 3"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, processes, said, tmp_path):
    experiment = dataclasses.replace(EXPERIMENT, out=tmp_path / "out", **changes)
    for refuse in (lambda e, p: check(e, p.count), lambda e, p: train.loop.train(e, DCT_DP, p, Told())):
        with pytest.raises(ValueError, match=said):
            refuse(experiment, Processes(0, processes))
    assert not (tmp_path / "out").exists()
