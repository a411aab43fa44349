"""The soak test's arithmetic and refusals; its faults are tested in tests/train/test_faults_restarts.py."""

import pytest

from benchmarks.faults import Samples, main


def test_quarters_are_medians_of_steps_that_were_done():
    samples = Samples()
    for second in range(16):
        restarting = second in (2, 13)  # no step is done in these seconds
        step = 10 * second if not restarting else 10 * (second - 1)
        samples.rows.append((float(second), step, 100.0 + second, 20 if second < 8 else 25))
    assert samples.quarters() == {
        "mb_first": 101.5,
        "descriptors_first": 20,
        "ms_step_first": 75.0,  # of 10 steps a second, and of 20
        "mb_last": 113.5,
        "descriptors_last": 25,
        "ms_step_last": 75.0,
    }


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--hosts", "1"], "--hosts must be at least 2, since a run that survives has others; got 1"),
        (["--mtbf", "nan"], "--mtbf must be positive and finite; got nan"),
        (["--minutes", "0"], "--minutes must be positive and finite; got 0"),
        (["--json", "/"], "--json must be a file; got the folder /"),
    ],
)
def test_bad_values_are_refused(argv, said, capsys):
    assert main(argv) == 2
    assert f"faults: {said}" in capsys.readouterr().err
