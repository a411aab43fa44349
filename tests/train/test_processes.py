"""Runs of several processes against simulated workers; how a process finds the others."""

import dataclasses
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import train.__main__
import train.processes
from benchmarks.netlab import Lab
from tests.refusals import refused
from tests.train.runs import Told, timeless
from train.__main__ import main, parse
from train.loop import rows_of
from train.loop import train as train_one
from train.processes import Processes, connect, prepare_jax
from train.rendezvous import Meeting

ROOT = Path(__file__).parents[2]
VARIABLES = ("JAXCOMM_COORDINATOR", "JAXCOMM_PROCESS_ID", "JAXCOMM_NUM_PROCESSES")
METHOD = ["method:dct-dp", "--method.sparsity", "0.9", "--method.life-span", "3"]
# The hosts' models differ: step 6 has just chosen a new core.
LOCAL = ["method:slim-dp", "--method.q", "3"]
TWO = ["--coordinator", "127.0.0.1:9777", "--process-id", "0", "--num-processes", "2"]
FEW = ["digits", "--warmup-steps", "2", "--global-batch", "24"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def joined(monkeypatch):
    """The arguments of `jax.distributed.initialize`, which does not wait for processes that never come."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **options: calls.append(arguments))
    monkeypatch.setattr(train.processes, "meet", lambda _, index, count, *options: Meeting(index, count, (), ()))
    return calls


def environment():
    """The environment of a process that a test starts in another folder."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
    return os.environ | {"PYTHONPATH": path}


def metrics(folder, method):
    return timeless(folder / method / "metrics.jsonl")


def on_hosts(count, argv, method, out):
    """Runs in network namespaces as root, otherwise on loopback; the lab sets JAXCOMM_... for each."""
    command = [sys.executable, "-m", "train", *argv, "--out", str(out), *method]
    with Lab(count, None) as lab:
        results = lab.run(command, env=environment(), timeout=300)
    assert [result.returncode for result in results] == [0] * count, results
    return results


def simulated(argv, out, **changes):
    """Runs the same with all workers simulated in this process."""
    experiment = dataclasses.replace(parse(argv), out=out, **changes)
    return train_one(experiment, experiment.method, Processes(), Told())


def assert_like_simulated(lines, expected, rtol):
    """Gloo sums over workers in another order, so a coordinate at the threshold may be decided differently."""
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for name in ("loss", "accuracy", "bytes_received"):
        values = [line[name] for line in lines]
        np.testing.assert_allclose(values, [line[name] for line in expected[: len(lines)]], rtol=rtol)


@pytest.mark.slow
def test_three_hosts(tmp_path):
    argv = [*FEW, "--workers", "3", "--steps", "6", "--eval-every", "3"]
    results = on_hosts(3, argv, LOCAL, tmp_path / "hosts")
    assert "digits: 3 workers, 6 steps, seed 0; bytes received by each worker" in " ".join(results[0].stdout.split())
    assert not any("accuracy" in result.stdout for result in results[1:])
    hosts = tmp_path / "hosts" / "digits"
    assert sorted(path.name for path in hosts.parent.iterdir()) == ["digits"]
    for method in ("plump_dp", "slim_dp"):
        options = LOCAL if method == "slim_dp" else ["method:plump-dp"]
        whole = simulated([*argv, *options], tmp_path / "one")
        assert len(metrics(hosts, method)) == 6
        assert_like_simulated(metrics(hosts, method), metrics(tmp_path / "one", method), 1e-3)
        (last,) = [line for line in metrics(hosts, method) if line["step"] == 6]
        assert abs(last["test_accuracy"] - whole.summary.accuracy) <= 2 / 450


@pytest.mark.slow
def test_two_stages(tmp_path):
    """Both read all rows, and write one checkpoint together, from which the whole goes on."""
    argv = [*FEW, "--steps", "3", "--workers", "1", "--stages", "2", "--boundary.sparsity", "0.9", "--no-baseline"]
    argv, method = [*argv, "--eval-every", "3", "--micro-batches", "2"], ["method:plump-dp"]
    on_hosts(2, argv, method, tmp_path / "hosts")
    name, hosts = "plump_dp-masked-0.9", tmp_path / "hosts" / "digits"
    whole = simulated([*argv, *method], tmp_path / "one")
    assert len(metrics(hosts, name)) == 3
    assert_like_simulated(metrics(hosts, name), metrics(tmp_path / "one", name), 1e-5)
    read = simulated([*argv, *method], hosts)
    assert read.losses == []
    pairs = zip(*(jax.tree.leaves(jax.device_get(run.state.params)) for run in (read, whole)), strict=True)
    for path, expected in pairs:
        np.testing.assert_allclose(path, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
def test_local_workers_on_hosts(hosts, tmp_path):
    """Two workers of two devices each, on two hosts or four: local steps, whose loss is a host's own, and shards."""
    argv = [*FEW, "--workers", "2", "--steps", "6", "--eval-every", "3", "--no-baseline"]
    method = ["method:local-sgd", "--method.steps", "2"]
    on_hosts(hosts, [*argv, "--fsdp", "2"], method, tmp_path / "hosts")
    simulated([*argv, *method], tmp_path / "one")
    hosts_metrics, expected = (metrics(path, "local_sgd") for path in (tmp_path / "hosts" / "digits", tmp_path / "one"))
    assert len(hosts_metrics) == 6
    losses = ([line["test_loss"] for line in lines if "test_loss" in line] for lines in (hosts_metrics, expected))
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert [line["test_accuracy"] for line in hosts_metrics if "test_accuracy" in line] == pytest.approx(
        [line["test_accuracy"] for line in expected if "test_accuracy" in line], abs=2 / 450
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        # On each host, one worker of two devices: shards cross the link between the hosts alone.
        pytest.param(["--slices", "2", "--fsdp", "2"], id="slices"),
        # Between hosts, a step is three programs in two threads; here, it is one.
        pytest.param(["--delay", "1"], id="exchanges beside gradients"),
    ],
)
def test_dct_dp_on_two_hosts(options, tmp_path):
    argv = [*FEW, "--workers", "2", *options, "--steps", "8", "--eval-every", "4", "--no-baseline"]
    on_hosts(2, argv, METHOD, tmp_path / "hosts")
    assert simulated([*argv, *METHOD], tmp_path / "alone").finished
    hosts_metrics, expected = metrics(tmp_path / "hosts" / "digits", "dct_dp"), metrics(tmp_path / "alone", "dct_dp")
    assert len(hosts_metrics) == 8
    assert_like_simulated(hosts_metrics, expected, 1e-3)


@pytest.mark.parametrize(
    ("count", "workers", "parts"),
    [
        (1, 4, [(0, 1)]),
        (2, 4, [(0, 2), (1, 2)]),
        (4, 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (4, 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),  # two stages of a worker in processes of their own
        (3, 1, [(0, 1)] * 3),
    ],
)
def test_a_worker_of_two_processes(count, workers, parts):
    assert [rows_of(Processes(index, count), workers) for index in range(count)] == parts


@pytest.mark.slow
def test_sigterm_to_one(tmp_path):
    """Two processes of two workers each."""
    argv = [*FEW, "--steps", "200", "--eval-every", "200", "--checkpoint-every", "10", "--no-baseline"]
    folder = tmp_path / "runs" / "digits"

    def start(*options):
        with socket.create_server(("127.0.0.1", 0)) as server:
            coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-m", "train", *argv, "--out", str(tmp_path / "runs"), *options]
        command += ["--coordinator", coordinator, "--num-processes", "2"]
        return [
            subprocess.Popen(
                [*command, "--process-id", str(index), *METHOD],
                cwd=ROOT,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]

    def end(processes):
        try:
            texts = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0, 0], texts
        return [out for out, _ in texts]

    processes = start()
    deadline = time.monotonic() + 100
    while not any((folder / "dct_dp" / "checkpoints").glob("[1-9]*")):
        alive = all(process.poll() is None for process in processes)
        if not alive or time.monotonic() > deadline:
            pytest.fail(str(end(processes)))
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    first, second = end(processes)
    (step,) = re.findall(r"Stopped and saved after step (\d+); go on with --resume\.", first)
    step = int(step)
    assert 10 <= step < 200
    assert "Stopped" not in second
    assert (folder / "dct_dp" / "checkpoints" / str(step)).is_dir()
    assert len(metrics(folder, "dct_dp")) == step
    simulated([*argv, *METHOD], tmp_path / "one", stop_after=8)
    assert_like_simulated(metrics(folder, "dct_dp")[:8], metrics(tmp_path / "one", "dct_dp"), 1e-3)

    first, _ = end(start("--resume", "--checkpoint-every", "100"))
    assert f"dct_dp: resumed after step {step}." in first
    lines = metrics(folder, "dct_dp")
    assert [line["step"] for line in lines] == list(range(1, 201))
    assert np.mean([line["loss"] for line in lines[-20:]]) < 0.3


def test_no_flags_and_variables(joined):
    assert connect(None, None, None) == Processes(0, 1)
    assert connect("127.0.0.1:9777", 0, 1) == Processes(0, 1)
    assert joined == []


def test_flags_before_variables(joined, monkeypatch):
    for name, value in zip(VARIABLES, ("10.0.0.1:9777", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert connect(None, None, None) == Processes(1, 4)
    assert connect("[::1]:80", 0, 2) == Processes(0, 2)
    assert joined == [("10.0.0.1:9777", 4, 1), ("[::1]:80", 2, 0)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("127.0.0.1:9777", None, None), "got none for --process-id, --num-processes. Give all three"),
        ((None, 0, None), "got none for --coordinator, --num-processes"),
        ((None, None, 2), "got none for --coordinator, --process-id"),
        (("127.0.0.1", 0, 2), "--coordinator must be HOST:PORT of process 0; got '127.0.0.1'. Write"),
        ((":9777", 0, 2), "--coordinator must be HOST:PORT"),
        (("::1:9777", 0, 2), "must have brackets around an IPv6 address; got '::1:9777'. Write [::1]:9777."),
        (("h" * 99 + ":9777", 0, 2), "--coordinator must name a host; got 'hhh"),
        (("host:http", 0, 2), "--coordinator must be HOST:PORT of process 0; got 'host:http'"),
        (("127.0.0.1:9777", 2, 2), "--process-id must be at least 0 and below --num-processes; got 2 of 2"),
        (("127.0.0.1:9777", -1, 2), "got -1 of 2"),
        (("127.0.0.1:9777", 0, 0), "got 0 of 0"),
    ],
)
def test_contradictions(argv, message, joined):
    with pytest.raises(ValueError, match=re.escape(message)):
        connect(*argv)
    assert joined == []


def test_a_name_that_comes_later(joined, monkeypatch, capsys):
    """Those of pods appear late."""
    monkeypatch.setattr(train.processes, "_check_own_name", lambda: None)
    find, failures = socket.getaddrinfo, [socket.gaierror(-2, "Name or service not known")] * 2

    def find_late(host, *args, **options):
        if failures:
            raise failures.pop()
        return find("::1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", find_late)
    monkeypatch.setattr(train.processes, "SAY", 0.01)
    assert connect("pod-0.pods:9777", 1, 2) == Processes(1, 2)
    message = "train: waiting for the address of pod-0.pods:9777 ([Errno -2] Name or service not known)\n"
    assert capsys.readouterr().err == message * 2
    failures += [socket.gaierror(-2, "Name or service not known")] * 99
    message = "must name a host within --connect-timeout; got 'pod-0.pods:9777' for 0 s: .*not known. Is the name right"
    with pytest.raises(TimeoutError, match=message):
        connect("pod-0.pods:9777", 1, 2, seconds=0)
    assert len(joined) == 1


def test_an_unknown_own_name(joined, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    message = (
        "own name must have an address, .* got 'no-such-name.invalid': .* Write it into /etc/hosts, with the address"
    )
    with pytest.raises(ValueError, match=message):
        connect("127.0.0.1:9777", 0, 2)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(ValueError, match=message):
        connect(None, None, None)
    assert joined == []


def test_a_short_cut_of_a_link(joined):
    """gRPC ends one after 20 s, whatever JAX is told."""
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
        for seconds, milliseconds in ((60.0, 120_000), (1e9, 2**31 - 1)):
            connect("127.0.0.1:9777", 1, 2, patience=seconds)
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(joined) == 2


def test_absent_processes(joined, monkeypatch):
    monkeypatch.setattr(train.processes, "meet", lambda *_: Meeting(1, 2, (1,), ()))
    assert connect("127.0.0.1:9777", 2, 3) == Processes(1, 2, missing=(1,))
    assert joined == [("127.0.0.1:9777", 2, 1)]
    monkeypatch.setattr(train.processes, "meet", lambda *_: Meeting(0, 1, (1, 2), ()))
    assert connect("127.0.0.1:9777", 0, 3) == Processes(0, 1, missing=(1, 2))
    assert len(joined) == 1


def test_a_bad_variable_of_a_launcher(joined, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "abc")
    monkeypatch.setenv("SLURM_PROCID", "0")
    refused(lambda: connect(None, None, None), "SLURM_NTASKS", "got 'abc'")


@pytest.mark.parametrize("name", VARIABLES[1:])
def test_a_bad_variable(name, joined, monkeypatch):
    monkeypatch.setenv(name, "first")
    with pytest.raises(ValueError, match=f"{name} must be an integer; got 'first'"):
        connect("127.0.0.1:9777", None, None)


@pytest.mark.parametrize(
    ("workers", "batch", "message"),
    [("4", "24", "--workers must be a multiple of the number of processes"), ("0", "24", "--workers must be at")],
)
def test_workers_that_cannot_be_shared(workers, batch, message, joined, monkeypatch, tmp_path, capsys):
    """Otherwise the process would wait minutes for the others before it says so."""
    monkeypatch.setattr(train.__main__, "prepare_jax", lambda devices: None)
    monkeypatch.setattr(train.__main__, "run", lambda *_, **__: pytest.fail("started"))
    argv = ["digits", "--workers", workers, "--global-batch", batch, "--out", str(tmp_path / "runs")]
    argv += ["--coordinator", "127.0.0.1:9777", "--process-id", "0", "--num-processes", "3"]
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert joined == []


@pytest.mark.parametrize(
    ("variables", "flags", "processes"),
    [
        ({}, [], 1),
        ({}, ["--workers", "2", "--stages", "2"], 1),
        ({}, [*TWO, "--workers", "1", "--stages", "4", "--cuts", "1", "2", "3"], 2),
        ({}, TWO, 2),
        (dict(zip(VARIABLES, ("127.0.0.1:9777", "0", "4"), strict=True)), [], 4),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, [], 4),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, [], 2),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:9777"}, [], 2),
    ],
)
def test_shares_of_workers_and_stages(variables, flags, processes, joined, monkeypatch):
    """With more devices per process, the mesh of all workers would be on the first process alone."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    devices, runs = [], []
    monkeypatch.setattr(train.__main__, "prepare_jax", devices.append)
    for name in ("run", "run_together"):
        monkeypatch.setattr(train.__main__, name, lambda _, processes, *__, **___: runs.append(processes) or 0)
    assert main(["digits", "--workers", "4", *flags]) == 0
    asked_jax = "JAX_COORDINATOR_ADDRESS" in variables  # which starts the devices, as they are
    assert runs == [Processes(0, processes, has_devices=asked_jax)]
    assert len(joined) == (processes > 1)
    assert devices == [None if asked_jax else 4 // processes]


def test_thread_pools(monkeypatch):
    updates = []
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")  # otherwise this process would keep all memory that the tests free
    monkeypatch.setattr(jax.config, "update", lambda *arguments: updates.append(arguments))
    monkeypatch.setenv("PJRT_NPROC", "3")
    prepare_jax()
    assert (os.environ["PJRT_NPROC"], updates) == ("3", [])
    monkeypatch.delenv("PJRT_NPROC")
    prepare_jax(1)
    assert "PJRT_NPROC" not in os.environ
    updates.clear()
    prepare_jax(4)
    assert (os.environ["PJRT_NPROC"], updates) == ("16", [("jax_num_cpu_devices", 4)])


_KEEPS = """
import resource
import numpy as np
from train.processes import keep_freed_memory
keep_freed_memory()
for _ in range(3):
    np.ones(20_000_000)  # 160 MB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(20_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
@pytest.mark.parametrize(("variables", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_freed_memory(variables, is_kept):
    # With large pages a buffer of 160 MB has 80 pages, with usual ones 39,062.
    env = {**os.environ, **variables}
    out = subprocess.run([sys.executable, "-c", _KEEPS], env=env, capture_output=True, text=True, check=True).stdout
    assert (int(out) < 40) == is_kept
