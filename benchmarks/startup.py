"""How long the library takes before it does anything: imports, --help, and the first step of the main job.

    python -m benchmarks.startup --json docs/data/startup.json

A time is that of a whole process, from its start to its end.
"""

import dataclasses
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.control import run, spread
from train.tables import print_table, write_records

COMMANDS = {
    "python": ["-c", ""],
    "import jax": ["-c", "import jax, jax.numpy"],
    "import jax, optax": ["-c", "import jax, jax.numpy, optax"],
    "import jaxcomm": ["-c", "import jaxcomm"],
    "python -m train --help": ["-m", "train", "--help"],
}
JOB = ["-m", "train", "digits", "--no-baseline", "--steps", "1", "--warmup-steps", "0", "--eval-every", "1"]


@dataclass(frozen=True)
class Config:
    """Time processes from their start to their end."""

    repeats: int = 5
    """Processes of each command. The first does not count, as its files are read from disk."""
    json: Path | None = None
    """File for the table, as a list of records."""


@dataclass(frozen=True)
class Record:
    """One command, milliseconds."""

    command: str
    ms_median: float
    ms_min: float
    ms_max: float


def main(config: Config) -> None:
    """Prints the table, and writes it where asked."""
    if config.repeats < 2:
        raise ValueError(f"--repeats must be at least 2, since the first does not count; got {config.repeats}.")
    records = [Record(name, **spread(_times(command, config.repeats))) for name, command in COMMANDS.items()]
    with tempfile.TemporaryDirectory() as scratch:
        times = [_ms([*JOB, "--out", f"{scratch}/{number}"]) for number in range(config.repeats)]
    records.append(Record("the main job of one step", **spread(times[1:])))
    by_name = {record.command: record.ms_median for record in records}
    rows = [dataclasses.asdict(record) for record in records]
    print_table("Milliseconds from the start of a process to its end", rows)
    beyond = by_name["import jaxcomm"] - by_name["import jax, optax"]
    print(f"jaxcomm itself takes {beyond:.0f} ms to import, beyond those of jax and optax.")
    write_records(config.json, rows)


def _times(command: list[str], repeats: int) -> list[float]:
    return [_ms(command) for _ in range(repeats)][1:]


def _ms(command: list[str]) -> float:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} must end with code 0; got {done.returncode}: {done.stderr[-500:]}")
    return 1e3 * (time.perf_counter() - begin)


if __name__ == "__main__":
    run(Config, __doc__, main)
