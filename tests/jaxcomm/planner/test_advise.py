"""The advice: its arithmetic by hand, its verdicts, and its measurements on a mesh."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.placement import make_plan
from jaxcomm.planner import COPY_BYTES, advise, candidates, costs, estimate, given_links
from jaxcomm.planner import advice as planner_advice
from jaxcomm.planner.__main__ import KEEP_DENSE, main
from jaxcomm.planner.costs import Bench
from jaxcomm.planner.prediction import ALL_DENSE, _verdict_of_exchanges
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.loss import loss_of

N, K, COPY = 100_000, 4, 1e-9
PARAMS = {"w": jax.ShapeDtypeStruct((250, 400), jnp.float32)}
TABLE = {
    "copies": {
        "plump_dp/float32": {"fixed": 1.0, "a_worker": 0.0},
        "plump_dp/bfloat16": {"fixed": 2.0, "a_worker": 0.5},
        "plump_dp/float16": {"fixed": 9.0, "a_worker": 0.5},  # never the fastest
        "topk/bfloat16": {"fixed": 10.0, "a_worker": 1.0},
    },
    "accuracy": {"topk": {"change": 0.1, "low": 0.05, "high": 0.15, "unit": "nats", "on": "a table"}},
}


@pytest.fixture
def table(monkeypatch):
    costs.known_costs.cache_clear()
    monkeypatch.setattr(costs, "known_costs", lambda: TABLE)


def rapid(rate, methods=None, **options):
    options = {"latency": 0.0, **options}
    return estimate(PARAMS, K, rate, copy=COPY, methods=methods or {"topk": jc.topk(0.99)}, **options)


def test_a_model_of_small_tensors():
    """Its residual has no elements, and XLA places such arrays where it likes."""
    params = {"w": jnp.ones((16, 4))}

    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    result = advise(loss, params, np.ones((8, 16), np.float32), jc.make_mesh(data=2), methods={"topk": jc.topk(0.9)})
    assert result["topk"].measured
    assert result["topk"].bytes == result["plump_dp"].bytes


def test_rapid_by_hand(table):
    advice = rapid(1e8, latency=1e-3, compute=0.2)
    unit = COPY_BYTES * N * COPY  # seconds of a copy of the gradient
    dense, narrow, topk = (advice[name] for name in ("plump_dp", "plump_dp(bfloat16)", "topk"))
    assert dense.coding == pytest.approx(unit)
    assert dense.wire == pytest.approx(6 * 1e-3 + 1.5 * 4 * N * 8 / 1e8)
    assert narrow.coding == pytest.approx((2 + 0.5 * K) * unit)
    report = jc.wire_report(jc.topk(0.99), PARAMS, K)
    assert topk.bytes == report.received
    assert topk.step == pytest.approx(0.2 + (10 + K) * unit + 3 * 1e-3 + report.received * 8 / 1e8)
    exchange = (10 + K) * unit + 3 * 1e-3 + report.received * 8 / 1e8
    assert topk.delayed == pytest.approx(0.2)
    assert rapid(1e8, latency=1e-3, compute=exchange - unit)["topk"].delayed == pytest.approx(exchange)
    assert topk.latency == pytest.approx(3e-3)
    assert topk.faster == pytest.approx(narrow.step / topk.step)
    assert not topk.measured
    assert topk.low < topk.step < topk.high
    assert topk.memory > 4 * N
    assert (topk.accuracy, topk.loss) == ("+0.10 nats (95%: +0.05 to +0.15), a table", 0.05)
    assert narrow.accuracy == "-"
    assert advice.best == "topk"
    assert [row.step for row in advice.predictions] == sorted(row.step for row in advice.predictions)


def test_one_worker():
    advice = estimate(PARAMS, 1, 1e8, latency=0.0)
    assert advice.best == "plump_dp"
    assert advice.verdict.startswith("keep dense: plump_dp. One worker receives nothing from others")


def test_a_latency_that_is_not_given_is_said(table):
    """By the rings of 4 workers, dense sends 2 * 3 messages one after another, and topk 3."""
    silent, said = rapid(1e8), rapid(1e8, latency=None)
    assert [(row.method, row.step) for row in said.predictions] == [
        (row.method, row.step) for row in silent.predictions
    ]
    assert (said["plump_dp"].messages, said["topk"].messages) == (6, 3)
    assert (silent.latency_assumed, said.latency_assumed) == (False, True)
    assert "latency" not in silent.verdict
    narrow = said["plump_dp(bfloat16)"].messages
    assert f"assumed to be 0: a step takes topk 3 ms and plump_dp(bfloat16) {narrow:g} ms longer" in said.verdict
    assert "(assumed)" in str(said)
    assert "(assumed)" not in str(silent)
    seconds = [rapid(1e8, latency=latency)["topk"].step for latency in (0.0, 0.05)]
    assert seconds[1] - seconds[0] == pytest.approx(3 * 0.05)
    kept = rapid(1e12, latency=None).verdict
    assert "a step takes plump_dp 6 ms and plump_dp(bfloat16) 4 ms longer for every ms" in kept


def test_dense_may_overlap():
    """Where collectives are asynchronous, dense may take no longer than the longer of computing and exchanging."""
    question = planner_advice._make_question({"topk": jc.topk(0.99)}, PARAMS, None, (K,), "data", [])
    compute, coding = costs.Cost(0.04, 0.04, 0.04), dict.fromkeys(question.chosen, costs.Cost(1e-3, 1e-3, 1e-3))
    given = ("thorough", question, given_links(1e8), compute, coding, [], 0, 0.0)
    alone, overlapping = planner_advice._advice(*given), planner_advice._advice(*given, dense_overlaps=True)
    wire = 1.5 * 4 * N * 8 / 1e8  # 48 ms, known within a quarter
    assert alone["plump_dp"].low == pytest.approx(0.041 + wire - wire / 4)
    assert overlapping["plump_dp"].low == pytest.approx(0.04)
    assert overlapping["plump_dp"].step == alone["plump_dp"].step
    assert overlapping["topk"] == alone["topk"]
    assert alone.best == "topk"
    assert overlapping.best in ("plump_dp(bfloat16)", "plump_dp(float16)")  # topk takes 3 ms more than computing does


def test_break_even(table):
    break_even = rapid(1e8, latency=1e-3)["topk"].break_even
    advice = rapid(break_even, latency=1e-3)
    assert advice["topk"].step == pytest.approx(advice["plump_dp(bfloat16)"].step)
    assert rapid(break_even / 2, latency=1e-3)["topk"].faster > 1
    faster = rapid(2 * break_even, latency=1e-3)
    assert faster["topk"].faster < 1
    assert faster.keeps_dense
    assert faster.verdict.startswith("keep dense")


def test_too_little_to_gain(table):
    """If it is between 1 and 1.05 times faster, or if the range of dense reaches below the best."""
    assert rapid(1e8, compute=10.0).keeps_dense
    slow, fast = rapid(1e6), rapid(1e12)
    assert (slow.best, fast.keeps_dense) == ("topk", True)
    text = str(slow)
    assert "verdict: topk: " in text
    assert text.endswith(". Its accuracy against dense: +0.10 nats (95%: +0.05 to +0.15), a table.")
    assert "~ from the table of costs" in text
    record = json.loads(slow.json())
    assert record["best"] == "topk"
    assert record["keeps_dense"] is False
    assert len(record["predictions"]) == 4


@pytest.mark.parametrize(("low", "keeps_dense"), [(0.99, True), (1.01, False)])
def test_uncertain_gains(table, low, keeps_dense):
    best, *slower = rapid(1e6).predictions
    assert min(row.step for row in slower) > 1.5 * best.step
    rows = [best, *(dataclasses.replace(row, low=low * best.step) for row in slower)]
    assert _verdict_of_exchanges(rows)[1].startswith("keep dense") == keeps_dense


def test_the_one_that_loses_least(table):
    """Of the methods whose range reaches the fastest's; one of which nothing is known comes last, dense never."""
    fastest, *slower = rapid(1e6).predictions
    wide = dataclasses.replace(fastest, step=1.0, low=0.9, high=1.2, loss=0.5)
    dense = [dataclasses.replace(row, step=9.0 + place, low=8.0) for place, row in enumerate(slower)]

    def best(**losses):
        rivals = [dataclasses.replace(wide, method=name, loss=loss, step=1.1) for name, loss in losses.items()]
        return _verdict_of_exchanges([wide, *rivals, *dense])[0]

    assert best() == best(b=0.6) == best(b=None) == best(b=0.5) == "topk"
    assert best(b=0.4) == best(b=0.4, c=0.45) == "b"
    far = dataclasses.replace(wide, method="far", step=2.0, low=1.3, loss=0.0)
    assert _verdict_of_exchanges([wide, far, *dense])[0] == "topk"
    near = dataclasses.replace(far, low=1.1)
    verdict = _verdict_of_exchanges([wide, near, *dense])
    assert verdict[0] == "far"
    assert "topk may be faster" in verdict[1]
    hardly = [dataclasses.replace(row, step=2.05, low=1.95) for row in dense]  # dense takes 1.02 times as long as "far"
    assert _verdict_of_exchanges([wide, near, *hardly])[0] == "topk"


def test_an_unknown_cost(table):
    with pytest.raises(ValueError, match=r"got mine\. Measure them"):
        rapid(1e8, {"mine": jc.sign()})
    local = rapid(1e8, {"local": jc.local_sgd(10, exchange=jc.topk(0.99)), "topk": jc.topk(0.99)})
    assert local["local"].coding == pytest.approx(local["topk"].coding / 10)
    assert local["local"].every == 10
    assert local["local"].delayed is None
    assert local.predictions[0].method == "local"
    assert local.best == "topk"  # the fastest method trains differently
    gain = local["topk"].step / local["local"].step
    assert local.verdict.endswith(f"local would be {gain:.2f}x faster than that, but trains in another way.")


def test_shortest_periods_by_hand(table):
    """Its exchange (coding and wire) then takes a twentieth of the computing between two exchanges."""
    methods = {"local": jc.local_sgd(10, exchange=jc.topk(0.99)), "topk": jc.topk(0.99)}
    advice = rapid(1e6, methods, compute=0.1)
    received = jc.wire_report(jc.topk(0.99), PARAMS, K).received
    exchange = (10 + K) * COPY_BYTES * N * COPY + received * 8 / 1e6
    expected = math.ceil(exchange / (0.05 * 0.1))
    assert advice["local"].shortest_period == expected > 10
    assert advice["topk"].shortest_period is None
    assert advice.verdict.endswith(f"From H = {expected} on, its step is within 5% of computing alone.")
    assert json.loads(str(advice.json()))["predictions"][0]["shortest_period"] == expected
    near = rapid(1e6, {"local": jc.local_sgd(expected, exchange=jc.topk(0.99))}, compute=0.1)
    assert 1.04 < near["local"].step / near.compute <= 1.05
    assert rapid(1e6, methods)["local"].shortest_period is None


def test_layers_by_hand(table):
    """All parameters are the layer's; the bias of a split layer is exchanged."""
    rows, rate, compute, kernel = 32, 1e8, 0.3, 240 * 400
    params = {"fc": {"kernel": jnp.zeros((240, 400)), "bias": jnp.zeros(400)}}

    def ask(**options):
        return estimate(params, K, rate, copy=COPY, methods={}, dense_layers={"fc": rows}, **options)

    advice = ask(compute=compute)
    late, split = advice["late"], advice["split"]
    seconds = compute * (K - 1) / 3 * kernel / (kernel + 400)  # one of three products, of K times the rows
    assert late.coding == pytest.approx(seconds)
    assert late.bytes == (K - 1) / K * rows * (240 + 400) * 4
    assert late.step == pytest.approx(compute + seconds + late.bytes * 8 / rate)
    assert split.coding == pytest.approx((2 + 0.5 * K) * COPY_BYTES * 400 * COPY)
    assert [(layer.way, layer.computing) for layer in advice.layers] == [("late", late.coding), ("split", 0.0)]
    assert ask()["late"].coding == 0
    assert make_plan(advice, params, methods={}).dense_layers == "split"


def test_costs_grow_with_what_is_sent(monkeypatch):
    """By hand, with the rank and with the percentage of coordinates; "at" is what the table was measured with."""
    copies = {
        "topk/bfloat16": {"fixed": 10.0, "a_worker": 1.0, "at": 1.0, "fixed_a_unit": 0.5, "a_worker_a_unit": 0.25},
        "powersgd": {"fixed": 16.0, "a_worker": 0.0, "at": 4.0, "fixed_a_unit": 3.0, "a_worker_a_unit": 0.0},
    }
    monkeypatch.setattr(costs, "known_costs", lambda: TABLE | {"copies": TABLE["copies"] | copies})
    methods = {"few": jc.topk(0.99), "half": jc.topk(0.5), "1": jc.powersgd(1), "4": jc.powersgd(4)}
    methods |= {"128": jc.powersgd(128), "dense": jc.topk(0.0)}
    advice = rapid(1e9, methods)
    expected = {"few": 10 + K, "half": 10 + 24.5 + 13.25 * K, "dense": 10 + 49.5 + 25.75 * K}
    expected |= {"1": 7, "4": 16, "128": 16 + 3 * 124}
    assert {name: advice[name].coding / (N * 8 * COPY) for name in methods} == pytest.approx(expected)


def test_one_slow_worker(table):
    mixture, slow = rapid([1e7, 1e8, 1e8, 1e8]), rapid(1e7)
    assert [row.step for row in mixture.predictions] == [row.step for row in slow.predictions]
    assert mixture.link == slow.link == pytest.approx(1e7)


def test_memory_by_hand():
    """With 256 rows per worker, 4,096 hidden numbers are kept for the backward pass, and little else."""
    bench, width, hidden = Bench(jc.make_mesh(data=2), "data"), 64, 4096
    params, batch = np.ones((width, hidden), np.float32), np.ones((512, width), np.float32)
    loss = loss_of(lambda w, x: ((x @ w) ** 2).mean(), False, False, "data")
    _, memory = costs.gradients_of(bench, loss, bench.spread(params), bench.shards(Batch.of(batch)))
    expected = 4 * (width * hidden + 256 * width + 256 * hidden)
    assert expected <= memory < 2 * expected


def test_the_shipped_table():
    advice = estimate(PARAMS, 8, 1e9)
    assert {row.method for row in advice.predictions} == set(candidates())
    page = (Path(__file__).parents[3] / "docs" / "waiting.md").read_text()
    for entry in costs.known_costs()["copies"].values():
        assert f"| {entry['fixed']:.1f} | {entry['a_worker']:.2f} |".replace("| 0.00 |", "| 0 |") in page
        if "at" in entry:
            growth = f"{entry['fixed_a_unit']:.2f} + {entry['a_worker_a_unit']:.3f} K"
            assert f"| {growth} above {entry['at']:g}" in page


def loss_fn(params, batch):
    x = jax.nn.relu(batch["x"] @ params["w"])
    return ((x @ params["v"])[:, 0] - batch["y"]).var(), {"largest": x.max()}


def problem(rows=8):
    random = np.random.default_rng(0)
    params = {"w": random.standard_normal((30, 40)).astype(np.float32), "v": np.ones((40, 1), np.float32)}
    batch = {"x": random.standard_normal((rows, 30)).astype(np.float32), "y": np.arange(rows, dtype=np.float32)}
    return loss_fn, params, batch


def test_thorough():
    mesh, options = jc.make_mesh(data=2), {"topk": jc.topk(0.9), "local": jc.local_sgd(3, exchange=jc.plump_dp())}
    before = jax.tree.map(np.array, problem()[1])
    advice = advise(*problem(), mesh, optimizer=optax.adam(1e-3), methods=options, seconds=3600.0)
    assert all(row.measured for row in advice.predictions)
    assert advice.compute >= 0  # for so small a model, the difference may vanish
    assert advice.link > 0
    assert advice.memory > sum(leaf.nbytes for leaf in jax.tree.leaves(before))
    assert f"{1e-6 * advice.memory:,.1f} MB a worker" in str(advice)
    for row in advice.predictions:
        assert row.low <= row.step <= row.high
        assert row.step == pytest.approx(advice.compute + row.coding + row.wire)
    jax.tree.map(np.testing.assert_array_equal, before, problem()[1])
    hurried = advise(*problem(), mesh, methods={"topk": jc.topk(0.9), "mine": jc.terngrad()}, seconds=0.0)
    assert {row.method: row.measured for row in hurried.predictions} == {
        "plump_dp": True,
        "plump_dp(bfloat16)": True,
        "plump_dp(float16)": True,
        "topk": False,
        "mine": True,  # nothing is known of it
    }


def test_bad_input(monkeypatch):
    loss, params, batch = problem()
    mesh = jc.make_mesh(data=2)
    with monkeypatch.context() as no_device:
        no_device.setattr(Bench, "spread", lambda *_: pytest.fail("a device was used"))
        no_device.setattr(Bench, "shards", lambda *_: pytest.fail("a device was used"))
        with pytest.raises(ValueError, match=r"must have a link between workers.*got one worker of \{'data': 1\}"):
            advise(loss, params, batch, jc.make_mesh(data=1))
        with pytest.raises(
            ValueError, match=r"must have a gradient on one worker's rows.*got TypeError: .*Call jax\.grad"
        ):
            advise(lambda p, b: loss(p, b)[0] + p["w"] @ b["y"], params, batch, mesh)
        with pytest.raises(
            ValueError, match=r"must be a multiple of the number of workers; got 7 rows at \"\['x'\]\" for 2 workers"
        ):
            advise(loss, params, problem(rows=7)[2], mesh)
        with pytest.raises(ValueError, match=r"must have the axes of the workers; got \{'other': 2\}"):
            advise(loss, params, batch, jc.make_mesh(other=2))
    with pytest.raises(ValueError, match="The loss must be a finite number for every worker; got"):
        advise(lambda p, b: loss(p, b)[0] * jnp.nan, params, batch, mesh)
    for bad in (-1.0, None):
        with pytest.raises(ValueError, match=f"compute must be seconds, 0 or more; got {bad}"):
            rapid(1e8, compute=bad)
    for bad in (0.0, None):
        with pytest.raises(ValueError, match=f"copy must be seconds a byte, above 0; got {bad}"):
            estimate(PARAMS, K, 1e8, copy=bad)  # type: ignore


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (["topk"], r"methods must be exchanges by name; got \['topk'\]"),
        ({"topk": jc.topk}, r"methods\['topk'\] must be a transformation.*Call it"),
        ({"late": jc.topk(0.9)}, "names of their own.*got \"topk as 'late'\""),
        ({"plump_dp": jc.topk(0.9)}, "names of their own.*got \"topk as 'plump_dp'\""),
        ({"topk": jc.topk(0.9, where="nothing")}, "exchanges of some of the parameters; got 'topk'. Widen its where="),
    ],
)
def test_methods_that_cannot_be_compared(methods, said):
    with pytest.raises(ValueError, match=said):
        rapid(1e8, methods=methods)


def test_a_tensor_of_2_31_elements():
    """Layers that are stacked for a scan. What can exchange them is compared, the rest named."""
    params = {"layers": jax.ShapeDtypeStruct((80, 8192, 8192), jnp.bfloat16)}
    advice = estimate(params, 8, "1gbit", latency=0.0)
    assert {row.method for row in advice.predictions} == {"local_sgd(10)", *ALL_DENSE}
    assert "Left out: dct_dp(0.99), topk(0.99), random_k(0.9)" in advice.verdict
    with pytest.raises(ValueError, match=r"fewer than 2\^31 elements"):
        estimate(params, 8, "1gbit", methods={"topk": jc.topk(0.9)})


def test_exit_codes(tmp_path, capsys):
    name = f"{__name__}:problem"
    file = tmp_path / "advice.json"
    slow = [name, "--rate", "1mbit", "--workers", "4", "--json", str(file)]
    assert main(slow) == 0
    assert json.loads(file.read_text())["keeps_dense"] is False
    assert "verdict: " in capsys.readouterr().out
    assert main([name, "--rate", "900gbit", "--workers", "4", "--compute-ms", "100"]) == KEEP_DENSE
    assert main([name, "--rate", "1mbit/1gbit", "--workers", "4"]) == 0
    assert "link 1 Mbit/s" in capsys.readouterr().out
    for wrong, message in (
        ([name, "--rate", "1gbit/1gbit/1gbit", "--workers", "2"], "--rate must have at most one a worker"),
        ([name, "--rate", "1mbit"], "--workers must be given with --rate"),
        ([name, "--rate", "fast", "--workers", "2"], "--rate must be a positive number with its unit; got 'fast'"),
        ([name, "--compute-ms", "3"], "must go with --rate"),
        ([name, "--copy-gbyte", "3"], "must go with --rate"),
        (["nowhere:problem", "--rate", "1mbit", "--workers", "2"], "must be importable from here"),
        (["problem", "--rate", "1mbit", "--workers", "2"], "must be MODULE:FUNCTION"),
        ([f"{__name__}:loss_fn_less", "--rate", "1mbit", "--workers", "2"], "must return"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def loss_fn_less():
    return 3


def test_integers_among_the_parameters():
    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2) + params["table"].sum()

    params = {"w": jnp.ones((4, 4)), "table": jnp.arange(3)}
    options = {"methods": {"topk": jc.topk(0.5)}, "seconds": 1, "optimizer": optax.sgd(0.1)}
    assert "16 parameters" in str(advise(loss, params, np.ones((8, 4), np.float32), jc.make_mesh(data=2), **options))
