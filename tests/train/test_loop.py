"""Runs of a few steps in this process: whether they learn, and what they report, refuse and skip."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxcomm as jc
import train.loop
from configs.methods import PlumpDp
from models.cnn import Cnn
from tests.train.runs import DCT_DP, EXPERIMENT, METHODS, Told, assert_same_bits, metrics, run
from train.data import eval_batches
from train.job import make_job
from train.methods import make_chain, run_name
from train.processes import Processes


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dct_dp", "topk", "plump_dp", "dgc", "slim_dp", "local_sgd"])
def test_training_learns(case, uninterrupted):
    losses = uninterrupted(case)[1].losses
    # Workers on their own have 6 rows a step.
    assert losses[-1] < losses[0] - (0.05 if METHODS[case].period else 0.2)


class WithNan:
    """Training batches with one NaN each, in worker 1's rows, at some steps."""

    def __init__(self, batches, steps):
        self._batches, self._steps = batches, steps

    def __next__(self):
        batch = next(self._batches)
        if self._batches.step in self._steps:
            batch["image"][7, 4, 4, 0] = np.nan
        return batch

    def __getattr__(self, name):
        return getattr(self._batches, name)


@pytest.fixture
def damage(monkeypatch):
    """A function that puts NaN into the batches of some steps."""
    make = train.loop.train_batches

    def change(steps):
        monkeypatch.setattr(train.loop, "train_batches", lambda *args, **kwargs: WithNan(make(*args, **kwargs), steps))

    return change


def saved(folder, method=DCT_DP):
    return sorted(int(path.name) for path in (folder / method.name / "checkpoints").iterdir())


def test_skips_in_a_row(damage, tmp_path):
    """The last checkpoint from before them is kept, and lines are valid JSON."""
    damage(range(5, 100))
    progress = Told()
    with pytest.raises(
        ValueError, match=r"fewer skipped steps in a row than --max-skipped 4; got steps 5 to 8"
    ) as error:
        run(tmp_path, told=progress, checkpoint_every=2, max_skipped=4)
    assert len(progress.updates) == 8
    assert (
        f"of dct_dp, whose gradients were not finite (the last loss before them: {progress.updates[3][1]:.4g})"
        in str(error.value)
    )
    assert "the checkpoint of step 4 is kept. Most often" in str(error.value)
    assert saved(tmp_path) == [2, 4]
    text = (tmp_path / "dct_dp" / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]
    assert [line["loss"] is None for line in lines] == [False] * 4 + [True] * 4
    # With repaired data, it goes on from there. With 3 such steps in a row, it does not stop.
    damage([5, 6, 7, 9, 10, 11])
    resumed = run(tmp_path, told=progress, checkpoint_every=2, max_skipped=4)
    assert progress.messages == ["dct_dp: resumed after step 4."]
    assert resumed.finished
    assert resumed.summary.skipped == 6


@pytest.mark.slow
def test_skips_over_a_resume(damage, tmp_path):
    damage(range(3, 100))
    run(tmp_path, max_skipped=4, stop_after=5)
    with pytest.raises(ValueError, match="got steps 3 to 6 of dct_dp"):
        run(tmp_path, max_skipped=4)


def test_checkpoints_wait_for_good_steps(damage, tmp_path):
    damage([4, 5])
    run(tmp_path, checkpoint_every=4, stop_after=7)
    assert saved(tmp_path) == [6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("method", [DCT_DP, PlumpDp()], ids=run_name)
def test_a_nan_is_skipped(method, damage, tmp_path):
    damage([3])
    before, after, part = (run(tmp_path, method, stop_after=stop) for stop in (2, 3, 4))
    assert_same_bits(after.state.params, before.state.params)
    assert_same_bits(after.state.opt_state[1:], before.state.opt_state[1:])
    assert (after.summary.skipped, part.summary.skipped) == (1, 1)
    assert int(after.state.step) == 3
    resumed = run(tmp_path, method)
    assert resumed.finished
    assert [line["skipped"] for line in metrics(tmp_path, method)] == [0, 0, 1] + [0] * 9
    losses = [line["loss"] for line in metrics(tmp_path, method)]
    assert [loss is not None for loss in losses] == [True, True, False] + [True] * 9
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(resumed.state))
    assert int(resumed.state.step) == 12


# By case of METHODS: the steps that cost the most, and those in which nothing is exchanged.
MOST = {"dgc": [1, 2, 3], "slim_dp": [4, 8, 12]}
QUIET = {"slim_dp": [1, 3, 5, 7, 9, 11], "local_sgd": [1, 2, 3, 5, 6, 7, 9, 10, 11]}


@pytest.mark.parametrize("case", ["dct_dp", "dct_dp, drained", "topk", "plump_dp", "dgc", "slim_dp", "local_sgd"])
def test_bytes(case, uninterrupted):
    folder, whole = uninterrupted(case)
    model = Cnn((8, 8, 1), 10, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    report = jc.wire_report(make_chain(EXPERIMENT, METHODS[case]), params, 4)
    scalars = 0 if case in QUIET else 2 * 3 / 4 * 2 * 4  # loss and accuracy; workers that train alone report their own
    usual, most = report.received_in_exchange + scalars, report.received_at_most + scalars
    lines, expected, total = metrics(folder, METHODS[case]), [], 0
    for line in lines:
        if line["step"] in QUIET.get(case, []):
            assert line["sent"] == 0
            total += scalars
        else:
            total += most if line["drained"] or line["step"] in MOST.get(case, []) else usual
        expected.append((line["step"], total))
    assert [(line["step"], line["bytes_received"]) for line in lines] == expected
    assert [(e.step, e.bytes_received) for e in whole.evaluations] == [expected[5], expected[11]]
    assert whole.summary.bytes_per_step == total / 12
    if case == "plump_dp":
        assert usual == 2 * 3 / 4 * 4 * 151_306 + scalars
    elif case in ("dct_dp", "topk", "local_sgd"):
        assert whole.summary.ratio_to_dense > 7
    assert whole.summary.ratio_to_dense == pytest.approx(2 * 3 / 4 * 4 * 151_306 / (total / 12))
    assert whole.summary.ratio_to_bfloat16 == pytest.approx(whole.summary.ratio_to_dense / 2)
    assert (total > 12 * usual) == (case in ("dct_dp, drained", "dgc", "slim_dp"))


@pytest.mark.slow
def test_bytes_of_fragments(uninterrupted):
    """The largest tensor is one fragment, all others another: each costs as much as by itself."""
    folder, _ = uninterrupted("local_sgd, streaming")
    params = nnx.to_pure_dict(nnx.state(Cnn((8, 8, 1), 10, rngs=nnx.Rngs(0)), nnx.Param))
    largest = params["blocks"][1]["dense1"].pop("kernel")
    parts = [jc.wire_report(jc.topk(0.9), part, 4).received for part in (largest, params)]
    expected = np.tile([0, parts[0], 0, parts[1]], 3)
    lines = metrics(folder, METHODS["local_sgd, streaming"])
    np.testing.assert_allclose([line["bytes_received"] for line in lines], np.cumsum(expected))
    assert [line["sent"] > 0 for line in lines] == [False, True] * 6


@pytest.mark.slow
def test_a_new_core(uninterrupted):
    lines = metrics(uninterrupted("slim_dp")[0], METHODS["slim_dp"])
    assert [line["step"] for line in lines if line["sent"] == 4 * 151_306] == MOST["slim_dp"]


@pytest.mark.parametrize("case", ["dct_dp", "slim_dp", "local_sgd"])
def test_test_accuracy(case, uninterrupted):
    """The evaluation pads the last batch, and is spread over the workers. Local workers are evaluated as merged."""
    _, whole = uninterrupted(case)
    model = Cnn((8, 8, 1), 10, rngs=nnx.Rngs(0))
    for block, params in jax.device_get(jc.state.global_params(whole.state)).items():
        nnx.update(model.blocks[block], params)
    batches = eval_batches("digits", global_batch=360)
    loss = right = 0
    for batch in batches:
        logits = model(batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        loss += float((losses * batch["mask"]).sum())
        right += int(((logits.argmax(-1) == batch["label"]) * batch["mask"]).sum())
    last = whole.evaluations[-1]
    assert last.accuracy == whole.summary.accuracy == right / batches.num_examples
    np.testing.assert_allclose(last.scores["loss"], loss / batches.num_examples, rtol=1e-5)


def test_progress(tmp_path):
    progress = Told()
    ended = run(tmp_path, PlumpDp(), progress, stop_after=3)
    assert progress.messages == []
    message = (
        f"{ended.summary.bytes_per_step:,.0f} bytes a step predicted; the compiled program sends them, and no more."
    )
    assert progress.proved == [f"dense (plump_dp): {message}"]
    assert progress.updates == [
        (line["step"], line["loss"], line["accuracy"], ended.summary.bytes_per_step)
        for line in metrics(tmp_path, PlumpDp())
    ]


@pytest.mark.slow
def test_one_worker(tmp_path):
    ended = run(tmp_path, workers=1, stop_after=2)
    assert ended.summary.bytes_per_step == 0
    assert ended.summary.ratio_to_dense is None
    assert [line["bytes_received"] for line in metrics(tmp_path)] == [0, 0]


@pytest.mark.slow
def test_seeds_share_a_job(tmp_path, uninterrupted):
    """A job that was compiled for one seed trains another, bit for bit like a job for that seed."""
    job = make_job(dataclasses.replace(EXPERIMENT, seed=7), DCT_DP)
    for seed in (7, 0):
        experiment = dataclasses.replace(EXPERIMENT, seed=seed, out=tmp_path / str(seed))
        ended = train.loop.train(experiment, DCT_DP, Processes(), Told(), job)
    assert_same_bits(ended.state, uninterrupted("dct_dp")[1].state)


@pytest.mark.slow
def test_averaged_models(tmp_path):
    ended = run(tmp_path, PlumpDp(p=2), stop_after=2)
    assert ended.summary.method == "plump_dp-p2"
    assert [path.name for path in tmp_path.iterdir()] == ["plump_dp-p2"]


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [
        ({"workers": 0}, 1, "--workers must be .*; got 0"),
        ({}, 3, "processes, .*; got 4 for 3"),
    ],
)
def test_bad_settings(changes, processes, message, tmp_path):
    experiment = dataclasses.replace(EXPERIMENT, out=tmp_path / "out", **changes)
    with pytest.raises(ValueError, match=message):
        train.loop.train(experiment, DCT_DP, Processes(0, processes), Told())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sizes", "axis", "device", "worker"),
    [
        ({"data": 4}, "data", 2, 2),
        ({"data": 2, "stage": 2}, "data", 3, 1),
        ({"slice": 2, "data": 2}, ("slice", "data"), 3, 3),
    ],
)
def test_a_copy_that_parted(sizes, axis, device, worker):
    mesh = jc.make_mesh(**sizes)

    def placed(copies):
        arrays = [jax.device_put(copy, losses) for copy, losses in zip(copies, mesh.devices.flat, strict=True)]
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.make_array_from_single_device_arrays(copies[0].shape, sharding, arrays)

    count = mesh.devices.size
    state = {"kernel": placed([np.ones((3, 5), np.float32)] * count), "bias": placed([np.zeros(5, np.float32)] * count)}
    job = SimpleNamespace(mesh=mesh, axis=axis)
    train.loop.check_replicas(job, state, "dct_dp", 9, None)
    copies = [np.ones((3, 5), np.float32) for _ in range(count)]
    copies[device][1, 2] = np.nextafter(np.float32(1), np.float32(2))
    message = (
        rf"other numbers on worker {worker} at \['kernel'\] after step 9 of dct_dp; the checkpoint of step 5 is kept"
    )
    with pytest.raises(ValueError, match=message):
        train.loop.check_replicas(job, state | {"kernel": placed(copies)}, "dct_dp", 9, 5)
