"""Runs of three processes in which something goes wrong: all end in time, and each says what failed, and where.

They run on `benchmarks.netlab`: network namespaces as root, otherwise loopback. `test_faults_restarts.py` has
`--restarts`.
"""

import re
import socket
import subprocess
import sys
import time

import pytest

from benchmarks.netlab import Lab
from tests.train.test_processes import environment

RUN = [
    *("digits", "--workers", "3", "--global-batch", "24", "--warmup-steps", "2", "--no-baseline"),
    *("--steps", "100000", "--eval-every", "100000", "--checkpoint-every", "100000"),
]
# A background process of a shell ignores Ctrl-C.
CTRL_C = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
METHOD = ["method:dct-dp", "--method.sparsity", "0.9"]


def end(tmp_path, *, options="", trouble=":"):
    """Starts three processes, runs `trouble` once process 2 trains, and returns their results.

    Args:
      options: of process 2 only.
      trouble: a shell command; $PID is process 2.
    """
    arguments = [*RUN, "--out", str(tmp_path / "runs"), "--peer-timeout", "8"]
    command = " ".join([sys.executable, "-m", "train", *arguments])
    script = f"""
    if [ $JAXCOMM_PROCESS_ID != 2 ]; then exec {command} {" ".join(METHOD)}; fi
    {sys.executable} -c "{CTRL_C}" {command} {options} {" ".join(METHOD)} & PID=$!
    until [ $(cat {tmp_path}/runs/digits/dct_dp/metrics.jsonl 2>/dev/null | wc -l) -gt 4 ]; do
        kill -0 $PID 2>/dev/null || break
        sleep 0.1
    done
    {trouble}
    wait $PID
    """
    with Lab(3, None) as lab:
        results = lab.run(["sh", "-c", script], env=environment(), timeout=300)
    return results, [" ".join(result.stderr.split()) for result in results]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Makes the lab wait for processes to end by themselves; otherwise it kills them after one has failed."""
    monkeypatch.setattr("benchmarks.netlab.FAILURE_GRACE", 60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--seed 7 --steps 50",
            "got --steps: 100000 in process 0, 50 in process 2; --seed: 0 in process 0, 7 in process 2. Start all with",
        ),
        ("--out {}/elsewhere", "does not have the file of process 0 in process 2"),
    ],
)
def test_other_options(options, message, tmp_path):
    results, texts = end(tmp_path, options=options.format(tmp_path))
    assert [result.returncode for result in results] == [2, 2, 2], texts
    for text in texts:
        assert message in text
        assert "Traceback" not in text
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.slow
def test_an_interruption(tmp_path):
    results, texts = end(tmp_path, trouble="kill -INT $PID")
    assert [result.returncode for result in results] == [0, 0, 0], texts
    assert "train: saves after this step, and ends" in texts[2]
    assert re.search(r"Stopped and saved after step \d+; go on with --resume\.", results[0].stdout)


@pytest.mark.slow
def test_unreadable_data(tmp_path):
    """Its folder of data is a file."""
    (tmp_path / "data").touch()
    results, texts = end(tmp_path, options=f"--data-dir {tmp_path}/data")
    assert [result.returncode for result in results] == [2, 2, 2], texts
    for text in texts:
        assert "process 2 has ended: FileExistsError" in text
        assert "Traceback" not in text


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-m", "train", "digits", "--coordinator", address]
        command += ["--process-id", "0", "--num-processes", "2"]
        begin = time.monotonic()
        process = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert process.returncode == 2
    assert f"must have a free port of process 0; got '{address}': Address already in use" in process.stderr
    assert time.monotonic() - begin < 60
