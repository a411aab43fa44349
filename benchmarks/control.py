"""Benchmarks whose hosts are timed together, at one link rate after another.

Rates change while the hosts run, so that every program is compiled once: host 0 asks by a file, and the process that
made the lab answers.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.netlab import Lab

_FOLDER = "JAXCOMM_BENCHMARK_CONTROL"  # set in a host's process: the folder where the hosts ask for a rate


def is_host() -> bool:
    """Returns whether this process is a host of `run_hosts`."""
    return _FOLDER in os.environ


def run_hosts(lab: Lab, module: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Runs a module on every host with this process's arguments, and sets the rates that they ask for.

    Args:
      lab: the hosts.
      module: "benchmarks.exchange", say; started with `python -m`.
      env: more variables for the hosts.

    Returns:
      What each host printed.

    Raises:
      SystemExit: if a host fails, with what it said.
    """
    done = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        server = threading.Thread(target=_serve_rates, args=(lab, Path(folder), done), daemon=True)
        server.start()
        try:
            results = lab.run([sys.executable, "-m", module, *sys.argv[1:]], env={_FOLDER: folder, **(env or {})})
        finally:
            done.set()
            server.join()
    failed = [result for result in results if result.returncode]
    if failed:
        raise SystemExit(f"host {failed[0].host} failed:\n{failed[0].stderr[-4000:]}")
    return [result.stdout for result in results]


def _serve_rates(lab: Lab, folder: Path, done: threading.Event) -> None:
    while not done.is_set():
        for request in folder.glob("*.want"):
            lab.set_rate(request.read_text())
            request.rename(request.with_suffix(".set"))
        time.sleep(0.02)


class Control:
    """How a host asks the lab for a rate, and waits for the others."""

    def __init__(self, host: int):
        """Takes the host's number."""
        self.folder, self.host, self.requests = Path(os.environ[_FOLDER]), host, 0

    def barrier(self) -> None:
        """Waits until all hosts are here; a few hundred bytes."""
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
