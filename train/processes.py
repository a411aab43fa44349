"""Several processes: how this one finds the others, and what must be set before JAX starts."""

import contextlib
import ctypes
import errno
import os
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax

from train.rendezvous import SAY, host_port, meet, say

# Seconds after which JAX itself gives up on a process, with many lines, none of which names the one that failed. The
# trainer's own signs of life tell earlier.
_TIMEOUTS = {"heartbeat_timeout_seconds": 600, "shutdown_timeout_seconds": 600}
_OPEN: list[socket.socket] = []  # kept open until this process ends: a closed one tells the others that it has


@dataclass(frozen=True)
class Processes:
    """This process among the others of a run.

    Attributes:
      index: from 0.
      count: how many there are.
      has_devices: whether JAX has already started this process's devices, to ask the cluster for index and count.
      missing: the processes that the run goes on without, by the numbers that they were started with.
      lines: open connections. Process 0 has one to each other process; these have one each, which ends when it does.
    """

    index: int = 0
    count: int = 1
    has_devices: bool = False
    missing: tuple[int, ...] = ()
    lines: tuple[socket.socket, ...] = field(default=(), compare=False, repr=False)


def prepare_jax(simulated_devices: int | None = None) -> None:
    """Sets what JAX reads once, before its first use; also calls `keep_freed_memory`.

    Args:
      simulated_devices: CPU devices of this process; None keeps the platform's own.
    """
    keep_freed_memory()
    if simulated_devices is not None:
        if simulated_devices > 1:
            # On few cores, jax before 0.12 can dead-lock with several devices unless its thread pool is larger. With
            # one device a larger pool only costs time.
            os.environ.setdefault("PJRT_NPROC", "16")
        jax.config.update("jax_num_cpu_devices", simulated_devices)


def keep_freed_memory() -> None:
    """Has glibc keep what the process frees, for its next allocation.

    By default, glibc returns every buffer above 32 MB, the end of its heap, and the heaps that it makes for threads, to
    the kernel, which fills them with zeros again, page by page, for the next step. Does nothing if a variable of
    glibc's allocator is set (one of MALLOC_..., or GLIBC_TUNABLES), or if the C library has no `mallopt`.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        trim_threshold, mmap_max, arena_max = -1, -4, -8  # M_TRIM_THRESHOLD and so on, of malloc.h
        set_option(trim_threshold, -1)  # no trimming
        set_option(mmap_max, 0)
        set_option(arena_max, 1)


def connect(
    coordinator: str | None,
    process_id: int | None,
    num_processes: int | None,
    *,
    check: Callable[[int], None] = lambda count: None,
    seconds: int = 300,
    fits: Callable[[int], bool] | None = None,
    patience: float = 0.0,
) -> Processes:
    """Joins the run's other processes, before JAX touches a device.

    Arguments that are None come from JAXCOMM_COORDINATOR, JAXCOMM_PROCESS_ID and JAXCOMM_NUM_PROCESSES. If these are
    not set either, JAX asks the cluster (Slurm, Open MPI, Kubernetes, Cloud TPU) if that has set its variables;
    otherwise the process runs alone.

    Args:
      coordinator: HOST:PORT of process 0.
      process_id: this process, from 0.
      num_processes: how many processes there are.
      check: called with the number of processes, if possible before this one waits for the others; raises to stop here.
      seconds: to wait for the others. If the three arguments are given, missing processes are named meanwhile and at
        the end; if JAX asks the cluster, it ends the process and names none.
      fits: see `rendezvous.meet`; if JAX asks the cluster, all must come.
      patience: see `rendezvous.meet`.

    Raises:
      ValueError: if only some of the three are given, they contradict each other or those of other processes, or the
        address is none; if this host's own name has no address; if the others go on without this process.
      TimeoutError: if not all have come, or the address's host is not known by then.
    """
    coordinator = coordinator or os.environ.get("JAXCOMM_COORDINATOR")
    process_id = _integer(process_id, "JAXCOMM_PROCESS_ID")
    num_processes = _integer(num_processes, "JAXCOMM_NUM_PROCESSES")
    options = {"--coordinator": coordinator, "--process-id": process_id, "--num-processes": num_processes}
    gaps = [name for name, value in options.items() if value is None]
    if coordinator is None and process_id is None and num_processes is None:
        if not _on_a_cluster():
            check(1)
            return Processes()
        # From the launcher's variables if it has set them: asking JAX would start its devices, before prepare_jax.
        processes = _launched()
        if processes is not None:
            check(processes.count)
        _check_own_name()
        jax.distributed.initialize(initialization_timeout=seconds, **_TIMEOUTS)
        outlast(patience)
        if processes is None:
            processes = Processes(jax.process_index(), jax.process_count(), has_devices=True)
            check(processes.count)
        return processes
    if coordinator is None or process_id is None or num_processes is None:
        raise ValueError(
            f"Several processes must be started with --coordinator, --process-id and --num-processes (or the variables "
            f"JAXCOMM_COORDINATOR, JAXCOMM_PROCESS_ID, JAXCOMM_NUM_PROCESSES); got none for {', '.join(gaps)}. Give "
            "all three to every process."
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"--coordinator must be HOST:PORT of process 0; got {coordinator!r}. Write 10.0.0.1:9777, say."
        )
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(
            f"--coordinator must have brackets around an IPv6 address; got {coordinator!r}. Write [{host}]:{port}."
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"--process-id must be at least 0 and below --num-processes; got {process_id} of {num_processes}. Number "
            "the processes from 0."
        )
    check(num_processes)
    if num_processes == 1:
        return Processes()
    _check_own_name()
    place, is_own = _address(coordinator, seconds, listens=process_id == 0)
    met = meet(place, process_id, num_processes, seconds, fits, patience)
    if met.count > 1:
        jax.distributed.initialize(
            coordinator,
            met.count,
            met.index,
            initialization_timeout=seconds,
            coordinator_bind_address=host_port(place) if process_id == 0 and is_own else None,
            **_TIMEOUTS,
        )
        outlast(patience)
    _OPEN.extend(met.lines)
    return Processes(met.index, met.count, missing=met.missing, lines=met.lines)


def outlast(seconds: float) -> None:
    """Keeps connections for twice `seconds` without an answer, so that `Liveness` is the first to give up.

    gRPC ends JAX's after 20 s and has no option for it, and JAX aborts a process whose connection has ended, though the
    link is back.
    """
    place = Path("/proc/self/fd")  # on Linux
    for number in [int(path.name) for path in place.iterdir()] if place.exists() else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or not of TCP
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as line:
                    milliseconds = min(int(2000 * seconds), 2**31 - 1)
                    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def is_addressed(coordinator: str | None) -> bool:
    """Returns whether the processes meet at an address that was given, and not at one that JAX asks the cluster for."""
    return coordinator is not None or "JAXCOMM_COORDINATOR" in os.environ


def _address(coordinator: str, seconds: float, *, listens: bool) -> tuple[tuple[str, int], bool]:
    """Returns the address and port of process 0, and whether it `listens` at that address alone.

    It listens at all addresses if that one is not this host's (behind address translation).

    Raises:
      ValueError: if the port is taken, or the host's name is none.
      TimeoutError: if the name is not known within `seconds`, as that of a pod that is not there yet.
    """
    host, _, port = coordinator.rpartition(":")
    deadline, addresses = time.monotonic() + seconds, []
    while not addresses:
        try:
            addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise ValueError(f"--coordinator must name a host; got {coordinator!r}: {error}. Correct it.") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"--coordinator must name a host within --connect-timeout; got {coordinator!r} for {seconds:g} s: "
                    f"{error}. Is the name right?"
                ) from None
            say(f"waiting for the address of {coordinator} ({error})")
            time.sleep(min(SAY, max(deadline - time.monotonic(), 0.1)))
    family, kind, protocol, _, place = addresses[0]
    address = (str(place[0]), int(port))
    if not listens:
        return address, False
    with socket.socket(family, kind, protocol) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return ("::" if family == socket.AF_INET6 else "", int(port)), False
            raise ValueError(
                f"--coordinator must have a free port of process 0; got {coordinator!r}: {error.strerror}. Is "
                "another run there, or two processes with --process-id 0? Take another port."
            ) from None
    return address, True


def _check_own_name() -> None:
    """Refuses a host that does not know its own name, at whose address Gloo listens: JAX would end with its stack."""
    name, platforms = socket.gethostname(), jax.config.jax_platforms
    if "cpu" not in (platforms or "cpu"):
        return
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise ValueError(
            f"A host's own name must have an address, at which Gloo listens; got {name!r}: {error}. Write it into "
            "/etc/hosts, with the address that the other hosts reach."
        ) from None


def _integer(value: int | None, variable: str) -> int | None:
    if value is not None or variable not in os.environ:
        return value
    try:
        return int(os.environ[variable])
    except ValueError:
        raise ValueError(f"{variable} must be an integer; got {os.environ[variable]!r}. Set it to a number.") from None


# Variables for the number of processes and the number of this one, of Slurm, Open MPI and MPICH.
_LAUNCHERS = {"SLURM_NTASKS": "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK"}


def _launched() -> Processes | None:
    """Returns this process among those of a launcher that has set its variables, for more than one process."""
    for count, index in _LAUNCHERS.items():
        if os.environ.get(count, "1") not in ("", "1") and index in os.environ:
            return Processes(_integer(None, index) or 0, _integer(None, count) or 1)
    return None


def _on_a_cluster() -> bool:
    """Returns whether a launcher that JAX knows has set its variables, for more than one process."""
    addresses = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "") or "JAX_COORDINATOR_ADDRESS" in os.environ
    return addresses or any(os.environ.get(name, "1") not in ("", "1") for name in _LAUNCHERS)
