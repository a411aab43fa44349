"""The lab of workers that come and go."""

import importlib.util
import json

import pytest

from tests.benchmarks.places import CAN_ISOLATE, run


@pytest.mark.slow
@pytest.mark.skipif(not CAN_ISOLATE or importlib.util.find_spec("moto") is None, reason="takes root, and moto's server")
def test_workers_that_come_and_go(tmp_path):
    path = tmp_path / "table.json"
    run("rounds", "--rounds", "8", "--json", str(path))
    rows = json.loads(path.read_text())
    assert [row["worker"] for row in rows] == [*"abcd", "one program"] * 2
    for row in rows:
        if row["worker"] != "one program":
            assert row["received"] < row["bytes_kernel"] < 1.3 * row["received"]
            assert 0 < row["rounds"] <= 8
            assert 0 < row["goodput"] <= 1.05
    assert len({row["digest"] for row in rows[:4]}) == len({row["digest"] for row in rows[5:9]}) == 1
