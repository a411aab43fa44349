"""What the papers' modules share: options, commands, and verdicts on claims."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.papers import __main__ as papers
from benchmarks.papers import common, timing
from benchmarks.papers.common import Config, first_reaching
from benchmarks.papers.report import Difference, all_hold, columns, draw, print_cause, print_claim
from train.records import Records


def test_forty_evaluations():
    experiment = Config().experiment("digits", steps=200, workers=8)
    assert (experiment.steps, experiment.eval_every, experiment.workers) == (200, 5, 8)
    assert experiment.max_skipped > experiment.steps
    assert Config(steps=12).experiment("digits", steps=200).steps == 12  # --steps comes first
    assert Config(steps=12).experiment("digits").warmup_steps == 3


def test_recorded_methods(monkeypatch, tmp_path):
    commands = []

    def run(command, check):
        commands.append(command)
        names = command[command.index("--method") + 1].split(",")
        path = command[command.index("--json") + 1]
        with open(path, "w") as file:
            json.dump([{"method": name, "ms_median": len(name), "hosts": 4} for name in names], file)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(timing.subprocess, "run", run)
    records, options = Records(None), {"shapes": "1e4", "hosts": 4, "rate": "1gbit", "steps": 3}
    timing.time_exchanges(records, methods=["topk", "sign"], **options)
    paths = timing.time_exchanges(records, methods=["sign", "slim_dp"], **options)
    assert {name: record["ms_median"] for name, record in paths.items()} == {"sign": 4, "slim_dp": 7}
    assert [command[command.index("--method") + 1] for command in commands] == ["topk,sign", "slim_dp"]


def test_exchanges_of_another_congestion_control(monkeypatch):
    records, options = Records(None), {"shapes": "1e4", "hosts": 4, "rate": "1gbit", "steps": 3}
    for method, control in (("topk", {}), ("sign", {"control": "cubic"})):
        monkeypatch.setattr(timing, "run_benchmark", lambda *_, row={"method": method, **control}: [row])
        if not control:
            timing.time_exchanges(records, methods=["topk"], **options)
    with pytest.raises(ValueError, match="got cubic and unknown"):
        timing.time_exchanges(records, methods=["topk", "sign"], **options)
    assert timing.time_exchanges(records, methods=["sign"], **options) == {"sign": records.find({"method": "sign"})}


def test_a_table_whose_inputs_changed(monkeypatch, tmp_path):
    """As the planner's costs, of which the plans of `placement` are made; records of before do not say."""
    tables, costs = [], tmp_path / "costs.json"
    monkeypatch.setattr(
        timing, "run_benchmark", lambda module, options: tables.append(options) or [{"ms": len(tables)}]
    )
    records = Records(None)
    records.add({"of": "placement", "options": {"rate": "1gbit"}, "table": [{"ms": 0}]})
    paths = []
    for text in ("a", "a", "b", "a"):
        costs.write_text(text)
        paths += timing.time_benchmark(records, "placement", inputs=[costs], rate="1gbit")
    assert paths == [{"ms": 1}, {"ms": 1}, {"ms": 2}, {"ms": 1}]
    assert tables == [{"rate": "1gbit"}] * 2


def test_two_standard_errors():
    """Of 2, 3 and 4: mean 3, standard deviation 1, standard error 1 / sqrt(3) = 0.577."""
    difference = Difference.of([3.0, 5.0, 4.0], [1.0, 2.0, 0.0])
    assert (difference.mean, difference.error) == (3.0, pytest.approx(0.57735, abs=1e-5))
    assert (difference.exceeds(), difference.exceeds(2.5), difference.exceeds(9.0)) == (True, None, False)
    assert Difference.of([3.0], [1.0]).exceeds() is None  # one seed decides nothing


@pytest.mark.parametrize(
    ("difference", "paper", "zero", "verdict"),
    [
        ((24.13, 5.0), 0.18, 1.0, False),  # DCT's table 4: the sign alone agrees
        ((8.0, 7.34), 0.0, 1.0, None),  # Slim-DP's figure 4: so wide that it shows nothing
        ((0.4, 0.2), 0.0, 1.0, True),
        ((-1.5, 0.2), 0.0, 1.0, False),  # the same means neither above nor below
        ((1.1, 0.2), 0.1, 1.0, None),
        ((20.0, 2.0), 23.0, 0.0, True),
        ((10.0, 0.0), 23.0, 0.0, False),  # of a gain of 23, less than half
        ((84.0, 0.0), 23.0, 0.0, False),
        ((-20.0, 2.0), 23.0, 0.0, False),
        ((-20.0, 2.0), -23.0, 0.0, True),
        ((0.1, None), 0.1, 1.0, None),  # one seed decides nothing
        ((math.inf, 0.0), 0.1, 1.0, False),
    ],
)
def test_verdicts_by_size(difference, paper, zero, verdict):
    assert Difference(*difference).agrees(paper, zero) is verdict


def test_gains_beyond_the_papers():
    assert Difference(84.0, 1.0).agrees(23.0, or_more=True) is True
    assert Difference(-84.0, 1.0).agrees(-23.0, or_more=True) is True
    assert Difference(12.0, 1.0).agrees(23.0, or_more=True) is None
    assert Difference(-84.0, 1.0).agrees(23.0, or_more=True) is False
    assert [all_hold(True, None), all_hold(None, False), all_hold(True, True)] == [None, False, True]


def test_words_of_verdicts(capsys):
    for holds, verdict in ((True, "holds here"), (False, "does NOT hold here"), (None, "is not told apart here")):
        print_claim("it is faster", holds, "2 ms")
        assert capsys.readouterr().out == f"The paper: it is faster. That {verdict}: 2 ms.\n"


def test_causes(capsys):
    """Half of -5 (1) is 2.5 (0.5). A cause holds if what is left is smaller by two standard errors."""
    short, tuned = Difference(-5.0, 1.0), Difference(0.0, 0.5)
    for last, verdict in (
        (tuned, "holds here"),
        (Difference(-4.0, 0.5), "does NOT hold here"),  # closer, but not by half
        (Difference(-9.0, 1.0), "does NOT hold here"),
        (Difference(-1.0, 1.5), "is not told apart here"),
        (Difference(4.5, 1.0), "is not told apart here"),  # the size counts, not the sign
        (Difference(0.0, None), "is not told apart here"),
    ):
        print_cause("it is short", {"9 steps": short, "20 steps": Difference(0.0, 0.1), "36 steps": last})
        assert capsys.readouterr().out == (
            f"Supposed: it is short. That {verdict}: the difference to dense is {short} with 9 steps, and {last} with "
            "36 steps.\n"
        )
    print_cause("it is short", {"9 steps": short, "36 steps": tuned}, base="the paper's ratio")
    assert "the difference to the paper's ratio is -5.00" in capsys.readouterr().out


def test_the_first_accuracy():
    run = {"steps": [10, 20, 30, 40], "accuracies": [50.0, 80.0, 70.0, 90.0]}
    assert [first_reaching(run, target) for target in (0.0, 75.0, 85.0, 91.0)] == [10, 20, 40, None]


def test_panels_and_lines(tmp_path):
    matplotlib = pytest.importorskip("matplotlib.image")
    lines = {"dense": ([1, 2], [[3.0, 4.0], [5.0, None]]), "slim": ([1, 2], [[1.0, 2.0]])}
    for count in (1, 3):
        draw(tmp_path / "new" / f"{count}.png", {f"panel {i}": lines for i in range(count)}, "x", "y")
    one, three = (matplotlib.imread(tmp_path / "new" / f"{count}.png") for count in (1, 3))
    assert three.shape[0] == 2 * one.shape[0]  # two columns
    assert one.std() > 0.05  # something is drawn


def test_every_function_is_listed():
    lines = [line.split() for line in papers.listed(papers.Config())]
    names = [(words[2].rpartition(".")[2], words[4]) for words in lines]
    slim = [name for module, name in names if module == "slim_dp"]
    assert slim == ["1", "2", "fig3", "fig4", "why"]  # the others need table 1's times
    assert {("iwp", name) for name in ("1", "why", "thresholds", "fig2", "fig5", "fig7", "nodes")} <= set(names)
    dct = ("1", "2", "3", "4", "5", "6", "7", "why", "fig2", "fig5", "fig7", "hybrid")
    assert {("dct", name) for name in dct} <= set(names)
    assert {("practical_lessons", name) for name in ("1", "2", "3", "placement")} <= set(names)
    assert ("iwp", "fig3") not in names  # of the runs of fig2
    assert len(names) == len(set(names))
    assert all(words[-2:] == ["--json", "docs/data/papers.json"] for words in lines)


def test_timed_tables_are_apart():
    names, training = (papers.listed(papers.Config(only=selection)) for selection in ("timed", "untimed"))
    assert sorted(names + training) == sorted(papers.listed(papers.Config()))
    assert {(line.split()[2].rpartition(".")[2], line.split()[4]) for line in names} == {
        ("slim_dp", "1"),
        ("iwp", "fig7"),
        *(("dct", name) for name in ("5", "fig7", "hybrid")),
        *(("practical_lessons", name) for name in ("1", "2", "3")),
    }


def test_one_command(monkeypatch, capsys):
    ran = []

    def run(command, check):
        ran.append(command[1:])
        return type("Done", (), {"returncode": int("iwp" in command[2])})

    monkeypatch.setattr(papers.subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"^Failed: python -m benchmarks.papers.iwp --only untimed --json new.json$"):
        papers.main(papers.Config(all=True, only="untimed", json=Path("new.json")))
    assert [words[1].rpartition(".")[2] for words in ran] == ["dct", "iwp", "practical_lessons", "slim_dp"]
    assert all(words[2:] == ["--only", "untimed", "--json", "new.json"] for words in ran)
    ran.clear()
    papers.main(papers.Config())
    assert not ran
    assert capsys.readouterr().out.endswith("\n".join(["", *papers.listed(papers.Config()), ""]))


def test_a_failure_ends_no_other(monkeypatch, capsys, tmp_path):
    results = []

    def bad(config, records):
        raise ValueError("no hosts")

    tables = {name: lambda config, records, name=name: results.append(name) for name in ("1", "fig3")}
    tables = {"1": tables["1"], "2": bad, "fig2": bad, "fig3": tables["fig3"]}
    monkeypatch.setattr("train.processes.prepare_jax", lambda devices: None)

    def run(*argv):
        monkeypatch.setattr("sys.argv", ["paper", *argv])
        common.run(Config, tables, None, devices=1, timed=("2", "fig2"))

    with pytest.raises(SystemExit, match=r"^--table 2: no hosts$"):  # which fig2 is as well
        run()
    assert results == ["1", "fig3"]
    run("--only", "untimed")
    run("--table", "1", "--only", "timed")
    assert results == ["1", "fig3", "1", "fig3", "1"]


def test_a_run_that_diverged():
    """Its record has None for a loss; what is known of the others is printed."""
    worse = Difference.of([None, 1.0], [1.0, 1.0])
    assert (worse.mean, worse.error, worse.exceeds()) == (math.inf, None, None)
    row = columns("loss", [None, 1.0], worse, "minus_dense")
    assert row == {"loss": math.inf, "stdev": None, "minus_dense": math.inf, "standard_error": None}
