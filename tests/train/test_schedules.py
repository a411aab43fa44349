"""Learning rates at steps that were worked out by hand."""

import dataclasses

import pytest

from tests.train.runs import EXPERIMENT
from train.schedules import make_schedule

# Step, from 0: rate over its peak.
RATES = {
    "constant": ({}, {0: 1, 7: 1, 99: 1}),
    "constant, warmed up": ({"warmup_steps": 10}, {0: 0, 3: 0.3, 9: 0.9, 10: 1, 99: 1}),
    # Half a cosine: 1/2 in the middle, (1 + 1/sqrt(2)) / 2 at a quarter, zero after the last step.
    "cosine": ({"schedule": "cosine"}, {0: 1, 25: 0.8535534, 50: 0.5, 75: 0.1464466, 100: 0}),
    "cosine, warmed up": (
        {"schedule": "cosine", "warmup_steps": 20},
        {0: 0, 10: 0.5, 20: 1, 40: 0.8535534, 60: 0.5, 100: 0},
    ),
    "drops": (
        {"schedule": "drops", "drop_at": (30, 60, 80)},
        {0: 1, 29: 1, 30: 0.1, 59: 0.1, 60: 0.01, 79: 0.01, 80: 0.001, 99: 0.001},
    ),
    # Drops are counted from the start of the run, not from the end of the warm-up.
    "drops, warmed up": (
        {"schedule": "drops", "drop_at": (30, 60, 90), "warmup_steps": 20},
        {0: 0, 5: 0.25, 20: 1, 29: 1, 30: 0.1, 60: 0.01, 90: 0.001},
    ),
    "drops, none left": ({"schedule": "drops", "drop_at": (100,)}, {0: 1, 99: 1}),
    "polynomial": ({"schedule": "polynomial"}, {0: 1, 19: 0.9, 36: 0.8, 75: 0.5, 99: 0.1, 100: 0}),
    "polynomial, warmed up": (
        {"schedule": "polynomial", "warmup_steps": 50},
        {0: 0, 25: 0.5, 50: 1, 68: 0.8, 82: 0.6, 100: 0},
    ),
    "inverse_sqrt": ({"schedule": "inverse_sqrt"}, {0: 1, 3: 0.5, 99: 0.1}),
    "inverse_sqrt, warmed up": (
        {"schedule": "inverse_sqrt", "warmup_steps": 4},
        {0: 0, 1: 0.25, 3: 0.75, 4: 1, 16: 0.5, 64: 0.25, 100: 0.2},
    ),
}


@pytest.mark.parametrize("case", RATES)
def test_rates(case):
    changes, expected = RATES[case]
    plain = dataclasses.replace(EXPERIMENT, schedule="constant", warmup_steps=0, steps=100, learning_rate=0.3)
    schedule = make_schedule(dataclasses.replace(plain, **changes))
    rates = {step: float(schedule(step)) for step in expected}
    assert rates == pytest.approx({step: 0.3 * rate for step, rate in expected.items()}, rel=1e-5, abs=1e-7)
