"""Processes that are started differently all fail with the difference, before anything is compiled."""

import dataclasses
import threading

import pytest

import train.start
from configs import CONFIGS
from tests.train.test_liveness import Memory
from train.processes import Processes
from train.start import DisagreementError, agree, check_shared, facts_of


def each(function, count):
    """Calls function(process) for every process at the same time; returns a result or an error for each."""
    answers = [None] * count

    def run(index):
        try:
            answers[index] = function(Processes(index, count))
        except Exception as error:
            answers[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_equal_processes():
    store = Memory()
    assert each(lambda process: agree(store, process, "settings", {"--seed": "3"}, 5.0), 3) == [None] * 3


def test_differences_are_named():
    store = Memory()
    facts = [{"--seed": "0", "--steps": "5"}, {"--seed": "0", "--steps": "5"}, {"--seed": "7", "--steps": "5"}]
    answers = each(lambda process: agree(store, process, "settings", facts[process.index], 5.0), 3)
    assert all(isinstance(error, DisagreementError) for error in answers)
    result = "--seed: 0 in process 0, 7 in process 2"
    message = f"All processes of a run must be started with the same settings; got {result}. Start all with the same."
    assert {str(error) for error in answers} == {message}


def test_many_differences():
    store = Memory()
    facts = [{f"--field{n}": str(process) for n in range(5)} for process in range(2)]
    facts[0]["--only"] = "here"
    answers = each(lambda process: agree(store, process, "settings", facts[process.index], 5.0), 2)
    assert "; and 3 more. Start all with the same." in str(answers[1])
    assert "--field2: 0 in process 0, 1 in process 1; and" in str(answers[0])


def test_a_missing_process():
    with pytest.raises(TimeoutError, match=r"got nothing from process 1 within 0\.1 s"):
        agree(Memory(), Processes(0, 2), "settings", {}, 0.1)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"learning_rate": 0.5},
        {"steps": 14},
        {"method": dataclasses.replace(CONFIGS["digits"].method, sparsity=0.95)},
        {"workers": 2},
        {"checkpoint_every": 7},
        {"min_workers": 2},
    ],
)
def test_settings_that_count(change):
    experiment = CONFIGS["digits"]
    variant = dataclasses.replace(experiment, **change)
    assert facts_of(experiment) == facts_of(experiment)
    one, variant_facts = facts_of(experiment), facts_of(variant)
    (name,) = change
    assert [key for key in one if one[key] != variant_facts[key]] == [f"--{name.replace('_', '-')}"]


def test_settings_that_do_not(tmp_path):
    experiment = CONFIGS["digits"]
    private = dataclasses.replace(experiment, process_id=1, coordinator="a:1", out=tmp_path, json=tmp_path / "a.json")
    assert facts_of(private) == facts_of(experiment)


def test_library_and_data(monkeypatch, tmp_path):
    before = facts_of(CONFIGS["digits"])
    assert before["the data"] == "1347 rows, {'version': '1.0.0'}"
    root = tmp_path / "copy"
    for package in ("jaxcomm", "models", "configs", "train"):
        (root / package).mkdir(parents=True)
        (root / package / "a.py").write_text("one")
    monkeypatch.setattr(train.start, "__file__", str(root / "train" / "start.py"))
    checksums = [train.start.library_crc32()]
    (root / "models" / "a.py").write_text("other")
    checksums.append(train.start.library_crc32())
    (root / "models" / "a.py").rename(root / "models" / "b.py")
    checksums.append(train.start.library_crc32())
    assert len(set(checksums)) == 3
    assert before["the text of this library"].startswith("crc32 ")


def test_plans(tmp_path):
    for name, text in (("a", "one"), ("b", "one"), ("c", "other")):
        (tmp_path / name).write_text(text)
    a, b, c = (facts_of(dataclasses.replace(CONFIGS["digits"], plan=tmp_path / name)) for name in "abc")
    assert a == b != c


def test_a_shared_folder(tmp_path):
    store = Memory()
    assert each(lambda process: check_shared(store, process, tmp_path / "runs", 5.0), 2) == [None, None]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_that_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(train.start, "PATIENCE", 0.3)
    store = Memory()
    outs = [tmp_path / "one", tmp_path / "two"]
    answers = each(lambda process: check_shared(store, process, outs[process.index], 5.0), 2)
    assert all(isinstance(error, DisagreementError) for error in answers)
    assert f"({outs[1]}) does not have the file of process 0 in process 1" in str(answers[0])
    assert list(outs[0].iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = Memory()
    first, second = each(lambda process: check_shared(store, process, blocked, 0.5), 2)
    assert isinstance(first, OSError)
    assert str(second) == "Process 0 must write a file to --out; got none within 0.5 s. Look at what it has printed."
