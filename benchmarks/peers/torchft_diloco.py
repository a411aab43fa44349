"""torchft's DiLoCo in the lab of `benchmarks.rounds`, with the same faults.

    python3.11 -m venv /tmp/torchft && /tmp/torchft/bin/pip install torch==2.13.0 torchft==0.2.0 numpy
    python -m benchmarks.peers.torchft_diloco --torch /tmp/torchft/bin/python --json docs/data/rounds_torchft.json

Host 0 has torchft's lighthouse. Hosts 1 to 4 have a worker each, with the model, rows, local steps, links and faults of
`benchmarks.rounds`, and the seconds of its runs: a worker ends with the first round after --seconds. "tuned" is
"faults" with a third of the local steps a round for the slow worker, as one who knows of it can set it by hand.

Settings are torchft's defaults, but for a quorum of 2 and an outer SGD of 1.0, as in `benchmarks.rounds`. Gloo's
all-reduce is dense float32 (torchft quantizes on GPUs alone).
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness, rounds
from benchmarks.conditions import heading
from benchmarks.netlab import ADDRESSES, Lab
from train.tables import print_table, write_records

KINDS = ("undisturbed", "faults", "tuned")
SHOWN = ("run", "worker", "rounds", "healed", "failed", "seconds", "goodput", "loss", "accuracy", "bytes_kernel")


@dataclass(frozen=True)
class Config(harness.Options):
    """Train by torchft's DiLoCo with workers that come and go, and without."""

    torch: Path | None = None  # The Python interpreter of an environment that has torchft.
    rate: str = "100mbit"  # Rate of every worker's link.
    delay: str = "25ms"  # What the lab adds in each direction.
    step: float = 0.1  # Seconds of a local step.
    rounds: int = 15  # Rounds of the run of `benchmarks.rounds`; the times of the faults follow from it.
    steps: int = 30  # Local steps of a round.
    seconds: float = 67.0  # Seconds after which the run ends.
    runs: str = ",".join(KINDS)  # Runs, separated by commas.
    kind: str = ""  # Of a host's process: one of --runs.


def serve(config: Config, folder: Path) -> None:
    """Runs the lighthouse until all workers have ended."""
    assert config.torch is not None
    command = [str(config.torch.parent / "torchft_lighthouse"), "--min_replicas", "2"]
    with subprocess.Popen([*command, "--bind", f"[::]:{rounds.PORT}"]) as lighthouse:
        try:
            time.sleep(1.0)
            (folder / "serves").touch()
            while not all((folder / f"{name}.json").exists() for name in rounds.NAMES):
                if lighthouse.poll() is not None:
                    raise SystemExit(f"torchft_lighthouse ended with {lighthouse.returncode}")
                time.sleep(0.2)
        finally:
            lighthouse.kill()


def write_jobs(config: Config, kind: str, folder: Path) -> None:
    """Writes for every worker the first weights, its settings and its rows."""
    weights = {name: np.asarray(w) for name, w in rounds.params0().items()}
    for name in rounds.NAMES:
        parts = [part for part, _ in zip(rounds.batches(name), range(int(config.seconds / config.step)), strict=False)]
        step, steps = pace(config, kind, name)
        settings = {"step": step, "steps": steps, "seconds": config.seconds}
        rows = {key: np.stack([part[key] for part in parts]) for key in ("x", "y")}
        np.savez(folder / f"{name}.npz", **weights, **settings, **rows)


def pace(config: Config, kind: str, name: str) -> tuple[float, int]:
    """Returns the seconds of a worker's local step, and the local steps of its rounds."""
    if kind == "undisturbed" or name != "b":
        return config.step, config.steps
    return 3 * config.step, config.steps // 3 if kind == "tuned" else config.steps


def row_of(
    row: Mapping[str, Any], syncs: Sequence[Mapping[str, Any]], alive: float, counted_seconds: float
) -> dict[str, Any]:
    """Returns a worker's row, with its rounds that counted.

    Args:
      row: what the worker has written.
      syncs: its rounds: whether they were committed, and whether it had taken another worker's state for that.
      alive: seconds that it was there.
      counted_seconds: of a round's local steps, at this worker's usual speed.
    """
    count = sum(sync["committed"] and not sync["healed"] for sync in syncs)
    healed, failed = sum(sync["healed"] for sync in syncs), sum(not sync["committed"] for sync in syncs)
    good = count * counted_seconds / alive
    return {**row, "rounds": count, "healed": healed, "failed": failed, "seconds": alive, "goodput": good}


def run_lab(config: Config, kind: str, command: Sequence[str]) -> list[dict[str, Any]]:
    """Runs all hosts once; returns a row for each worker."""
    rates = f"none/{config.rate}"
    with tempfile.TemporaryDirectory() as name, Lab(1 + len(rounds.NAMES), rates, delay=config.delay) as lab:
        if not lab.isolated:
            raise ValueError("The lab must be run as root, for links of its own; got loopback alone.")
        folder, conditions = Path(name), lab.conditions()
        write_jobs(config, kind, folder)
        results = lab.run([*command, "--kind", kind], env={rounds.FOLDER: name}, timeout=540)
        if failed := [result for result in results if result.returncode]:
            raise SystemExit("\n".join(f"host {result.host} failed: {result.stderr[-4000:]}" for result in failed))
        first = {name: float((folder / f"begun-{name}").read_text()) for name in rounds.NAMES}
        rows = [json.loads((folder / f"{name}.json").read_text()) for name in rounds.NAMES]
        syncs = [list(map(json.loads, (folder / f"syncs-{name}").read_text().splitlines())) for name in rounds.NAMES]
        outage = rows[2]["begun"] - float((folder / "killed").read_text()) if kind != "undisturbed" else 0.0
        for index, worker in enumerate(rounds.NAMES):
            step, steps = pace(config, kind, worker)
            alive = rows[index]["ended"] - first[worker] - (outage if worker == "c" else 0.0)
            rows[index] = row_of(rows[index], syncs[index], alive, steps * step)
            with np.load(folder / f"model-{worker}.npz") as file:
                params = dict(file)
            digest = hashlib.sha256(b"".join(params[key].tobytes() for key in sorted(params))).hexdigest()[:32]
            rows[index] |= {
                **conditions,
                "run": kind,
                "steps_of_round": steps,
                "digest": digest,
                "syncs": syncs[index],
                **rounds.test_scores(params),
            }
    return rows


def main(config: Config) -> None:
    """Runs the lab, and prints a table."""
    if config.torch is None or not (config.torch.parent / "torchft_lighthouse").exists():
        raise ValueError(f"--torch must name the Python of an environment with torchft; got {config.torch}.")
    if not set(config.runs.split(",")) <= set(KINDS):
        raise ValueError(f"--runs must be some of {', '.join(KINDS)}; got {config.runs}.")
    if folder := os.environ.get(rounds.FOLDER):
        index = int(os.environ["JAXCOMM_PROCESS_ID"])
        if index == 0:
            serve(config, Path(folder))
            return
        os.environ["TORCHFT_BENCHMARK_ADDRESS"] = ADDRESSES[index]
        os.environ["TORCHFT_BENCHMARK_LIGHTHOUSE"] = f"{ADDRESSES[0]}:{rounds.PORT}"
        seconds = config.rounds * config.steps * config.step if config.kind != "undisturbed" else None
        command = [str(config.torch), "-m", "benchmarks.peers.torchft_host"]
        rounds.supervise(Path(folder), rounds.NAMES[index - 1], command, seconds)
        return
    command = [sys.executable, "-m", "benchmarks.peers.torchft_diloco", *sys.argv[1:]]
    table = [row for kind in config.runs.split(",") for row in run_lab(config, kind, command)]
    print_table(heading("", table), [{key: row.get(key) for key in SHOWN} for row in table])
    write_records(config.json, table)


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
