"""The figures of the README and of pages' first lines are those of the records."""

import itertools
import json
import re
from pathlib import Path

import pytest

from benchmarks.exchange import summary

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
