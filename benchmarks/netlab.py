"""Run a command on every host of a small network made on this machine, at a chosen link rate.

    python -m benchmarks.netlab --hosts 4 --rate 100mbit -- python -m train ...
    python -m benchmarks.netlab --delay 50ms -- python -m train ...    # a round trip takes 100 ms
    python -m benchmarks.netlab --trace FILE -- python -m train ...    # the bytes that host 0 receives, over time

A host is a network namespace with its own address and interface, `eth0`. Its link to the switch, a
bridge in one more namespace, passes `rate` in each direction, so hosts that send to one host at
once share that host's link, as on a real switch. The rate counts Ethernet frames: a TCP stream gets
0.96 of it. With a delay, `benchmarks.switch` is in place of the bridge.

TCP uses CUBIC, Linux's default, if this machine has it: `Lab.congestion_control` is what the hosts' kernel
says. The hosts share this machine's cores, and run as batch processes (SCHED_BATCH).

Making namespaces takes root, iproute2 and util-linux. If they are missing, the lab says so on stderr
and runs the same processes on 127.0.0.1, where no rate, delay or share is obeyed.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import tyro

from benchmarks import switch
from benchmarks.conditions import machine
from benchmarks.trace import Trace

MAX_HOSTS, MAX_SHARE = 64, 64
ADDRESSES = [f"10.77.0.{host + 1}" for host in range(MAX_HOSTS)]
PORT = 9777  # free in every lab: it is opened in the namespace of the lab's host 0
FAILURE_GRACE = 3.0  # seconds for the other hosts to report what they saw of one host's failure
CONTROL = "cubic"  # the congestion control of hosts, where this machine has it

_NAMESPACES = Path("/var/run/netns")  # where iproute2 keeps them
_HOST_FILES = Path("/etc/netns")  # `ip netns exec NAME` shows the files of NAME here as /etc's
_NAME = re.compile(r"netlab-(\d+)-\d+-(?:h\d+|switch)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TCP = Path("/proc/sys/net/ipv4")
_CGROUPS = Path("/sys/fs/cgroup")
_LISTS = ("allowed", "available")
_PERIOD = 10_000  # microseconds in which a host's processes get their share of a core
_counter = itertools.count()

Direction = tuple[int | None, int | None]  # bits per second up and down

# An idle link should count no bytes, but IPv6 sends multicast reports even without an address. The
# kernel's memory of earlier connections would start a run with the window of the run before it. With BBR, the
# default of some machines, a step after many megabytes may take twice its time. What holds then is read back.
_SETTINGS = f"""{{
    echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6
    echo 1 > {_TCP}/tcp_no_metrics_save
    echo {CONTROL} > {_TCP}/tcp_congestion_control
}} 2> /dev/null; cat {_TCP}/tcp_congestion_control"""

# Hosts share this machine's cores. Gloo writes to a peer while it holds a lock, and the thread that wants
# the lock next polls. By the kernel's default, the peer that the write wakes takes the writer's core, and
# the polling thread has the other until its time slice ends: an all-reduce of 4 KB takes 5 ms between 4
# hosts, and 16 ms between 8, on two cores. Batch processes do not interrupt each other: 1 and 5 ms.
_BATCH = ("chrt", "--batch", "0")


@dataclass(frozen=True)
class HostResult:
    """What one host's process did.

    `returncode` is minus the signal's number if a signal ended the process. If the lab killed it,
    the last line of `stderr` says why.
    """

    host: int
    returncode: int
    stdout: str
    stderr: str


class Lab:
    """Hosts behind one switch, from `with Lab(...) as lab:` to the end of the block.

    Labs do not see each other, whether they are of one process or of several. Entering one also
    removes what labs of killed processes left behind, and ends what still runs there. While a lab is
    open, SIGTERM and SIGHUP raise `SystemExit`, so that it is removed, unless the program handles them.

    Args:
      hosts: number of hosts, 1 to 64.
      rate: bits per second of each link in each direction, as tc writes it ("100mbit", "1gbit");
        None or "none" for no limit. ":" separates the rates up, from the host, and down: "20mbit:100mbit".
        "/" separates the rates of hosts 0, 1, ..., the last of which also applies to all further hosts:
        "100mbit/1gbit" is a slow link for host 0.
      delay: what every frame takes longer from one host to another ("50ms"); a round trip takes twice
        this. None or "none" for a usual switch.
      jitter: the most that a frame takes longer than `delay`, at random.
      shares: the share of a core that the processes of host 0, 1, ... get together; 0 or none for no limit.

    Attributes:
      isolated: whether the hosts are namespaces; False until the lab is entered, and in a fallback.
      congestion_control: what TCP uses on the hosts, by their kernel; "unknown" until the lab is entered.

    Raises:
      ValueError: for a number of hosts, a rate, a delay or a share out of range.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None,
        *,
        delay: str | None = None,
        jitter: str | None = None,
        shares: Sequence[float] = (),
    ):
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be 1 to {MAX_HOSTS}; got {hosts}. Change --hosts.")
        if len(shares) > hosts or any(share and not 0.1 <= share <= MAX_SHARE for share in shares):
            raise ValueError(
                f"shares must be 0.1 to {MAX_SHARE} of a core, or 0, at most one a host; got {tuple(shares)!r} for "
                f"{hosts}. Write (0, 0.5), say."
            )
        self.hosts = hosts
        self.isolated = False
        self.congestion_control = "unknown"
        self._bits = parse_rates(rate, hosts)
        self._delay, self._jitter = parse_delay(delay), parse_delay(jitter, "jitter")
        self._shares = [*shares, *[0.0] * (hosts - len(shares))]
        self._relay: subprocess.Popen[str] | None = None
        self._open = False
        self._prefix = f"netlab-{os.getpid()}-{next(_counter)}-"
        self._names = [f"{self._prefix}h{host}" for host in range(hosts)]
        self._switch = f"{self._prefix}switch"
        self._handled: list[signal.Signals] = []

    def __enter__(self) -> "Lab":
        self._open = True
        main = threading.current_thread() is threading.main_thread()
        ending = (signal.SIGTERM, signal.SIGHUP) if main else ()
        self._handled = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._handled:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        try:
            if os.geteuid() != 0:
                raise PermissionError("making network namespaces takes root")
            with _uninterrupted():
                _remove([name for name, pid in _labs() if not Path("/proc", pid).exists()])
                self._build()
            self.isolated = True
            if self.congestion_control != CONTROL:
                print(
                    f"netlab: TCP uses {self.congestion_control} and not {CONTROL}, which this machine does not allow; "
                    "times do not compare with those of other labs",
                    file=sys.stderr,
                )
        except OSError as error:
            with contextlib.suppress(OSError):
                self.congestion_control = (_TCP / "tcp_congestion_control").read_text().strip()
            print(
                f"netlab: fell back to loopback: {self.hosts} processes on 127.0.0.1, not isolated,"
                f" and no rate, delay or share is obeyed, because {error}",
                file=sys.stderr,
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        with _uninterrupted():  # otherwise a signal could cut the removal short
            _remove([name for name, _ in _labs() if name.startswith(self._prefix)])
            if self._relay is not None:
                self._relay.kill()
                self._relay.communicate()
                self._relay = None
        for number in self._handled:
            signal.signal(number, signal.SIG_DFL)
        self._handled = []

    def _build(self) -> None:
        _tool(*_BATCH, "true")
        names = [self._switch, *self._names]
        _tool("ip", "-batch", "-", lines=[f"netns add {name}" for name in names])
        _allow(CONTROL)
        controls = {_tool("ip", "netns", "exec", name, "sh", "-c", _SETTINGS) for name in names}
        self.congestion_control = "/".join(sorted(controls))
        is_late = self._delay > 0 or self._jitter > 0
        bridge = ["link add switch type bridge mcast_snooping 0", "link set switch up"]
        ports, master = ([], "") if is_late else (bridge, "master switch ")
        for host, name in enumerate(self._names):
            ports.append(f"link add port{host} type veth peer name eth0 netns {name}")
            ports.append(f"link set port{host} {master}up")
        _tool("ip", "-n", self._switch, "-batch", "-", lines=ports)
        for host, name in enumerate(self._names):
            links = [f"addr add {ADDRESSES[host]}/24 dev eth0", "link set lo up", "link set eth0 up"]
            _tool("ip", "-n", name, "-batch", "-", lines=links)
            # Gloo listens on the address of the machine's name, which must not be loopback's.
            (_HOST_FILES / name).mkdir(parents=True, exist_ok=True)
            addresses = f"127.0.0.1 localhost\n{ADDRESSES[host]} {socket.gethostname()}\n"
            (_HOST_FILES / name / "hosts").write_text(addresses)
        if any(map(any, self._bits)):
            self._limit(self._bits)
        for name, share in zip(self._names, self._shares, strict=True):
            if share:
                _limit_share(_cgroup(name), share)
        if is_late:
            # Frames are due even while hosts compute. Isolated (-I), Python finds its own modules alone.
            program = ["nice", "-n", "-20", sys.executable, "-I", str(switch.__file__)]
            self._relay = subprocess.Popen(
                ["ip", "netns", "exec", self._switch, *program, *map(str, (self.hosts, self._delay, self._jitter))],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
            assert self._relay.stdout is not None
            if (line := self._relay.stdout.readline()) != switch.READY + "\n":
                raise OSError(f"the switch with a delay said {line + self._relay.stdout.read()!r}")

    def conditions(self) -> dict[str, Any]:
        """Returns what a timed record says of its lab (see `benchmarks.conditions`); measures the machine's speed.

        On loopback, which obeys none of them, links have no delay, and no rate whatever was asked for.
        """
        delay, jitter = (f"{1e3 * seconds:g}ms" if seconds else "none" for seconds in (self._delay, self._jitter))
        shares = "/".join(f"{share:.3g}" for share in self._shares) if any(self._shares) else "none"
        obeyed = {"delay": delay, "jitter": jitter, "shares": shares}
        obeyed = obeyed if self.isolated else dict.fromkeys((*obeyed, "rate"), "none")
        return {"control": self.congestion_control, **obeyed, **machine()}

    def set_rate(self, rate: str | None) -> None:
        """Changes the limit of every link, as for `Lab`; connections stay up."""
        bits = parse_rates(rate, self.hosts)
        if self._open and self.isolated and bits != self._bits:
            self._limit(bits)
        self._bits = bits

    def set_link(self, host: int, *, up: bool) -> bool:
        """Cuts a host off the switch, or reconnects it; without isolation, does nothing and returns False."""
        if self._open and self.isolated:
            _tool("ip", "-n", self._switch, "link", "set", f"port{host}", "up" if up else "down")
        return self._open and self.isolated

    def _limit(self, bits: Sequence[Direction]) -> None:
        uplinks = [(name, "eth0", up) for name, (up, _) in zip(self._names, bits, strict=True)]
        ports = [(self._switch, f"port{host}", down) for host, (_, down) in enumerate(bits)]
        for name, links in itertools.groupby([*uplinks, *ports], key=lambda link: link[0]):
            segments, queues = [], []
            for _, device, rate in links:
                segment, queue = 2**16, f"qdisc replace dev {device} root noqueue"
                if rate is not None:
                    segment, burst, limit = _bucket(rate)
                    queue = f"qdisc replace dev {device} root tbf rate {rate}bit burst {burst} limit {limit}"
                segments.append(f"link set {device} gso_max_size {segment}")
                queues.append(queue)
            _tool("ip", "-n", name, "-batch", "-", lines=segments)
            _tool("tc", "-n", name, "-batch", "-", lines=queues)

    def _joining(self, host: int) -> list[str]:
        """Returns the words before a command that give it the host's share of a core."""
        procs = _cgroup(self._names[host]) / "cgroup.procs"
        return ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh"] if self._shares[host] else []

    def _counters(self) -> IO[str]:
        """Returns the open counters of host 0's interfaces; without isolation, of the machine's."""
        if not self.isolated:
            return Path("/proc/self/net/dev").open()
        holder = ["ip", "netns", "exec", self._names[0], "sh", "-c", "echo; cat"]
        with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()  # it is in the namespace now
            return Path(f"/proc/{process.pid}/net/dev").open()

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stream: bool = False,
        trace: Trace | None = None,
    ) -> list[HostResult]:
        """Runs one command on every host and waits for all of them.

        The environment of each process holds
          JAXCOMM_COORDINATOR: an address of host 0 with a free port, as "IP:PORT".
          JAXCOMM_PROCESS_ID, JAXCOMM_NUM_PROCESSES: the host's number, from 0; the number of hosts.
          NETLAB_INTERFACE, GLOO_SOCKET_IFNAME: the interface of the host's traffic, for
            `trace.received_bytes`; without isolation "lo", which counts all hosts together.

        When one host's process fails, the lab kills the others after `FAILURE_GRACE`.

        Args:
          argv: the command and its arguments.
          env: variables to set in addition to those of the calling process.
          timeout: seconds after which the lab kills what still runs; None for no limit.
          stream: whether host 0's stdout and stderr also pass through while it runs.
          trace: where to keep samples of what host 0 receives; without isolation, all hosts together.

        Returns:
          One result a host, in order.

        Raises:
          ValueError: if the command is empty or cannot be found.
          RuntimeError: if the lab is not open.
        """
        environment = {**os.environ, **(env or {})}
        if not argv or shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise ValueError(
                f"The command must name a program; got {' '.join(argv)!r}. Write it after `--`, for example `python -m "
                "benchmarks.netlab --hosts 4 -- python -m train`."
            )
        if not self._open:
            raise RuntimeError(
                "A lab must be open to run commands; got one that is not. Write `with Lab(...) as lab:`."
            )
        interface = "eth0" if self.isolated else "lo"
        environment |= {
            "JAXCOMM_COORDINATOR": f"{ADDRESSES[0]}:{PORT}" if self.isolated else _free_port(),
            "JAXCOMM_NUM_PROCESSES": str(self.hosts),
            "NETLAB_INTERFACE": interface,
            "GLOO_SOCKET_IFNAME": interface,
        }
        processes: list[subprocess.Popen[bytes]] = []
        files: list[tuple[IO[bytes], IO[bytes]]] = []
        with contextlib.ExitStack() as stack:
            try:
                if trace is not None:
                    trace.begin(stack.enter_context(self._counters()), interface)
                for host, name in enumerate(self._names):
                    # Not pipes, which block a writer if nobody reads.
                    out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                    files.append((out, err))
                    process = subprocess.Popen(
                        [*self._joining(host), "ip", "netns", "exec", name, *_BATCH, *argv] if self.isolated else argv,
                        env=environment | {"JAXCOMM_PROCESS_ID": str(host)},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                    processes.append(process)

                killed = _wait(processes, timeout, files[0] if stream else (), trace)
                if trace is not None:
                    trace.end()
            finally:
                with _uninterrupted():
                    for process in processes:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
            for host, reason in killed.items():
                os.write(files[host][1].fileno(), f"netlab: killed, because {reason}\n".encode())
            texts = [[_read(file).decode(errors="replace") for file in pair] for pair in files]
        return [HostResult(h, p.returncode, *texts[h]) for h, p in enumerate(processes)]


def parse_rate(rate: str | None) -> int | None:
    """Returns the bits per second of a rate as tc writes it ("100mbit", "2.5gbit"); None for None or "none".

    Anything else, and a rate under 1kbit or over 100gbit, raises `ValueError`.
    """
    if rate is None or rate == "none":
        return None
    match = _RATE.fullmatch(rate)
    bits = round(float(match[1]) * _FACTORS[match[2]]) if match else 0
    if not 10**3 <= bits <= 10**11:
        raise ValueError(
            f"rate must be a number with the unit bit, kbit, mbit or gbit, from 1kbit to 100gbit; got {rate!r}. Write "
            "for example '100mbit', or 'none' for no limit."
        )
    return bits


def parse_rates(rate: str | None, hosts: int) -> list[Direction]:
    """Returns the bits per second of every host's link, up and down; see `Lab`.

    More rates than hosts, and more than two for one link, raise `ValueError`.
    """
    bits = []
    for word in ("none" if rate is None else rate).split("/"):
        up, *down = (parse_rate(part) for part in word.split(":", maxsplit=1))
        bits.append((up, down[0] if down else up))
    if len(bits) > hosts:
        raise ValueError(f"rate must name at most one rate for every host; got {rate!r} for {hosts}. Leave some out.")
    return bits + bits[-1:] * (hosts - len(bits))


def parse_delay(delay: str | None, name: str = "delay") -> float:
    """Returns the seconds of a delay as tc writes it ("50ms", "200us", "0.1s"); 0 for None or "none".

    Anything else, and more than 10 seconds, raises `ValueError`.
    """
    if delay is None or delay == "none":
        return 0.0
    match = _DELAY.fullmatch(delay)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else -1.0
    if not 0 <= seconds <= 10:
        raise ValueError(
            f"{name} must be a number with the unit us, ms or s, of at most 10s; got {delay!r}. Write '50ms', say."
        )
    return seconds


def slow_last(hosts: int, slow: float) -> list[float]:
    """Returns the shares of a core with which the last host computes slower.

    It gets an even share of this machine's cores, at most one, divided by `slow`; but at least a tenth.

    Raises:
      ValueError: for less than 1.
    """
    if not 1 <= slow <= 100:
        raise ValueError(f"slow must be 1 to 100 times; got {slow}. Write 3, say.")
    if slow == 1:
        return []
    even = min(len(os.sched_getaffinity(0)) / hosts, 1.0)
    return [0.0] * (hosts - 1) + [max(0.1, even / slow)]


def _allow(control: str) -> None:
    """Allows namespaces a congestion control that this machine has; what they then use is read back."""
    with contextlib.suppress(OSError):  # only the first namespace has the lists
        allowed, available = ((_TCP / f"tcp_{which}_congestion_control").read_text().split() for which in _LISTS)
        if control in available and control not in allowed:
            (_TCP / "tcp_allowed_congestion_control").write_text(" ".join([*allowed, control]))


def _cgroup(name: str) -> Path:
    """Returns the folder of a host's share: of the cpu controller where there are several hierarchies (version 1)."""
    return (_CGROUPS / "cpu" if (_CGROUPS / "cpu").is_dir() else _CGROUPS) / name


def _limit_share(folder: Path, share: float) -> None:
    folder.mkdir()
    quota, old = round(share * _PERIOD), folder / "cpu.cfs_quota_us"
    if old.exists():
        (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
        old.write_text(str(quota))
    else:
        (folder / "cpu.max").write_text(f"{quota} {_PERIOD}")


def _bucket(bits: int) -> tuple[int, int, int]:
    """Returns the sizes of a token bucket of `bits` per second: longest segment, burst and queue, in bytes.

    An idle link passes `burst` bytes at once. 1 ms of the rate is small compared with a message. But
    with less than two segments, the link loses tokens whenever the timer fires late, so on slow
    links the segments are shorter than the kernel's 64 KiB. The queue is deep, so that hosts sending
    to one host wait for each other rather than lose packets and wait for TCP's timers.
    """
    per_ms = bits // 8000
    segment = min(max(per_ms // 4, 2**14), 2**16)
    return segment, max(per_ms, 2 * segment), max(100 * per_ms, 2**20)


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def _tool(*argv: str, lines: Sequence[str] = ()) -> str:
    """Runs a tool, and returns what it says; a failure raises `OSError`."""
    result = subprocess.run(argv, input="\n".join(lines), capture_output=True, check=False, text=True)
    if result.returncode:
        raise OSError(f"`{' '.join(argv)}` failed: {' '.join(result.stderr.split())}")
    return result.stdout.strip()


def _labs() -> list[tuple[str, str]]:
    """Returns the names of the namespaces of all labs on this machine, each with its owner's process id."""
    folders = [folder for folder in (_NAMESPACES, _HOST_FILES) if folder.is_dir()]
    names = {path.name for folder in folders for path in folder.iterdir()}
    return [(match[0], match[1]) for match in map(_NAME.fullmatch, names) if match]


def _remove(names: Sequence[str]) -> None:
    # Nothing is checked: another lab may be removing the same stale namespace at this moment.
    for name in names:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=False)
        for pid in pids.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(_HOST_FILES / name, ignore_errors=True)
        folder, patience = _cgroup(name), time.monotonic() + 1.0
        while folder.exists() and time.monotonic() < patience:
            with contextlib.suppress(OSError):  # the killed are still there
                folder.rmdir()
            time.sleep(0.01)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defers signals that would end the lab, so that their handlers do not raise inside the block.

    If `SystemExit` is raised between two instructions of `Popen.poll`, its lock stays taken, and `Popen.wait` never
    returns. Masking signals would not help: a mask is per thread, and another thread would take the process's signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run only in the main thread
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came[:1]:
            signal.raise_signal(number)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    timeout: float | None,
    followed: Sequence[IO[bytes]],
    trace: Trace | None,
) -> dict[int, str]:
    """Waits until all have ended, or one has failed and the grace period is over, or time is up.

    Meanwhile, copies what is written to `followed` (no files, or two) to stdout and stderr, and samples for `trace`.
    Returns, for each host whose process still runs, why it is to be killed.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    reason, failed, offsets = f"it ran longer than {timeout} s", None, [0, 0]
    while True:
        with _uninterrupted():
            codes = [process.poll() for process in processes]
        if trace is not None:
            trace.sample()
        for index, file in enumerate(followed):
            screen = (sys.stdout, sys.stderr)[index]
            offsets[index] += screen.buffer.write(_read(file, offsets[index]))
            screen.flush()
        running = [host for host, code in enumerate(codes) if code is None]
        if failed is None:
            failed = next((host for host, code in enumerate(codes) if code), None)
            if failed is not None and time.monotonic() + FAILURE_GRACE < deadline:
                deadline = time.monotonic() + FAILURE_GRACE
                reason = f"host {failed} had failed with exit code {codes[failed]}"
        if not running or time.monotonic() >= deadline:
            return dict.fromkeys(running, reason)
        time.sleep(0.02)


def _read(file: IO[bytes], start: int = 0) -> bytes:
    # Not by file.read, which would move the position at which the host's process writes.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size - start, start)


@dataclass(frozen=True)
class Config:
    """Run COMMAND on every host of a small network: [options] -- COMMAND ARG..."""

    hosts: int = 4  # Number of hosts, 1 to 64.
    rate: str = "100mbit"
    """Limit of each link in each direction, such as "100mbit", or "none"; "100mbit/1gbit" for a slow host 0;
    "20mbit:100mbit" up and down."""
    delay: str = "none"  # What a frame takes longer from one host to another, such as "50ms"; a round trip, twice this.
    jitter: str = "none"  # The most that a frame takes longer than that, at random.
    slow: float = 1.0  # How many times slower the last host computes: its share of a core.
    timeout: float | None = None  # Seconds after which the lab kills what still runs.
    trace: Path | None = None
    """File for the bytes that host 0 has received and their rate in kB/s, sampled every 0.1 s, as a list of records."""


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 0, a failed host's exit code, or 2 for bad input."""
    split = list(argv).index("--") if "--" in argv else len(argv)
    config = tyro.cli(Config, prog="python -m benchmarks.netlab", args=argv[:split])
    from train.tables import check_file, write_records

    trace = Trace()
    try:
        check_file("--trace", config.trace)
        shares = slow_last(config.hosts, config.slow)
        with Lab(config.hosts, config.rate, delay=config.delay, jitter=config.jitter, shares=shares) as lab:
            conditions = lab.conditions() if config.trace else {}
            results = lab.run(argv[split + 1 :], timeout=config.timeout, stream=True, trace=trace)
        write_records(config.trace, [sample | conditions for sample in trace.records()])
    except ValueError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    failed = [result for result in results if result.returncode]
    for host in failed:
        tail = "\n".join(host.stderr.splitlines()[-10:])
        print(f"netlab: host {host.host} ended with {host.returncode}\n{tail}", file=sys.stderr)
    # Negative codes are signals, mostly of hosts that the lab killed after the failure.
    codes = [host.returncode for host in failed]
    return next((code for code in codes if code > 0), 128 - codes[0] if codes else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
