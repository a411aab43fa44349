"""The benchmark of delayed steps on two hosts, with programs in two threads."""

import json

import pytest

from tests.benchmarks.places import CAN_ISOLATE, run


@pytest.mark.slow
def test_two_hosts(tmp_path):
    path = tmp_path / "table.json"
    hosts = ("--hosts", "2", "--rate", "none", "--rows", "8")
    run("delay", *hosts, "--methods", "plump_dp topk(0.99)", "--steps", "1", "--json", str(path))
    dense, sparse = json.loads(path.read_text())
    assert (dense["method"], sparse["method"]) == ("plump_dp", "topk(0.99)")
    for record in (dense, sparse):
        assert 0 < record["ms_min"] <= record["ms_median"] <= record["ms_max"]
        assert record["times_faster"] == record["ms_at_once"] / record["ms_median"]
        assert record["ms_longer"] == max(record["ms_computing"], record["ms_at_once"] - record["ms_computing"])
        if CAN_ISOLATE:
            assert record["bytes_kernel"] == pytest.approx(record["bytes_predicted"], rel=0.1)
    assert dense["bytes_predicted"] == 4 * (4 * 1024 * 1025) + 4  # and the loss
