"""Impossible settings are refused, with the rule, the value and the remedy, before anything is done."""

import dataclasses
import itertools
import math

import pytest

from configs import CONFIGS
from configs.experiment import Architecture, BoundaryFields, Experiment, check, with_fewer
from tests.refusals import refused

PLAIN = Experiment(name="few", dataset="digits", architecture=Architecture("mlp"), steps=12, learning_rate=0.1)
PIPELINE = {"workers": 2, "stages": 2, "global_batch": 24}


@pytest.mark.parametrize(
    ("changes", "processes"),
    [
        ({}, 4),
        (PIPELINE, 1),
        (PIPELINE | {"micro_batches": 3, "cuts": (1,), "boundary": BoundaryFields(0.5, "bfloat16")}, 1),
        (PIPELINE, 2),  # a worker each
        (PIPELINE, 4),  # a stage each
        (PIPELINE | {"workers": 1}, 2),
        (PIPELINE | {"stages": 4}, 4),  # two stages each
        ({"slices": 2}, 4),
        ({"slices": 4}, 1),
        ({"dense_layers": "late"}, 4),
        ({"dense_layers": "split"}, 2),
        ({"embeddings": "rows"}, 2),
        ({"schedule": "drops", "drop_at": (5, 8, 90), "warmup_steps": 4}, 1),
        ({"workers": 96, "global_batch": 288}, 1),
        ({"learning_rate": 0.0, "momentum": 0.0, "label_smoothing": 0.99, "seed": 2**32 - 1}, 1),
    ],
)
def test_valid_settings(changes, processes):
    check(dataclasses.replace(PLAIN, **changes), processes)


def test_fewer_workers_of_whole_groups():
    whole = dataclasses.replace(PLAIN, workers=4, global_batch=48, rows_per_group=12, restarts=1, min_workers=1)
    assert with_fewer(whole, 3, 4) is None  # 16 rows each
    assert with_fewer(whole, 2, 4) == dataclasses.replace(whole, workers=2)


def test_an_error_budget_without_a_plan():
    refused(lambda: check(dataclasses.replace(PLAIN, error_budget=0.1), 1), "--error-budget", "got 0.1", "--advise")


NAN, INF = math.nan, math.inf
NUMBERS = {
    "steps": [0, 10**20],
    "workers": [-1],
    "global_batch": [0],
    "eval_every": [0],
    "checkpoint_every": [0],
    "stop_after": [0],
    "stages": [0],
    "slices": [0],
    "beam": [0],
    "max_skipped": [0],
    "rows_per_group": [0],
    "restarts": [-1],
    "warmup_steps": [12, -3],
    "learning_rate": [1e300, NAN, INF, -1.0],
    "momentum": [1.0, -1.0, NAN],
    "weight_decay": [NAN, INF, -1.0],
    "label_smoothing": [1.0, -0.1, NAN],
    "error_budget": [NAN],
    "connect_timeout": [-5],
    "peer_timeout": [NAN, 0.0],
    "step_timeout": [INF],
    "seed": [-1, 2**32],
    "name": ["../../x", ""],
    "compress": ["("],
    "delay": [2],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_bad_values(name):
    for value in NUMBERS[name]:
        message = f"got {value!r}" if isinstance(value, str) else f"got {value}"
        refused(
            lambda value=value: check(dataclasses.replace(PLAIN, **{name: value}), 1),
            f"--{name.replace('_', '-')} must be ",
            message,
        )


DROPS = {"schedule": "drops"}
BF16 = BoundaryFields(value_dtype="bfloat16")


@pytest.mark.parametrize(
    ("changes", "processes", "name", "value"),
    [
        (PIPELINE | {"micro_batches": 0}, 1, "--micro-batches", "got 0"),
        (DROPS, 1, "--schedule drops", "got () with drops"),
        (DROPS | {"drop_at": (10**20,)}, 1, "--drop-at", "got "),
        (DROPS | {"drop_at": (0, 5)}, 1, "--drop-at", "got (0, 5) with drops"),
        (DROPS | {"drop_at": (5, 5)}, 1, "--drop-at", "got (5, 5) with drops"),
        (DROPS | {"drop_at": (5,), "warmup_steps": 5}, 1, "--drop-at 5", "--warmup-steps 5"),
        ({"drop_at": (5,)}, 1, "--drop-at", "got (5,) with cosine"),
        ({"workers": 96, "global_batch": 256}, 1, "--workers", "got 256 for 96. Try 288"),
        ({"global_batch": 26}, 1, "--global-batch", "got 26 for 4. Try 28"),
        (PIPELINE | {"micro_batches": 5}, 1, "--micro-batches", "got 24 for 2 * 5. Try 30"),
        ({"fsdp": 3, "workers": 4}, 1, "--fsdp", "got 128 for 4 * 3. Try 132"),
        ({"slices": 3}, 1, "--slices", "got 4 in 3 slices"),
        # What needs a pipeline.
        ({"micro_batches": 2}, 1, "--micro-batches", "--stages"),
        ({"cuts": (1,)}, 1, "--cuts", "pipeline"),
        ({"boundary": BoundaryFields(0.5)}, 1, "boundary", "pipeline"),
        ({"boundary": BF16}, 1, "boundary", "pipeline"),
        ({"pipeline_schedule": "1f1b"}, 1, "--pipeline-schedule", "pipeline"),
        # What the processes cannot share.
        ({}, 3, "processes", "got 4 for 3"),
        ({"workers": 2}, 4, "processes", "got 2 for 4"),
        (PIPELINE, 3, "devices, 4", "got 3 processes for --workers 2 --stages 2"),
        (PIPELINE, 8, "devices, 4", "got 8 processes"),  # half a stage each
        # Six devices in two processes, but three workers: one of them would be in both.
        (PIPELINE | {"workers": 3}, 2, "--workers times --fsdp", "got 2 processes for --workers 3 --stages 2"),
    ],
)
def test_settings_that_exclude(changes, processes, name, value):
    refused(lambda: check(dataclasses.replace(PLAIN, **changes), processes), name, value)


# Every field of a layout with another value; those of a pipeline go with --stages.
CHANGED = {
    "compress": "w",
    "delay": 1,
    "slices": 2,
    "fsdp": 2,
    "model_parallel": 2,
    "stages": 2,
    "dense_layers": "late",
    "embeddings": "rows",
}
TOGETHER = {
    frozenset(pair)
    for pair in (("compress", "delay"), ("slices", "delay"), ("slices", "fsdp"), ("slices", "model_parallel"))
}


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(CHANGED, 2)))
def test_one_way_to_split_a_model(one, two):
    experiment = dataclasses.replace(PLAIN, **{name: CHANGED[name] for name in (one, two)})
    if {one, two} in TOGETHER:
        return check(experiment, 1)
    options = [f"--{name.replace('_', '-')} {CHANGED[name]}" for name in (one, two)]
    refused(lambda: check(experiment, 1), "A model must be split in one way", *options)


def test_a_layout_names_its_changes():
    assert PLAIN.layout == {}
    assert dataclasses.replace(PLAIN, boundary=BoundaryFields(), stages=2).layout == {"stages": 2}
    assert CONFIGS["dlrm_criteo"].layout == {"embeddings": "late"}
