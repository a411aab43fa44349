"""The exchange benchmark on two hosts."""

import contextlib
import dataclasses
import json
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc
from benchmarks import exchange
from benchmarks.exchange import METHODS, Config, main, make_usual, summary
from jaxcomm.planner.alone import without_wire
from tests.benchmarks.places import CAN_ISOLATE, run


@pytest.mark.slow
def test_two_hosts(tmp_path):
    path = tmp_path / "table.json"
    names = ["plump_dp", "topk", "dct_dp", "naive", "slim_dp"]
    options = ("--method", ",".join(names), "--steps", "1", "--json", str(path))
    out, _ = run("exchange", "--shapes", "2e5", "--hosts", "2", "--rate", "none", *options)
    records = json.loads(path.read_text())
    assert [record["method"] for record in records] == names
    for record in records:
        assert (record["hosts"], record["rate"]) == (2, "none")
        assert 0 < record["ms_min"] <= record["ms_median"] <= record["ms_max"]
        assert record["bytes_predicted"] == record["bytes_compiled"] > 0
        assert record["compile_s"] > 0
        assert record["method"] in out
    dense, topk, dct_dp, naive, _ = records
    assert dense["bytes_compiled"] == pytest.approx(2 * 1 / 2 * 4 * 200_000, abs=64)
    assert naive["bytes_compiled"] == pytest.approx(8 * 2000, abs=64)
    assert naive["bytes_compiled"] > 2 * topk["bytes_compiled"]
    assert 200 > dct_dp["times_fewer_bytes"] > 80
    assert [record["ms_refresh"] is not None for record in records] == [False, False, True, False, True]
    if CAN_ISOLATE:
        assert dense["bytes_kernel"] == pytest.approx(dense["bytes_compiled"], rel=0.1)
    else:
        assert dense["bytes_kernel"] is None


@pytest.mark.slow
def test_devices_of_one_process(tmp_path):
    """As on two GPUs, on two simulated devices."""
    path, env = tmp_path / "table.json", {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "PJRT_NPROC": "16"}
    options = ("--method", "plump_dp,topk", "--steps", "2", "--rounds", "2", "--json", str(path))
    run("exchange", "--device", "cpu", "--shapes", "2e5", *options, env=env)
    dense, topk = json.loads(path.read_text())
    assert dense["bytes_compiled"] == pytest.approx(2 * 1 / 2 * 4 * 200_000, abs=64)
    assert dense["times_fewer_bytes"] == 1 < 50 < topk["times_fewer_bytes"]
    for row in (dense, topk):
        assert (row["hosts"], row["processes"], row["device"], row["bytes_kernel"]) == (2, 1, "cpu", None)
        assert 0 < row["ms_min"] <= row["ms_median"] <= row["ms_max"]
        assert 0 < row["times_faster_min"] <= row["times_faster"] <= row["times_faster_max"]


def test_timed_steps_are_usual():
    """The first steps refresh thresholds often."""
    tx, ones = jc.dct_dp(0.9), [jnp.arange(2000.0)]
    update = jax.jit(without_wire(tx.update, 2))
    _, first = update(ones, jax.jit(without_wire(tx.init, 2))(ones), ones)
    usual = make_usual(first)
    _, after = update([3 * ones[0]], usual, ones)
    np.testing.assert_array_equal(after.memory.threshold.rows, first.memory.threshold.rows)
    assert not usual.residual.rows.any()
    _, early = update([3 * ones[0]], first, ones)
    assert np.all(early.memory.threshold.rows != first.memory.threshold.rows)


def test_medians_and_ratios():
    def row(method, ms):
        spread = {"ms_median": ms, "ms_min": ms - 1, "ms_max": ms + 1}
        fields = {"bytes_kernel": None, "bytes_compiled": 8.0, "compile_s": 1.0, "ms_refresh": None}
        return {"method": method, "rate": "none", **spread, **fields}

    rounds = [[row("plump_dp", ms), row("topk", ms / ratio)] for ms, ratio in ((90, 2), (300, 3), (120, 6))]
    dense, topk = summary(rounds)
    assert [dense[f"ms_{name}"] for name in ("median", "min", "max")] == [120, 89, 301]
    assert dense["bytes_kernel"] is None
    assert [topk[f"ms_{name}"] for name in ("median", "min", "max")] == [45, 19, 101]
    assert [topk[f"times_faster{name}"] for name in ("", "_min", "_max")] == [3, 2, 6]
    assert [row["times_faster"] for row in summary([[row("topk", 9.0)]])] == [None]


def test_rounds_of_other_days(tmp_path, monkeypatch):
    """They are kept, and the table is of all; those of other links or methods are refused before anything is timed."""
    days, table, timed = tmp_path / "days.json", tmp_path / "table.json", []
    links = {"delay": "none", "jitter": "none", "shares": "none"}

    def on_hosts(hosts, rate, options, **_):
        timed.append(rate)
        lab = {"hosts": hosts, "rate": rate, **links, "control": "cubic", "day": f"2026-11-0{len(timed)}"}
        fields = {"bytes_kernel": None, "bytes_compiled": 8.0, "compile_s": 1.0, "ms_refresh": None, "machine_ms": 20.0}
        times = {"plump_dp": 100.0, "topk": 10.0 * len(timed)}
        spread = ("ms_median", "ms_min", "ms_max")
        like = [jax.ShapeDtypeStruct((10_000,), np.float32)]
        sent = {name: jc.wire_report(METHODS[name](0.99), like, 2).received for name in times}
        return [
            {"method": name, **lab, **fields, **dict.fromkeys(spread, ms), "bytes_predicted": sent[name]}
            for name, ms in times.items()
        ]

    def lab(control):
        return lambda *_, **__: contextlib.nullcontext(
            SimpleNamespace(conditions=lambda: {"control": control, **links})
        )

    monkeypatch.setattr(exchange.harness, "on_hosts", on_hosts)
    monkeypatch.setattr(exchange, "Lab", lab("cubic"))
    config = Config(shapes="1e4", hosts=2, rate="1gbit", method="plump_dp,topk", days=days, json=table)
    for _ in range(3):
        main(config)
    (topk,) = [row for row in json.loads(table.read_text()) if row["method"] == "topk"]
    assert [topk[f"times_faster{name}"] for name in ("", "_min", "_max")] == [5, 100 / 30, 10]
    assert topk["day"] == "2026-11-01/2026-11-02/2026-11-03"
    with pytest.raises(ValueError, match=r"got one with .*'plump_dp'.* in the place of .*'sign'"):
        main(dataclasses.replace(config, method="sign,topk"))
    with pytest.raises(ValueError, match=r"got one with None in the place of .*'sign'"):
        main(dataclasses.replace(config, method="plump_dp,topk,sign"))
    for other in ({"sparsity": 0.9}, {"shapes": "2e4"}):
        with pytest.raises(ValueError, match=r"of the same methods, bytes, .* got one with .*bytes_predicted"):
            main(dataclasses.replace(config, **other))
    monkeypatch.setattr(exchange, "Lab", lab("bbr"))
    with pytest.raises(ValueError, match="got bbr and cubic"):
        main(config)
    assert len(timed) == 3


def test_a_device_that_is_not_here():
    """It is refused after others were found as well, and JAX stays as it was."""
    platforms, _ = jax.config.jax_platforms, jax.devices()
    with pytest.raises(ValueError, match="got 'abacus'"):
        main(Config(device="abacus", shapes="1e4", method="plump_dp"))
    assert jax.config.jax_platforms == platforms
