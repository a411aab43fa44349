"""The advice: its arithmetic by hand, its verdicts, and what is measured on a mesh."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.planner import COPY_BYTES, advise, candidates, costs, estimate
from jaxcomm.planner.__main__ import KEEP_DENSE, main

N, K, COPY = 100_000, 4, 1e-9
PARAMS = {"w": jax.ShapeDtypeStruct((250, 400), jnp.float32)}
TABLE = {
    "copies": {
        "plump_dp/float32": {"fixed": 1.0, "a_worker": 0.0},
        "plump_dp/bfloat16": {"fixed": 2.0, "a_worker": 0.5},
        "topk/bfloat16": {"fixed": 10.0, "a_worker": 1.0},
    },
    "accuracy": {"topk": "as good as dense, by a table"},
}


@pytest.fixture
def table(monkeypatch):
    costs.known_costs.cache_clear()
    monkeypatch.setattr(costs, "known_costs", lambda: TABLE)


def rapid(rate, methods=None, **options):
    return estimate(PARAMS, K, rate, copy=COPY, methods=methods or {"topk": jc.topk(0.99)}, **options)


def test_a_rapid_estimate_by_hand(table):
    advice = rapid(1e8, latency=1e-3, compute=0.2)
    unit = COPY_BYTES * N * COPY  # seconds of a copy of the gradient
    dense, narrow, topk = (advice[name] for name in ("plump_dp", "plump_dp(bfloat16)", "topk"))
    assert dense.coding == pytest.approx(unit)
    assert dense.wire == pytest.approx(6 * 1e-3 + 1.5 * 4 * N * 8 / 1e8)
    assert narrow.coding == pytest.approx((2 + 0.5 * K) * unit)
    report = jc.wire_report(jc.topk(0.99), PARAMS, K)
    assert topk.bytes == report.received
    assert topk.step == pytest.approx(0.2 + (10 + K) * unit + 3 * 1e-3 + report.received * 8 / 1e8)
    assert topk.latency == pytest.approx(3e-3)
    assert topk.faster == pytest.approx(narrow.step / topk.step)
    assert not topk.measured
    assert topk.low < topk.step < topk.high
    assert topk.memory > 4 * N
    assert topk.accuracy == TABLE["accuracy"]["topk"]
    assert narrow.accuracy == "-"
    assert advice.best == "topk"
    assert [row.step for row in advice.predictions] == sorted(row.step for row in advice.predictions)


def test_at_its_break_even_a_method_is_as_fast_as_dense(table):
    even = rapid(1e8, latency=1e-3)["topk"].break_even
    advice = rapid(even, latency=1e-3)
    assert advice["topk"].step == pytest.approx(advice["plump_dp(bfloat16)"].step)
    assert rapid(even / 2, latency=1e-3)["topk"].faster > 1
    above = rapid(2 * even, latency=1e-3)
    assert above["topk"].faster < 1
    assert above.keeps_dense
    assert above.verdict.startswith("keep dense")


def test_too_little_to_gain_is_nothing_to_gain(table):
    """Between 1 and 1.05 times faster, and where the range of dense reaches below the best."""
    assert rapid(1e8, compute=10.0).keeps_dense
    slow, fast = rapid(1e6), rapid(1e12)
    assert (slow.best, fast.keeps_dense) == ("topk", True)
    text = str(slow)
    assert "verdict: topk: " in text
    assert "~ from the table of costs" in text
    record = json.loads(slow.json())
    assert record["best"] == "topk"
    assert record["keeps_dense"] is False
    assert len(record["predictions"]) == 3


def test_a_method_without_a_known_cost_is_measured_or_refused(table):
    with pytest.raises(ValueError, match=r"got mine\. Measure them"):
        rapid(1e8, {"mine": jc.sign()})
    local = rapid(1e8, {"local": jc.local_sgd(10, exchange=jc.topk(0.99)), "topk": jc.topk(0.99)})
    assert local["local"].coding == pytest.approx(local["topk"].coding / 10)
    assert local["local"].every == 10
    assert local.predictions[0].method == "local"
    assert local.best == "topk"  # the fastest trains in another way
    gain = local["topk"].step / local["local"].step
    assert local.verdict.endswith(f"local would be {gain:.2f}x faster than that, but trains in another way.")


def test_the_shipped_table_has_every_candidate():
    advice = estimate(PARAMS, 8, 1e9)
    assert {row.method for row in advice.predictions} == set(candidates())


def loss_fn(params, batch):
    x = jax.nn.relu(batch["x"] @ params["w"])
    return ((x @ params["v"])[:, 0] - batch["y"]).var(), {"largest": x.max()}


def problem(rows=8):
    random = np.random.default_rng(0)
    params = {"w": random.standard_normal((30, 40)).astype(np.float32), "v": np.ones((40, 1), np.float32)}
    batch = {"x": random.standard_normal((rows, 30)).astype(np.float32), "y": np.arange(rows, dtype=np.float32)}
    return loss_fn, params, batch


def test_a_thorough_advice_times_everything_or_says_what_it_did_not():
    mesh, given = jc.make_mesh(data=2), {"topk": jc.topk(0.9), "local": jc.local_sgd(3, exchange=jc.plump_dp())}
    before = jax.tree.map(np.array, problem()[1])
    advice = advise(*problem(), mesh, optimizer=optax.adam(1e-3), methods=given, seconds=3600.0)
    assert all(row.measured for row in advice.predictions)
    assert advice.compute >= 0  # of so small a model the difference may vanish
    assert advice.link > 0
    for row in advice.predictions:
        assert row.low <= row.step <= row.high
        assert row.step == pytest.approx(advice.compute + row.coding + row.wire)
    jax.tree.map(np.testing.assert_array_equal, before, problem()[1])
    hurried = advise(*problem(), mesh, methods={"topk": jc.topk(0.9), "mine": jc.terngrad()}, seconds=0.0)
    assert {row.method: row.measured for row in hurried.predictions} == {
        "plump_dp": True,
        "plump_dp(bfloat16)": True,
        "topk": False,
        "mine": True,  # nothing is known of it
    }


def test_input_that_cannot_be_advised_on_is_refused():
    loss, params, batch = problem()
    mesh = jc.make_mesh(data=2)
    with pytest.raises(ValueError, match="The loss must be a finite number for every worker; got"):
        advise(lambda p, b: loss(p, b)[0] * jnp.nan, params, batch, mesh)
    with pytest.raises(ValueError, match="must have rows for every worker; got an array of shape"):
        advise(loss, params, problem(rows=7)[2], mesh)
    with pytest.raises(ValueError, match=r"must have the axes of the workers; got \{'other': 2\}"):
        advise(loss, params, batch, jc.make_mesh(other=2))
    with pytest.raises(ValueError, match="compute must be seconds, 0 or more"):
        rapid(1e8, compute=-1.0)
    with pytest.raises(ValueError, match="copy must be seconds a byte, above 0"):
        estimate(PARAMS, K, 1e8, copy=0.0)


def test_the_command_line_says_it_by_its_exit_code(tmp_path, capsys):
    here = f"{__name__}:problem"
    file = tmp_path / "advice.json"
    slow = [here, "--rate", "1mbit", "--workers", "4", "--json", str(file)]
    assert main(slow) == 0
    assert json.loads(file.read_text())["keeps_dense"] is False
    assert "verdict: " in capsys.readouterr().out
    assert main([here, "--rate", "900gbit", "--workers", "4", "--compute-ms", "100"]) == KEEP_DENSE
    for wrong, message in (
        ([here, "--rate", "1mbit"], "--workers must be given with --rate"),
        ([here, "--rate", "fast", "--workers", "2"], "--rate is a positive number with its unit, got 'fast'"),
        ([here, "--compute-ms", "3"], "must go with --rate"),
        (["nowhere:problem", "--rate", "1mbit", "--workers", "2"], "must be importable from here"),
        (["problem", "--rate", "1mbit", "--workers", "2"], "must be MODULE:FUNCTION"),
        ([f"{__name__}:loss_fn_less", "--rate", "1mbit", "--workers", "2"], "must return"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def loss_fn_less():
    return 3
