"""The benchmark of the memory of a worker's device."""

import json

import pytest

from benchmarks.memory import Config, main


@pytest.mark.slow
def test_parts_of_devices(tmp_path):
    main(Config(layers=1, width=64, stages=2, micro_batches=(4, 16), json=tmp_path / "table.json"))
    records = json.loads((tmp_path / "table.json").read_text())
    assert len(records) == 12 + 4
    few, few_1f1b, many, many_1f1b = (record["temporary_mb"] for record in records[12:])
    crossing = 128 * 64 * 4 / 1e6  # of a micro-batch: a row of 128 tokens
    assert many - few > 10 * crossing
    assert many_1f1b - few_1f1b < 2 * crossing
    assert many_1f1b < many - 10 * crossing
    for whole, half, quarter in (records[start : start + 3] for start in range(0, 12, 3)):
        assert [record["devices"] for record in (whole, half, quarter)] == [1, 2, 4]
        assert half["state_mb"] < 0.55 * whole["state_mb"]
        assert quarter["state_mb"] < 0.3 * whole["state_mb"]
        received = [record["received_over_workers"] for record in (quarter, half, whole)]
        assert received == sorted(set(received))
