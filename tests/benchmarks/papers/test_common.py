"""What the papers' modules share: their options and commands, and what is told of claims."""

import json

import pytest

from benchmarks.papers import __main__ as papers
from benchmarks.papers import timing
from benchmarks.papers.common import Config, first_reaching
from benchmarks.papers.report import Difference, draw, print_claim
from train.records import Records


def test_an_experiment_is_evaluated_forty_times_and_never_stopped():
    experiment = Config().experiment("digits", steps=200, workers=8)
    assert (experiment.steps, experiment.eval_every, experiment.workers) == (200, 5, 8)
    assert experiment.max_skipped > experiment.steps
    assert Config(steps=12).experiment("digits", steps=200).steps == 12  # what is asked for comes first
    assert Config(steps=12).experiment("digits").warmup_steps == 3


def test_methods_that_are_recorded_are_not_timed_again(monkeypatch, tmp_path):
    commands = []

    def run(command, check):
        commands.append(command)
        names = command[command.index("--method") + 1].split(",")
        path = command[command.index("--json") + 1]
        with open(path, "w") as file:
            json.dump([{"method": name, "ms_median": len(name), "hosts": 4} for name in names], file)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(timing.subprocess, "run", run)
    records, given = Records(None), {"shapes": "1e4", "hosts": 4, "rate": "1gbit", "steps": 3}
    timing.time_exchanges(records, methods=["topk", "sign"], **given)
    found = timing.time_exchanges(records, methods=["sign", "slim_dp"], **given)
    assert {name: record["ms_median"] for name, record in found.items()} == {"sign": 4, "slim_dp": 7}
    assert [command[command.index("--method") + 1] for command in commands] == ["topk,sign", "slim_dp"]


def test_differences_are_told_apart_by_two_standard_errors():
    """Of 2, 3 and 4: mean 3, standard deviation 1, standard error 1 / sqrt(3) = 0.577."""
    found = Difference.of([3.0, 5.0, 4.0], [1.0, 2.0, 0.0])
    assert (found.mean, found.error) == (3.0, pytest.approx(0.57735, abs=1e-5))
    assert (found.exceeds(), found.exceeds(2.5), found.exceeds(9.0)) == (True, None, False)
    assert Difference.of([3.0], [1.0]).exceeds() is None  # one seed tells nothing


def test_a_claim_that_does_not_hold_is_said_not_to(capsys):
    for holds, said in ((True, "holds here"), (False, "does NOT hold here"), (None, "is not told apart here")):
        print_claim("it is faster", holds, "2 ms")
        assert capsys.readouterr().out == f"The paper: it is faster. That {said}: 2 ms.\n"


def test_the_first_evaluation_with_an_accuracy_is_found():
    run = {"steps": [10, 20, 30, 40], "accuracies": [50.0, 80.0, 70.0, 90.0]}
    assert [first_reaching(run, target) for target in (0.0, 75.0, 85.0, 91.0)] == [10, 20, 40, None]


def test_a_figure_has_a_panel_for_each_title_and_a_line_for_each_label(tmp_path):
    matplotlib = pytest.importorskip("matplotlib.image")
    lines = {"dense": ([1, 2], [[3.0, 4.0], [5.0, None]]), "slim": ([1, 2], [[1.0, 2.0]])}
    for count in (1, 3):
        draw(tmp_path / "new" / f"{count}.png", {f"panel {i}": lines for i in range(count)}, "x", "y")
    one, three = (matplotlib.imread(tmp_path / "new" / f"{count}.png") for count in (1, 3))
    assert three.shape[0] == 2 * one.shape[0]  # two columns
    assert one.std() > 0.05  # something is drawn


def test_every_function_of_every_paper_has_one_command():
    found = papers.commands(papers.Config(smoke=True))
    names = [(command[2].rpartition(".")[2], command[4]) for command in found]
    slim = [name for module, name in names if module == "slim_dp"]
    assert slim == ["1", "2", "fig3", "fig4"]  # the others need table 1's times
    assert {("iwp", name) for name in ("1", "thresholds", "fig2", "fig5", "fig7", "nodes")} <= set(names)
    assert {("dct", name) for name in ("1", "2", "3", "4", "5", "6", "7", "fig2", "fig5", "fig7", "hybrid")} <= set(
        names
    )
    assert {("practical_lessons", name) for name in ("1", "2", "3", "placement")} <= set(names)
    assert ("iwp", "fig3") not in names  # of the runs of fig2
    assert len(names) == len(set(names))
    assert all(command[-1] == "--smoke" and "--json" not in command for command in found)
    (kept,) = [c for c in papers.commands(papers.Config()) if c[2:5] == ["benchmarks.papers.iwp", "--table", "1"]]
    assert kept[-2] == "--json"
    assert kept[-1].endswith("docs/data/papers_iwp.json")
