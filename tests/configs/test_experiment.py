"""Impossible settings are refused, with the rule, the value and the remedy, before anything is done."""

import dataclasses
import math

import pytest

from configs.experiment import Architecture, BoundaryFields, Experiment, check

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
def test_what_works(changes, processes):
    check(dataclasses.replace(PLAIN, **changes), processes)


@pytest.mark.parametrize(
    ("changes", "processes", "said"),
    [
        ({"steps": 0}, 1, "--steps must be at least 1 and below 2\\*\\*31; got 0"),
        ({"workers": -1}, 1, "--workers must be at least 1 and below 2\\*\\*31; got -1"),
        ({"global_batch": 0}, 1, "--global-batch must be at least 1 and below 2\\*\\*31; got 0"),
        ({"eval_every": 0}, 1, "--eval-every must be at least 1 and below 2\\*\\*31; got 0"),
        ({"checkpoint_every": 0}, 1, "--checkpoint-every must be at least 1 and below 2\\*\\*31; got 0"),
        ({"stop_after": 0}, 1, "--stop-after must be at least 1 and below 2\\*\\*31; got 0"),
        ({"stages": 0}, 1, "--stages must be at least 1 and below 2\\*\\*31; got 0"),
        (PIPELINE | {"micro_batches": 0}, 1, "--micro-batches must be at least 1 and below 2\\*\\*31; got 0"),
        ({"slices": 0}, 1, "--slices must be at least 1 and below 2\\*\\*31; got 0"),
        ({"beam": 0}, 1, "--beam must be at least 1 and below 2\\*\\*31; got 0"),
        ({"warmup_steps": 12}, 1, "--warmup-steps must be less than --steps; got 12 of 12"),
        ({"warmup_steps": -3}, 1, r"--warmup-steps must be at least 0 and below 2\*\*31; got -3. 0 is no warm-up"),
        (
            {"steps": 10**20},
            1,
            "--steps must be at least 1 and below .*; got 100000000000000000000. Give such a number",
        ),
        ({"rows_per_group": 0}, 1, "--rows-per-group must be at least 1 and .*; got 0"),
        ({"learning_rate": 1e300}, 1, r"--learning-rate must be at least 0 and below 1e\+38; got 1e\+300"),
        ({"error_budget": math.nan}, 1, "--error-budget must be at least 0 and .*; got nan. 0.1 is a tenth"),
        ({"restarts": -1}, 1, r"--restarts must be at least 0 and below 2\*\*31; got -1. 0 is none"),
        ({"connect_timeout": -5}, 1, r"--connect-timeout must be at least 1 and below 10\*\*7; got -5. 300 s"),
        ({"peer_timeout": math.nan}, 1, "--peer-timeout must be at least 2 and .*; got nan. 60 s are usual; signs"),
        ({"peer_timeout": 0.0}, 1, "--peer-timeout must be at least 2 and .*; got 0.0"),
        ({"step_timeout": math.inf}, 1, "--step-timeout must be at least 1 and .*; got inf"),
        ({"name": "../../x"}, 1, r"--name must be letters, .*, since it names a folder; got '\.\./\.\./x'. Choose"),
        ({"name": ""}, 1, "--name must be letters, .*; got ''"),
        ({"schedule": "drops", "drop_at": (10**20,)}, 1, "--drop-at must be rising positive steps"),
        ({"max_skipped": 0}, 1, "--max-skipped must be at least 1 and below 2\\*\\*31; got 0"),
        ({"learning_rate": math.nan}, 1, "--learning-rate must be at least 0 and below 1e.38; got nan. 0.1 is usual"),
        ({"learning_rate": math.inf}, 1, "--learning-rate must be at least 0 and below 1e.38; got inf"),
        ({"learning_rate": -1.0}, 1, "--learning-rate must be at least 0 and below 1e.38; got -1.0"),
        ({"momentum": 1.0}, 1, "--momentum must be at least 0 and below 1; got 1.0. 0.9 is usual, 0 is none"),
        ({"momentum": -1.0}, 1, "--momentum must be at least 0 and below 1; got -1.0"),
        ({"momentum": math.nan}, 1, "--momentum must be at least 0 and below 1; got nan"),
        ({"weight_decay": math.nan}, 1, "--weight-decay must be at least 0 and below 1e.38; got nan"),
        ({"weight_decay": math.inf}, 1, "--weight-decay must be at least 0 and below 1e.38; got inf"),
        ({"weight_decay": -1.0}, 1, "--weight-decay must be at least 0 and below 1e.38; got -1.0"),
        ({"label_smoothing": 1.0}, 1, "--label-smoothing must be at least 0 and below 1; got 1.0"),
        ({"label_smoothing": -0.1}, 1, "--label-smoothing must be at least 0 and below 1; got -0.1"),
        ({"label_smoothing": math.nan}, 1, "--label-smoothing must be at least 0 and below 1; got nan"),
        ({"seed": -1}, 1, r"--seed must be at least 0 and below 2\*\*32; got -1. Any such number"),
        ({"seed": 2**32}, 1, r"--seed must be at least 0 and below 2\*\*32; got 4294967296"),
        (
            {"schedule": "drops"},
            1,
            r"with --schedule drops, and empty with another schedule; got \(\) with drops. Give --",
        ),
        (
            {"schedule": "drops", "drop_at": (0, 5)},
            1,
            r"--drop-at must be rising positive steps .* got \(0, 5\) with drops",
        ),
        ({"schedule": "drops", "drop_at": (5, 5)}, 1, r"must be rising positive steps .* got \(5, 5\) with drops"),
        ({"drop_at": (5,)}, 1, r"and empty with another schedule; got \(5,\) with cosine"),
        (
            {"schedule": "drops", "drop_at": (5,), "warmup_steps": 5},
            1,
            "The first drop must come after the warm-up; got --drop-at 5 with --warmup-steps 5. Drop later, or",
        ),
        ({"workers": 96, "global_batch": 256}, 1, "a multiple of --workers; got 256 for 96. Try 288"),
        ({"dense_layers": "late", "slices": 2}, 1, "--dense-layers late with --stages 1 and --slices 2. Leave both at"),
        (PIPELINE | {"dense_layers": "split"}, 1, "--dense-layers split with --stages 2 and --slices 1"),
        (PIPELINE | {"embeddings": "late"}, 1, "--embeddings late with --stages 2 .* or give --embeddings exchange"),
        ({"embeddings": "rows", "model_parallel": 2}, 1, "--model-parallel must be the only way .* --embeddings rows"),
        (PIPELINE | {"slices": 2}, 1, "--stages or --slices must be 1; got --stages 2 with --slices 2. Leave one"),
        ({"micro_batches": 2}, 1, "--micro-batches, .* must go with a pipeline; got .*. Give --stages"),
        ({"cuts": (1,)}, 1, "must go with a pipeline"),
        ({"boundary": BoundaryFields(0.5)}, 1, "must go with a pipeline"),
        ({"pipeline_schedule": "1f1b"}, 1, "--pipeline-schedule .* must go with a pipeline"),
        ({"boundary": BoundaryFields(value_dtype="bfloat16")}, 1, "must go with a pipeline"),
        ({"fsdp": 2, "model_parallel": 2}, 1, "--fsdp or --model-parallel must be 1, .*; got 2 and 2. Leave one"),
        ({"fsdp": 3, "workers": 4}, 1, r"multiple of --workers times --fsdp; got 128 for 4 \* 3. Try 132"),
        ({"fsdp": 2, "embeddings": "rows"}, 1, "--fsdp must be the only way .*; got it with --embeddings rows"),
        ({"fsdp": 2, "delay": 1}, 1, "--delay must be 0, .* got 1 with --fsdp 2"),
        ({"compress": "w", "slices": 2}, 1, "--compress must be the only way .*; got it with --slices 2"),
        ({"compress": "w", "embeddings": "columns"}, 1, "--compress must be the only way .* --embeddings columns"),
        ({"compress": "w", "dense_layers": "late"}, 1, "--compress must be the only way .* --dense-layers late"),
        (
            PIPELINE | {"compress": "w"},
            1,
            r"--compress must be .* --stages 2. Leave one out \(--compress takes an",
        ),
        ({"compress": "("}, 1, r"--compress must be a regular expression; got '\('"),
        ({"slices": 3}, 1, "--workers must be a multiple of --slices, since every .*; got 4 in 3 slices"),
        (
            PIPELINE | {"micro_batches": 5},
            1,
            r"a multiple of --workers times --micro-batches; got 24 for 2 \* 5. Try 30",
        ),
        ({"global_batch": 26}, 1, "--global-batch must be a multiple of --workers; got 26 for 4. Try 28"),
        ({}, 3, "a multiple of the number of processes, since every .*; got 4 for 3"),
        ({"workers": 2}, 4, "a multiple of the number of processes, since every .*; got 2 for 4"),
        (PIPELINE, 3, "must divide the number of devices, 4, .*; got 3 processes for --workers 2 --stages 2"),
        (PIPELINE, 8, "must divide the number of devices, 4, .*; got 8 processes"),  # half a stage each
        # Six devices in two processes, but three workers: one of them would be in both.
        (PIPELINE | {"workers": 3}, 2, "--workers times --fsdp .*; got 2 processes for --workers 3 --stages 2"),
    ],
)
def test_what_cannot_work(changes, processes, said):
    with pytest.raises(ValueError, match=said):
        check(dataclasses.replace(PLAIN, **changes), processes)
