"""Which layers multiply late, and the marks and modes that say so."""

import jax
import numpy as np
import pytest

import jaxcomm as jc
from tests.refusals import refused

ALEXNET = {"fc6": (9216, 4096), "fc7": (4096, 4096), "fc8": (4096, 1000)}


def zeros(shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


PARAMS = {
    "embedding": zeros((100, 30)),
    "blocks": {0: {"kernel": zeros((3, 3, 5, 7)), "bias": zeros((7,))}, 1: {"kernel": zeros((40, 30))}},
    "last": {"layer": {"kernel": zeros((30, 3)), "bias": zeros((3,)), "scale": zeros((3,))}},
}


@pytest.mark.parametrize("workers", [2, 4, 96])
def test_crossover_formula(workers):
    for path, (n, m) in ALEXNET.items():
        equal = 2 * n * m / (n + m)
        for rows in (int(equal) // workers * workers, -(-int(equal + 1) // workers) * workers):
            plan = jc.planner.plan_late_multiply({path: (n, m)}, rows, workers)
            assert (plan.mode(path) == "late") == (rows < equal)
            np.testing.assert_allclose(plan.layers[0].crossover, equal, rtol=1e-12)
    assert int(jc.planner.plan_late_multiply(ALEXNET, 192, workers).layers[0].crossover) == 5671


def test_numbers_and_words():
    plan = jc.planner.plan_late_multiply(ALEXNET, 1792, 4)
    first, _, last = plan.layers
    assert first.bytes_late == 3 * 448 * (9216 + 4096) * 4
    assert first.bytes_reduce == 1.5 * 4 * 9216 * 4096
    assert plan.received == first.bytes_late + 3 * 448 * 8192 * 4 + last.bytes_reduce
    assert [traffic.operand_bytes for traffic in plan.traffic] == [448 * n * 4 for n in (9216, 4096, 4096, 4096)]
    text = str(plan)
    assert "2 of 3 dense layers multiply late, batch 1,792, 4 workers: 140,181,504 bytes received" in text
    assert "fc6 (9,216 x 4,096): late, late 71,565,312 bytes < reduce 226,492,416; equal at a batch of 5,671" in text
    assert "fc8 (4,096 x 1,000): reduce, late 27,396,096 bytes > reduce 24,576,000; equal at a batch of 1,608" in text


def test_half_the_bytes():
    wide, narrow = (
        jc.planner.plan_late_multiply({"a": (7, 3)}, 15, 3, activation_bytes=size).layers[0] for size in (4, 2)
    )
    assert narrow.crossover == 2 * wide.crossover
    assert [traffic.operand_bytes for traffic in wide.late] == [140, 60]
    assert [traffic.operand_bytes for traffic in narrow.late] == [72, 32]


def test_another_exchange():
    exchange = jc.dct_dp(0.99)
    plan = jc.planner.plan_late_multiply(ALEXNET, 256, 4, exchange)
    assert [layer.is_late for layer in plan.layers] == [False, False, False]
    for layer in plan.layers:
        assert layer.bytes_reduce == jc.wire_report(exchange, {"kernel": zeros(layer.shape)}, 4).received
    assert all(layer.is_late for layer in jc.planner.plan_late_multiply(ALEXNET, 8, 4, exchange).layers)
    assert plan.traffic == ()
    axes = ("slice", "data")
    groups = jc.hierarchical(jc.plump_dp(axis_name="slice"), inside="data", across="slice")
    plan = jc.planner.plan_late_multiply(ALEXNET, 256, (2, 2), groups, axis_name=axes)
    assert plan.workers == 4
    assert {traffic.axes for traffic in plan.traffic} == {axes}
    assert (
        plan.layers[0].bytes_reduce
        == jc.wire_report(groups, {"kernel": zeros((9216, 4096))}, (2, 2), axis_name=axes).received
    )


def test_names_of_kernels():
    plan = jc.planner.plan_late_multiply(PARAMS, 8, 4)
    assert {layer.path: layer.shape for layer in plan.layers} == {"blocks/1": (40, 30), "last/layer": (30, 3)}
    assert (plan.mode("blocks/1"), plan.mode("last/layer")) == ("late", "reduce")


@pytest.mark.parametrize(
    "kernels",
    [
        {"blocks/1": (40, 30), "last/layer": (30, 3)},
        {"blocks/1/kernel": (40, 30), "last": {"layer": {"kernel": (30, 3)}}},
    ],
)
def test_marks(kernels):
    plan = jc.planner.plan_late_multiply(kernels, 4, 4)

    def is_marked(path, leaf):
        return not plan.exchanges(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)

    marks = jax.tree_util.tree_map_with_path(is_marked, PARAMS)
    assert marks == {
        "embedding": False,
        "blocks": {0: {"kernel": False, "bias": False}, 1: {"kernel": True}},
        "last": {"layer": {"kernel": True, "bias": True, "scale": False}},
    }


def test_one_worker():
    layer = jc.planner.plan_late_multiply({"a": (7, 3)}, 5, 1).layers[0]
    assert (layer.is_late, layer.bytes_late, layer.bytes_reduce, layer.crossover) == (False, 0, 0, float("inf"))


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (({"a": (7, 3)}, 10, 4), "got 10 rows for 4 workers"),
        (({"a": (7, 3)}, 0, 4), "got 0 rows for 4 workers"),
        (({"a": (7, 3)}, 8, 0), "got 8 rows for 0 workers"),
        (({"a": (7, 3)}, 8, 4, None, 1), "got 1"),
        (({}, 8, 4), "got none in []"),
        (({"w": zeros((7, 3))}, 8, 4), "got none in ['w']"),
        (({"a": (7, 3, 3)}, 8, 4), "got (7, 3, 3) at 'a'"),
        (({"a": (7, 0)}, 8, 4), "got (7, 0) at 'a'"),
        ((ALEXNET, 8, 4), "got 'fc9'. "),
    ],
)
def test_bad_plans(arguments, value):
    refused(lambda: jc.planner.plan_late_multiply(*arguments).mode("fc9"), value)
