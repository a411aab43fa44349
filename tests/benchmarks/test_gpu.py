"""The benchmark that compiles for GPUs: rows that are kept, hosts; and, if the compiler is installed, three steps."""

import importlib.util
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.gpu import Config, axes_between_hosts, main
from tests.benchmarks.places import run

HAS_COMPILER = importlib.util.find_spec("jax_cuda12_plugin") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs the wheels jax-cuda12-plugin, jax-cuda12-pjrt")


def compiled(*argv, code=0):
    return run("gpu", *argv, code=code, env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"})


def test_rows_are_saved_and_not_made_again(tmp_path, monkeypatch, capsys):
    made, path = [], tmp_path / "table.json"

    def planned(config):
        for method in config.method.split(","):

            def make(method=method):
                made.append(method)
                if method == "sign":
                    raise ValueError("stopped")
                return {"compile_s": 1.5, "launches": 10 * len(made)}

            yield {"program": config.shapes, "method": method}, make

    monkeypatch.setattr(gpu, "planned", planned)
    with pytest.raises(ValueError, match="stopped"):
        main(Config(json=path, shapes="1e5", method="topk,sign,demo"))
    main(Config(json=path, shapes="1e5", method="topk,demo"))
    main(Config(json=path, shapes="1e6", method="topk"))
    assert made == ["topk", "sign", "demo", "topk"]
    rows = json.loads(path.read_text())
    assert [(row["program"], row["method"], row["launches"]) for row in rows] == [
        ("1e5", "topk", 10),
        ("1e5", "demo", 30),
        ("1e6", "topk", 40),
    ]
    assert "topk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hosts", "axes"),
    [([[0, 0], [1, 1]], ("data",)), ([[0, 1], [0, 1]], ("inside",)), ([[0, 1], [2, 3]], ("data", "inside"))],
)
def test_axes_between_hosts(hosts, axes):
    devices = np.array([[SimpleNamespace(process_index=host) for host in row] for row in hosts])
    assert axes_between_hosts(SimpleNamespace(devices=devices, axis_names=("data", "inside"))) == axes


@pytest.mark.skipif(HAS_COMPILER, reason="needs an environment without the compiler")
def test_without_the_compiler():
    _, err = compiled("--n", "1000", code=2)
    assert "pip install jax-cuda12-plugin" in err
    assert "Traceback" not in err


@pytest.mark.slow
@needs_compiler
def test_compiled_steps(tmp_path):
    path = tmp_path / "table.json"
    compiled("--n", "1e5", "--methods", "plump_dp,topk,quant_dp", "--json", str(path))
    dense, sparse, coded = json.loads(path.read_text())
    assert [row["verified"] for row in (dense, sparse, coded)] == ["yes"] * 3
    assert dense["collectives"] == "1 all_reduce f32 between"
    assert sparse["collectives"] == "1 all_gather u32 between"
    assert coded["collectives"] == "1 all_reduce f32 between, 1 all_reduce s8 between"  # scales, and codes
    assert dense["bytes"] > 600_000 > 10 * sparse["bytes"]  # 2 (K-1)/K * 4 n
    assert dense["host_waits"] == dense["atomics"] == 0
    for row in (dense, sparse, coded):
        assert 0 < row["in_graphs"] < row["launches"]
        assert 0 < row["touched_in_exchange"] < row["bytes_touched"]


@pytest.mark.slow
@needs_compiler
def test_two_levels(tmp_path):
    path = tmp_path / "table.json"
    compiled("--n", "1e6", "--methods", "topk", "--topology", "2x8", "--json", str(path))
    (row,) = json.loads(path.read_text())
    kinds = {"1 reduce_scatter f32 inside", "1 all_gather u32 between", "1 all_gather f32 inside"}
    assert set(row["collectives"].split(", ")) == kinds
    assert row["verified"] == "yes"
    # Inside, 7/8 of 4 bytes a parameter twice.
    assert row["bytes"] - row["between_hosts"] == pytest.approx(7e6, rel=1e-3)
