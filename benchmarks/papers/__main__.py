"""Every table and figure of every paper, by one command, which goes on where it stopped.

python -m benchmarks.papers                                      # lists a command for each
python -m benchmarks.papers --all --json docs/data/papers.json   # makes them; what the file has is not made again
python -m benchmarks.papers --all --smoke                        # the smallest size of each
"""

import importlib
import pkgutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import benchmarks.papers
from benchmarks import harness
from benchmarks.papers.common import selected_tables

_JSON = "docs/data/papers.json"


@dataclass(frozen=True)
class Config:
    """Make the tables and figures of all papers, one process per paper, one after another."""

    all: bool = False  # Make them; otherwise their commands are listed.
    smoke: bool = False  # Make them at their smallest size; figures are not kept.
    only: Literal["all", "timed", "untimed"] = "all"
    """Only those that time something on hosts and need a quiet machine, or only the others."""
    json: Path | None = None
    """File for the records of all papers; those that it has with the same settings are not made again."""
    data_dir: Path | None = None  # Folder of prepared datasets.


def papers() -> dict[str, ModuleType]:
    """Returns the modules of the papers, by name: those with `TABLES`."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.papers.__path__) if module.name != "__main__"]
    modules = {name: importlib.import_module(f"benchmarks.papers.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "TABLES")}


def listed(config: Config) -> list[str]:
    """Returns a command for each table; tables and figures that one function makes share a command."""
    return [
        f"python -m benchmarks.papers.{paper} --table {name} --json {config.json or _JSON}"
        for paper, module in papers().items()
        for name in selected_tables("all", config.only, module.TABLES, module.TIMED)
    ]


def commands(config: Config) -> list[list[str]]:
    """Returns the commands that make all of them, one per paper."""
    options = ["--only", config.only, *(["--smoke"] if config.smoke else [])]
    for name in ("json", "data_dir"):
        if (path := getattr(config, name)) is not None:
            options += [f"--{name.replace('_', '-')}", str(path)]
    return [[sys.executable, "-m", f"benchmarks.papers.{paper}", *options] for paper in papers()]


def main(config: Config) -> None:
    """Makes or lists them; in the end, names the commands that failed."""
    if not config.all:
        print("\n".join(listed(config)))
        return
    failed = []
    for command in commands(config):
        line = " ".join(["python", *command[1:]])
        print(f"== {line}", flush=True)
        begin = time.perf_counter()
        if subprocess.run(command, check=False).returncode:
            failed.append(line)
        print(f"== {time.perf_counter() - begin:.0f} s", flush=True)
    if failed:
        raise SystemExit("Failed: " + "; ".join(failed))


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
