"""What the modules of papers share: their options, and the command that makes their tables.

A module has a `Config`; `TABLES`, the functions of its tables and figures by name; and `TIMED`, the names of those that
time something on hosts. It ends with `run`. Results that take long are records, made only if --json does not have them.
Claims and figures are in `report`, timed exchanges and steps in `timing`.
"""

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from benchmarks import harness
from configs import CONFIGS
from configs.experiment import Architecture, Experiment
from train.records import Record, Records

SMOKE_STEPS = 4  # of training, with --smoke
SMOKE_NETWORK = Architecture("mlp", {"hidden": (32,)})  # on the digits
EVALUATIONS = 40  # in a run
LONGER = 4  # times as many steps, to see whether a claim fails only because a run is short

_FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@dataclass(frozen=True)
class Config:
    """Options that every paper has."""

    table: str = "all"  # A table or a figure of the paper; or all.
    only: Literal["all", "timed", "untimed"] = "all"
    """Of all tables, only those that time something on hosts and need a quiet machine, or only the others."""
    seeds: int = 3  # Runs of each setting, with the seeds 0, 1, ...
    steps: int | None = None  # Training steps; by default as many as suit the table.
    json: Path | None = None  # File for the records; those that it has with the same settings are not made again.
    figures: Path | None = None  # Folder of the figures; docs/figures if not given, or with --smoke a temporary one.
    data_dir: Path | None = None  # Folder of prepared datasets.
    smoke: bool = False
    """Run the smallest size, in under a minute, to see that everything works. Its results mean nothing."""

    SMALLEST: ClassVar[dict[str, Any]] = {}  # more options of --smoke, of a paper

    def smallest(self) -> Self:
        """Returns the options of --smoke."""
        return dataclasses.replace(self, seeds=1, steps=SMOKE_STEPS, **self.SMALLEST)

    def figure(self, name: str) -> Path:
        """Returns the file of a figure."""
        return (self.figures or _FIGURES) / name

    def experiment(self, name: str, **changes: Any) -> Experiment:
        """Returns an experiment of `configs/` with other fields; --steps overrides those given here."""
        changes |= {"data_dir": self.data_dir, **({"steps": self.steps} if self.steps else {})}
        if self.smoke and name == "digits":
            changes.setdefault("architecture", SMOKE_NETWORK)
        experiment = dataclasses.replace(CONFIGS[name], **changes)
        steps = experiment.steps
        return dataclasses.replace(
            experiment,
            warmup_steps=min(experiment.warmup_steps, steps // 4),
            eval_every=max(1, steps // EVALUATIONS),
            checkpoint_every=steps,
            max_skipped=steps + 1,  # a method that diverges is a result
        )

    def longer(self, steps: int) -> Self:
        """Returns the options of runs `LONGER` times as long as `steps`."""
        return dataclasses.replace(self, steps=LONGER * steps)


C = TypeVar("C", bound=Config)
Table = Callable[[C, Records], None]


def run(
    config_type: type[C], tables: Mapping[str, Table[C]], description: str | None, devices: int, timed: Collection[str]
) -> None:
    """Reads the command line of a paper's module, and makes the tables that it asks for, even if some of them fail.

    Args:
      config_type: the module's options.
      tables: by name; those with the same function are made once.
      description: of the module.
      devices: simulated devices; at least the most workers of a table.
      timed: names of the tables that time something on hosts.
    """
    harness.run(config_type, description, partial(_make, tables, devices, timed))


def _make(tables: Mapping[str, Table[C]], devices: int, timed: Collection[str], config: C) -> None:
    if config.table not in (*tables, "all"):
        raise ValueError(f"--table must be one of {', '.join(tables)}, or all; got {config.table!r}.")
    if config.seeds < 1 or (config.steps is not None and config.steps < 2):
        raise ValueError(f"--seeds must be at least 1 and --steps at least 2; got {config.seeds} and {config.steps}.")
    import jax

    from train.processes import prepare_jax

    prepare_jax(devices)
    if config.smoke:  # programs compile faster, here and in the processes of benchmarks
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_disable_most_optimizations", True)
    failed = []
    with contextlib.ExitStack() as stack:
        if config.smoke:
            config = config.smallest()
        if config.smoke and config.figures is None:
            config = dataclasses.replace(config, figures=Path(stack.enter_context(tempfile.TemporaryDirectory())))
        records = Records(config.json)
        for name in selected_tables(config.table, config.only, tables, timed):
            begin = time.perf_counter()
            try:
                tables[name](config, records)
            except (ValueError, OSError, RuntimeError) as error:
                failed.append(f"--table {name}: {error}")
            print(f"--table {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    if failed:
        raise SystemExit("\n".join(failed))


def selected_tables(table: str, only: str, tables: Mapping[str, Any], timed: Collection[str]) -> list[str]:
    """Returns the names of the tables to make; of those with the same function, the first.

    Args:
      table: its name, or "all".
      only: with "all", which ones: "all", "timed" or "untimed".
      tables: functions by name.
      timed: the names of the timed ones.
    """
    if table != "all":
        return [table]
    first: dict[Any, str] = {}
    for name, function in tables.items():
        if only in ("all", "timed" if name in timed else "untimed"):
            first.setdefault(function, name)
    return list(first.values())


def last_accuracies(runs: Sequence[Record]) -> list[float]:
    """Returns the accuracy in % that each run ends with."""
    return [run["accuracies"][-1] for run in runs]


def first_reaching(record: Mapping[str, Any], target: float) -> int | None:
    """Returns the step of a run's first evaluation with at least this accuracy; None if there is none."""
    curve = zip(record["steps"], record["accuracies"], strict=True)
    return next((step for step, accuracy in curve if accuracy >= target), None)
