"""Runs of models that are split, or have running statistics, go on bit for bit, or not at all."""

import jax
import numpy as np
import pytest

from configs.experiment import Architecture, BoundaryFields
from configs.methods import PlumpDp
from tests.train.runs import DCT_DP, MLP, PIPELINE, Told, assert_same_bits, files, metrics, run
from train.methods import run_name

pytestmark = pytest.mark.usefixtures("compile_once")

RESNET = Architecture("resnet", {"layers": (1,), "width": 4, "stem": "cifar"})
# Of what a run is made, and after which of its 6 steps it is stopped. Thresholds are renewed after 0 and 5.
CASES = {
    "pipeline": (DCT_DP, PIPELINE | {"boundary": BoundaryFields(0.5)}, 3),
    # What was not sent back waits for the row at the same place of the next batch.
    "boundary's residual": (PlumpDp(), PIPELINE | {"boundary": BoundaryFields(0.75, "topk_gradient")}, 2),
    # A projection that is drawn anew in every step.
    "sketch": (PlumpDp(), PIPELINE | {"boundary": BoundaryFields(0.5, "sketch")}, 3),
    "running statistics": (DCT_DP, {"architecture": RESNET, "workers": 2, "rows_per_group": 4}, 4),
    "slices": (DCT_DP, {"architecture": MLP, "slices": 2}, 3),
}


def six(out, case, told=None, **changes):
    method, fields, _ = CASES[case]
    return run(out, method, told, **{"steps": 6, "eval_every": 3} | fields | changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function from a case to its run, and to a folder in which it was stopped; made once."""
    made = {}

    def get(case):
        if case not in made:
            out = tmp_path_factory.mktemp("split")
            whole = six(out / "whole", case)
            made[case] = whole, six(out / "stopped", case, stop_after=CASES[case][2]), out
        return made[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(case, runs):
    whole, stopped, out = runs(case)
    method, fields, stop = CASES[case]
    boundary = fields.get("boundary")
    assert (stopped.finished, stopped.summary.steps) == (False, stop)
    told = Told()
    resumed = six(out / "stopped", case, told)
    assert resumed.finished
    assert told.messages == [f"{run_name(method, boundary)}: resumed after step {stop}."]
    assert_same_bits(resumed.state, whole.state)
    assert resumed.losses == whole.losses[stop:]
    assert resumed.evaluations == whole.evaluations
    assert metrics(out / "stopped", method, boundary) == metrics(out / "whole", method, boundary)


def test_what_is_compared_is_there_to_be_lost(runs):
    """Residuals, of the gradients of workers and stages and of the boundary, and statistics."""
    residual = np.asarray(runs("pipeline")[1].state.opt_state[0].residual.rows)
    assert residual.shape[:2] == (2, 2)  # stages, workers
    assert np.all(np.any(residual != 0, axis=-1))
    ((waiting,),) = runs("boundary's residual")[1].state.model_state["boundaries"].rows
    assert waiting.shape == (2, 2, 2, 6, 16)  # stages, workers, micro-batches, rows, features
    sent_back, first = np.asarray(waiting)
    assert np.any(first != 0) != np.any(sent_back != 0)  # one end of the boundary keeps it
    kept = first if np.any(first != 0) else sent_back
    assert np.all(np.any(kept != 0, axis=(-1, -2)))
    assert np.all(np.sum(kept != 0, axis=-1) <= 12)  # the 4 largest of 16 were sent
    whole, stopped, _ = runs("running statistics")
    for early, late in zip(*(jax.tree.leaves(each.state.model_state) for each in (stopped, whole)), strict=True):
        assert np.any(np.asarray(early) != np.asarray(late))
    shares = np.asarray(runs("slices")[1].state.opt_state[0].exchange.residual.rows)
    assert shares.shape[0] == 4
    assert np.all(np.any(shares != 0, axis=-1))


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        (
            "pipeline",
            {"workers": 1},
            r"a checkpoint of 2 workers for 1 on a mesh with \{'stage': 2\}: .* --workers 2",
        ),
        ("boundary's residual", {"workers": 1}, r"not for stages or slices, got a checkpoint of 2 workers for 1"),
        ("slices", {"workers": 2}, r"a checkpoint of 4 workers for 2 on a mesh with \{'slice': 2\}: .* --workers 4"),
        ("pipeline", {"stages": 3}, r"with stages 2 \(now 3\): give the same settings"),
        ("pipeline", {"micro_batches": 1}, r"with micro_batches 2 \(now 1\)"),
        ("pipeline", {"cuts": (1,)}, r"with cuts None \(now \[1\]\)"),
        ("slices", {"slices": 1}, r"with slices 2 \(now 1\)"),
        ("running statistics", {"rows_per_group": 6}, r"with rows_per_group 4 \(now 6\)"),
    ],
)
def test_another_mesh_is_refused_and_nothing_changed(case, changes, said, runs):
    _, _, out = runs(case)
    before = files(out)
    with pytest.raises(ValueError, match=said):
        six(out / "stopped", case, **changes)
    assert files(out) == before


def test_running_statistics_go_on_with_another_number_of_workers(tmp_path):
    """Of plain workers there is one set of statistics, that of all."""
    case = "running statistics"
    before = six(tmp_path, case, stop_after=3)
    resized = six(tmp_path, case, workers=1, stop_after=3)  # no step: as the checkpoint was read
    assert_same_bits(resized.state.model_state, before.state.model_state)
    ended = six(tmp_path, case, workers=1)
    assert ended.finished
    assert ended.losses[-1] < before.losses[0] - 0.1
