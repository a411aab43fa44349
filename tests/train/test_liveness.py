"""Signs of life: who is silent, who is stuck, and that all processes end, each with one line that names the cause."""

import threading
import time
from types import SimpleNamespace

import jax
import pytest

from train import liveness
from train.liveness import Liveness, Signs
from train.pace import slowest
from train.processes import Processes


class Memory:
    """A store in this process; `broken` makes it fail like JAX's when process 0 is gone, `slow` makes it hang."""

    def __init__(self):
        self.values, self.broken, self.slow = {}, False, threading.Event()
        self.slow.set()

    def _check(self):
        self.slow.wait()
        if self.broken:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")

    def put(self, key, value):
        self._check()
        self.values[key] = value

    def get(self, key, seconds):
        self._check()
        deadline = time.monotonic() + seconds
        while key not in self.values:
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(0.01)
        return self.values[key]

    def under(self, prefix):
        self._check()
        return {key.removeprefix(f"{prefix}/"): value for key, value in dict(self.values).items() if prefix in key}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(liveness, "PERIOD", 0.02)
    monkeypatch.setattr(liveness, "SILENCE", 2.0)  # seconds that a busy machine may keep a thread waiting


class Ended(list):
    """Records the exit codes of a process, instead of ending it."""

    def wait(self):
        deadline = time.monotonic() + 20
        while not self and time.monotonic() < deadline:
            time.sleep(0.01)
        return list(self)


def member(store, index, count=3, timeout=60.0, deadline=60.0):
    ended = Ended()
    return Liveness(store, Processes(index, count), timeout, deadline, ended.append), ended


def test_silence():
    signs = Signs(3)
    signs.update({"0": "1 step 1", "1": "1 step 1", "2": "9 done"}, 0.0)
    signs.update({"0": "2 step 1", "1": "1 step 1", "2": "9 done"}, 10.0)
    assert signs.silent(10.0, 10.0) is None
    assert signs.silent(11.0, 10.0) == "no sign of life from process 1 (11 s)"
    signs.update({"0": "2 step 1", "1": "2 step 1", "2": "9 done"}, 12.0)
    assert signs.silent(21.0, 10.0) == "no sign of life from process 0 (11 s)"
    assert signs.silent(99.0, 10.0) == "no sign of life from process 0 (89 s), process 1 (87 s)"


def test_a_process_that_never_came():
    signs = Signs(2)
    signs.update({"0": "1 starting"}, 0.0)
    signs.update({"0": "2 starting"}, 30.0)
    assert signs.silent(30.0, 20.0) == "no sign of life from process 1 (30 s)"


def test_a_run_that_is_stuck():
    signs = Signs(2)
    signs.update({"0": "1 step 4", "1": "1 reading rows of step 4"}, 0.0)
    signs.update({"0": "2 step 4", "1": "2 reading rows of step 4"}, 50.0)
    assert signs.stuck(50.0, 50.0) is None
    message = "no process has gone on for 50 s (process 0: step 4, process 1: reading rows of step 4)"
    assert signs.stuck(51.0, 50.0) == message
    signs.update({"0": "3 step 4", "1": "3 step 4"}, 60.0)
    assert signs.stuck(110.0, 50.0) is None
    assert signs.stuck(111.0, 50.0) is not None
    signs.update({"0": "3 step 4", "1": "3 done"}, 112.0)
    assert signs.stuck(999.0, 50.0) is None


def test_living_processes_end():
    store = Memory()
    members = [member(store, index, timeout=2.0) for index in range(3)]
    with members[0][0], members[1][0], members[2][0]:
        time.sleep(3.0)
    assert [ended for _, ended in members] == [[]] * 3
    assert {value.partition(" ")[2] for value in store.values.values()} == {"done"}


def test_a_silent_process_ends_all(capsys):
    store = Memory()
    (one, ended), (two, second_end) = member(store, 0, timeout=2.0), member(store, 1, timeout=2.0)
    store.values["jaxcomm/alive/2"] = "7 step 3"
    with one, two:
        assert (ended.wait(), second_end.wait()) == ([1], [1])
    lines = capsys.readouterr().err.splitlines()
    assert len(set(lines)) == 1
    assert lines[0].startswith("train: no sign of life from process 2 (")


def test_an_error_ends_all(capsys):
    store = Memory()
    members = [member(store, index) for index in range(3)]
    with members[0][0], members[1][0], members[2][0]:
        members[2][0].fail(ValueError("the rule\nand the rest"), 2)
        assert [ended.wait() for _, ended in members] == [[2], [2], [2]]
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("train: process 2 has ended: ValueError: the rule") == 3
    assert lines.count("and the rest") == 1


def test_ctrl_c(capsys):
    store = Memory()
    one, ended = member(store, 0, count=1)
    with one:
        one.fail(KeyboardInterrupt(), 1)
    assert ended == [1]
    assert capsys.readouterr().err == "train: process 0 has ended: interrupted\n"


def test_a_failed_collective(capsys):
    """The process whose collective has failed waits for some seconds: it is not the cause."""
    store = Memory()
    (one, ended), (two, second_end) = member(store, 0), member(store, 1)
    store.values["jaxcomm/alive/2"] = "7 step 3"
    with one, two:
        one.fail(jax.errors.JaxRuntimeError("Gloo: Connection closed by peer"), 1)
        assert ended == [1]  # before the error could be raised on, and print its stack below that line
        assert second_end.wait() == [1]
    (line,) = set(capsys.readouterr().err.splitlines())
    assert line.startswith("train: no sign of life from process 2 (")


def test_errors_of_jax():
    gloo = "Gloo AllGather failed: Connection reset by peer"
    errors = [jax.errors.JaxRuntimeError(f"UNKNOWN: {gloo}"), ValueError(f"UNKNOWN: {gloo}"), ValueError(gloo)]
    assert [liveness.is_of_jax(error) for error in errors] == [True, True, False]


def test_a_failed_collective_of_the_living(capsys):
    store = Memory()
    (one, ended), (two, second_end) = member(store, 0, count=2), member(store, 1, count=2)
    with one, two:
        one.fail(jax.errors.JaxRuntimeError("out of memory"), 1)
        assert (ended.wait(), second_end.wait()) == ([1], [1])
    assert set(capsys.readouterr().err.splitlines()) == {"train: process 0 has ended: JaxRuntimeError: out of memory"}


def test_a_failing_store(capsys):
    for fault in ("broken", "slow"):
        store = Memory()
        one, ended = member(store, 1, timeout=0.3)
        with one:
            if fault == "broken":
                store.broken = True
            else:
                store.slow.clear()
            assert ended.wait() == [1]
            store.slow.set()
        (line,) = capsys.readouterr().err.splitlines()
        expected = {"broken": "is gone", "slow": "has not answered for "}[fault]
        assert line.startswith(f"train: process 0, through which the others speak, {expected}")


def test_a_run_that_stands_still(capsys):
    store = Memory()
    (one, ended), (two, second_end) = member(store, 0, 2, deadline=2.0), member(store, 1, 2, deadline=2.0)
    with one, two:
        for step in range(30):
            one.doing(f"step {step}")
            time.sleep(0.1)
        assert (ended, second_end) == ([], [])
        two.doing("reading rows of step 7")
        assert (ended.wait(), second_end.wait()) == ([1], [1])
    message = "train: no process has gone on for 2 s (process 0: step 29, process 1: reading rows of step 7)"
    assert set(capsys.readouterr().err.splitlines()) == {message}


def test_a_slow_process_is_named_once(capsys):
    store = Memory()
    one, _ = member(store, 0)
    store.values |= {f"jaxcomm/alive/{index}": f"{index} done" for index in (1, 2)}
    store.values |= {"jaxcomm/pace/0": "0.001", "jaxcomm/pace/2": "0.0031"}
    with one:
        time.sleep(0.2)
        assert capsys.readouterr().err == ""  # nobody knows yet how fast process 1 is
        store.values["jaxcomm/pace/1"] = "0.001"
        time.sleep(1.0)
    assert capsys.readouterr().err == (
        "train: process 2 takes 3.1 times as long as the others for the same work: these wait for it for about 68% of "
        "the time that a step computes\n"
    )


def test_a_slow_process():
    assert slowest({0: 1.0, 1: 1.9, 2: 1.0}) is None
    assert slowest({0: 1.0, 1: 2.0, 2: 1.0, 3: 1.1}) == (1, 2.0)
    assert slowest({0: 3.0, 1: 1.0}) == (0, 3.0)
    assert slowest({0: 3.0}) is None


def test_times_of_processes(monkeypatch):
    monkeypatch.setattr("train.pace.COUNT", 2)
    clock = iter([10.0, 10.1, 12.0, 12.3, 13.0, 13.1])  # before and after each measurement
    monkeypatch.setattr("train.pace.time", SimpleNamespace(monotonic=lambda: next(clock)))
    store, ready = Memory(), jax.numpy.zeros(3)
    one, _ = member(store, 0, count=1)
    one.doing("test batch 8")
    for step in (7, 8, 9, 16):  # eight steps take two seconds: every eighth is next
        assert store.values == {}
        one.doing(f"reading rows of step {step}", step, ready)
    assert float(store.values["jaxcomm/pace/0"]) == pytest.approx(0.2)
    for step in (17, 20, 23, 24):
        one.doing(f"reading rows of step {step}", step, ready)
    assert not list(clock)
