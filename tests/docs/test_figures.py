"""The figures of the README and of pages' first lines are those of the records."""

import itertools
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.exchange import summary
from benchmarks.ladder import BOUNDARIES
from benchmarks.papers.report import Difference

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


def best_of(file: str, width: int) -> dict[str, dict[int, float]]:
    """By method or boundary, the losses of the seeds at the rate that is best for the first one."""
    losses: dict[str, dict[float, dict[int, float]]] = {}
    for row in json.loads((ROOT / f"docs/data/{file}.json").read_text()):
        if row["of"] == "run" and row["width"] == width:
            losses.setdefault(row["method"], {}).setdefault(row["rate"], {})[row["seed"]] = row["loss"]
    return {name: min(rates.values(), key=lambda seeds: seeds[0]) for name, rates in losses.items()}


def losses_of_boundaries() -> dict[str, list[float]]:
    """By boundary, on the first rung."""
    return {name: list(seeds.values()) for name, seeds in best_of("ladder_boundaries", 48).items()}


def table_after(title: str) -> list[list[str]]:
    """The cells of the first table after a title of the boundaries' page, its head and its rule included."""
    lines = (ROOT / "docs/measurements/boundaries.md").read_text().partition(f"{title}\n")[2].splitlines()
    return [line.split(" | ") for line in itertools.takewhile(lambda line: line[:1] != "#", lines) if "| " in line]


def test_all_boundaries():
    """Times, bytes and losses of the table; what is not run has no figure."""
    losses, rows = losses_of_boundaries(), table_after("## All boundaries at 48 features")
    names = [name for name in BOUNDARIES if name in losses and name != "d/8 muon"]
    cells = dict(zip(names, rows[2:], strict=True))
    for record in json.loads((ROOT / "docs/data/gpt_stages_links.json").read_text()):
        name, mean = record["method"], f"{record['ms_mean']:,.0f}"
        if "delay" in record and record["delay"] != "none":
            assert cells[name][4] == mean
        else:
            assert cells[name][1] == f"{record['bytes_kernel']:,.0f}"
            assert cells[name][3] == f"{mean} ({record['ms_min']:,.0f}, {record['ms_max']:,.0f})"
    for name, row in cells.items():
        assert len(losses[name]) == 3
        gap = Difference.of(losses[name], losses["dense"])
        text = "" if name == "dense" else f" {gap.mean:+.3f} ({gap.error:.3f})"
        assert row[-1].strip(" |") == f"{fmean(losses[name]):.3f}{text}"
    dense = [r["loss"] for r in json.loads((ROOT / "docs/data/ladder_sines.json").read_text()) if muon_of_the_ladder(r)]
    whole, learned = fmean(dense), fmean(losses["d/8 muon"])
    assert f"whole activations end at {whole:.3f}, d/8 at {learned:.3f}" in text_of("docs/measurements/boundaries.md")


def muon_of_the_ladder(row: dict[str, Any]) -> bool:
    return row["of"] == "run" and (row["width"], row["method"], row["rate"]) == (48, "muon", 0.016)


def test_what_to_send():
    """Bytes, and losses minus those of whole activations by the same optimizer and seed; Muon's are the ladder's."""
    near = json.loads((ROOT / "docs/data/ladder_boundaries_near.json").read_text())
    best = best_of("ladder_boundaries_near", 64)
    whole = {"adam": best["dense"], "muon": best_of("ladder", 64)["muon"]}
    received = {BOUNDARIES[row["method"]].boundary: row["bytes_per_step"] for row in near}
    labels = {entry.boundary: entry.label for entry in BOUNDARIES.values() if entry.optimizer == "adam"}
    rows = {row[0].removeprefix("| "): [cell.strip(" |") for cell in row[1:]] for row in table_after("## What to send")}
    assert {labels[boundary] for boundary in received} == set(list(rows)[2:])
    for boundary, count in received.items():
        fewer, *cells = rows[labels[boundary]]
        assert fewer == f"{received['dense'] / count:.{1 if count > received['dense'] / 9.95 else 0}f}"
        for optimizer, text in zip(whole, cells, strict=True):
            if boundary == "dense":
                assert text == f"{fmean(whole[optimizer][seed] for seed in best['dense']):.3f}"
                continue
            entries = [n for n, e in BOUNDARIES.items() if (e.boundary, e.optimizer) == (boundary, optimizer)]
            losses = next((best[name] for name in entries if name in best), {})
            gap = Difference.of([*losses.values()], [whole[optimizer][seed] for seed in losses]) if losses else None
            error = f" ({gap.error:.3f})" if len(losses) > 1 and gap else ""
            assert text == (f"{gap.mean:+.3f}{error}" if gap else "")


def test_a_wider_model():
    """What a 16th of the features costs with Muon, at twice the width."""
    wide = json.loads((ROOT / "docs/data/ladder_boundaries_wide.json").read_text())
    losses = {row["method"]: row["loss"] for row in wide}
    whole, learned = losses["muon"], losses["d/16 muon"]
    assert {(row["width"], row["steps"][-1]) for row in wide} == {(128, 3876)}
    text = f"whole activations end at {whole:.3f} and d/16, 8 numbers, at {learned:.3f}: {learned - whole:+.3f}"
    assert text in text_of("docs/measurements/boundaries.md")


def test_the_index_says_what_a_learned_boundary_costs():
    """d/8 of 48 features is six numbers; whole activations are what it is compared with."""
    losses = losses_of_boundaries()
    text = f"Six learned numbers in place of 48 features cost {fmean(losses['d/8']) - fmean(losses['dense']):.2f} nats"
    assert text in text_of("docs/measurements/index.md")


@pytest.mark.parametrize(("delay", "label"), [("none", "none"), ("50ms", "50 ms"), ("150ms", "150 ms")])
def test_what_latency_costs(delay, label):
    rows = {row["method"]: row for row in json.loads((ROOT / f"docs/data/exchange_delay_{delay}.json").read_text())}
    times = {name: f"{row['ms_median']:,.0f}" for name, row in rows.items()}
    faster = (f"{times[name]} ({rows[name]['times_faster']:.1f}x)" for name in ("topk", "dct_dp", "powersgd"))
    assert f"| {label} | {times['plump_dp']} | {' | '.join(faster)} |" in text_of("docs/measurements/exchange.md")
