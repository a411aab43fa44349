"""Part of the table of meshes, with smaller twins; `python -m benchmarks.meshes` makes all of it."""

from functools import cache, partial

import numpy as np
import optax
import pytest

from benchmarks.meshes import TWINS, train_losses
from configs import CONFIGS
from models.transformer import smoothed_losses
from tests.models.twins import TWINS as SMALL
from tests.models.twins import make

ROWS, STEPS = 16, 10
# Every kind of mesh for one model of each kind of data, and one mesh for a model of other outputs, and of running
# statistics; the benchmark has them all.
CASES = [
    *(("alexnet", mesh) for mesh in ("data 4", "stage 4", "data 2 x stage 2", "data 2 x model 2", "hybrid 2")),
    *(("dlrm", mesh) for mesh in ("stage 3", "data 2 x stage 2", "hybrid 2")),
    ("transformer", "data 2 x stage 2"),
    ("googlenet", "data 4"),
    ("resnet", "stage 2"),
]


def image_loss(output, batch):
    outputs = output if isinstance(output, tuple) else (output,)
    return sum(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean() for logits in outputs), {}


def click_loss(output, batch):
    return optax.sigmoid_binary_cross_entropy(output, batch["label"]).mean(), {}


def translation_loss(output, batch):
    return smoothed_losses(output, batch["target"])[0].mean(), {}


LOSSES = {"dlrm": click_loss, "transformer": translation_loss}


def batches_of(model):
    rows = SMALL[model][1](ROWS * STEPS)
    cut = [{name: array[step * ROWS :][:ROWS] for name, array in rows.items()} for step in range(STEPS)]
    return [batch | {"seed": np.arange(ROWS, dtype=np.uint32) + step} for step, batch in enumerate(cut)]


@cache
def losses_on(model, mesh):
    return train_losses(partial(make, model), LOSSES.get(model, image_loss), batches_of(model), mesh, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_ten_steps(model, mesh):
    expected = losses_on(model, "1 device")
    assert len(set(expected)) == STEPS  # it trains
    np.testing.assert_allclose(losses_on(model, mesh), expected, rtol=2e-5)


def test_no_hybrid_without_layers():
    assert losses_on("resnet", "hybrid 2") is None


def test_twins_are_experiments():
    assert set(TWINS) <= set(CONFIGS)
