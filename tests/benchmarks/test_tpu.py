"""The benchmark that compiles for TPUs: what it refuses; and, if the compiler is installed, a step of each kind."""

import importlib.util
import json
import os

import pytest

from tests.benchmarks.places import run


def tpu(*argv, code=0):
    return run("tpu", *argv, code=code, env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"})


def test_an_unknown_topology():
    _, err = tpu("--shapes", "1000", "--topology", "v5e:7x5", code=2)
    assert "Traceback" not in err
    for part in ("got 'v5e:7x5'", "jaxcomm[tpu]"):
        assert part in err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the compiler of the extra tpu")
@pytest.mark.parametrize("slices", [1, 2])
def test_compiled_steps(slices, tmp_path):
    path = tmp_path / "table.json"
    options = ("--method", "plump_dp,plump_dp_bfloat16,topk,powersgd", "--slices", str(slices), "--json", str(path))
    tpu("--shapes", "1e5", *options)
    records = json.loads(path.read_text())
    assert [record["verified"] for record in records] == ["yes"] * 4
    assert "all_gather" in records[2]["collectives"]
    assert "all_reduce" not in records[2]["collectives"]
    wire = "bytes" if slices == 1 else "between_slices"
    assert records[0][wire] > 10 * records[2][wire]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the compiler of the extra tpu")
def test_layouts_of_the_trainer(tmp_path):
    path = tmp_path / "table.json"
    tpu("--layouts", "--json", str(path))
    records = {record["layout"]: record for record in json.loads(path.read_text())}
    assert [name for name, record in records.items() if record["verified"] != "yes"] == []
    assert records["stages, 4 bits"]["bytes"] < 0.5 * records["stages"]["bytes"]
    assert records["stages, 1F1B"]["megabytes_temporary"] < 0.8 * records["stages, 4 bits"]["megabytes_temporary"]
    assert records["whole, dense"]["overlap"] > 0.2  # of its buckets, the last layers' can be sent at once
    assert records["whole"]["overlap"] < 0.01
