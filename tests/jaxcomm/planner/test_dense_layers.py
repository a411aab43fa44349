"""Dense layers that multiply late or are split: their bytes by hand, and the advice about them."""

import jax
import numpy as np
import pytest

import jaxcomm as jc
from jaxcomm.planner import advise, dense_layers
from jaxcomm.planner.costs import Bench, Cost, Timing
from jaxcomm.planner.dense_layers import layers_of
from tests.refusals import refused

K, B, N, M = 4, 16, 8, 12
PARAMS = {"fc/kernel": np.zeros((N, M)), "fc/bias": np.zeros(M), "wide/kernel": np.zeros((M, N))}


def layers(params=PARAMS, rows=None, sizes=(K,), axis_name="data"):
    rows_ = layers_of(params, {"fc": B, "wide": B} if rows is None else rows, sizes, axis_name)
    return {(layer.path, layer.way): layer for layer in rows_}


def test_bytes_by_hand():
    """Late, the other workers' rows of inputs and errors; split, by the table of `split_dense`, both ways."""
    rows_ = layers()
    late, bias = (K - 1) * B // K * (N + M) * 4, (K - 1) / K * 4 * 2
    assert rows_["fc", "late"].program.received == late == rows_["wide", "late"].program.received
    assert rows_["fc", "split"].program.received == bias * B * (N + M / K)  # by outputs: it widens
    assert rows_["wide", "split"].program.received == bias * B * (N + M / K)  # by inputs: it narrows
    assert rows_["fc", "late"].tensors == ("fc/kernel", "fc/bias")
    assert rows_["fc", "split"].tensors == ("fc/kernel",)
    assert rows_["wide", "late"].tensors == ("wide/kernel",)


def test_even_splits():
    assert {way for _, way in layers({"fc/kernel": np.zeros((N, M + 1))}, {"fc": B})} == {"late"}
    assert {way for _, way in layers(sizes=(2, 2), axis_name=("slice", "data"))} == {"late"}


def test_bad_layers():
    with pytest.raises(ValueError, match="must have a kernel \\(N, M\\); got none at 'gone/kernel'"):
        layers(rows={"gone": B})
    with pytest.raises(ValueError, match=r"must have a kernel \(N, M\); got \(12,\)"):
        layers({"fc/kernel": np.zeros(M)}, {"fc": B})
    refused(lambda: layers(rows={"fc": 18}), "rows of 'fc'", "got 18")


def test_a_split_layer_updates_its_shard(monkeypatch):
    """If an update takes a second per element, and a product takes no time."""
    params = {
        name: np.zeros((N, width), np.float32) for name, width in (("a/kernel", M), ("b/kernel", 2 * M), ("c", 5))
    }
    bench, zero = Bench(jc.make_mesh(data=K), "data"), Cost(0.0, 0.0, 0.0)

    def seconds(timing):
        return Cost(*[float(sum(leaf[0].size for leaf in jax.tree.leaves(timing._params)))] * 3)

    monkeypatch.setattr(Timing, "cost", seconds)
    monkeypatch.setattr(dense_layers, "_measure_layer", lambda *_: zero)
    rows_, rows = layers_of(params, {"a": B, "b": B}, (K,), "data"), bench.spread(params)
    costs = dense_layers.measure_layers(bench, rows_, jc.plump_dp(), rows, rows)
    spared = {path: (1 - 1 / K) * params[path].size for path in ("a/kernel", "b/kernel")}
    for layer, cost in zip(rows_, costs, strict=True):
        assert cost.seconds == pytest.approx(0.0 if layer.way == "late" else -spared[layer.tensors[0]])


@pytest.mark.slow
def test_advice():
    random = np.random.default_rng(0)
    params = {
        "conv": np.eye(N, dtype=np.float32),
        "fc": {"kernel": random.standard_normal((N, 256)).astype(np.float32), "bias": np.zeros(256, np.float32)},
    }

    def loss_fn(params, x):
        return (jax.nn.relu(x @ params["conv"]) @ params["fc"]["kernel"] + params["fc"]["bias"]).var()

    batch = random.standard_normal((B, N)).astype(np.float32)
    advice = advise(loss_fn, params, batch, jc.make_mesh(data=2), methods={}, dense_layers={"fc": B})
    late, split = advice["late"], advice["split"]
    assert [(layer.path, layer.way) for layer in advice.layers] == [("fc", "late"), ("fc", "split")]
    elements = {"late": N * N, "split": N * N + 256}
    for row, layer in zip((late, split), advice.layers, strict=True):
        bias = jc.wire_report(jc.plump_dp(value_dtype="bfloat16"), [np.zeros(elements[row.method], np.float32)], 2)
        assert row.bytes == pytest.approx(layer.bytes + bias.received + 4)  # the loss
        assert layer.wire > 0
        assert row.wire >= layer.wire
        assert row.accuracy == "as dense"
    assert [layer.memory for layer in advice.layers] == [0, 4 * N * 256 // 2]
    assert advice.layers[0].computing >= 0
