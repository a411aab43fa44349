"""Benchmarks whose hosts are timed together, at one link rate after another.

The first process makes the lab, and starts its own command again on every host. Each host prints its records as lines
of JSON; the first process merges them. Rates change while the hosts run, so that every program is compiled only once:
host 0 asks for a rate by writing a file, and the first process sets it.
"""

import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tyro

from benchmarks.netlab import Lab, parse_rate
from benchmarks.trace import received_bytes

Config = TypeVar("Config")
Record = TypeVar("Record")

_FOLDER = "JAXCOMM_BENCHMARK_CONTROL"  # set in a host's process: the folder where the hosts ask for a rate


def run(
    config: type[Config],
    description: str | None,
    main: Callable[[Config], Any],
    host: Callable[[Config], Any] | None = None,
) -> None:
    """Reads the command line, and does this process's part: that of a host, if it is one, or that of the lab.

    Input that cannot be used ends the process with one line and exit code 2.
    """
    arguments: Any = tyro.cli(config, description=description)
    if host is not None and _FOLDER in os.environ:
        host(arguments)
        return
    from train.tables import check_file  # takes time to import, for which --help should not have to wait

    try:
        check_file("--json", getattr(arguments, "json", None))
        main(arguments)
    except (ValueError, OSError) as error:
        path = Path(sys.argv[0])
        print(f"{path.parent.name if path.stem == '__main__' else path.stem}: {error}", file=sys.stderr)
        sys.exit(2)


def choose(methods: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the methods with these names, each once.

    Raises:
      ValueError: for an unknown name, or if there are no names.
    """
    strangers = [name for name in names if name not in methods]
    if strangers or not names:
        raise ValueError(f"--methods must be some of {', '.join(methods)}; got {', '.join(strangers) or 'none'}.")
    return {name: methods[name] for name in names}


def check_run(rate: str, steps: int) -> list[str]:
    """Returns the rates, which commas separate.

    Raises:
      ValueError: for a rate that no link has, or fewer than one step.
    """
    rates = rate.split(",")
    for host_rate in itertools.chain.from_iterable(rate.split("/") for rate in rates):
        parse_rate(host_rate)
    if steps < 1:
        raise ValueError(f"--steps must be at least 1; got {steps}.")
    return rates


def run_hosts(lab: Lab, module: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Runs a module on every host with this process's arguments, and sets the rates that they ask for.

    Args:
      lab: the hosts.
      module: such as "benchmarks.exchange"; started with `python -m`.
      env: more environment variables for the hosts.

    Returns:
      What each host printed.

    Raises:
      SystemExit: if a host fails, with its stderr.
    """
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        server = threading.Thread(target=_serve_rates, args=(lab, Path(folder), stop), daemon=True)
        server.start()
        try:
            results = lab.run([sys.executable, "-m", module, *sys.argv[1:]], env={_FOLDER: folder, **(env or {})})
        finally:
            stop.set()
            server.join()
    failed = [result for result in results if result.returncode]
    if failed:
        raise SystemExit(f"host {failed[0].host} failed:\n{failed[0].stderr[-4000:]}")
    return [result.stdout for result in results]


def _serve_rates(lab: Lab, folder: Path, stop: threading.Event) -> None:
    while not stop.is_set():
        for request in folder.glob("*.want"):
            lab.set_rate(request.read_text())
            request.rename(request.with_suffix(".set"))
        time.sleep(0.02)


def print_record(record: Any) -> None:
    """Prints a host's record, for `read_records`."""
    print(json.dumps({type(record).__name__: dataclasses.asdict(record)}), flush=True)


def read_records(kind: type[Record], stdout: str) -> list[Record]:
    """Returns a host's records of one kind."""
    lines = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return [kind(**line[kind.__name__]) for line in lines if kind.__name__ in line]


def merge_records(hosts: Sequence[list[Any]], isolated: bool, column: str = "bytes_kernel") -> list[Any]:
    """Takes times from host 0 (see `Control.timed`), and merges the bytes received.

    Args:
      hosts: the records of each host, the same ones in the same order.
      isolated: whether hosts have interfaces of their own. On loopback the kernel counts all hosts together, and the
        bytes are None.
      column: the field of the bytes: numbers are averaged, lists concatenated.
    """
    merged = []
    for host_records in zip(*hosts, strict=True):
        counts_of_host = [getattr(record, column) for record in host_records]
        merged_counts = (
            [count for counts in counts_of_host for count in counts]
            if isinstance(counts_of_host[0], list)
            else statistics.fmean(counts_of_host)
        )
        merged.append(dataclasses.replace(host_records[0], **{column: merged_counts if isolated else None}))
    return merged


def spread(times: Sequence[float]) -> dict[str, float]:
    """Returns the median, minimum and maximum of milliseconds as fields of a record."""
    return {"ms_median": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


class Control:
    """A host's control: asks the lab for a rate, waits for the other hosts, and times what all do together."""

    def __init__(self) -> None:
        """Connects this process with the others; must come before any other use of JAX."""
        from train.processes import connect, prepare_jax

        prepare_jax()
        processes = connect(None, None, None)
        self.host, self.hosts = processes.index, processes.count
        self.folder, self.requests = Path(os.environ[_FOLDER]), 0

    def timed(self, function: Callable[[], Any]) -> tuple[float, int, Any]:
        """Returns the milliseconds of a call on the slowest host, the bytes received here, and the result.

        After its last collective a step still computes, and hosts that share cores do not end it together.
        """
        import jax
        from jax.experimental import multihost_utils

        self.barrier()
        interface = os.environ["NETLAB_INTERFACE"]
        before, begin = received_bytes(interface), time.perf_counter()
        result = jax.block_until_ready(function())
        ms, count = (time.perf_counter() - begin) * 1e3, received_bytes(interface) - before
        return float(multihost_utils.process_allgather(np.float32(ms)).max()), count, result

    def barrier(self) -> None:
        """Waits until all hosts are here; costs a few hundred bytes."""
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("benchmark")

    def set_rate(self, rate: str) -> None:
        """Changes the rate of all links."""
        self.requests += 1
        self.barrier()
        request = self.folder / f"{self.requests}.want"
        if self.host == 0:
            draft = request.with_suffix(".draft")
            draft.write_text(rate)
            draft.rename(request)
        while not request.with_suffix(".set").exists():
            time.sleep(0.02)
        self.barrier()
