"""Every table and figure of every paper: `python -m benchmarks.papers --all`, or by name.

python -m benchmarks.papers                   # lists them
python -m benchmarks.papers --all --smoke     # the smallest size of each
"""

import importlib
import pkgutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import benchmarks.papers

_DATA = Path(__file__).parents[2] / "docs" / "data"


@dataclass(frozen=True)
class Config:
    """Run the tables and figures of all papers, one process after another."""

    all: bool = False
    """Run them; without it they are listed."""
    smoke: bool = False
    """At their smallest size, and keep nothing. Otherwise records go to docs/data, figures to docs/figures."""


def commands(config: Config) -> list[list[str]]:
    """Returns the command of each, in a paper's order; figures of one function, of the same runs, have one."""
    found = []
    for module in pkgutil.iter_modules(benchmarks.papers.__path__, "benchmarks.papers."):
        tables = (
            {} if module.name.endswith("__main__") else vars(importlib.import_module(module.name)).get("TABLES", {})
        )
        kept = ["--json", str(_DATA / f"papers_{module.name.rpartition('.')[2]}.json")]
        first: dict[Any, str] = {}
        for name, table in tables.items():
            first.setdefault(table, name)
        for name in first.values():
            options = ["--smoke"] if config.smoke else kept
            found.append([sys.executable, "-m", module.name, "--table", name, *options])
    return found


def main(config: Config) -> None:
    """Runs them, and ends with those that failed."""
    failed = []
    for command in commands(config):
        line = " ".join(["python", *command[1:]])
        if not config.all:
            print(line)
            continue
        print(f"== {line}", flush=True)
        begin = time.perf_counter()
        if subprocess.run(command, check=False).returncode:
            failed.append(line)
        print(f"== {time.perf_counter() - begin:.0f} s", flush=True)
    if failed:
        raise SystemExit("Failed: " + "; ".join(failed))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
