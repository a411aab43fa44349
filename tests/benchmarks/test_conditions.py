"""Conditions of timed records: measured, shown in headings, and not mixed."""

from datetime import date

import pytest

from benchmarks.conditions import check_control, headed, heading, machine
from benchmarks.harness import HostOptions, compare, over_rounds


def row(control="cubic", ms=1.0, **fields):
    conditions = {"control": control, "delay": "none", "jitter": "none", "shares": "none"}
    spread = {"ms_median": ms, "ms_min": ms, "ms_max": ms, "bytes_compiled": 8.0}
    return spread | conditions | {"day": "2026-11-27", "machine_ms": 16.0} | fields


OLD = {"method": "dense", "ms_median": 2.0, "ms_min": 1.0, "ms_max": 3.0, "bytes_compiled": 8.0}


def test_the_machine():
    about = machine()
    assert date.fromisoformat(about["day"]) <= date.today()
    assert 0 < about["machine_ms"] < 10_000


def test_one_control():
    check_control([row(), row()])
    check_control([OLD, OLD])
    for rows, controls in (([row(), row("bbr")], "bbr and cubic"), ([row(), OLD], "cubic and unknown")):
        with pytest.raises(ValueError, match=f"one congestion control; got {controls}. Time all of them again"):
            check_control(rows)
        with pytest.raises(ValueError, match=f"got {controls}"):
            compare(rows, [])
        with pytest.raises(ValueError, match=f"got {controls}"):
            over_rounds([rows[:1], rows[1:]])


def test_rows_of_one_delay_are_compared():
    """A compressor with 50 ms is not compared with dense without."""
    rows = [
        row(method="dense", ms=8.0),
        row(method="dense", ms=30.0, delay="50ms"),
        row(method="topk", ms=10.0, delay="50ms"),
        row(method="topk", ms=2.0, shares="0/0.2"),
    ]
    assert [row["times_faster"] for row in compare(rows, [], method="dense")] == [1.0, 1.0, 3.0, None]


def test_headings():
    rows = [row(machine_ms=16.04), row(machine_ms=18.0, day="2026-11-28")]
    title, shown = headed("Exchange", rows)
    assert title == "Exchange; control cubic; 2026-11-27/2026-11-28; machine 16.0 to 18.0 ms"
    assert [*shown[0]] == ["ms_median", "ms_min", "ms_max", "bytes_compiled"]
    title, shown = headed("Exchange", [row(delay="50ms"), row()])
    assert title == "Exchange; control cubic; delay 50ms/none; 2026-11-27; machine 16.0 ms"
    assert [row["delay"] for row in shown] == ["50ms", "none"]
    assert headed("Exchange", [OLD]) == ("Exchange", [OLD])
    assert heading("", [row(control="bbr", delay="50ms", shares="0/0.2")]).startswith(
        "control bbr; delay 50ms; shares 0/0.2"
    )


def test_rounds_keep_their_conditions():
    rounds = [[row(machine_ms=ms)] for ms in (16.0, 20.0, 17.0)]
    assert [(row["control"], row["machine_ms"]) for row in over_rounds(rounds)] == [("cubic", 17.0)]


def test_keys_of_old_records():
    """Without a delay a key is what it was; with one it is another."""
    assert HostOptions().link("100mbit") == "100mbit"
    link = HostOptions(delay="50ms", slow=3.0).link("100mbit")
    assert link == "100mbit, delay 50ms, slow 3.0"
