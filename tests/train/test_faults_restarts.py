"""Runs with `--restarts` under faults: they go on, and end with the bits of an undisturbed run."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.faults import Soaked, same_states
from benchmarks.netlab import Lab
from tests.train.test_processes import FEW, METHOD, ROOT, environment, metrics

SHORT = [*FEW[1:], "--no-baseline", "--steps", "120", "--eval-every", "120", "--checkpoint-every", "15"]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Makes the lab wait for processes to end by themselves."""
    monkeypatch.setattr("benchmarks.netlab.FAILURE_GRACE", 100.0)
    monkeypatch.setattr("benchmarks.faults.environment", lambda out: environment())


@pytest.fixture
def run():
    """Runs that are ended with their test, even if it fails."""
    begun = []

    def make(*arguments):
        begun.append(Soaked(*arguments))
        begun[-1].begin()
        return begun[-1]

    yield make
    for run in begun:
        for pid in (*run.processes(supervisors=True).values(), *run.processes().values()):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="links are cut in network namespaces, which take root")
def test_slow_dead_damaged_and_cut(tmp_path, run):
    with Lab(2, None) as lab:
        options = [*SHORT, "--workers", "2", "--restarts", "5", "--peer-timeout", "8"]
        reference = run(lab, tmp_path / "alone", options)
        reference.wait(100)
        soaked = run(lab, tmp_path / "soaked", options)
        soaked.until_step(5)
        processes = soaked.processes()
        soaked.suffer("slow", 1)
        assert soaked.processes() == processes
        soaked.suffer("damage", 0)
        soaked.suffer("cut", 1)
        assert soaked.wait(100)
    first, second = soaked.results
    assert (first.returncode, second.returncode) == (0, 0), soaked.results
    assert "train: process 0, through which the others speak, is gone" in second.stderr
    assert "is passed over" in first.stdout
    assert "train: no sign of life from process 1" in first.stderr
    assert "through which the others speak, has not answered" in second.stderr
    assert "2 restarts" in first.stdout[first.stdout.index("Goodput") :]
    assert metrics(soaked.folder, "dct_dp") == metrics(reference.folder, "dct_dp")
    assert same_states([soaked.folder, reference.folder], 120) == []


@pytest.mark.slow
def test_a_machine_that_does_not_return(tmp_path, run):
    options = [*SHORT, "--workers", "3", "--restarts", "2", "--min-workers", "2", "--peer-timeout", "8"]
    with Lab(3, None) as lab:
        soaked = run(lab, tmp_path / "runs", options)
        soaked.until_step(20)
        victim = soaked.processes()[2]
        os.kill(soaked.processes(supervisors=True)[2], signal.SIGKILL)
        os.kill(victim, signal.SIGSTOP)
        assert soaked.wait(200) or os.kill(victim, signal.SIGKILL) or soaked.wait(20)
    assert [result.returncode for result in soaked.results] == [0, 0, -9], soaked.results
    first = " ".join(soaked.results[0].stderr.split())
    assert "no sign of life from process 2" in first
    assert "process 2 did not come back within 8 s; the run goes on with 2 of 3 workers" in first
    assert "The checkpoint's residual of worker 2 is kept" in first
    assert "The checkpoint has 3 workers and the run 2" in " ".join(soaked.results[0].stdout.split())
    assert [line["step"] for line in metrics(soaked.folder, "dct_dp")] == list(range(1, 121))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted, which takes root")
def test_a_full_disk_and_two_runs(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], check=True)

    def start(*options):
        command = [sys.executable, "-m", "train", "digits", *SHORT, "--workers", "1", "--out", str(disk)]
        command += [*options, "--steps", "300", *METHOD]
        return subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)

    def end(processes):
        texts = [process.communicate(timeout=100)[1] for process in processes]
        return [process.returncode for process in processes], texts

    def saved(name):
        folder = disk / name / "dct_dp" / "checkpoints"
        return {int(path.name) for path in folder.iterdir() if path.name.isdigit()} if folder.exists() else set()

    names, processes = ("digits", "digits-2"), [start(), start()]
    try:
        deadline = time.monotonic() + 60
        while not all(map(saved, names)) and time.monotonic() < deadline:
            time.sleep(0.02)
        before = {name: max(saved(name)) for name in names}
        filling = subprocess.run(
            ["dd", "if=/dev/zero", f"of={disk}/ballast", "bs=64k"], capture_output=True, check=False
        )
        assert filling.returncode  # it is full
        codes, texts = end(processes)
        assert codes == [2, 2], texts
        for text in texts:
            assert "No space left on device" in text
            assert len(text.splitlines()) == 1, text
        assert all(max(saved(name)) >= before[name] for name in names)
        (disk / "ballast").unlink()

        processes = [start("--resume"), start("--resume")]
        codes, texts = end(processes)
        assert sorted(codes) == [0, 2], texts
        assert "in which another process trains. Wait for it" in texts[codes.index(2)]
        resumed = re.search(r"--resume goes on with (\S+), which was written last of 2 runs", texts[codes.index(0)])
        assert resumed is not None
        assert len(metrics(Path(resumed[1]), "dct_dp")) == 300

        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        codes, texts = end([start()])
        assert codes == [2]
        assert "Read-only file system" in texts[0]
        assert len(texts[0].splitlines()) == 1
    finally:
        for process in processes:
            process.kill()
        subprocess.run(["umount", "-l", disk], check=True)
