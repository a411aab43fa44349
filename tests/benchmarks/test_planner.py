"""The planner's benchmark: what its summary counts, and the source of the table of costs."""

import itertools
import json

import pytest

from benchmarks.ladder import METHODS
from benchmarks.planner import COMPUTED, COSTS, MEASURED, Accuracy, accuracy, ladder_accuracy, problem, summary
from benchmarks.shapes import MODELS, with_biases
from configs import CONFIGS
from configs.methods import PlumpDp, TopK
from jaxcomm.planner.advice import DENSE
from jaxcomm.steps.batch import check_batch
from tests.benchmarks.places import run
from train.loop import describe
from train.seeds import label


def row(method, predicted, median, faster_predicted, faster_measured):
    times = {"ms_predicted": predicted, "ms_low": 0.9 * predicted, "ms_high": 1.1 * predicted, "ms_median": median}
    ratios = {"faster_predicted": faster_predicted, "faster_measured": faster_measured}
    return {"method": method, "hosts": 2, "rate": "1gbit", "error": predicted / median - 1} | times | ratios


def test_cells():
    rows = [
        row(DENSE, 100, 100, 1.0, 1.0),
        row("near", 109, 100, 0.9, 0.95),
        row("far", 50, 100, 2.0, 1.0 - 0.04),
        row("wrong", 50, 200, 2.0, 0.5),
    ]
    assert summary(rows) == (
        "2 of 4 cells are predicted within 10%, 2 lie in their range. Faster or slower than dense in bfloat16 is told "
        "wrongly in 2 of 3 cells, by more than 5% in: wrong K=2 1gbit."
    )


def test_known_accuracy():
    assert json.loads(COSTS.read_text())["accuracy"] == accuracy()


LOSSES = {"dense": (2.0, 2.1, 2.2), "topk": (2.15, 2.3, 2.45), "powersgd": (2.0,)}


def ladder_records(width=56, **more):
    """Runs of a rung at three rates, of which the middle one is best: nats above dense 0.15, 0.2 and 0.25."""
    about = {"length": 256, "batch": 4}
    for name, losses in (LOSSES | more).items():
        key = {"of": "run", "about": about, "width": width, "method": name, "setting": label(METHODS[name].method)}
        trials = [(0.016, seed, loss) for seed, loss in enumerate(losses)] + [(0.008, 0, 3.0), (0.032, 0, 3.0)]
        yield from (key | {"rate": rate, "seed": seed, "loss": loss} for rate, seed, loss in trials)


def test_interval_of_accuracy(tmp_path, monkeypatch):
    """Points below dense of 1, 2 and 3: the mean is 2, its standard error 1/sqrt(3), and Student's t 4.303.

    Nats are 0.05 apart: a twentieth of it, around 0.2. powersgd lacks seeds.
    """

    def runs(method, *accuracies):
        about = describe(CONFIGS["fashion"], method)
        for seed, percent in enumerate(accuracies):
            yield {
                "of": "run",
                "about": about | {"seed": seed, "steps": 2000},
                "scores": {"accuracy": percent / 100, "loss": 1.0},
            }

    methods = TopK(sparsity=0.99, residual_dtype="bfloat16"), TopK(sparsity=0.98), PlumpDp(p=10)
    records = [*runs(PlumpDp(), 90, 91, 92), *(run for method in methods for run in runs(method, 0, 0, 0))]
    records += [run for method in MEASURED.values() for run in reversed([*runs(method, 89, 89, 89)])]
    monkeypatch.setattr("benchmarks.planner.ACCURACY", tmp_path / "runs.json")
    monkeypatch.setattr("benchmarks.planner.LADDER", tmp_path / "ladder.json")
    fields = {"bytes_per_step": 1.0, "dense_bytes": 1.0, "overflow_per_step": 0.0, "skipped": 0, "parameters": 1}
    (tmp_path / "runs.json").write_text(json.dumps([record | fields for record in records]))
    expected = {
        "change": -2.0,
        "low": -4.48,
        "high": 0.48,
        "unit": "points",
        "on": "Fashion-MNIST, 2,000 steps, 3 seeds",
    }
    (tmp_path / "ladder.json").write_text(json.dumps([*ladder_records()]))
    expected_nats = {"change": 0.2, "low": 0.076, "high": 0.324, "unit": "nats"}
    on = "a GPT of 153,776 parameters on 3.1 MB of text, 3 seeds"
    nats = {"topk(0.99)": expected_nats | {"on": on}}
    assert accuracy() == dict.fromkeys(MEASURED, expected) | nats
    assert (Accuracy(**expected).loss, Accuracy(**nats["topk(0.99)"]).loss) == (None, 0.076)
    assert str(Accuracy(**expected)) == "-2.00 points (95%: -4.48 to +0.48), Fashion-MNIST, 2,000 steps, 3 seeds"


def test_methods_are_compared_on_one_rung(tmp_path, monkeypatch):
    """The second rung has topk alone: quant_dp, which the first has too, would be compared with another model's."""
    monkeypatch.setattr("benchmarks.planner.LADDER", tmp_path / "ladder.json")
    for both, size in (({}, "153,776"), ({"quant_dp": (2.0, 2.1, 2.2)}, "200,320")):
        records = [*ladder_records(56, quant_dp=(2.0, 2.1, 2.2)), *ladder_records(64, **both)]
        (tmp_path / "ladder.json").write_text(json.dumps(records))
        known = ladder_accuracy()
        assert known.keys() == {"topk(0.99)", "quant_dp(8)"}
        assert all(size in row["on"] for row in known.values())


@pytest.mark.parametrize("shapes", ["mlp", "1000", "twin"])
def test_problems(shapes, monkeypatch):
    import jax

    monkeypatch.setitem(MODELS, "twin", lambda: with_biases([(3, 3, 2, 4), (36, 20), (20, 10)]))
    monkeypatch.setitem(COMPUTED, "twin", 2)
    loss, params, batch = problem(shapes, 2)
    check_batch(batch, 2)
    rows = jax.tree.map(lambda leaf: leaf[: len(leaf) // 2], batch)
    value, gradient = jax.value_and_grad(loss)(params, rows, ways={})
    assert abs(float(value)) < 1e4
    assert all(leaf.any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_a_plan_on_hosts(tmp_path):
    """Host 0 plans, and both hosts train by its plan."""
    options = {"--hosts": "2", "--rate": "none", "--shapes": "1e4", "--methods": "sign", "--steps": "1"}
    path = tmp_path / "cells.json"
    run("planner", *itertools.chain(*options.items()), "--seconds", "1", "--plan", "--json", str(path))
    rows = {row["method"]: row for row in json.loads(path.read_text())}
    assert rows["plan"]["uses"]
    assert rows["plan"]["ms_median"] > 0
    assert rows["sign"]["uses"] == ""
    assert all(row["day"] for row in rows.values())
