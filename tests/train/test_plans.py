"""Training by a plan: the advice writes it, a run executes it, and what it refuses."""

import dataclasses
import json

import jax
import pytest
from flax import nnx

from configs import CONFIGS
from configs.experiment import check
from jaxcomm.exchange import leaf_name
from models.functional import split
from train.__main__ import parse, run
from train.advice import advise_experiment
from train.architectures import make_model
from train.data import dataset_info
from train.plans import Watch, compare
from train.processes import Processes

SMALL = ["digits", "--workers", "2", "--steps", "4", "--eval-every", "4", "--warmup-steps", "1", "--no-baseline"]


def main(args):
    """Runs the command line on the devices of this process."""
    experiment = parse(args)
    check(experiment, 1)
    return run(experiment, Processes())


def plan_record(architecture):
    """A plan for a model of the digits that compresses only matrices."""
    info = dataset_info("digits", None)
    params = nnx.eval_shape(lambda: split(make_model(architecture, info, "float32", 0)).params)
    tensors = {
        leaf_name(path): (leaf.shape, "topk" if leaf.ndim > 1 else "dense")
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    return {
        "format": 1,
        "workers": 2,
        "cuts": [],
        "tensors": tensors,
        "exchanges": {
            "dense": {"method": "plump_dp", "options": {}},
            "topk": {"method": "topk", "options": {"sparsity": 0.9}},
        },
        "micro_batches": 1,
        "compute": 0.01,
        "boundaries": 0.0,
        "exchange_seconds": 0.002,
    }


@pytest.fixture
def plan_file(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_record(CONFIGS["digits"].architecture)))
    return file


@pytest.mark.slow
def test_a_run_by_a_plan(plan_file, tmp_path, capsys):
    args = [*SMALL, "--plan", str(plan_file), "--out", str(tmp_path / "runs")]
    assert main([*args, "--stop-after", "2"]) == 0
    assert "plan" in capsys.readouterr().out
    assert main([*args, "--resume"]) == 0
    assert "resumed after step 2" in capsys.readouterr().out
    record = json.loads(plan_file.read_text())
    record["exchanges"]["topk"]["options"]["sparsity"] = 0.5
    plan_file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"method\.exchanges"):  # another plan has other residuals
        main([*args, "--resume"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["late", "split"])
def test_dense_layers_of_a_plan(way, tmp_path, capsys):
    plan_file, record = tmp_path / "plan.json", plan_record(CONFIGS["alexnet_digits"].architecture)
    layers = {path.rpartition("/")[0] for path, (shape, _) in record["tensors"].items() if len(shape) == 2}
    late = sorted(layers)[:1]  # of the others the gradients are exchanged
    for path, (shape, _) in record["tensors"].items():
        layer, _, name = path.rpartition("/")
        if (way == "late" and layer in late) or (way == "split" and layer in layers and name == "kernel"):
            record["tensors"][path] = (shape, way)
    plan_file.write_text(json.dumps(record))
    args = ["alexnet_digits", *SMALL[1:], "--plan", str(plan_file), "--out", str(tmp_path / "runs")]
    with pytest.raises(ValueError, match=f"--dense-layers must be {way} by"):
        main(args)
    assert main([*args, "--dense-layers", way]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "bytes a step predicted; the compiled program sends them, and no more." in out
    assert way == "split" or f"1 of {len(layers)} dense layers multiply late" in out


def test_another_run(plan_file, tmp_path):
    args = [*SMALL, "--plan", str(plan_file), "--out", str(tmp_path / "runs")]
    for changes, message in (
        (["--workers", "4"], "A plan must be for 2 workers; got 4"),
        (["--stages", "2"], "--stages must be 1 by"),
        (["--compress", "kernel"], "A plan must be for all parameters"),
        (["--plan", str(tmp_path / "none.json")], "A plan must be a file"),
    ):
        with pytest.raises(ValueError, match=message):
            main([*args, *changes])
    assert not (tmp_path / "runs").exists()


def test_whole_models_alone():
    digits = CONFIGS["digits"]
    for change in (
        *({"stages": 2}, {"slices": 2}, {"dense_layers": "late"}, {"embeddings": "rows"}),
        *({"compress": "dense1"}, {"delay": 1}),  # another exchange, or another step
    ):
        ((name, value),) = change.items()
        said = f"--advise must be of workers that hold the whole.*got --{name.replace('_', '-')} {value}. Leave"
        with pytest.raises(ValueError, match=said):
            advise_experiment(dataclasses.replace(digits, **change))


@pytest.mark.slow
def test_advice_to_plan_to_run(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert main([*SMALL, "--advise", "--plan", str(file), "--json", str(tmp_path / "advice.json")]) in (0, 3)
    out = capsys.readouterr().out
    assert "verdict: " in out
    assert "--method dct_dp" in out
    assert {row["method"] for row in json.loads((tmp_path / "advice.json").read_text())["predictions"]} >= {"plump_dp"}
    assert main([*SMALL, "--plan", str(file), "--out", str(tmp_path / "runs")]) == 0


def test_distance_from_the_prediction():
    assert compare(0.1, [0.11, 0.12, 5.0]).endswith("predicted were 100.0.")
    assert "more than 20% off" in compare(0.1, [0.13, 0.13])
    assert "more than 20% off" in compare(0.1, [0.05])
    assert Watch(CONFIGS["digits"].method).run(lambda: 3) == (3, None)
