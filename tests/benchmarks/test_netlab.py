"""The lab on this machine: namespaces if the tests run as root with iproute2, otherwise its fallback."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import netlab
from benchmarks.netlab import Lab, parse_delay, parse_rate, parse_rates, slow_last
from benchmarks.trace import Trace, received_bytes
from tests.benchmarks.places import CAN_ISOLATE, ROOT
from tests.refusals import refusals, refused

CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NETLAB = [sys.executable, "-m", "benchmarks.netlab"]

# What the programs below begin with: where host 0 is, and how the others connect to it.
CONNECT = """
import os, socket, sys, time
address, port = os.environ["JAXCOMM_COORDINATOR"].split(":")

def connect():
    for attempt in range(200):
        try:
            return socket.create_connection((address, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.05)
"""

# Host 0 receives SIZE bytes from each other host ("gather") or sends as many to each ("scatter"), and
# prints the seconds that this took and the bytes that its interface counted in that direction.
TRANSFER = f"""{CONNECT}
from benchmarks.trace import received_bytes, transmitted_bytes
gathers, size = sys.argv[1] == "gather", int(sys.argv[2])
count = received_bytes if gathers else transmitted_bytes
interface, hosts = os.environ["NETLAB_INTERFACE"], int(os.environ["JAXCOMM_NUM_PROCESSES"])
own = socket.gethostbyname(socket.gethostname())

def get(peer, size):
    while size:
        size -= len(peer.recv(size))

if os.environ["JAXCOMM_PROCESS_ID"] == "0":
    assert own == address
    with socket.create_server((address, int(port))) as server:
        peers = [server.accept()[0] for _ in range(hosts - 1)]
    before, start = count(interface), time.perf_counter()
    for peer in peers:
        peer.sendall(bytes(1 if gathers else size))
    for peer in peers:
        get(peer, size if gathers else 1)
    print(time.perf_counter() - start, count(interface) - before)
else:
    assert own != address
    peer = connect()
    get(peer, 1 if gathers else size)
    peer.sendall(bytes(size if gathers else 1))
"""


# Host 1 opens a connection to host 0 and prints the seconds of round trips of one byte, the shortest of three.
ROUND_TRIP = f"""{CONNECT}
if os.environ["JAXCOMM_PROCESS_ID"] == "0":
    with socket.create_server((address, int(port))) as server:
        peer = server.accept()[0]
    while peer.recv(1):
        peer.sendall(b"x")
elif os.environ["JAXCOMM_PROCESS_ID"] == "1":
    peer = connect()
    times = []
    for trip in range(3):
        begin = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        times.append(time.perf_counter() - begin)
    print(min(times))
"""
CPU_SECONDS = """
import time
end = time.monotonic() + 0.5
while time.monotonic() < end:
    pass
print(time.process_time())
"""

ISOLATED = pytest.mark.skipif(not CAN_ISOLATE, reason="takes root and namespaces")


def transfer(lab, direction, size, trace=None):
    """Returns host 0's seconds and counted bytes."""
    argv = [sys.executable, "-c", TRANSFER, direction, str(size)]
    results = lab.run(argv, env={"PYTHONPATH": str(ROOT)}, timeout=30, trace=trace)
    assert [result.returncode for result in results] == [0] * lab.hosts, results
    seconds, counter = results[0].stdout.split()
    return float(seconds), int(counter)


def remains(pid):
    folders = [Path("/var/run/netns"), Path("/etc/netns")]
    return [path for folder in folders for path in folder.glob(f"netlab-{pid}-*")]


def command_line(*arguments, **options):
    return subprocess.run([*NETLAB, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, **options)


@pytest.fixture
def loopback(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def lab(capfd):
    """A lab of three hosts: isolated if this machine can, otherwise with a message that says so."""
    with Lab(3, None) as lab:
        assert lab.isolated == CAN_ISOLATE
        assert ("fell back to loopback" in capfd.readouterr().err) == (not CAN_ISOLATE)
        yield lab
    assert remains(os.getpid()) == []


@pytest.mark.parametrize(
    ("rate", "bits"),
    [
        (None, None),
        ("none", None),
        ("9600bit", 9600),
        ("64kbit", 64_000),
        ("100mbit", 100_000_000),
        ("2.5gbit", 2_500_000_000),
    ],
)
def test_rates_of_tc(rate, bits):
    assert parse_rate(rate) == bits


@refusals(
    *(
        (lambda rate=rate: Lab(2, rate), "unit bit, kbit", "got ", "Write for example '100mbit'")
        for rate in ("", "100", "mbit", "100mbps", "100Mbit", "-1mbit", "0mbit", "1tbit", "1e3bit", "1mbit:1mbit:1mbit")
    ),
    *(
        (lambda delay=delay: Lab(2, None, delay=delay), "delay must be ", "us, ms or s", f"got {delay!r}", "'50ms'")
        for delay in ("", "50", "-5ms", "11s", "1e3ms")
    ),
    (lambda: Lab(2, None, jitter="1"), "jitter must be ", "got '1'"),
    *(
        (lambda shares=shares: Lab(2, None, shares=shares), "shares must be 0.1 to 64", f"got {shares!r} for 2")
        for shares in ((0.05,), (65.0,), (-1.0,), (1.0, 1.0, 1.0))
    ),
    (lambda: slow_last(2, 0.5), "slow must be 1 to 100", "got 0.5"),
    *((lambda hosts=hosts: Lab(hosts, None), f"hosts must be 1 to 64; got {hosts}") for hosts in (-1, 0, 65)),
    (lambda: received_bytes("nowhere0"), "must be one of ", "lo", "got 'nowhere0'", "NETLAB_INTERFACE"),
)
def test_refusals(call, said):
    refused(call, *said)


def test_rates_of_hosts():
    assert parse_rates("100mbit/none/1kbit", 3) == [(10**8, 10**8), (None, None), (10**3, 10**3)]
    assert parse_rates("1mbit/2mbit", 4) == [(10**6, 10**6), *[(2 * 10**6, 2 * 10**6)] * 3]
    assert parse_rates("1mbit:none/2mbit:3mbit", 2) == [(10**6, None), (2 * 10**6, 3 * 10**6)]
    assert parse_rates(None, 2) == [(None, None)] * 2
    with pytest.raises(ValueError, match="at most one rate for every host; got '1mbit/1mbit' for 1"):
        Lab(1, "1mbit/1mbit")


def test_delays_of_tc():
    texts = {None: 0.0, "none": 0.0, "0ms": 0.0, "50ms": 0.05, "2.5ms": 0.0025, "200us": 0.0002, "1s": 1.0}
    assert [parse_delay(text) for text in texts] == pytest.approx(list(texts.values()))


def test_a_slow_host(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert slow_last(4, 1.0) == []
    assert slow_last(4, 2.0) == [0.0, 0.0, 0.0, 0.25]  # of half a core
    assert slow_last(1, 2.0) == [0.5]  # of a core, since it may compute in one thread


@pytest.mark.parametrize("argv", [[], ["no-such-program"]])
def test_a_missing_command(loopback, argv):
    with Lab(1, None) as lab, pytest.raises(ValueError, match=r"command must name a program.*after `--`"):
        lab.run(argv)


def test_a_closed_lab():
    with pytest.raises(RuntimeError, match="with Lab"):
        Lab(1, None).run(["true"])


def test_the_fallback(loopback, capfd):
    script = "import os; print(*(os.environ[name] for name in os.environ['NAMES'].split()))"
    names = "JAXCOMM_COORDINATOR JAXCOMM_PROCESS_ID JAXCOMM_NUM_PROCESSES NETLAB_INTERFACE"
    with Lab(2, "1mbit", delay="1s", shares=(0.1,)) as lab:
        assert not lab.isolated
        lab.set_rate("2mbit")
        about = lab.conditions()
        results = lab.run([sys.executable, "-c", script], env={"NAMES": names})
    outputs = [result.stdout.split() for result in results]
    coordinator = outputs[0][0]
    assert coordinator.startswith("127.0.0.1:")
    assert outputs == [[coordinator, "0", "2", "lo"], [coordinator, "1", "2", "lo"]]
    assert about["control"] == CONTROL.read_text().strip()
    assert (about["delay"], about["shares"], about["rate"]) == ("none", "none", "none")  # they are not obeyed
    message = capfd.readouterr().err
    assert message.count("fell back to loopback") == 1
    assert "takes root" in message


def test_no_namespaces(monkeypatch, capfd):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(netlab, "_labs", list)
    with Lab(1, "1mbit") as lab:
        assert not lab.isolated
    assert "No such file or directory: 'chrt'" in capfd.readouterr().err


def test_outputs_of_hosts(lab):
    script = "import os, sys; sys.stderr.write(os.environ['JAXCOMM_PROCESS_ID'] * 300_000); print('é')"
    results = lab.run([sys.executable, "-c", script], timeout=20)
    assert [result.host for result in results] == [0, 1, 2]
    assert [result.stderr for result in results] == [str(host) * 300_000 for host in range(3)]
    assert [result.stdout for result in results] == ["é\n"] * 3


def test_host_0_prints(lab, capfd):
    script = "echo started $JAXCOMM_PROCESS_ID; sleep 1; echo warned >&2"
    rates = []

    def look():
        time.sleep(0.6)
        rates.append(capfd.readouterr().out)

    looker = threading.Thread(target=look)
    looker.start()
    results = lab.run(["sh", "-c", script], stream=True)
    looker.join()
    assert rates == ["started 0\n"]
    assert capfd.readouterr() == ("", "warned\n")
    assert results[0].stdout == "started 0\n"


def test_a_failed_host(lab, monkeypatch):
    monkeypatch.setattr(netlab, "FAILURE_GRACE", 0.3)
    script = "[ $JAXCOMM_PROCESS_ID = 1 ] && { echo broken >&2; exit 7; }; sleep 60 & wait"
    start = time.monotonic()
    results = lab.run(["sh", "-c", script])
    assert time.monotonic() - start < 5
    assert [result.returncode for result in results] == [-signal.SIGKILL, 7, -signal.SIGKILL]
    assert results[1].stderr == "broken\n"
    assert results[0].stderr == "netlab: killed, because host 1 had failed with exit code 7\n"


def test_a_timeout(lab):
    start = time.monotonic()
    results = lab.run(["sleep", "60"], timeout=0.3)
    assert time.monotonic() - start < 5
    assert [result.returncode for result in results] == [-signal.SIGKILL] * 3
    assert "ran longer than 0.3 s" in results[0].stderr


def megabits_per_second(lab, direction, size, received, limit):
    """The fastest of three transfers: other work on the machine can slow one down, but none may exceed the limit."""
    rates = []
    for _ in range(3):
        seconds, counter = transfer(lab, direction, size)
        assert counter == pytest.approx(2 * size, rel=0.03)
        rates.append(received * 8 / seconds / 1e6)
        assert rates[-1] < 1.05 * limit
        if rates[-1] > 0.6 * limit:
            break
    return max(rates)


def test_rates_and_bytes(lab):
    if not lab.isolated:
        return  # the fixture has seen the fallback say so
    size = 1_000_000
    for direction, megabits in (("gather", 100), ("scatter", 100), ("gather", 300)):
        lab.set_rate(f"{megabits}mbit")
        assert megabits_per_second(lab, direction, size, 2 * size, megabits) > 0.6 * megabits
    for rate in ("none/20mbit/none", "none/none/20mbit"):  # one slow host, for which the other need not wait
        lab.set_rate(rate)
        assert megabits_per_second(lab, "gather", size, size, 20) > 0.6 * 20
    lab.set_rate("none")
    seconds, _ = transfer(lab, "gather", size)
    assert 2 * size * 8 / seconds / 1e6 > 400


@ISOLATED
def test_the_congestion_control_is_what_the_kernel_says(lab):
    results = lab.run(["cat", str(CONTROL)])
    assert [result.stdout for result in results] == [f"{lab.congestion_control}\n"] * 3
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if "cubic" in available:
        assert lab.congestion_control == "cubic"


@ISOLATED
def test_another_congestion_control_is_said(monkeypatch, capfd):
    monkeypatch.setattr(netlab, "CONTROL", "vegas9")  # no machine has it
    monkeypatch.setattr(netlab, "_SETTINGS", netlab._SETTINGS.replace("cubic", "vegas9"))
    with Lab(2, None) as lab:
        about = lab.conditions()
    assert about["control"] == lab.congestion_control != "vegas9"
    assert f"TCP uses {lab.congestion_control} and not vegas9" in capfd.readouterr().err


@ISOLATED
def test_a_delay():
    """What TCP sees of a delay; other work on the machine can only make round trips longer."""
    with Lab(3, "100mbit", delay="30ms", jitter="1ms") as lab:
        about = lab.conditions()
        results = lab.run([sys.executable, "-c", ROUND_TRIP], timeout=30)
        assert [result.returncode for result in results] == [0] * 3, results
        assert 0.06 <= float(results[1].stdout) < 0.5
        for direction in ("gather", "scatter"):
            seconds, counter = transfer(lab, direction, 1_000_000)
            assert counter == pytest.approx(2_000_000, rel=0.03)
            assert seconds > 0.16 + 0.06
        assert lab.set_link(1, up=False)
        cut = lab.run(["sh", "-c", "cat /sys/class/net/eth0/carrier"])
        assert [result.stdout.strip() for result in cut] == ["1", "0", "1"]
        assert lab.set_link(1, up=True)
        transfer(lab, "gather", 1000)
    assert (about["delay"], about["jitter"], about["shares"]) == ("30ms", "1ms", "none")
    assert remains(os.getpid()) == []


@ISOLATED
def test_rates_up_and_down(lab):
    """Each way takes at least as long as its rate; a host that is fast down and slow up receives fast."""
    lab.set_rate("20mbit:200mbit/none")
    assert transfer(lab, "scatter", 500_000)[0] > 0.9 * 8e6 / 20e6
    lab.set_rate("200mbit:20mbit/none")
    assert transfer(lab, "gather", 500_000)[0] > 0.9 * 8e6 / 20e6
    lab.set_rate("20mbit:200mbit/none")
    assert min(transfer(lab, "gather", 500_000)[0] for _ in range(3)) < 0.9 * 8e6 / 20e6


@ISOLATED
def test_shares():
    try:
        with Lab(2, None, shares=(0.0, 0.2)) as lab:
            if not lab.isolated:
                pytest.skip("no cgroups for processors here")
            about = lab.conditions()
            _, slow = (float(result.stdout) for result in lab.run([sys.executable, "-c", CPU_SECONDS]))
    finally:
        assert [path for path in Path("/sys/fs/cgroup").rglob(f"netlab-{os.getpid()}-*")] == []
    assert slow < 0.25  # of more than 0.5 s
    assert about["shares"] == "0/0.2"


def test_traces(lab):
    """Twice 1 MB at 20 Mbit/s takes at least 0.8 s; other work on the machine can only make it longer."""
    if not lab.isolated:
        return  # the fixture has seen the fallback say so
    trace = Trace()
    lab.set_rate("20mbit")
    transfer(lab, "gather", 1_000_000, trace)
    lab.set_rate("none")
    series = trace.records()
    assert 2_000_000 < series[-1]["received"] < 2_060_000
    kilobytes, before = 0.0, 0.0
    for second in series:
        assert second["seconds"] - before > 0.0999
        kilobytes, before = kilobytes + second["kB_per_s"] * (second["seconds"] - before), second["seconds"]
        assert kilobytes * 1e3 == pytest.approx(second["received"])
    busy = [index for index, second in enumerate(series) if second["kB_per_s"] > 100]
    begin = series[busy[0] - 1]["seconds"] if busy[0] else 0.0
    assert series[busy[-1]]["seconds"] - begin > 0.75


def test_a_trace_by_command(tmp_path):
    path = tmp_path / "trace.json"
    process = command_line("--hosts", "1", "--rate", "none", "--trace", str(path), "--", "sleep", "0.5")
    assert process.returncode == 0, process.stderr
    series = json.loads(path.read_text())
    assert len(series) >= 2
    assert {"seconds", "received", "kB_per_s", "control", "day", "machine_ms"} <= set(series[0])
    process = command_line("--hosts", "1", "--rate", "none", "--trace", str(tmp_path), "--", "sleep", "0")
    assert process.returncode == 2
    assert "--trace must be a file; got the folder" in process.stderr


def test_hosts_are_independent(lab):
    results = lab.run([sys.executable, "-c", "import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH)"])
    assert [result.stdout for result in results] == [f"{lab.isolated}\n"] * 3


def test_an_idle_interface(lab):
    if not lab.isolated:
        return  # the fixture has seen the fallback say so
    results = lab.run(["sh", "-c", "sleep 1.5; grep eth0 /proc/net/dev"])
    assert [result.stdout.split()[1] for result in results] == ["0"] * 3


def test_exceptions_clean_up():
    def broken_block():
        with Lab(2, "10mbit") as lab:
            assert bool(remains(os.getpid())) == lab.isolated
            raise KeyError

    with pytest.raises(KeyError):
        broken_block()
    assert remains(os.getpid()) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_clean_up(number, tmp_path):
    script = f"echo $$ > {tmp_path}/$JAXCOMM_PROCESS_ID; exec sleep 60"
    process = start_and_wait(script, tmp_path)
    try:
        process.send_signal(number)
        assert process.wait(timeout=10) == 128 + number
    finally:
        process.kill()
        process.wait()
    assert remains(process.pid) == []
    assert not any(is_alive(int(path.read_text())) for path in tmp_path.iterdir())


@pytest.mark.parametrize("while_it", ["builds", "runs"])
def test_a_signal_in_a_poll(monkeypatch, while_it):
    make_lock, signals = threading.Lock, []

    class Interrupted:
        """The lock of a `Popen`: a signal arrives after it is taken and before the `try` that would release it."""

        def __init__(self):
            self.lock = make_lock()

        def acquire(self, blocking=True):
            acquired = self.lock.acquire(timeout=10) if blocking else self.lock.acquire(False)
            assert acquired or not blocking, "nobody will release the lock"
            if not signals:
                signals.append(os.kill(os.getpid(), signal.SIGTERM))
                time.sleep(0.1)  # until the other thread has taken it
            return acquired

        def release(self):
            self.lock.release()

        def __enter__(self):
            return self.acquire()

        def __exit__(self, *_):
            self.release()

    # As in a process with JAX: another thread takes the process's signals, whatever the main thread blocks.
    threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
    if while_it == "builds":
        monkeypatch.setattr(threading, "Lock", Interrupted)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)), Lab(1, None):
            raise AssertionError("the signal came before")
        return
    with Lab(1, None) as lab:
        monkeypatch.setattr(threading, "Lock", Interrupted)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            lab.run(["sleep", "60"])


def test_leftovers_of_a_killed_lab(tmp_path):
    script = f"echo $$ > {tmp_path}/$JAXCOMM_PROCESS_ID; exec sleep 5"
    with start_and_wait(script, tmp_path) as process:
        process.kill()
    assert bool(remains(process.pid)) == CAN_ISOLATE
    with Lab(1, None) as lab:
        if lab.isolated:
            assert remains(process.pid) == []
            assert not any(is_alive(int(path.read_text())) for path in tmp_path.iterdir())


def start_and_wait(script, folder):
    """Starts a command line lab of two hosts; returns once each has written its process id."""
    argv = [*NETLAB, "--hosts", "2", "--", "sh", "-c", script]
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # If the tests run in the background, signals may be ignored, which children inherit.
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in SIGNALS],
    )
    deadline = time.monotonic() + 15
    while sum(path.stat().st_size > 0 for path in folder.iterdir()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_command_line():
    good = command_line("--hosts", "2", "--rate", "1gbit", "--", "sh", "-c", "echo I am $JAXCOMM_PROCESS_ID")
    assert (good.returncode, good.stdout) == (0, "I am 0\n")
    bad = command_line("--hosts", "2", "--", "sh", "-c", "echo no $JAXCOMM_PROCESS_ID >&2; exit $JAXCOMM_PROCESS_ID")
    assert bad.returncode == 1
    assert "netlab: host 1 ended with 1\nno 1\n" in bad.stderr
    no_command = command_line("--hosts", "2")
    assert no_command.returncode == 2
    assert "Write it after `--`" in no_command.stderr


def test_help():
    script = """
import os, sys
os.geteuid = lambda: 1000
from benchmarks.netlab import main
try:
    main(["--help"])
finally:
    assert "jax" not in sys.modules
"""
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert "--hosts" in process.stdout
