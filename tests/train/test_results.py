"""The table of a run fits a terminal, and its line on a link has the planner's time of the run's own bytes."""

import dataclasses
import re

import numpy as np
import pytest

import jaxcomm as jc
from tests.train.runs import EXPERIMENT
from train.metrics import Summary
from train.progress import Bar
from train.results import link_line, print_results, table_rows

PARAMS = {"w": np.zeros((1000, 50), np.float32)}


def end(method, exchange, seconds=0.020, skipped=0, **scores):
    report = jc.wire_report(exchange, PARAMS, workers=4)
    scores = {"loss": 0.1, "accuracy": 0.975} | scores
    fields = {"method": method, "workers": 4, "seed": 0, "steps": 400, "bytes_per_step": report.received}
    fields |= {"ratio_to_dense": report.ratio_to_dense, "ratio_to_bfloat16": None, "overflow_per_step": 1.0}
    return Summary(scores=scores, skipped=skipped, seconds_per_step=seconds, seconds=30.0, **fields), report


NO_TIME = end("dct_dp-late", jc.dct_dp(0.99), None, auc=0.75, log_loss=0.5)
RUNS = [end("plump_dp", jc.plump_dp()), end("dct_dp", jc.dct_dp(0.99), 0.025)]


def test_time_of_a_link():
    """A dense all-reduce between 4 workers receives 1.5 times the gradient: 300 kB, 24 ms at 100 Mbit/s."""
    line = link_line(RUNS)
    (dense, sparse), wires = re.findall(r"([\d.]+) ms with", line), re.search(r"and ([\d.]+) and ([\d.]+) ms on", line)
    assert float(wires[1]) == 24
    assert float(dense) == 24 + 20
    assert float(wires[2]) == pytest.approx(8e-5 * RUNS[1][1].received, rel=0.01)
    assert float(sparse) == pytest.approx(25 + float(wires[2]), rel=0.01)


@pytest.mark.parametrize(
    "runs",
    [
        RUNS,
        [end("plump_dp", jc.plump_dp(), auc=0.75, log_loss=0.5, skipped=3), NO_TIME],
        [end("local_sgd-masked-0.9-bfloat16", jc.plump_dp(), 12.0, bleu=30.5, bleu_lower=31.5)],
    ],
)
def test_width_and_numbers(runs, capsys):
    print_results(EXPERIMENT, runs, on_a_link=False)
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    assert "97.5" in output
    assert f"{runs[0][0].bytes_per_step:,.0f}" in output
    assert ("skipped" in output) == any(summary.skipped for summary, _ in runs)


def test_no_link(capsys):
    for changes, on_a_link in (({}, True), ({"workers": 1}, False), ({"delay": 1}, False), ({"slices": 2}, False)):
        print_results(dataclasses.replace(EXPERIMENT, **changes), RUNS, on_a_link=on_a_link)
    assert "Mbit/s" not in capsys.readouterr().out
    print_results(EXPERIMENT, RUNS, on_a_link=False)
    assert "At 100 Mbit/s" in capsys.readouterr().out


def test_the_baseline_is_dense():
    assert [row["method"] for row in table_rows([summary for summary, _ in RUNS])] == ["dense (plump_dp)", "dct_dp"]


def test_no_steps_no_bar(capsys):
    with Bar("dct_dp", 400, shows=True) as bar:
        bar.say("a line")
    assert "0/400" not in capsys.readouterr().out
    with Bar("dct_dp", 400, shows=True) as bar:
        bar.update(400, 0.5, 0.9, 1e3)
    assert "400/400" in capsys.readouterr().out
