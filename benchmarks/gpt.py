"""A GPT on real text: validation loss against bytes, for the dense exchange and for compressed ones.

    python -m benchmarks.gpt --data-dir FOLDER --seeds 3 --json docs/data/gpt.json --figure docs/figures/gpt.png
    python -m benchmarks.gpt --data-dir FOLDER --hosts 4 --rate 100mbit --json docs/data/gpt.json

The first command trains every method with simulated workers; the dense exchange, with which the others are compared,
is always among them. All use Adam with the same settings, except Muon, and DeMo, whose updates are signs. Runs of the
same seed have the same order of rows and the same initial parameters. What --json has is not trained again. The text is
what `configs/gpt_linux.py` or `gpt_stdlib` reads. The model is smaller than gpt_linux's, so that a run takes minutes;
--layers 8 --width 256 is gpt_linux's.

With --hosts it instead times training steps of the same model and rows on the hosts of `benchmarks.netlab`, and keeps
the times in the same file. The first command then also shows the seconds of a run: its steps times their mean time.

    python -m benchmarks.gpt --data-dir FOLDER --stages 3 --rate 100mbit --json docs/data/gpt_stages_links.json

With --stages, the model of one worker is cut into stages, and `boundaries` are compared instead of methods: first the
time of steps on as many hosts, then the loss, unless --seeds is 0.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from benchmarks import harness
from benchmarks.conditions import CONDITIONS, check_control, headed
from benchmarks.harness import Control, HostOptions
from benchmarks.papers.report import Difference, Lines, columns, draw, or_infinite
from configs import CONFIGS
from configs.experiment import Architecture, BoundaryFields, Experiment
from configs.methods import DctDp, Demo, LocalSgd, Method, PlumpDp, PowerSgd, SparseLoco, TopK
from train.data import train_batches
from train.job import make_job
from train.loop import to_mesh
from train.processes import prepare_jax
from train.records import Record, Records
from train.seeds import settings_of, train_seeds
from train.tables import print_table

METHODS: dict[str, Method] = {
    "dense": PlumpDp(),
    "bfloat16": PlumpDp(value_dtype="bfloat16"),
    "topk": TopK(sparsity=0.99),
    "dct_dp": DctDp(sparsity=0.99, life_span=100),
    "powersgd": PowerSgd(rank=4),
    "local_sgd": LocalSgd(steps=10),
    "sparse_loco": SparseLoco(steps=10),
    "pulse_loco": LocalSgd(
        steps=10, exchange="pulse", exchange_sparsity=0.5, outer_learning_rate=1.0, outer_momentum=0.0
    ),
    "muon": PlumpDp(),
    "muloco": LocalSgd(steps=10),
    "demo": Demo(k=32, sign_size=1.0),
}
# The other methods use the experiment's optimizer.
OPTIMIZERS: dict[str, Literal["sgd", "muon"]] = {"muon": "muon", "muloco": "muon", "demo": "sgd"}


def boundaries(width: int) -> dict[str, BoundaryFields]:
    """Returns the boundaries that are compared, for a model of so many features; d/128 is at least one number."""
    return {
        "dense": BoundaryFields(),
        "dct_mp(0.9)": BoundaryFields(0.9),
        "dct_mp(0.95)": BoundaryFields(0.95),
        "int8": BoundaryFields(value_dtype="int8"),
        "int4": BoundaryFields(value_dtype="int4"),
        "d": BoundaryFields(rank=width),  # the layers of a bottleneck, without one
        "d int4": BoundaryFields(rank=width, value_dtype="int4"),
        "d/2": BoundaryFields(rank=max(1, width // 2)),
        "d/2 int4": BoundaryFields(rank=max(1, width // 2), value_dtype="int4"),
        "d/4": BoundaryFields(rank=max(1, width // 4)),
        "d/4 int4": BoundaryFields(rank=max(1, width // 4), value_dtype="int4"),
        "d/8": BoundaryFields(rank=max(1, width // 8)),
        "d/16": BoundaryFields(rank=max(1, width // 16)),
        "d/128": BoundaryFields(rank=max(1, width // 128)),
        "d/8 int4": BoundaryFields(rank=max(1, width // 8), value_dtype="int4"),
    }


@dataclass(frozen=True)
class Config(HostOptions):
    """Train a GPT on real text by every method, or time its steps on hosts."""

    experiment: str = "gpt_linux"  # The text: gpt_linux, which you prepare, or gpt_stdlib.
    methods: str = ""  # Methods, or with --stages boundaries, separated by commas; all if not given.
    layers: int = 2  # Layers of the model.
    width: int = 128  # Features of a token.
    steps: int = 700  # Training steps.
    learning_rate: float = 3e-3
    """Peak for Adam, Muon and DeMo's signs: it rises over a tenth of the steps, then falls by a cosine."""
    batch: int = 16  # Rows per step, over all workers.
    workers: int = 4  # Simulated workers.
    stages: int = 1  # Cut the model into so many stages, on as many hosts, and compare the boundaries between them.
    micro_batches: int = 4  # Micro-batches of the pipeline.
    evaluations: int = 6  # Evaluations on the test split in a run.
    seeds: int = 3  # Runs of each method, with the seeds 0, 1, ...
    hosts: int = 0  # Time steps on so many hosts, one worker each; 0 trains.
    rate: str = "100mbit"  # Speed of the hosts' links.
    timed_steps: int = 20  # Timed steps of each method.
    json: Path | None = None  # File for the records; those that it has with the same settings are not made again.
    figure: Path | None = None  # File for the curves, as PNG.
    data_dir: Path | None = None  # Folder of prepared datasets.


def main(config: Config) -> None:
    """Trains or times, prints the table, and draws the curves where asked."""
    check(config)
    records = Records(config.json)
    if config.hosts or config.stages > 1:
        hosts = config.hosts or config.stages
        title = (
            f"GPT of {config.layers} layers of {config.width}, {config.batch} rows a step: milliseconds of "
            f"{config.timed_steps} steps on {hosts} hosts at {config.rate}"
        )
        print_table(*headed(title, time_methods(config, records, hosts)))
    if config.hosts or not config.seeds:
        return
    prepare_jax(max(config.workers, config.stages))
    train_methods(config, records)


def check(config: Config) -> None:
    """Raises ValueError for options that cannot work."""
    if config.experiment not in ("gpt_linux", "gpt_stdlib"):
        raise ValueError(f"--experiment must be gpt_linux or gpt_stdlib; got {config.experiment!r}.")
    sizes = ("layers", "width", "batch", "workers", "evaluations", "stages", "micro_batches")
    harness.check_least(config, 1, *sizes)
    harness.check_least(config, 0 if config.stages > 1 else 1, "seeds")
    if config.stages > 1 and (config.hosts or config.batch % config.micro_batches):
        raise ValueError(
            f"With --stages, --hosts must be 0 and --batch a multiple of --micro-batches; got --hosts {config.hosts} "
            f"and {config.batch} rows in {config.micro_batches}. Leave --hosts out: stages run on as many hosts."
        )
    if config.steps < config.evaluations or config.hosts < 0:
        raise ValueError(
            f"--steps must be at least --evaluations, and --hosts at least 0; got {config.steps}, {config.evaluations} "
            f"and {config.hosts}."
        )
    harness.check_run(config.rate, config.timed_steps, one=True)
    compared(config)
    if config.stages == 1 and config.batch % (config.hosts or config.workers):
        raise ValueError(f"--batch must be a multiple of the workers, or of the hosts; got {config.batch}.")


def experiment_of(config: Config, name: str = "dense") -> Experiment:
    """Returns what a method of `METHODS`, or one of the `boundaries`, trains."""
    options = {"layers": config.layers, "width": config.width, "heads": 4}
    split = {"workers": config.hosts or config.workers}
    if config.stages > 1:
        split = {"workers": 1, "stages": config.stages, "micro_batches": config.micro_batches}
        split |= {"boundary": boundaries(config.width)[name]}
    return dataclasses.replace(
        CONFIGS[config.experiment],
        architecture=Architecture("gpt", options),
        steps=config.steps,
        learning_rate=config.learning_rate,
        optimizer=OPTIMIZERS.get(name, CONFIGS[config.experiment].optimizer),
        global_batch=config.batch,
        warmup_steps=config.steps // 10,
        eval_every=-(-config.steps // config.evaluations),
        checkpoint_every=config.steps,
        max_skipped=config.steps + 1,  # a method that diverges is a result
        data_dir=config.data_dir,
        **split,
    )


def compared(config: Config) -> dict[str, Method]:
    """Returns the methods, the dense one first; with stages, the dense method for every boundary."""
    known = METHODS if config.stages == 1 else dict.fromkeys(boundaries(config.width), METHODS["dense"])
    names = config.methods.split(",") if config.methods else known
    return harness.choose(known, ["dense", *(name for name in names if name != "dense")])


def train_methods(config: Config, records: Records) -> None:
    """Trains every method with all seeds, prints the table, and draws the curves."""
    experiment = experiment_of(config)
    runs = {
        name: train_seeds(records, experiment_of(config, name), method, config.seeds)
        for name, method in compared(config).items()
    }
    times = {name: records.find(_key(config, name, config.workers)) for name in runs}
    dense, rows = runs["dense"], []
    for name, method_runs in runs.items():
        losses, timed = [run["scores"]["loss"] for run in method_runs], times[name]
        bytes_per_step = method_runs[0]["bytes_per_step"]  # 0 if no exchange was due
        gain = Difference.of(losses, [run["scores"]["loss"] for run in dense])
        rows.append(
            {
                "method": name,
                **columns("loss", losses, gain, "minus_dense"),
                "bits_per_byte": statistics.fmean(or_infinite([run["scores"]["bits_per_byte"] for run in method_runs])),
                "bytes_per_step": bytes_per_step,
                "fewer_than_dense": method_runs[0]["dense_bytes"] / bytes_per_step if bytes_per_step else None,
                "ms_per_step": timed and timed["ms_mean"],
                "seconds": timed and experiment.steps * timed["ms_mean"] / 1e3,
            }
        )
    print_table(
        f"GPT of {dense[0]['parameters']:,} parameters on {experiment.dataset}, K={experiment.workers}, {config.steps} "
        f"steps of {config.batch} rows{f' in {config.stages} stages' if config.stages > 1 else ''}, mean over "
        f"{config.seeds} seeds: validation loss (nats a byte), bytes that a device receives a step; seconds at "
        f"{config.rate} where they were timed",
        rows,
    )
    if config.figure is not None:
        shown = {name: own for name, own in runs.items() if name != "bfloat16"}  # dense, in half of the bytes
        panels = {
            _most_for_bytes(shown): {
                name: ([count / 1e6 for count in own[0]["received"]], _losses(own)) for name, own in shown.items()
            }
        }
        axes = ["MB received by a worker"]
        if all(times.values()):
            seconds = {name: timed["ms_mean"] / 1e3 for name, timed in times.items() if timed}
            lines = {
                name: ([seconds[name] * step for step in own[0]["steps"]], _losses(own)) for name, own in shown.items()
            }
            panels[_most_for_time(lines)] = lines
            axes.append(f"seconds at {config.rate}")
        draw(config.figure, panels, axes, "validation loss, nats a byte", x_scale="log")


def _most_for_bytes(runs: dict[str, list[Record]]) -> str:
    """Returns the finding of the panel over bytes: where the best of the compressed methods ends, and dense."""
    last = {name: statistics.fmean(losses[-1] for losses in _losses(own)) for name, own in runs.items()}
    received = {name: own[0]["received"][-1] for name, own in runs.items()}
    compressed = [name for name in runs if received[name] < received["dense"]]
    if not compressed:
        return f"dense ends at {last['dense']:.2f}"
    best = min(compressed, key=lambda name: last[name])
    fewer = received["dense"] / received[best]
    return f"{best}: {last[best]:.2f} in {fewer:.0f} times fewer bytes than dense ({last['dense']:.2f})"


def _most_for_time(lines: Lines) -> str:
    """Returns the finding of the panel over time: the lowest loss when the first of the runs has ended."""
    end = min(seconds[-1] for seconds, _ in lines.values())
    then = {name: np.interp(end, seconds, np.mean(losses, 0)) for name, (seconds, losses) in lines.items()}
    best = min(then, key=lambda name: then[name])
    return f"after {end:.0f} s {best} is ahead: {then[best]:.2f}, dense {then['dense']:.2f}"


def _losses(runs: list[Record]) -> list[list[float]]:
    return [or_infinite(run["losses"]) for run in runs]


def _key(config: Config, name: str, workers: int) -> Record:
    """Returns the key of a method's timed steps."""
    experiment = experiment_of(config, name)
    if config.stages == 1:
        experiment = dataclasses.replace(experiment, workers=workers)
    about = settings_of(experiment, compared(config)[name])
    return {"of": "gpt step", "about": about, "rate": config.link(config.rate), "timed_steps": config.timed_steps}


def time_methods(config: Config, records: Records, hosts: int) -> list[Record]:
    """Returns the timed steps of every method; runs the hosts if some are missing."""
    keys = {name: _key(config, name, hosts) for name in compared(config)}
    known = [record for key in keys.values() if (record := records.find(key)) is not None]
    if len(known) < len(keys):
        rows = harness.on_hosts(hosts, config.rate, config)
        check_control([*known, *rows])
        for row in rows:
            records.add(keys[row["method"]] | row | {"isolated": row["bytes_kernel"] is not None})
    columns = ("method", "ms_mean", "ms_min", "ms_max", "bytes_kernel", *CONDITIONS)
    return [
        {name: record[name] for name in columns if name in record}
        for key in keys.values()
        if (record := records.find(key)) is not None
    ]


def run_host(config: Config, control: Control) -> Iterator[Record]:
    """Runs one host's part: the steps of every method; yields a row for each."""
    rows_of = (control.host, control.hosts) if config.stages == 1 else (0, 1)  # the stages of a worker read the same
    for name, method in compared(config).items():
        control.set_rate("none")
        experiment = experiment_of(config, name)
        job = make_job(experiment, method)
        where = {"process_index": rows_of[0], "process_count": rows_of[1], "data_dir": config.data_dir}
        batches = train_batches(experiment.dataset, global_batch=config.batch, seed=0, **where)

        def step(state: Any, job: Any = job, batches: Any = batches) -> Any:
            return job.step(state, to_mesh(next(batches), job))[0]

        state = jax.block_until_ready(step(job.start(0)))  # compiles, and opens Gloo's connections
        control.set_rate(config.rate)
        times, counts, _ = control.measure(step, state, config.timed_steps)
        batches.close()
        spread = {"ms_mean": statistics.fmean(times), "ms_min": min(times), "ms_max": max(times)}
        yield {"method": name, **spread, "bytes_kernel": statistics.fmean(counts)}


if __name__ == "__main__":
    harness.run(Config, __doc__, main, run_host)
