"""Step times and times to the same accuracy, against PyTorch's DistributedDataParallel.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch==2.13.0 numpy
    python -m benchmarks.peers --torch /tmp/torch/bin/python --hosts 2 --rate 1gbit
    python -m benchmarks.peers --torch /tmp/torch/bin/python --data fashion --steps 301 --segment 20

All methods train one model, three layers of 1024 x 1024 and a head (3,159,050 parameters), from the same weights, on
the same rows, by SGD with momentum. Each method has a separate run in each round on the hosts of a lab; methods take
turns. ms is the wall time of a step, including reading and placing its batch, without evaluations and without the first
step, which compiles and connects (first_s). A ratio is the median over the rounds of the ratio to torch:dense in the
same round.
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.conditions import check_control, heading
from benchmarks.harness import HostOptions
from benchmarks.netlab import Lab
from benchmarks.peers.jax_host import METHODS
from benchmarks.peers.job import CLASSES, WIDTH, Job, initial_weights
from train.data.fashion import read_split
from train.records import Records
from train.tables import print_table

PEERS = {"jaxcomm": tuple(METHODS), "torch": ("dense", "fp16", "powersgd_1", "powersgd_4")}
BASELINE = "torch:dense"
SAME = ("hosts", "data", "rows", "steps", "segment", "learning_rate")  # settings of a record
ATTEMPTS = 4  # of a run of PyTorch
# The settings of `train.processes.keep_freed_memory`, as glibc's variables, for PyTorch's side.
KEEP_FREED_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
USUAL = (
    "jaxcomm:dense,jaxcomm:bfloat16,jaxcomm:float16,jaxcomm:quant_dp_16,jaxcomm:quant_dp,jaxcomm:powersgd_1,"
    "jaxcomm:powersgd_4,jaxcomm:topk,jaxcomm:dct_dp,jaxcomm:sign,torch:dense,torch:fp16,torch:powersgd_1,torch:powersgd_4"
)


@dataclass(frozen=True)
class Config(HostOptions):
    """Train one model with this library and with PyTorch's DDP, on the hosts of a lab."""

    methods: str = USUAL  # Methods, separated by commas, each with "jaxcomm:" or "torch:" before it.
    torch: Path | None = None  # The Python interpreter of an environment that has torch; needed for the runs of torch.
    hosts: int = 2  # Hosts, one worker each.
    rate: str = "1gbit"  # Limit of every link; several, separated by commas, are run one after another.
    data: str = "noise"
    """"noise"; or "fashion", the four files of Fashion-MNIST in --source, and accuracies on its test images."""
    source: Path = Path("/usr/share/datasets/fashion-mnist")
    """Folder of train-images-idx3-ubyte.gz and the other three files."""
    rows: int = 64  # Rows per worker and step.
    steps: int = 51  # Training steps; the first is not timed.
    segment: int = 10  # Steps between two readings of the clock, and between two evaluations.
    learning_rate: float = 0.05  # Learning rate of SGD with momentum 0.9.
    target: float = 85.0  # Accuracy in percent, the time to which is shown.
    rounds: int = 3  # Runs of each method; round r has the seed r, for weights and order of rows.
    json: Path | None = None  # File for the records of the runs; what it has is not run again.
    figure: Path | None = None
    """File for bars of the seconds to the target, with --data fashion; a panel for each rate."""


def main(config: Config) -> None:
    """Runs the methods in turn, and prints a table for each rate."""
    methods = config.methods.split(",")
    rates = harness.check_run(config.rate, config.steps)
    check(config, methods)
    records = Records(config.json)
    splits = read(config)
    panels: dict[str, dict[str, list[float | None]]] = {}
    for rate in rates:
        runs: list[dict[str, Any]] = []
        same = {"rate": config.link(rate), **{name: getattr(config, name) for name in SAME}}
        keys = [{"method": method, "seed": seed, **same} for seed in range(config.rounds) for method in methods]
        known = [record for key in keys if (record := records.find(key)) is not None]
        for key in keys:
            method, seed, record = key["method"], key["seed"], records.find(key)
            if record is None:
                made = run(config, method, rate, seed, splits)
                check_control([*known, *runs, made])
                record = records.add({**key, **made})
            runs.append(record)
            print(f"{method} at {rate}, round {seed}: {step_ms(runs[-1]):.4g} ms a step", flush=True)
        print_table(
            heading(
                f"{config.hosts} hosts, {config.link(rate)}, {config.rows} rows a worker, {config.data}, "
                f"{config.rounds} rounds",
                runs,
            ),
            [summary(method, runs, config.target) for method in methods],
        )
        if config.figure is not None:
            reached = {name: [seconds_to(r, config.target) for r in runs if r["method"] == name] for name in methods}
            panels[f"{config.hosts} hosts, {rate}"] = reached
    if config.figure is not None:
        draw(config.figure, panels, config.target)


def check(config: Config, methods: Sequence[str]) -> None:
    """Raises ValueError for options that cannot work."""
    for method in methods:
        peer, _, name = method.partition(":")
        if name not in PEERS.get(peer, ()):
            names_of_peers = ", ".join(f"{peer}:{name}" for peer, names in PEERS.items() for name in names)
            raise ValueError(f"--methods must be some of {names_of_peers}; got {method!r}.")
        if peer == "torch" and (config.torch is None or not config.torch.exists()):
            raise ValueError(
                f"--torch must name the Python of an environment with torch for {method}; got {config.torch}."
            )
    if config.figure is not None and config.data == "noise":
        raise ValueError(
            "--figure must have test accuracies to show; got --data noise, which has none. Use --data fashion."
        )
    if config.data not in ("noise", "fashion"):
        raise ValueError(f"--data must be noise or fashion; got {config.data!r}.")
    if min(config.rows, config.segment, config.rounds, config.steps - 1) < 1:
        raise ValueError(
            f"--rows, --segment and --rounds must be at least 1, and --steps at least 2; got {config.rows}, "
            f"{config.segment}, {config.rounds} and {config.steps}."
        )


def read(config: Config) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the images (N, 1024), uint8, and labels (N,) of the splits; noise has no test images."""
    if config.data == "noise":
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (4096, WIDTH), np.uint8)
        return {"train": (images, rng.integers(0, CLASSES, 4096)), "test": (images[:0], np.zeros(0, np.int64))}
    splits = {split: read_split(config.source, prefix) for split, prefix in (("train", "train"), ("test", "t10k"))}
    return {  # 28 x 28 pixels in the middle of 32 x 32
        split: (np.pad(images, ((0, 0), (2, 2), (2, 2))).reshape(-1, WIDTH), labels.astype(np.int64))
        for split, (images, labels) in splits.items()
    }


def run(
    config: Config, method: str, rate: str, seed: int, splits: dict[str, tuple[np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    """Trains once on the hosts of a lab; returns the segments, with bytes averaged over the hosts.

    PyTorch's processes sometimes abort on Gloo. The run is then repeated, and the abort counted.
    """
    peer, _, name = method.partition(":")
    rng = np.random.default_rng(seed)
    rows, count = config.rows * config.hosts, len(splits["train"][1])
    epochs = -(-config.steps * rows // count)
    order = np.concatenate([rng.permutation(count) for _ in range(epochs)])[: config.steps * rows]
    job = Job(
        method=name,
        learning_rate=config.learning_rate,
        segment=config.segment,
        weights=initial_weights(seed),
        images=splits["train"][0],
        labels=splits["train"][1],
        test_images=splits["test"][0],
        test_labels=splits["test"][1],
        order=order.reshape(config.steps, rows),
    )
    python = sys.executable if peer == "jaxcomm" else str(config.torch)
    with tempfile.TemporaryDirectory() as folder, Lab(config.hosts, rate, **config.lab(config.hosts)) as lab:
        path, conditions = Path(folder, "job.npz"), lab.conditions()
        job.save(path)
        command = [python, "-m", f"benchmarks.peers.{'jax' if peer == 'jaxcomm' else peer}_host", str(path)]
        env = {} if peer == "jaxcomm" else KEEP_FREED_MEMORY
        results, aborts = lab.run(command, env=env), 0
        while failed := [result for result in results if result.returncode]:
            aborts += 1
            if peer == "jaxcomm" or aborts == ATTEMPTS:
                raise SystemExit(f"{method}: host {failed[0].host} failed:\n{failed[0].stderr[-4000:]}")
            results = lab.run(command, env=env)
        isolated = lab.isolated
    hosts = [segments_of(result.stdout) for result in results]
    segments = [
        {
            **host_segments[0],
            "received": statistics.fmean(segment["received"] for segment in host_segments) if isolated else None,
        }
        for host_segments in zip(*hosts, strict=True)
    ]
    return {**conditions, "segments": segments, "aborts": aborts}


def segments_of(stdout: str) -> list[dict[str, Any]]:
    """Returns the segments that a host has printed, among lines of Gloo."""
    return [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]


def step_ms(record: dict[str, Any]) -> float:
    """Returns the milliseconds of a step, the median over the segments."""
    return statistics.median(1e3 * segment["seconds"] / segment["steps"] for segment in record["segments"][1:])


def seconds_to(record: dict[str, Any], target: float) -> float | None:
    """Returns the seconds of training until an evaluation reaches the target (in percent); None if none does."""
    seconds = 0.0
    for segment in record["segments"][1:]:
        seconds += segment["seconds"]
        if 100 * segment.get("accuracy", 0.0) >= target:
            return seconds
    return None


def draw(path: Path, panels: Mapping[str, Mapping[str, Sequence[float | None]]], target: float) -> None:
    """Draws the median seconds to the target as a bar for each method, and those of each round as points.

    Args:
      path: of the PNG file.
      panels: by hosts and rate, and by method, the seconds of each round; None if a round does not reach the target.
      target: in percent.
    """
    with harness.figure(path, 1, len(panels), (7 * len(panels), 3.6)) as (_, grid):
        for axes, (about, rounds) in zip(grid.flat, panels.items(), strict=True):
            _draw_bars(axes, about, rounds, target)


def _draw_bars(axes: Any, about: str, rounds: Mapping[str, Sequence[float | None]], target: float) -> None:
    medians = {m: statistics.median(math.inf if s is None else s for s in each) for m, each in rounds.items()}
    order = sorted(rounds, key=lambda method: medians[method], reverse=True)
    for place, method in enumerate(order):
        median, colour = medians[method], "C0" if method.startswith("jaxcomm:") else "C7"
        reached = [seconds for seconds in rounds[method] if seconds is not None]
        axes.barh(place, median if math.isfinite(median) else 0.0, color=colour, alpha=0.7)
        axes.plot(reached, [place] * len(reached), "k.")
        text = f"  {median:.1f} s" if math.isfinite(median) else "  not reached"
        axes.text(max(reached, default=0.0), place, text, va="center", fontsize=9)
    names = [f"{'DDP' if peer == 'torch' else peer}, {name}" for peer, _, name in (m.partition(":") for m in order)]
    axes.set_yticks(range(len(order)), names)
    axes.margins(x=0.12)
    reached = [(medians[method], name) for method, name in zip(order, names, strict=True)]
    reached = [f"{seconds:.1f} s with {name}" for seconds, name in reached if math.isfinite(seconds)]
    title = f"{target:g}% in {reached[-1]}, {reached[0]}" if reached else f"no method reaches {target:g}%"
    axes.set_title(f"{title} ({about})", fontsize=9)
    axes.set(xlabel=f"seconds of training to {target:g}%: median, and every round")


def summary(method: str, runs: Sequence[dict[str, Any]], target: float) -> dict[str, Any]:
    """Returns a row of the table: medians over the rounds."""
    method_runs = [run for run in runs if run["method"] == method]
    base = {run["seed"]: run for run in runs if run["method"] == BASELINE}
    times = [step_ms(run) for run in method_runs]
    ratios = [step_ms(base[run["seed"]]) / step_ms(run) for run in method_runs if run["seed"] in base]
    timed = [segment for run in method_runs for segment in run["segments"][1:]]
    rates = [segment["received"] / segment["steps"] for segment in timed if segment["received"] is not None]
    row: dict[str, Any] = {
        "method": method,
        "ms": statistics.median(times),
        "ms_min": min(times),
        "ms_max": max(times),
        "times_faster": statistics.median(ratios) if ratios else None,
        "kB_received": statistics.median(rates) / 1e3 if rates else None,
        "first_s": statistics.median(run["segments"][0]["seconds"] for run in method_runs),
        "aborts": sum(run["aborts"] for run in method_runs),
        "last_loss": statistics.median(run["segments"][-1]["loss"] for run in method_runs),
    }
    if "accuracy" in method_runs[0]["segments"][-1]:
        row["accuracy_%"] = 100 * statistics.median(run["segments"][-1]["accuracy"] for run in method_runs)
        times_to_target = [seconds_to(run, target) for run in method_runs]
        finite_times = [seconds for seconds in times_to_target if seconds is not None]
        # A run that never reaches the target makes the median unknown, not smaller.
        row[f"s_to_{target:g}%"] = (
            statistics.median(finite_times) if len(finite_times) == len(times_to_target) else None
        )
    return row


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
