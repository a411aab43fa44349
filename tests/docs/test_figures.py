"""The figures of the README and of pages' first lines are those of the records."""

import itertools
import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.exchange import summary
from benchmarks.ladder import BOUNDARIES

ROOT = Path(__file__).parents[2]


def exchange_of(method: str, rate: str) -> dict[str, float]:
    """A method's row over the rounds of all days."""
    rows = json.loads((ROOT / "docs/data/exchange_days.json").read_text())
    rounds = [list(group) for _, group in itertools.groupby(rows, lambda row: row["round"])]
    (row,) = [row for row in summary(rounds) if (row["method"], row["rate"]) == (method, rate)]
    return row | {"runs": len(rounds), "days": len(row["day"].split("/"))}


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / page).read_text())


def days(row: dict[str, float]) -> str:
    return f"{row['runs']} run{'s' if row['runs'] > 1 else ''} on {row['days']} day{'s' if row['days'] > 1 else ''}"


def test_the_first_figures_of_the_readme():
    row, text = exchange_of("dct_dp", "100mbit"), text_of("README.md")
    assert f"**{row['times_fewer_bytes']:.1f} times fewer bytes**" in text
    ends = f"{row['times_faster_min']:.0f} to {row['times_faster_max']:.0f}"
    assert f"**{row['times_faster']:.0f} times faster** ({ends} in {days(row)}" in text


@pytest.mark.parametrize(("rate", "name"), [("100mbit", "At 100 Mbit/s"), ("1gbit", "at 1 Gbit/s")])
def test_the_first_lines_of_the_exchange(rate, name):
    text = text_of("docs/measurements/exchange.md")
    for method in ("dct_dp", "topk", "powersgd"):
        row = exchange_of(method, rate)
        ends = f"{row['times_faster_min']:.1f} to {row['times_faster_max']:.1f}"
        assert f"`{method}` {row['times_faster']:.1f} times ({ends})" in text.partition(name)[2].partition(";")[0]
    assert days(exchange_of("dct_dp", rate)) in text


def test_the_index_says_what_the_exchange_does():
    slow, fast = (exchange_of("dct_dp", rate)["times_faster"] for rate in ("100mbit", "1gbit"))
    text = f"`dct_dp` {slow:.0f} times at 100 Mbit/s and {fast:.1f} times at 1 Gbit/s, between 4 hosts"
    assert text in text_of("docs/measurements/index.md")


def test_the_boundaries_of_the_pipelines():
    """Times, bytes and losses of the table; what is not run has no figure."""
    page, data = (ROOT / "docs/measurements/pipelines.md").read_text(), ROOT / "docs/data"
    rows = [line.split(" | ") for line in page.partition("## A boundary that learns")[2].splitlines() if "| " in line]
    cells = dict(zip(BOUNDARIES, rows[2:], strict=True))
    for record in json.loads((data / "gpt_stages_links.json").read_text()):
        name, mean = record["method"], f"{record['ms_mean']:,.0f}"
        if "delay" in record and record["delay"] != "none":
            assert cells[name][4] == mean
        else:
            assert cells[name][1] == f"{record['bytes_kernel']:,.0f}"
            assert cells[name][3] == f"{mean} ({record['ms_min']:,.0f}, {record['ms_max']:,.0f})"
    losses: dict[str, list[float]] = {}
    for row in json.loads((data / "ladder_boundaries.json").read_text()):
        if row["rate"] == 0.016:
            losses.setdefault(row["method"], []).append(row["loss"])
    shown = {name: row[-1].strip(" |") for name, row in cells.items()}
    assert {name: loss for name, loss in shown.items() if loss} == {
        name: loss_cell(own) for name, own in losses.items()
    }


def test_the_index_says_what_a_learned_boundary_costs():
    """d/8 of 48 features is six numbers; whole activations are what it is compared with."""
    rows = json.loads((ROOT / "docs/data/ladder_boundaries.json").read_text())
    means = [fmean(r["loss"] for r in rows if (r["method"], r["rate"]) == (n, 0.016)) for n in ("d/8", "dense")]
    text = f"Six learned numbers in place of 48 features cost {means[0] - means[1]:.2f} nats"
    assert text in text_of("docs/measurements/index.md")


def loss_cell(losses: list[float]) -> str:
    """The mean over the seeds, and the distance between them."""
    return f"{fmean(losses):.3f}" + (f" ({max(losses) - min(losses):.3f})" if len(losses) > 1 else "")


@pytest.mark.parametrize(("delay", "label"), [("none", "none"), ("50ms", "50 ms"), ("150ms", "150 ms")])
def test_what_latency_costs(delay, label):
    rows = {row["method"]: row for row in json.loads((ROOT / f"docs/data/exchange_delay_{delay}.json").read_text())}
    times = {name: f"{row['ms_median']:,.0f}" for name, row in rows.items()}
    faster = (f"{times[name]} ({rows[name]['times_faster']:.1f}x)" for name in ("topk", "dct_dp", "powersgd"))
    assert f"| {label} | {times['plump_dp']} | {' | '.join(faster)} |" in text_of("docs/measurements/exchange.md")
