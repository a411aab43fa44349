"""The soak test's arithmetic; its faults are tested in tests/train/test_faults_restarts.py."""

from benchmarks.faults import Samples


def test_quarters():
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
