"""The benchmark of late-multiply: how it finds a crossover, what it compares, a run on two hosts."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm as jc
from benchmarks import late_multiply
from benchmarks.crossover import bisect, crossing
from benchmarks.late_multiply import Config, check, compare, equal_batch, parse_layers
from tests.benchmarks.places import run


def row_of(mode, ms, received=100.0, hosts=2, rate="10gbit", batch=256):
    about = {"hosts": hosts, "rate": rate, "batch": batch, "mode": mode}
    return about | {"ms_median": ms, "bytes_kernel": 1000.0, "bytes_compiled": received}


def test_layers():
    layers = parse_layers(late_multiply.ALEXNET)
    assert layers == [(9216, 4096), (4096, 4096), (4096, 1000)]
    assert int(equal_batch(layers[0])) == 5671
    assert parse_layers("3x5") == [(3, 5)]


@pytest.mark.parametrize(
    ("edge", "step", "start"), [(109.7, 2, 109.7), (109.7, 4, 1.0), (1, 4, 50.0), (5671.4, 8, 9e4)]
)
def test_bisection(edge, step, start):
    sizes = []

    def is_cheaper(batch):
        sizes.append(batch)
        return batch < edge

    low, high = bisect(is_cheaper, step, start)
    assert low < edge <= high
    assert (high - low, low % step) == (step, 0)
    assert len(sizes) == len(set(sizes)) < 20
    assert 0 not in sizes


@pytest.mark.parametrize("mode", late_multiply.MODES)
def test_mean_gradient(mode):
    layers, mesh = [(5, 4), (4, 3)], jc.make_mesh(data=2)
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(6, width)).astype(np.float32) for shape in layers for width in shape]
    step, *_ = late_multiply.compile_step(layers, mesh, mode, 6)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    for result, x, error in zip(step(*jax.device_put(rows, sharding)), rows[::2], rows[1::2], strict=True):
        np.testing.assert_allclose(result, x.T @ error / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("layer", "workers"), [((30, 5), 4)])
def test_compiled_bytes(layer, workers):
    crossover = late_multiply.bytes_crossover(layer, jc.make_mesh(data=workers))
    assert crossover == pytest.approx(2 * layer[0] * layer[1] / sum(layer), rel=1e-6)


def test_crossing():
    assert crossing([(10, 0.5), (20, 1.0), (40, 2.0)]) == pytest.approx(20)
    assert crossing([(10, 0.5), (40, 2.0)]) == pytest.approx(20)
    assert crossing([(10, 0.25), (40, 2.0)]) == pytest.approx(10 * 4 ** (2 / 3))
    assert crossing([(10, 0.5), (20, 0.9)]) is None
    assert crossing([(10, 1.5), (20, 3.0)]) is None
    assert crossing([(10, 2.0), (20, 0.5), (80, 2.0)]) == pytest.approx(40)


def test_comparison():
    places = [{}, {"hosts": 4}, {"rate": "1gbit"}, {"batch": 512}]
    rows = [
        row_of(mode, ms, received, **place)
        for place in places
        for mode, ms, received in (("reduce", 8.0, 100.0), ("late", 2.0, 10.0))
    ]
    rows[0]["ms_median"] = 6.0
    compared = compare(rows, is_papers=True)
    assert [row["times_faster"] for row in compared] == [1, 3, 1, 4, 1, 4, 1, 4]
    assert [row["times_fewer_bytes"] for row in compared] == [1, 10] * 4
    assert [row["paper_ms"] for row in compared[:6]] == [894, 164, 1287, 399, None, None]
    fresh = compare([row_of("reduce", 8.0), row_of("late", 2.0, 0.0)], is_papers=False)
    assert [row["paper_ms"] for row in fresh] == [None, None]
    assert fresh[1]["times_fewer_bytes"] is None


def test_defaults():
    layers, counts, rates = check(Config())
    assert (layers, counts, rates) == (parse_layers(late_multiply.ALEXNET), [2, 4], ["1gbit", "10gbit"])
    assert check(Config(crossover=True))[0] == parse_layers(late_multiply.SMALL)


@pytest.mark.slow
def test_two_hosts(tmp_path):
    path = tmp_path / "table.json"
    argv = ["--layers", "64x48,48x8", "--batch", "8", "--hosts", "2", "--rate", "none", "--steps", "1"]
    out, _ = run("late_multiply", *argv, "--json", str(path))
    reduced, late = json.loads(path.read_text())
    assert [row["mode"] for row in (reduced, late)] == ["reduce", "late"]
    assert reduced["bytes_predicted"] == reduced["bytes_compiled"] == 4 * (64 * 48 + 48 * 8)
    assert late["bytes_predicted"] == late["bytes_compiled"] == 4 * 4 * (64 + 48 + 48 + 8)
    for row in (reduced, late):
        assert 0 < row["ms_min"] <= row["ms_median"] <= row["ms_max"]
        assert row["ms_communication"] > 0
        assert row["mode"] in out
    assert late["times_fewer_bytes"] == reduced["bytes_compiled"] / late["bytes_compiled"]
