"""What no run can have is refused, with the rule, the value and the remedy, before anything is done."""

import dataclasses

import pytest

from configs.experiment import Architecture, BoundaryFields, Experiment, check

PLAIN = Experiment(name="few", dataset="digits", architecture=Architecture("mlp"), steps=12, learning_rate=0.1)
PIPELINE = {"workers": 2, "stages": 2, "global_batch": 24}


@pytest.mark.parametrize(
    ("changes", "processes"),
    [
        ({}, 4),
        (PIPELINE, 1),
        (PIPELINE | {"micro_batches": 3, "cuts": (1,), "boundary": BoundaryFields(0.5, "sketch")}, 1),
        (PIPELINE, 2),  # a worker each
        (PIPELINE, 4),  # a stage each
        (PIPELINE | {"workers": 1}, 2),
        (PIPELINE | {"stages": 4}, 4),  # two stages each
        ({"slices": 2}, 4),
        ({"slices": 4}, 1),
        ({"dense_layers": "late"}, 4),
        ({"dense_layers": "split"}, 2),
        ({"schedule": "drops", "drop_every": 5, "warmup_steps": 4}, 1),
    ],
)
def test_what_works(changes, processes):
    check(dataclasses.replace(PLAIN, **changes), processes)


@pytest.mark.parametrize(
    ("changes", "processes", "said"),
    [
        ({"steps": 0}, 1, "--steps is at least 1, got 0: give a positive number"),
        ({"workers": -1}, 1, "--workers is at least 1, got -1"),
        ({"global_batch": 0}, 1, "--global-batch is at least 1, got 0"),
        ({"eval_every": 0}, 1, "--eval-every is at least 1, got 0"),
        ({"checkpoint_every": 0}, 1, "--checkpoint-every is at least 1, got 0"),
        ({"stop_after": 0}, 1, "--stop-after is at least 1, got 0"),
        ({"stages": 0}, 1, "--stages is at least 1, got 0"),
        (PIPELINE | {"micro_batches": 0}, 1, "--micro-batches is at least 1, got 0"),
        ({"slices": 0}, 1, "--slices is at least 1, got 0"),
        ({"beam": 0}, 1, "--beam is at least 1, got 0"),
        ({"warmup_steps": 12}, 1, "--warmup-steps is less than --steps, got 12 of 12"),
        ({"schedule": "drops"}, 1, "with --schedule drops, and none with others, got None with drops"),
        ({"schedule": "drops", "drop_every": 0}, 1, "--drop-every is a positive number of steps .* got 0 with drops"),
        ({"drop_every": 5}, 1, "and none with others, got 5 with cosine"),
        (
            {"schedule": "drops", "drop_every": 5, "warmup_steps": 5},
            1,
            "The first drop comes after the warm-up, got --drop-every 5 with --warmup-steps 5: drop later, or",
        ),
        ({"dense_layers": "late", "slices": 2}, 1, "--dense-layers late with --stages 1 and --slices 2: leave both at"),
        (PIPELINE | {"dense_layers": "split"}, 1, "--dense-layers split with --stages 2 and --slices 1"),
        (PIPELINE | {"slices": 2}, 1, "a pipeline or has slices, got --stages 2 with --slices 2: leave one"),
        ({"micro_batches": 2}, 1, "Only a pipeline has micro-batches, cuts and boundaries, got .*: give --stages"),
        ({"cuts": (1,)}, 1, "Only a pipeline has"),
        ({"boundary": BoundaryFields(0.5)}, 1, "Only a pipeline has"),
        ({"boundary": BoundaryFields(kind="sketch")}, 1, "Only a pipeline has"),
        ({"boundary": BoundaryFields(value_dtype="bfloat16")}, 1, "Only a pipeline has"),
        ({"slices": 3}, 1, "--workers is a multiple of --slices, got 4 in 3 slices: every slice has"),
        (
            PIPELINE | {"micro_batches": 5},
            1,
            r"a multiple of workers and micro-batches, got 24 for 2 \* 5: try 30",
        ),
        ({"global_batch": 26}, 1, "--global-batch is a multiple of --workers, got 26 for 4: try 28"),
        ({}, 3, "--workers is a multiple of the number of processes, got 4 for 3"),
        ({"workers": 2}, 4, "--workers is a multiple of the number of processes, got 2 for 4"),
        (PIPELINE, 3, r"\(times --stages\) .* got 2 workers and 2 stages for 3"),
        (PIPELINE, 8, r"\(times --stages\)"),  # half a stage each
        # Six devices in two processes, but three workers: one of them would lie in both.
        (PIPELINE | {"workers": 3}, 2, "got 3 workers and 2 stages for 2: every process runs the same number"),
    ],
)
def test_what_cannot_work(changes, processes, said):
    with pytest.raises(ValueError, match=said):
        check(dataclasses.replace(PLAIN, **changes), processes)
