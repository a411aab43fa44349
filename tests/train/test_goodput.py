import pytest

from train import goodput
from train.goodput import Goodput


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is told to."""

    class Clock:
        now, jump = 1000.0, 0.0

        def monotonic(self):
            return self.now

        def time(self):
            return self.now + self.jump

    clock = Clock()
    monkeypatch.setattr(goodput, "time", clock)
    return clock


def train(account, clock, steps, first=5.0):
    """A step takes a second, the first one five."""
    for number in range(steps):
        clock.now += 1.0 if number else first
        account.step()


def test_kinds_of_seconds(tmp_path, clock):
    account = Goodput(tmp_path)
    clock.now += 3  # connecting
    account.take("dct_dp", 0)
    clock.jump = 86400.0  # the wall clock is set, and counts nothing
    train(account, clock, 11)
    with account.on("checkpoints"):
        clock.now += 2
    account.saved(11)
    train(account, clock, 5, first=1.0)
    with account.on("evaluation"):
        clock.now += 4
    account.write()

    clock.now += 20  # it was killed, and started again
    account = Goodput(tmp_path, begin=clock.now - 1, restarted=True)
    account.take("dct_dp", 11, 5)
    train(account, clock, 3)
    assert account.record() == {
        "goodput": pytest.approx(12 / 56),
        "seconds": 56.0,
        "s_steps": 10.0 + 2,
        "s_start": 3.0 + 5,
        "s_evaluation": 4.0,
        "s_checkpoints": 2.0,
        "s_restarts": 20.0 + 5,
        "s_lost": 5.0,
        "n_restarts": 1,
        "n_lost_steps": 5,
    }
    assert account.line() == (
        "Goodput 21.4%: 12.0 of 56.0 s in steps that count; the rest: start and compiling 8.0 s, evaluation 4.0 s, "
        "checkpoints 2.0 s, 1 restart 25.0 s, 5 lost steps 5.0 s"
    )


def test_time_between_runs(tmp_path, clock):
    account = Goodput(tmp_path)
    account.take("dct_dp", 0)
    train(account, clock, 3)
    account.write()
    clock.now += 1e6
    account = Goodput(tmp_path)
    account.take("dct_dp", 3)
    train(account, clock, 2)
    assert account.record()["seconds"] == 5 + 2 + 5 + 1


def test_when_it_is_printed(tmp_path, clock):
    counter = Goodput(tmp_path)
    counter.take("dct_dp", 0)
    train(counter, clock, 3)
    assert counter.line() == ""
    clock.now += goodput.LONG
    counter.write()
    assert counter.line().startswith("Goodput ")


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        "null",
        "[" * 9999,
        '{"seconds": 5}',
        '{"runs": 5}',
        '{"until": "x"}',
        '{"restarts": "x"}',
        '{"runs": {"a": {}}}',
        '{"runs": {"a": 5}}',
        '{"lost": null}',
    ],
)
def test_another_file(text, tmp_path):
    (tmp_path / goodput.FILE).write_text(text)
    with pytest.raises(ValueError, match=r"goodput.json must hold the counts of a run; got .*. Remove it"):
        Goodput(tmp_path)
