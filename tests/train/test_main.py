"""The command line: what it reads, prints, writes and refuses; SIGTERM."""

import ast
import dataclasses
import inspect
import json
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

from configs import CONFIGS
from configs.methods import DctDp, Iwp, LocalSgd, Method, PlumpDp, QuantDp, SlimDp, TopK
from tests.train.runs import MLP, Told
from train.__main__ import come_together, main, parse, run
from train.loop import train as train_one
from train.processes import Processes
from train.restarts import BEGUN

ROOT = Path(__file__).parents[2]
# Three real steps.
SHORT = ["--steps", "3", "--warmup-steps", "1", "--global-batch", "24", "--eval-every", "3"]


def explained(text):
    """The fields of a configs module's classes with their docstrings: {class: {field: docstring}}."""
    classes = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            fields = classes[node.name] = {}
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign):
                    doc = after.value.value if isinstance(after, ast.Expr) else ""
                    fields[field.target.id] = " ".join(doc.split())
    return classes


def documented(method):
    """The fields of a method with their help, from its docstring or from those of its base classes."""
    docs = {}
    for base in reversed(method.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        fields = re.findall(r"^  (\w+): (.*?)(?=^\S|^  \w|\Z)", section, flags=re.DOTALL | re.MULTILINE)
        docs |= {name: " ".join(doc.split()) for name, doc in fields}
    return docs


def help_of(read, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        read()
    assert ended.value.code == 0
    return re.sub(r"[\s│]+", " ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "name"), [([], "digits"), (["--seed", "3"], "digits"), (["method:top-k"], "digits"), (["mnist"], "mnist")]
)
def test_the_default(argv, name):
    experiment = parse(argv)
    assert experiment.name == name
    assert dataclasses.replace(experiment, seed=0, method=CONFIGS[name].method) == CONFIGS[name]


@pytest.mark.parametrize(
    ("argv", "method"),
    [
        ([], CONFIGS["digits"].method),
        (["method:dct-dp", "--method.sparsity", "0.99"], dataclasses.replace(CONFIGS["digits"].method, sparsity=0.99)),
        (["method:dct-dp", "--method.drain-every", "7"], dataclasses.replace(CONFIGS["digits"].method, drain_every=7)),
        (["method:top-k"], TopK()),
        *[([f"method:{method.name}"], method()) for method in get_args(Method)],  # the library's names
        (["method:top-k", "--method.value-dtype", "float32"], TopK(value_dtype="float32")),
        (["method:plump-dp"], PlumpDp()),
        (["method:plump-dp", "--method.p", "4"], PlumpDp(p=4)),
        (["method:slim-dp", "--method.alpha", "0.4", "--method.unsent", "carry"], SlimDp(alpha=0.4, unsent="carry")),
        (["method:local-sgd", "--method.exchange-sparsity", "0.9"], LocalSgd(exchange_sparsity=0.9)),
        (
            ["method:local-sgd", "--method.fragments", "2", "--method.overlap", "5", "--method.mix", "0.5"],
            LocalSgd(fragments=2, overlap=5, mix=0.5),
        ),
        (["method:quant-dp", "--method.bits", "4"], QuantDp(bits=4)),
        (["method:iwp", "--method.C", "2.0", "--method.no-factor-masking"], Iwp(C=2.0, factor_masking=False)),
        (["method:iwp", "--method.alpha", "0.01"], Iwp(alpha=0.01)),
        (
            ["method:iwp", "--method.alpha", "0.005", "0.1", "--method.beta", "0", "1", "--method.change-at", "9"],
            Iwp(alpha=(0.005, 0.1), beta=(0.0, 1.0), change_at=(9,)),
        ),
    ],
)
def test_choice_of_methods(argv, method):
    assert parse(["digits", "--workers", "2", *argv]) == dataclasses.replace(
        CONFIGS["digits"], workers=2, method=method
    )


@pytest.mark.parametrize(("name", "guess"), [("digit", "did you mean 'digits'?"), ("imagenet", "got 'imagenet'")])
def test_typos(name, guess, started, capsys):
    assert main([name, "--steps", "1"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"train: An experiment must be one of {', '.join(CONFIGS)}; got ")
    assert guess in message


@pytest.mark.parametrize("argv", [["digits", "--stepz", "3"], ["digits", "--steps", "many"], ["method:none"]])
def test_unknown_options(argv, started, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_help_of_fields(capsys, monkeypatch):
    classes = {}
    for name in ("experiment", "comparison"):
        classes |= explained((ROOT / "configs" / f"{name}.py").read_text())
    del classes["Architecture"]  # a module of configs/ says which
    assert set(classes["Experiment"]) == {field.name for field in dataclasses.fields(CONFIGS["digits"])}
    pages = {"Experiment": ["digits"], "BoundaryFields": ["digits"], "Comparison": None}
    prefixes = {"Experiment": "--", "BoundaryFields": "--boundary.", "Comparison": "--"}
    assert set(pages) == set(classes)
    for name, argv in pages.items():
        read = partial(parse, [*argv, "--help"]) if argv else partial(main, ["compare", "--help"])
        text = help_of(read, capsys, monkeypatch)
        for field, doc in classes[name].items():
            assert doc, field
            if field == "architecture":
                assert doc not in text
                assert "--architecture" not in text
                continue
            assert doc in text, field
            if field not in ("method", "boundary"):
                assert prefixes[name] + field.replace("_", "-") in text
    text = help_of(partial(parse, ["mnist", "--help"]), capsys, monkeypatch)
    assert f"Experiments: {', '.join(CONFIGS)}." in text
    assert "method:plump-dp" in text


@pytest.mark.parametrize("method", get_args(Method))
def test_help_of_methods(method, capsys, monkeypatch):
    name = re.sub("(?<!^)(?=[A-Z])", "-", method.__name__).lower()
    text = help_of(partial(parse, [f"method:{name}", "--help"]), capsys, monkeypatch)
    docs, options = documented(method), method().options()
    assert set(options) <= {field.name for field in dataclasses.fields(method)} - {"where", "others", "axis_name"}
    for option in options:
        assert f"--method.{option.replace('_', '-')}" in text
        assert docs[option] in text, option
    assert {option.removeprefix("no-").replace("-", "_") for option in re.findall(r"--method\.([\w-]+)", text)} == set(
        options
    )


@pytest.mark.slow
def test_files_of_a_run(tmp_path, capsys):
    table = ["--json", str(tmp_path / "new" / "table.json"), "--tensorboard"]
    argv = [*SHORT, "--out", str(tmp_path), *table, "method:top-k"]
    assert run(parse(argv), Processes()) == 0
    records = json.loads((tmp_path / "new" / "table.json").read_text())
    assert [record["method"] for record in records] == ["plump_dp", "topk"]
    for record in records:
        plain = {"method", "workers", "seed", "accuracy", "steps", "bytes_per_step", "ratio_to_dense"}
        assert plain <= set(record)
        assert (record["workers"], record["seed"], record["steps"]) == (4, 0, 3)
        assert 0 < record["accuracy"] <= 1
    assert records[1]["ratio_to_dense"] > 10 * records[0]["ratio_to_dense"]
    folder = tmp_path / "digits"
    assert (folder / "accuracy_against_bytes.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for method in ("plump_dp", "topk"):
        lines = [json.loads(line) for line in (folder / method / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert "test_accuracy" in lines[2]
        settings = json.loads((folder / method / "settings.json").read_text())
        assert (settings["method"], settings["workers"], settings["learning_rate"]) == (method, 4, 0.05)
        assert settings["dense_bytes"] == 2 * 3 / 4 * 4 * settings["parameters"]
        assert len(list((folder / method).glob("events.out.tfevents.*"))) == 1
    assert main(["report", str(folder)]) == 0
    assert "<td>4</td>" in (folder / "report.html").read_text()
    output = capsys.readouterr().out
    assert "digits: 4 workers, 3 steps, seed 0; bytes received by each worker" in " ".join(output.split())
    assert "Goodput" not in output
    assert "At 100 Mbit/s a step would take" in output
    assert f"are in {folder}" in "".join(output.splitlines())


@pytest.mark.slow
def test_a_pipeline_and_its_dense_twin(tmp_path):
    """Each in its own folder, also where both exchange gradients by the same method."""
    argv = [*SHORT, "--workers", "1", "--stages", "2", "--boundary.sparsity", "0.9", "method:plump-dp"]
    experiment = dataclasses.replace(parse(argv), architecture=MLP, out=tmp_path, json=tmp_path / "table.json")
    assert run(experiment, Processes()) == 0
    whole, sparse = json.loads((tmp_path / "table.json").read_text())
    assert (whole["method"], sparse["method"]) == ("plump_dp", "plump_dp-masked-0.9")
    assert sparse["ratio_to_dense"] > 2 * whole["ratio_to_dense"]
    folders = {path.parent.name for path in (tmp_path / "digits").glob("*/metrics.jsonl")}
    assert folders == {"plump_dp", "plump_dp-masked-0.9"}
    # Without a boundary it is the baseline itself, and is trained once.
    argv = [*SHORT, "--workers", "1", "--stages", "2", "method:plump-dp"]
    assert run(dataclasses.replace(parse(argv), architecture=MLP, out=tmp_path / "alone"), Processes()) == 0
    assert [path.parent.name for path in (tmp_path / "alone" / "digits").glob("*/metrics.jsonl")] == ["plump_dp"]


@pytest.mark.slow
def test_other_settings_are_refused_before_the_baseline(tmp_path):
    """Which would be longer then, and could not go on at its old length."""
    argv = [*SHORT, "--out", str(tmp_path)]
    assert run(parse([*argv, "method:top-k"]), Processes()) == 0
    lines = (tmp_path / "digits" / "plump_dp" / "metrics.jsonl").read_text()
    longer = parse([*argv, "--resume", "--steps", "6", "method:top-k", "--method.sparsity", "0.5"])
    with pytest.raises(ValueError, match=r"got a checkpoint in .*topk.* with method\.sparsity 0\.\d+ \(now 0\.5\)"):
        run(longer, Processes())
    assert (tmp_path / "digits" / "plump_dp" / "metrics.jsonl").read_text() == lines


@pytest.mark.slow
def test_folders_and_resume(tmp_path, capsys):
    """The first run is stopped in the baseline: resuming finishes that, and then trains the method."""
    argv = [*SHORT, "--out", str(tmp_path)]
    assert run(parse([*argv, "--stop-after", "2", "method:top-k"]), Processes()) == 0
    assert "Stopped and saved after step 2; go on with --resume." in capsys.readouterr().out
    first = tmp_path / "digits"
    assert not (first / "topk").exists()
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    table = tmp_path / "table.json"

    assert run(parse([*argv, "method:plump-dp"]), Processes()) == 0
    second = tmp_path / "digits-2"
    assert (second / "plump_dp" / "checkpoints" / "3").is_dir()
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before

    second.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert run(parse([*argv, "--resume", "--json", str(table), "method:top-k"]), Processes()) == 0
    assert "dense (plump_dp): resumed after step 2." in capsys.readouterr().out
    assert not second.exists()
    assert [(record["method"], record["steps"]) for record in json.loads(table.read_text())] == [
        ("plump_dp", 3),
        ("topk", 3),
    ]
    for method in ("plump_dp", "topk"):
        lines = (first / method / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workers", "0"], ["--workers must be at least 1 and below 2**31; got 0"]),
        (["--global-batch", "4000"], ["at most the 1347 training examples", "got 4000", "Lower it"]),
        (["--workers", "3", "--stages", "3"], ["got 8 for (data=3, stage=3)"]),
        (["--stages", "2", "--cuts", "2", "3"], ["A pipeline of 2 stages must have 1 cuts; got --cuts (2, 3)"]),
        (["--dataset", "iwslt14", "--data-dir", "/nowhere"], ["iwslt14 must be prepared", "/nowhere"]),
        (["--dataset", "letters"], ["letters", "digits"]),
        (["--dataset", "mnist", "--data-dir", "/nowhere"], ["/nowhere"]),
        (["--json", "."], ["--json must be a file; got the folder .", "Name a file in it"]),
        (["--json", "/dev/null/x.json"], ["--json must be a file that can be written", "got /dev/null/x.json"]),
        (["--out", "/dev/null"], ["--out must be a folder in which", "got '/dev/null'"]),
        (["--resume"], ["--resume must go on with a run that has begun", "Leave --resume out"]),
        (["--beam", "3"], ["--beam must go with a translation", "got 3 for digits", "Leave it out"]),
        (["--plan", "plan.json", "method:top-k"], ["--plan must go without a method", "got method:topk with --plan"]),
        (["--peer-timeout", "8"], ["--peer-timeout must go with several processes", "got --peer-timeout 8.0 with one"]),
        (["--step-timeout", "8"], ["--step-timeout must go with several processes", "got --step-timeout 8.0 with one"]),
        (["--connect-timeout", "8"], ["--connect-timeout must go with several processes"]),
        (["--momentum", "1.0", "method:dgc"], ["momentum", "below 1", "got 1.0"]),
        (["method:iwp", "--method.publishers", "5"], ["publishers must be at most the number of workers, 4; got 5"]),
        (["--optimizer", "adam", "method:dgc"], ["--optimizer must be sgd with dgc", "momentum inside", "got adam"]),
        (
            ["--slices", "2", "method:slim-dp"],
            ["workers must exchange gradients; got slim_dp", "Leave --slices"],
        ),
    ],
)
def test_bad_values(argv, message, started, tmp_path, capsys):
    out = tmp_path / "runs"
    assert main([*SHORT, "--out", str(out), *argv]) == 2
    text = capsys.readouterr().err
    assert text.startswith("train: ")
    for part in message:
        assert part in text
    assert not out.exists()


def test_one_process_has_no_others_to_go_on_with(started, tmp_path, monkeypatch, capsys):
    with tempfile.TemporaryFile() as file:  # as under a supervisor
        monkeypatch.setenv(BEGUN, str(file.fileno()))
        assert main([*SHORT, "--out", str(tmp_path), "--restarts", "1", "--min-workers", "2"]) == 2
    assert "--min-workers must go with several processes, which" in capsys.readouterr().err


def test_a_process_with_another_min_workers(started, tmp_path, monkeypatch):
    """Process 0 goes on with fewer workers than this one may."""

    def connect(*args, check, **options):
        check(3)
        return Processes(1, 2, missing=(2,))

    monkeypatch.setattr("train.__main__.connect", connect)
    with pytest.raises(ValueError, match="--min-workers must be the same in all processes; got None in process 1"):
        come_together(parse([*SHORT, "--workers", "3", "--restarts", "1"]))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["method:dct-dp", "--method.sparsity", "1.0"], ["sparsity must be", "got 1.0", "Use 0.99"]),
        (["method:dct-dp", "--method.life-span", "0"], ["life_span", "got 0"]),
        (["method:slim-dp", "--method.beta", "0.4"], ["beta", "at most alpha (0.3)", "got 0.4"]),
        (
            ["method:iwp", "--method.alpha", "1", "2"],
            ["alpha must be one number, or one more than change_at has steps", "(1.0, 2.0)"],
        ),
        (["method:local-sgd", "--method.steps", "0"], ["steps must be an integer of at least 1; got 0"]),
        (["method:quant-dp", "--method.bits", "3"], ["'--method.bits'", "('2', '4', '8', '16')"]),
    ],
)
def test_bad_options_of_methods(argv, message, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main([*SHORT, *argv])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    for part in message:
        assert part in text


def test_a_bad_variable(started, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JAXCOMM_NUM_PROCESSES", "two")
    assert main([*SHORT, "--out", str(tmp_path / "runs")]) == 2
    assert "JAXCOMM_NUM_PROCESSES must be an integer; got 'two'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_before_training(number, tmp_path):
    """Leaves nothing: a folder without a step would be the run that --resume takes."""
    out = tmp_path / "runs"
    argv = [sys.executable, "-m", "train", "digits", *SHORT[2:], "--no-baseline", "--out", str(out)]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / "digits" / "runs.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "train: interrupted; what was saved is kept\n")
    assert not out.exists()


@pytest.mark.slow
def test_a_signal_in_a_callback(tmp_path):
    """Python ignores what is raised there, as in JAX's callback of garbage collection: the interrupt is repeated."""
    out = tmp_path / "runs"
    program = textwrap.dedent(f"""
        import gc, os, pathlib, runpy, signal, sys
        runs = pathlib.Path({str(out / "digits" / "runs.json")!r})
        def end(*_):
            if runs.exists():
                gc.callbacks.remove(end)
                os.kill(os.getpid(), signal.SIGTERM)
                sum(range(1000))  # the signal is handled in here
        gc.callbacks.append(end)
        runpy.run_module("train", run_name="__main__", alter_sys=True)
    """)
    argv = [sys.executable, "-c", program, "digits", *SHORT[2:], "--no-baseline", "--out", str(out)]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (130, "train: interrupted; what was saved is kept\n")
    assert not out.exists()


@pytest.mark.slow
def test_sigterm_and_resume(tmp_path):
    options = [*SHORT[2:], "--steps", "200", "--checkpoint-every", "10", "--no-baseline"]
    method = ["method:dct-dp", "--method.sparsity", "0.9", "--method.life-span", "7"]
    argv = [sys.executable, "-m", "train", "digits", *options, "--out", str(tmp_path / "runs")]

    process = subprocess.Popen([*argv, *method], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "digits" / "dct_dp"
    deadline = time.monotonic() + 120
    while not any((folder / "checkpoints").glob("[1-9]*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    (message,) = re.findall(r"Stopped and saved after step (\d+); go on with --resume\.", out)
    step = int(message)
    assert 10 <= step < 200
    assert (folder / "checkpoints" / message).is_dir()
    lines = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, step + 1))

    # The rest in this process, which compiles the step for the uninterrupted run anyway.
    experiment = parse(["digits", *options, *method])
    assert isinstance(experiment.method, DctDp)
    progress = Told()
    ended, whole = (
        train_one(dataclasses.replace(experiment, out=place), experiment.method, Processes(), progress).state
        for place in (tmp_path / "runs" / "digits", tmp_path / "whole")
    )
    assert progress.messages == [f"dct_dp: resumed after step {step}."]
    lines = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 201))
    equalities = jax.tree.map(np.array_equal, jax.device_get(ended), jax.device_get(whole))
    assert all(jax.tree.leaves(equalities)), equalities
