"""The benchmark of the time before the first step."""

import json

import pytest

from tests.benchmarks.places import run


@pytest.mark.slow
def test_commands(tmp_path):
    out, _ = run("startup", "--repeats", "2", "--json", str(tmp_path / "table.json"))
    times = {record["command"]: record["ms_median"] for record in json.loads((tmp_path / "table.json").read_text())}
    assert 0 < times["python"] < times["import jax"] < times["import jaxcomm"] < times["the main job of one step"]
    assert "jaxcomm itself takes" in out


@pytest.mark.slow
def test_many_tensors(tmp_path):
    run("startup", "--tensors", "4", "--repeats", "1", "--json", str(tmp_path / "table.json"))
    records = {record["exchange"]: record for record in json.loads((tmp_path / "table.json").read_text())}
    assert set(records) == {"plain jit", "plump_dp", "topk 99%", "powersgd 4", "dct_dp 99%", "quant_dp 8"}
    assert records["plain jit"]["ratio_to_plain_jit"] == 1
    assert all(record["ratio_to_plain_jit"] > 0 for record in records.values())
