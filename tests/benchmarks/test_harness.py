"""The harness of benchmarks: rows of hosts and of rounds, comparisons, options; and its place below all of them."""

import ast
import graphlib

import pytest

from benchmarks.harness import Control, check_least, check_run, compare, find, merge_rows, numbers, over_rounds
from tests.benchmarks.places import ROOT


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def modules_of(path):
    return [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]


def test_imports_have_no_circle():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.glob("benchmarks/**/*.py")}
    graph = {name: set(imports_of(path)) & files.keys() - {name} for name, path in files.items()}
    packages = {name.rpartition(".")[0] for name in files}
    modules = {name for path in files.values() for name in modules_of(path) if name.startswith("benchmarks")}
    assert modules <= files.keys() | packages
    assert {"benchmarks.conditions", "benchmarks.netlab", "benchmarks.trace"} == graph["benchmarks.harness"]
    assert set(graphlib.TopologicalSorter(graph).static_order()) == files.keys()  # raises CycleError


def test_rows_of_hosts():
    hosts = [[{"ms": 1.0, "kernel": [10], "cpu": 2.0}], [{"ms": 9.0, "kernel": [30], "cpu": 3.0}]]
    assert merge_rows(hosts, True, "kernel", ["cpu"]) == [{"ms": 1.0, "kernel": [10, 30], "cpu": 5.0}]
    assert merge_rows(hosts, False, "kernel") == [{"ms": 1.0, "kernel": None, "cpu": 2.0}]
    assert merge_rows(hosts, True) == hosts[0]  # no such column
    assert merge_rows([[{"bytes_kernel": 1000.0}], [{"bytes_kernel": 3000.0}]], True) == [{"bytes_kernel": 2000.0}]


def test_rounds():
    rounds = [[{"ms_median": ms, "ms_min": ms - 1, "ms_max": ms + 1, "refresh": None, "s": ms}] for ms in (5, 1, 9)]
    expected = {"ms_median": 5, "ms_min": 0, "ms_max": 10, "refresh": None, "s": 5}
    assert over_rounds(rounds, "refresh", "s") == [expected]


def test_comparison_with_the_same_rate():
    rows = [
        {"method": method, "rate": rate, "ms_median": ms, "bytes_compiled": count}
        for method, rate, ms, count in (("dense", "a", 8.0, 100), ("topk", "a", 2.0, 10), ("topk", "b", 1.0, 0))
    ]
    ratios = [(row["times_faster"], row["times_fewer_bytes"]) for row in compare(rows, ["rate"], method="dense")]
    assert ratios == [(1.0, 1.0), (4.0, 10.0), (None, None)]
    assert find(rows, method="topk", rate="b") is rows[2]
    assert find(rows, method="sign") is None


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: numbers("--workers", "2,x"), ["--workers", "'x'"]),
        (lambda: numbers("--workers", "2,0", least=1), ["--workers", "at least 1", "'0'"]),
        (lambda: numbers("--kept", "nan", float, least=0), ["--kept", "'nan'"]),
        (lambda: check_least(type("Config", (), {"timed_steps": 0}), 1, "timed_steps"), ["--timed-steps", "got 0"]),
        (lambda: check_run("1gbit,2gbit", 1, one=True), ["--rate", "1gbit,2gbit"]),
    ],
    ids=["word", "least", "nan", "field", "rates"],
)
def test_refusals(call, parts):
    with pytest.raises(ValueError, match="must be") as error:
        call()
    assert [part for part in parts if part not in str(error.value)] == []


def test_numbers():
    assert numbers("--kept", "0.5,1e-2", float) == [0.5, 0.01]
    assert check_run("100mbit/1gbit,none", 1) == ["100mbit/1gbit", "none"]


@pytest.mark.parametrize(("first", "left_out"), [(700.0, 5), (3_000.0, 2), (13_000.0, 1)])
def test_calls_in_which_tcp_adapts_to_a_rate_are_left_out(tmp_path, monkeypatch, first, left_out):
    control = object.__new__(Control)  # connecting takes a lab
    control.folder, control.host, control.requests, control.unsettled = tmp_path, 0, 0, 0

    def timed(function):
        call = function()
        return first if call <= left_out else 450.0, call, call

    monkeypatch.setattr(control, "barrier", lambda: None)
    monkeypatch.setattr(control, "timed", timed)
    (tmp_path / "1.set").touch()  # the lab's answer

    control.set_rate("100mbit")
    times, calls, state = control.measure(lambda state: state + 1, 0, 3)
    again, _, _ = control.measure(lambda state: state + 1, 0, left_out)

    assert (times, calls, state) == ([450.0] * 3, [left_out + 1, left_out + 2, left_out + 3], left_out + 3)
    assert again == [first] * left_out  # at the same rate all calls are timed
