"""How time, bytes, compile time and memory of an exchange grow with parameters, hosts and density.

    python -m benchmarks.growth --json docs/data/growth.json

runs three sweeps of `benchmarks.exchange`: more parameters (one vector, 2 hosts, 1% kept), more hosts (10M parameters,
1% kept) and other densities (10M parameters, 4 hosts), and draws all of them as one figure. Every measured quantity is
compared with its law: bytes are those of `wire_report`; time is the time of these bytes on the link, plus a time
proportional to the parameters; memory is proportional to the parameters; compile time is constant. The free constants
of the laws, one per quantity and method, are medians over a sweep. Rows that a file has are not measured again; those
of other settings stay in it, and are not shown.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.conditions import check_control, heading
from jaxcomm.planner.links import bits_per_second
from train.figures import label_ends
from train.records import Record, Records
from train.tables import print_table

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "growth.png"
HELD = 12  # copies of the gradient that a host holds at most, by `benchmarks.exchange`, with a margin
COLUMNS = {
    "ms_median": "milliseconds",
    "bytes_kernel": "bytes received by a worker",
    "compile_s": "seconds to compile",
    "held_bytes": "bytes held by a worker",
}
DRAWN = {name: COLUMNS[name] for name in ("ms_median", "bytes_kernel")}  # the others are in the tables
NAMES = {"plump_dp": "dense"}


@dataclass(frozen=True)
class Config:
    """Show how the cost of an exchange grows with parameters, hosts and density."""

    sizes: str = "1e5,1e6,1e7,1e8,2e8"  # Numbers of parameters, separated by commas: of one vector, on 2 hosts.
    hosts: str = "2,4,8"  # Numbers of hosts, separated by commas, with --size parameters.
    density: str = "0.001,0.003,0.01,0.03,0.1"
    """Fractions of the coordinates that sparse methods send, separated by commas, with --size parameters on 4 hosts."""
    size: float = 1e7  # Number of parameters in the sweeps over hosts and density.
    method: str = "plump_dp,plump_dp_bfloat16,sign,topk,dct_dp"
    """Methods of `benchmarks.exchange`, separated by commas."""
    rate: str = "1gbit"  # Link rate: "100mbit", "1gbit", or "none" for no limit.
    steps: int = 5  # Timed steps of each row.
    figure: Path = FIGURE  # File for the figure.
    json: Path | None = None  # File for the records, as a list; those that it has are kept.


def main(config: Config) -> None:
    """Measures what the file does not have, prints the tables, and draws the figure."""
    harness.check_run(config.rate, config.steps)
    if config.rate != "none":
        bits_per_second(config.rate)  # the law is of one rate
    records, rows = Records(config.json), list[Record]()
    for sweep, settings in _sweeps(config).items():
        own = list[Record]()
        for size, hosts, density in settings:
            setting = {"sweep": sweep, "parameters": size, "hosts": hosts, "density": density, "rate": config.rate}
            # Dense methods need only one density.
            dense = {row["method"] for row in own if sweep == "density" and not _is_sparse(row["method"])}
            for method in config.method.split(",") if _fits(size, hosts) else ():
                key = {**setting, "method": method, "steps": config.steps}
                if method not in dense:
                    own.append(records.get(key, lambda key=key: _measure(config, key)))
                    check_control([*rows, *own])
        rows += own
        print_table(heading(f"Growth with {sweep}", own), [_against_law(row, own) for row in own])
    draw(config.figure, rows)


def _sweeps(config: Config) -> dict[str, list[tuple[int, int, float]]]:
    """Returns the (parameters, hosts, density) of every sweep."""
    sizes = sorted({int(size) for size in harness.numbers("--sizes", config.sizes, float, least=1)})
    hosts = sorted(set(harness.numbers("--hosts", config.hosts, least=2)))
    densities = sorted(set(harness.numbers("--density", config.density, float)))
    harness.check_least(config, 1, "size")
    if not 0 < densities[0] <= densities[-1] < 1:
        raise ValueError(f"--density must be between 0 and 1; got {config.density}.")
    size = int(config.size)
    return {
        "parameters": [(n, 2, 0.01) for n in sizes],
        "hosts": [(size, K, 0.01) for K in hosts],
        "density": [(size, 4, density) for density in densities],
    }


def _is_sparse(method: str) -> bool:
    return not method.startswith(("plump_dp", "sign", "quant_dp", "terngrad"))


def _fits(size: int, hosts: int) -> bool:
    """Returns whether the hosts, which share this machine's memory, have room for it; prints a line if not."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    demand = HELD * 4 * size * hosts
    if demand > memory:
        print(f"{size:,} parameters on {hosts} hosts take some {demand / 1e9:.0f} GB: left out.", flush=True)
    return demand <= memory


def _measure(config: Config, setting: Record) -> Record:
    """Times a method, in processes of its own: a host's keep what they have freed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        command = [sys.executable, "-m", "benchmarks.exchange", "--json", str(path), "--rate", config.rate]
        command += ["--shapes", str(setting["parameters"]), "--hosts", str(setting["hosts"]), "--steps"]
        command += [str(config.steps), "--sparsity", str(1 - setting["density"]), "--method", setting["method"]]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise ValueError(f"{' '.join(command[1:])} failed: {result.stderr[-2000:]}")
        (record,) = json.loads(path.read_text())
    size, hosts, density, method = (setting[name] for name in ("parameters", "hosts", "density", "method"))
    print(f"{size:,} parameters, {hosts} hosts, {density:.1%}: {method} {record['ms_median']:.0f} ms", flush=True)
    return record | {"held_bytes": 4 * size * record["sizes_held"]}


def _against_law(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns what a row measured, and each quantity divided by its law."""
    law, columns = _law(row, rows), {key: row[key] for key in ("method", "parameters", "hosts", "density", *COLUMNS)}
    ratios = {name: law[name] and row[name] is not None and row[name] / law[name] for name in COLUMNS}
    return columns | {f"{name}_by_law": ratio or None for name, ratio in ratios.items()}


def _law(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Returns what the laws predict for a row, given all rows; see the module's docstring."""
    like = [record for record in rows if (record["sweep"], record["method"]) == (row["sweep"], row["method"])]

    def wire(record: dict[str, Any]) -> float:
        return 0.0 if record["rate"] == "none" else 8e3 * record["bytes_predicted"] / bits_per_second(record["rate"])

    cost = statistics.median((record["ms_median"] - wire(record)) / record["parameters"] for record in like)
    held_per_parameter = statistics.median(record["held_bytes"] / record["parameters"] for record in like)
    return {
        "ms_median": wire(row) + cost * row["parameters"],
        "bytes_kernel": row["bytes_predicted"],
        "compile_s": statistics.median(record["compile_s"] for record in like),
        "held_bytes": held_per_parameter * row["parameters"],
    }


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draws every quantity of DRAWN against what grows, as points, and its law as a line, into a PNG file."""
    sweeps = list(dict.fromkeys(row["sweep"] for row in rows))
    methods = [method for method in dict.fromkeys(row["method"] for row in rows) if method != "plump_dp_bfloat16"]
    size = (4.8 * len(sweeps), 3.5 * len(DRAWN))
    with harness.figure(path, len(DRAWN), len(sweeps), size) as (drawing, panels):
        drawing.suptitle("Time and bytes are proportional to the parameters (points: measured; lines: law)")
        for column, sweep in enumerate(sweeps):
            for panel, (quantity, label) in zip(panels[:, column], DRAWN.items(), strict=True):
                for index, method in enumerate(methods):
                    points = [row for row in rows if (row["sweep"], row["method"]) == (sweep, method)]
                    points = [row for row in points if row[quantity] is not None]
                    x, colour = [row[sweep] for row in points], f"C{index}"
                    panel.plot(x, [row[quantity] for row in points], "o", color=colour, markersize=5)
                    law = [_law(row, rows)[quantity] for row in points]
                    panel.plot(x, law, color=colour, linewidth=0.9, alpha=0.7, label=NAMES.get(method, method))
                panel.set(xlabel=sweep, ylabel=label, xscale="log", yscale="log")
                panel.grid(alpha=0.3)
                label_ends(panel)


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
