"""A GPT on real text: validation loss against bytes, of the dense exchange and of compressed ones.

    python -m benchmarks.gpt --data-dir FOLDER --seeds 3 --json docs/data/gpt.json --figure docs/figures/gpt.png
    python -m benchmarks.gpt --data-dir FOLDER --hosts 4 --rate 100mbit --json docs/data/gpt.json

The first command trains every method with simulated workers: by Adam with the same settings, but for Muon and for DeMo,
whose updates are signs; with the rows in the same order and the same initial parameters of a seed. What --json has is
not trained again. The text is what `configs/gpt_linux.py` or `gpt_stdlib` reads; the model is smaller than gpt_linux's,
so that a run takes minutes.

With --hosts it times training steps instead, of the same model and rows, on the hosts of `benchmarks.netlab`, and keeps
them in the same file. The first command then shows the seconds of a run too: its steps times the mean of those timed.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.control import Control, check_run, merge_records, print_record, read_records, run, run_hosts
from benchmarks.netlab import Lab
from benchmarks.papers.report import Difference, draw
from configs import CONFIGS
from configs.experiment import Architecture, Experiment
from configs.methods import DctDp, Demo, LocalSgd, Method, PlumpDp, PowerSgd, SparseLoco
from train.records import Record, Records
from train.seeds import settings_of, train_seeds
from train.tables import print_table, stdev

METHODS: dict[str, Method] = {
    "dense": PlumpDp(),
    "dense, bfloat16": PlumpDp(value_dtype="bfloat16"),
    "dct_dp, 99%": DctDp(sparsity=0.99, life_span=100),
    "powersgd, rank 4": PowerSgd(rank=4),
    "local_sgd, H=10": LocalSgd(steps=10),
    "sparse_loco, H=10": SparseLoco(steps=10),
    "dense, Muon": PlumpDp(),
    "muloco, H=10": LocalSgd(steps=10),
    "demo, k=32": Demo(k=32, sign_size=1.0),
}
# Of the other methods it is the experiment's.
OPTIMIZERS: dict[str, Literal["sgd", "muon"]] = {"dense, Muon": "muon", "muloco, H=10": "muon", "demo, k=32": "sgd"}
WARM_UP = 4  # steps before the timed ones: the first compiles, and connections open


@dataclass(frozen=True)
class Config:
    """Train a GPT on real text by every method, or time its steps on hosts."""

    experiment: str = "gpt_linux"
    """The text: gpt_linux, which you prepare, or gpt_stdlib."""
    layers: int = 2
    """Of the model."""
    width: int = 128
    """Features of a token."""
    steps: int = 700
    """Training steps."""
    learning_rate: float = 3e-3
    """Of Adam, Muon and DeMo's signs; it rises in a tenth of the steps, and falls by a cosine."""
    batch: int = 16
    """Rows of a step, over all workers."""
    workers: int = 4
    """Simulated workers."""
    evaluations: int = 6
    """Evaluations on the test split in a run."""
    seeds: int = 3
    """Runs of each method, with the seeds 0, 1, ..."""
    hosts: int = 0
    """Time steps on so many hosts, as many workers; 0 trains."""
    rate: str = "100mbit"
    """Speed of the hosts' links."""
    timed_steps: int = 20
    """Timed steps of each method."""
    json: Path | None = None
    """File for the records; what it has of the same settings is not made again."""
    figure: Path | None = None
    """File for the curves, as PNG."""
    data_dir: Path | None = None
    """Folder of prepared datasets."""


@dataclass
class Timed:
    """Milliseconds of a method's training steps on hosts; the bytes that a host receives in them, a step."""

    method: str
    ms_mean: float
    ms_min: float
    ms_max: float
    bytes_kernel: float | None


def main(config: Config) -> None:
    """Trains or times, prints the table, and draws the curves where asked."""
    check(config)
    records = Records(config.json)
    if config.hosts:
        print_table(
            f"GPT of {config.layers} layers of {config.width}, {config.batch} rows a step: milliseconds of "
            f"{config.timed_steps} steps on {config.hosts} hosts at {config.rate}",
            time_methods(config, records),
        )
        return
    from train.processes import prepare_jax

    prepare_jax(config.workers)
    train_methods(config, records)


def check(config: Config) -> None:
    """Raises ValueError for what cannot be run."""
    if config.experiment not in ("gpt_linux", "gpt_stdlib"):
        raise ValueError(f"--experiment is gpt_linux or gpt_stdlib, got {config.experiment!r}.")
    counts = {name: getattr(config, name) for name in ("layers", "width", "batch", "workers", "evaluations", "seeds")}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"--{name} is at least 1, got {value}.")
    if config.steps < config.evaluations or config.hosts < 0:
        raise ValueError("--steps is at least --evaluations, and --hosts at least 0.")
    if len(check_run(config.rate, config.timed_steps)) > 1:
        raise ValueError(f"--rate is one rate, got {config.rate}: run this once for each.")
    if config.batch % (config.hosts or config.workers):
        raise ValueError(f"--batch is a multiple of the workers, or of the hosts, got {config.batch}.")


def experiment_of(config: Config, name: str = "dense") -> Experiment:
    """Returns what a method trains, one of `METHODS`."""
    options = {"layers": config.layers, "width": config.width, "heads": 4}
    return dataclasses.replace(
        CONFIGS[config.experiment],
        architecture=Architecture("gpt", options),
        steps=config.steps,
        learning_rate=config.learning_rate,
        optimizer=OPTIMIZERS.get(name, CONFIGS[config.experiment].optimizer),
        global_batch=config.batch,
        workers=config.hosts or config.workers,
        warmup_steps=config.steps // 10,
        eval_every=-(-config.steps // config.evaluations),
        checkpoint_every=config.steps,
        max_skipped=config.steps + 1,  # a method that diverges is a result
        data_dir=config.data_dir,
    )


def train_methods(config: Config, records: Records) -> None:
    """Trains every method with all seeds, prints the table, and draws the curves."""
    experiment = experiment_of(config)
    runs = {
        name: train_seeds(records, experiment_of(config, name), method, config.seeds)
        for name, method in METHODS.items()
    }
    times = {name: records.find(_key(config, name, config.workers)) for name in METHODS}
    dense, rows = runs["dense"], []
    for name, own in runs.items():
        losses, timed = [run["scores"]["loss"] for run in own], times[name]
        gain = Difference.of(losses, [run["scores"]["loss"] for run in dense])
        rows.append(
            {
                "method": name,
                "loss": statistics.fmean(losses),
                "stdev": stdev(losses),
                "minus_dense": gain.mean,
                "standard_error": gain.error,
                "bits_per_byte": statistics.fmean(run["scores"]["bits_per_byte"] for run in own),
                "bytes_per_step": own[0]["bytes_per_step"],
                "fewer_than_dense": own[0]["dense_bytes"] / own[0]["bytes_per_step"],
                "seconds": timed and experiment.steps * timed["ms_mean"] / 1e3,
            }
        )
    print_table(
        f"GPT of {dense[0]['parameters']:,} parameters on {experiment.dataset}, K={config.workers}, {config.steps} "
        f"steps of {config.batch} rows, mean over {config.seeds} seeds: validation loss (nats a byte), bytes that a "
        f"worker receives a step; seconds at {config.rate} where --hosts {config.workers} has timed them",
        rows,
    )
    if config.figure is not None:
        megabytes = {name: [received / 1e6 for received in own[0]["received"]] for name, own in runs.items()}
        panels = {"MB received by a worker": {name: (megabytes[name], _losses(own)) for name, own in runs.items()}}
        if all(times.values()):
            seconds = {name: timed["ms_mean"] / 1e3 for name, timed in times.items() if timed}
            panels[f"Seconds at {config.rate}"] = {
                name: ([seconds[name] * step for step in own[0]["steps"]], _losses(own)) for name, own in runs.items()
            }
        draw(config.figure, panels, "", "validation loss, nats a byte", x_scale="log")


def _losses(runs: list[Record]) -> list[list[float | None]]:
    return [run["losses"] for run in runs]


def _key(config: Config, name: str, workers: int) -> Record:
    """Returns the key of a method's timed steps."""
    experiment = dataclasses.replace(experiment_of(config, name), workers=workers)
    about = settings_of(experiment, METHODS[name])
    return {"of": "gpt step", "about": about, "rate": config.rate, "timed_steps": config.timed_steps}


def time_methods(config: Config, records: Records) -> list[Record]:
    """Returns the timed steps of every method; the hosts run where some are not there."""
    keys = {name: _key(config, name, config.hosts) for name in METHODS}
    if any(records.find(key) is None for key in keys.values()):
        with Lab(config.hosts, config.rate) as lab:
            hosts = [read_records(Timed, text) for text in run_hosts(lab, "benchmarks.gpt")]
            for record in merge_records(hosts, lab.isolated):
                records.add(keys[record.method] | dataclasses.asdict(record) | {"isolated": lab.isolated})
    found = [record for key in keys.values() if (record := records.find(key)) is not None]
    return [{field.name: record[field.name] for field in dataclasses.fields(Timed)} for record in found]


def time_host(config: Config) -> None:
    """Runs one host's part: the steps of every method; prints JSON records."""
    control = Control()
    import jax

    from train.data import train_batches
    from train.job import make_job

    for name, method in METHODS.items():
        control.set_rate("none")
        experiment = experiment_of(config, name)
        job = make_job(experiment, method)
        where = {"process_index": control.host, "process_count": control.hosts, "data_dir": config.data_dir}
        batches = train_batches(experiment.dataset, global_batch=config.batch, seed=0, **where)
        state, times, received = job.start(0), [], []

        def step(state: Any, job: Any = job, batches: Any = batches, by_rows: Any = job.by_rows) -> Any:
            rows = next(batches)
            placed = {key: jax.make_array_from_process_local_data(by_rows, own) for key, own in rows.items()}
            return job.step(state, placed)

        for number in range(WARM_UP + config.timed_steps):
            if number == WARM_UP:
                control.set_rate(config.rate)
            ms, count, (state, _) = control.timed(lambda state=state, step=step: step(state))
            if number >= WARM_UP:
                times.append(ms)
                received.append(count)
        batches.close()
        print_record(Timed(name, statistics.fmean(times), min(times), max(times), statistics.fmean(received)))


if __name__ == "__main__":
    run(Config, __doc__, main, time_host)
