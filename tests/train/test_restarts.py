"""The supervisor: what it restarts and what not; a killed process costs only the steps since its checkpoint."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks.netlab import Lab
from tests.tpu_scripts.world import wait_for
from tests.train.test_processes import FEW, METHOD, environment, metrics
from train.restarts import BEGUN, is_supervised, note_begun, previous_run_folder, supervise


class Starts:
    """Instead of the trainer, starts shell commands, one after another."""

    def __init__(self, *scripts):
        self.scripts, self.commands, self.notes = list(scripts), [], []

    def __call__(self, command, env, pass_fds):
        self.commands.append(command)
        self.notes.append(os.pread(int(env[BEGUN]), 100, 0).decode())
        return subprocess.Popen(["sh", "-c", self.scripts[len(self.commands) - 1]], env=env, pass_fds=pass_fds)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("train.restarts.PAUSE", 0.0)


@pytest.mark.parametrize("code", [0, 2, 3, 130])
def test_an_end(code):
    starts = Starts(f"exit {code}")
    assert supervise(["digits"], 5, starts) == code
    assert starts.commands == [[sys.executable, "-m", "train", "digits"]]


def test_a_fault_is_started_again(capsys, monkeypatch, tmp_path):
    """Nothing of it has a name in the folder of temporary files, from which old files are removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("train.restarts.time.sleep", lambda seconds: names.extend(tmp_path.iterdir()))
    names = []
    starts = Starts("exit 1", f"printf runs/digits > /proc/self/fd/${BEGUN}; kill -9 $$", "exit 0")
    assert supervise(["digits"], 5, starts) == 0
    assert (starts.notes, names) == (["", "", "runs/digits"], [])
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "train: ended with 1; start 2 of 6 begins anew",
        "train: ended with -9; start 3 of 6 goes on from the last checkpoint",
    ]


def test_the_number_of_starts():
    starts = Starts("exit 1", "kill -9 $$", "kill -6 $$")
    assert supervise([], 2, starts) == 128 + 6
    assert len(starts.commands) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_the_end(number):
    starts = Starts(f"trap 'exit 7' TERM; kill -{int(number)} {os.getpid()}; sleep 20 & wait")
    before = signal.getsignal(number)
    assert supervise([], 5, starts) == 7
    assert signal.getsignal(number) is before
    assert len(starts.commands) == 1


def test_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert supervise([], 5, Starts(f"kill -HUP {os.getpid()}; exit 0")) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_in_a_start(tmp_path):
    def start(command, env, pass_fds):
        process = subprocess.Popen(["sh", "-c", f"trap 'exit 7' TERM; touch {tmp_path}/there; sleep 20 & wait"])
        while not (tmp_path / "there").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)  # its handler runs now, before the supervisor knows the process
        return process

    assert supervise([], 5, start) == 7


def test_a_signal_between_starts(monkeypatch):
    monkeypatch.setattr("train.restarts.time.sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))
    starts = Starts("exit 1", "exit 0")
    assert supervise([], 5, starts) == 1
    assert len(starts.commands) == 1


def test_no_supervisor(monkeypatch, tmp_path):
    monkeypatch.delenv(BEGUN, raising=False)
    note_begun(tmp_path)
    assert (is_supervised(), previous_run_folder()) == (False, None)
    with tempfile.TemporaryFile() as file:
        monkeypatch.setenv(BEGUN, str(file.fileno()))
        assert (is_supervised(), previous_run_folder()) == (True, None)
        note_begun(tmp_path / "runs")
        assert previous_run_folder() == tmp_path / "runs"


@pytest.mark.slow
def test_a_killed_supervisor(tmp_path):
    argv = [*FEW, "--steps", "1000000", "--no-baseline", "--out", str(tmp_path), "--restarts", "2", *METHOD]
    folder = tmp_path / "digits" / "dct_dp"
    with subprocess.Popen([sys.executable, "-m", "train", *argv], env=environment()) as supervisor:
        wait_for((folder / "metrics.jsonl").exists, 60)
        (trainer,) = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
        supervisor.kill()
    status = Path(f"/proc/{trainer}/stat")
    wait_for(lambda: not status.exists() or status.read_text().split()[2] == "Z")
    assert any((folder / "checkpoints").iterdir())  # it has saved


@pytest.mark.slow
def test_a_killed_run(tmp_path):
    argv = [*FEW, "--workers", "2", "--steps", "40", "--eval-every", "40", "--checkpoint-every", "10", "--no-baseline"]
    out = tmp_path / "runs"
    command = " ".join([sys.executable, "-m", "train", *argv, "--out", str(out), "--restarts", "2", *METHOD])
    # Once there is a checkpoint, the trainer of the second process is killed; its supervisor is `exec`'s.
    script = f"""
    if [ $JAXCOMM_PROCESS_ID = 1 ]; then
        (until [ -d {out}/digits/dct_dp/checkpoints/10 ]; do sleep 0.05; done; pkill -9 -P $$ python) &
    fi
    exec {command}
    """
    with Lab(2, None) as lab:
        results = lab.run(["sh", "-c", script], env=environment(), timeout=300)
        undisturbed = lab.run(
            [sys.executable, "-m", "train", *argv, "--out", str(tmp_path / "other"), *METHOD], env=environment()
        )
    assert [result.returncode for result in results] == [0, 0], results
    assert "train: ended with 1; start 2 of 3 goes on from the last checkpoint" in results[0].stderr
    assert "no sign of life from process 1" in " ".join(results[0].stderr.split())
    assert "train: ended with -9; start 2 of 3 goes on from the last checkpoint" in results[1].stderr
    assert [path.name for path in out.iterdir()] == ["digits"]
    assert [result.returncode for result in undisturbed] == [0, 0]
    assert len(metrics(out / "digits", "dct_dp")) == 40
    assert metrics(out / "digits", "dct_dp") == metrics(tmp_path / "other" / "digits", "dct_dp")
