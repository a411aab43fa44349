"""Runs of models that are split, or have running statistics, resume bit for bit, or are refused."""

import dataclasses
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs.experiment import Architecture, BoundaryFields
from configs.methods import LocalSgd, PlumpDp
from tests.train.runs import DCT_DP, EXPERIMENT, MLP, PIPELINE, Told, assert_same_bits, files, metrics
from train.job import make_job
from train.loop import train
from train.methods import run_name
from train.processes import Processes

RESNET = Architecture("resnet", {"layers": (1,), "width": 4, "stem": "cifar"})
# Of 24 rows two of its three layers multiply late.
WIDE = Architecture("mlp", {"hidden": (64, 64), "dropout": 0.2})
# What a run is made of, and after which of its 6 steps it is stopped. Thresholds are renewed after 0 and 5.
CASES = {
    "pipeline": (DCT_DP, PIPELINE | {"boundary": BoundaryFields(0.75)}, 3),
    "running statistics": (DCT_DP, {"architecture": RESNET, "workers": 2, "rows_per_group": 4}, 4),
    "slices": (DCT_DP, {"architecture": MLP, "slices": 2}, 3),
    "slices of shards": (DCT_DP, {"architecture": MLP, "workers": 4, "slices": 2, "fsdp": 2}, 3),
    "late": (PlumpDp(), {"architecture": WIDE, "workers": 2, "dense_layers": "late"}, 3),
    "shards that train on their own": (LocalSgd(steps=2), {"architecture": MLP, "workers": 2, "fsdp": 2}, 3),
    "layers in slices": (DCT_DP, {"architecture": MLP, "workers": 2, "dense_layers": "split"}, 3),
}


def six(out, case, told=None, job=None, **changes):
    method, fields, _ = CASES[case]
    experiment = dataclasses.replace(EXPERIMENT, **{"out": out, "steps": 6, "eval_every": 3} | fields | changes)
    job = job or make_job(experiment, method)
    return train(experiment, method, Processes(), told or Told(), job)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function from a case to its job, its run, and one that was stopped, with their folder; made once."""
    cache = {}

    def get(case):
        if case not in cache:
            out, (method, fields, stop) = tmp_path_factory.mktemp("split"), CASES[case]
            experiment = dataclasses.replace(EXPERIMENT, steps=6, **fields)
            job = make_job(experiment, method)
            whole, partial = six(out / "whole", case, job=job), six(out / "stopped", case, job=job, stop_after=stop)
            cache[case] = SimpleNamespace(job=job, whole=whole, stopped=partial, out=out)
        return cache[case]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bit_for_bit(case, runs):
    pair, (method, fields, stop) = runs(case), CASES[case]
    split = (fields.get("boundary"), fields.get("dense_layers", "exchange"))
    assert (pair.stopped.finished, pair.stopped.summary.steps) == (False, stop)
    progress = Told()
    resumed = six(pair.out / "stopped", case, progress, pair.job)
    assert resumed.finished
    assert progress.messages == [f"{run_name(method, *split)}: resumed after step {stop}."]
    assert_same_bits(resumed.state, pair.whole.state)
    assert resumed.losses == pair.whole.losses[stop:]
    assert resumed.evaluations == pair.whole.evaluations
    assert metrics(pair.out / "stopped", method, *split) == metrics(pair.out / "whole", method, *split)


@pytest.mark.slow
def test_statistics_matter(runs):
    """There are residuals of the workers' and stages' gradients, and statistics."""
    state = runs("pipeline").stopped.state
    residual = np.asarray(state.opt_state[0].residual.rows)
    assert residual.shape[:2] == (2, 2)  # stages, workers
    assert np.all(np.any(residual != 0, axis=-1))
    shares = np.asarray(runs("slices").stopped.state.opt_state[0].memory.residual.rows)
    assert len(shares) == 4
    assert np.all(np.any(shares != 0, axis=-1))
    pair = runs("running statistics")
    early, late = (jax.tree.leaves(run.state.model_state) for run in (pair.stopped, pair.whole))
    assert early
    assert not any(np.array_equal(*pair) for pair in zip(early, late, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("pipeline", {"stages": 3}, r"with stages 2 \(now 3\). Give the same settings"),
        ("pipeline", {"micro_batches": 1}, r"with micro_batches 2 \(now 1\)"),
        ("pipeline", {"cuts": (1,)}, r"with cuts None \(now \[1\]\)"),
        ("slices", {"slices": 1}, r"with workers_per_slice 2 \(now None\)"),
        ("slices", {"workers": 8}, r"with workers_per_slice 2 \(now 4\)"),
        ("running statistics", {"rows_per_group": 6}, r"with rows_per_group 4 \(now 6\)"),
    ],
)
def test_another_mesh(case, changes, message, runs):
    out = runs(case).out
    before = files(out)
    with pytest.raises(ValueError, match=message):
        six(out / "whole", case, **changes)
    assert files(out) == before


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("pipeline", {"workers": 1}),
        ("pipeline", {"workers": 4}),
        ("slices", {"workers": 6, "slices": 3}),
        ("slices", {"workers": 8, "slices": 4}),
        ("layers in slices", {"workers": 4}),
        ("late", {"workers": 1}),  # which alone would multiply no layer late
        ("late", {"workers": 4}),
    ],
)
def test_another_number_of_workers(case, changes, runs, tmp_path):
    """Every stage and share keeps the mean of the workers' residuals, and the model stays the same."""
    pair = runs(case)
    folder, before, workers = (
        shutil.copytree(pair.out / "whole", tmp_path / "copy"),
        pair.whole,
        changes["workers"],
    )
    progress = Told()
    resized = six(folder, case, progress, **changes)  # no step: as the checkpoint was read
    assert resized.losses == []
    assert f"and the run {workers}: their residuals were averaged into {workers} rows" in "".join(progress.messages)
    assert_same_bits(resized.state.params, before.state.params)

    def owed(state):  # stages or shares first
        exchange = state.opt_state[0]
        if case == "slices":
            rows = np.asarray(exchange.memory.residual.rows)  # of the workers of every share, one after the other
            return rows.reshape(len(rows) // 2, 2, -1).mean(0)
        if case == "pipeline":
            return np.asarray(exchange.residual.rows).mean(1)
        return np.ones(1)  # layers that are sharded, and dense exchanges, owe nothing

    debt = owed(before.state)
    assert np.any(debt != 0)
    np.testing.assert_allclose(owed(resized.state), debt, rtol=0, atol=1e-6 * np.abs(debt).max())
    trained = six(folder, case, steps=8, **changes)  # layers that multiply late are those of the first start
    assert np.all(np.isfinite(trained.losses))
    assert len(trained.losses) == 2
    if changes == {"workers": 1} and case == "late":
        assert "2 of 3 dense layers multiply late" in progress.messages[0]


@pytest.mark.slow
def test_statistics_of_other_workers(runs, tmp_path):
    """Plain workers share one set of statistics."""
    case = "running statistics"
    folder, before = shutil.copytree(runs(case).out / "whole", tmp_path / "copy"), runs(case).whole
    resized = six(folder, case, workers=1)  # no step: as the checkpoint was read
    assert resized.losses == []
    assert_same_bits(resized.state.model_state, before.state.model_state)
    assert_same_bits(resized.state.params, before.state.params)
