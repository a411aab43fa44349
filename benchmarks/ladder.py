"""A ladder of GPTs: does what compression costs shrink as the model grows?

    python -m benchmarks.ladder --data-dir DIR --json docs/data/ladder.json --hours 8
    python -m benchmarks.ladder --data-dir DIR --compare boundaries --json FILE

Width alone grows. Every model is trained once over 20 bytes of the text for each parameter outside of tables and
logits, by every method. Learning rates are searched on the first two rungs by one rule for all, dense included: with
one seed, from a middle rate, or from the best of the rung before (`benchmarks.mup` carries rates from width to width),
until the best rate has a worse one on both sides. The lowest of those within 0.005 nats of it is taken, and trained
with the other seeds. On later rungs methods are trained at the rate that the second took.

With --compare boundaries, the boundaries of `benchmarks.gpt` are compared in the same way, between --stages stages of
one worker, which run one after another.

What --json has is not trained again, and every run is written as it ends, so the ladder may be climbed over many days:
rung by rung, dense Adam first, with which all others are compared: it is refused if its seeds end more than 0.02 nats
apart. Before the last rung, its losses and gaps are predicted from the others (`benchmarks.power_law`), and the
command ends. It goes on once the prediction is committed.

Time at --rate is computed: the bytes that a worker receives at that rate, and a step of one worker on its rows, which
is timed on this machine without the others.
"""

import itertools
import json
import math
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks import gpt, harness
from benchmarks.mup import Optimizer, Text, Trainer, body_size
from benchmarks.papers.report import Difference, draw, or_infinite
from benchmarks.power_law import PowerLaw, draws, quantiles
from configs import CONFIGS
from configs.methods import Demo, LocalSgd, Method, QuantDp, SparseLoco
from jaxcomm.planner.links import bits_per_second
from train.data import dataset_info
from train.data.datasets import open_split
from train.processes import prepare_jax
from train.records import Record, Records
from train.seeds import label
from train.tables import format_cell, print_table

DENSE = gpt.METHODS["dense"]
BASELINE = "dense"  # the entry that all others are compared with


@dataclass(frozen=True)
class Entry:
    """What is compared.

    Attributes:
      label: its name in tables.
      method: how the workers exchange gradients.
      optimizer: of the layers' matrices.
      start: the part of the steps, at the beginning, that exchange dense.
      boundary: what crosses between stages, by its name in `benchmarks.gpt`.
      rungs: the number of rungs, from the first, on which it is trained; None for all.
    """

    label: str
    method: Method = DENSE
    optimizer: Optimizer = "adam"
    start: float = 0.0
    boundary: str = "dense"
    rungs: int | None = None


METHODS = {
    "dense": Entry("dense, Adam"),
    "muon": Entry("dense, Muon", optimizer="muon"),
    "powersgd": Entry("`powersgd(4)`", gpt.METHODS["powersgd"]),
    "powersgd_start": Entry("`powersgd(4)`, 10% dense", gpt.METHODS["powersgd"], start=0.1, rungs=2),
    "topk": Entry("`topk(0.99)`", gpt.METHODS["topk"]),
    "topk_start": Entry("`topk(0.99)`, 10% dense", gpt.METHODS["topk"], start=0.1, rungs=2),
    "dct_dp": Entry("`dct_dp(0.99)`", gpt.METHODS["dct_dp"]),
    "demo": Entry("`demo(32)`", Demo(k=32), "sign"),
    "quant_dp": Entry("`quant_dp(8)`", QuantDp(bits=8)),
    "local_sgd": Entry("DiLoCo: `local_sgd(30)`", LocalSgd(steps=30)),
    "sparse_loco": Entry("`sparse_loco(30)`", SparseLoco(steps=30)),
    "muloco": Entry("MuLoCo: `local_sgd(30)` after Muon", LocalSgd(steps=30), "muon"),
}
BOUNDARIES = {
    "dense": Entry("whole activations"),
    "muon": Entry("whole activations, Muon", optimizer="muon"),
    "d": Entry("d numbers: the layers alone", boundary="d"),
    "d int4": Entry("d numbers of 4 bits", boundary="d int4"),
    "d/2": Entry("d/2 numbers", boundary="d/2"),
    "d/2 int4": Entry("d/2 numbers of 4 bits", boundary="d/2 int4"),
    "d/2 int4 muon": Entry("d/2 numbers of 4 bits, Muon", optimizer="muon", boundary="d/2 int4"),
    "d/4": Entry("d/4 numbers", boundary="d/4"),
    "d/4 muon": Entry("d/4 numbers, Muon", optimizer="muon", boundary="d/4"),
    "d/4 int4": Entry("d/4 numbers of 4 bits", boundary="d/4 int4"),
    "d/4 int4 muon": Entry("d/4 numbers of 4 bits, Muon", optimizer="muon", boundary="d/4 int4"),
    "d/8": Entry("d/8 numbers", boundary="d/8"),
    "d/8 muon": Entry("d/8 numbers, Muon", optimizer="muon", boundary="d/8"),
    "d/16": Entry("d/16 numbers", boundary="d/16"),
    "d/16 muon": Entry("d/16 numbers, Muon", optimizer="muon", boundary="d/16"),
    "d/128": Entry("one number", boundary="d/128"),
    "d/8 int4": Entry("d/8 numbers of 4 bits", boundary="d/8 int4"),
    "int8": Entry('8 bits, `dct_mp(0.0, value_dtype="int8")`', boundary="int8"),
    "int4": Entry('4 bits, `dct_mp(0.0, value_dtype="int4")`', boundary="int4"),
    "dct_mp(0.9)": Entry("`dct_mp(0.9)`", boundary="dct_mp(0.9)"),
    "dct_mp(0.95)": Entry("`dct_mp(0.95)`", boundary="dct_mp(0.95)"),
}
COMPARED = {"methods": METHODS, "boundaries": BOUNDARIES}
NOISE = 0.02  # nats between the seeds of the baseline, at most
TIE = 0.005  # nats: of rates whose losses are as close as this, the lowest is taken
MARKS = ("<!-- records -->", "<!-- end of records -->")


@dataclass(frozen=True)
class Config:
    """Train a ladder of GPTs by every method, and predict the last rung from the others."""

    compare: Literal["methods", "boundaries"] = "methods"
    """Methods of workers, or boundaries between the stages of one worker."""
    methods: str = ""  # Methods, or boundaries, separated by commas, beside the baseline; all if not given.
    stages: int = 3  # Stages, where boundaries are compared.
    experiment: str = "gpt_linux"  # The text: gpt_linux, which you prepare, or gpt_stdlib.
    widths: str = "56,64,80,96"  # Features of a token, of every rung, separated by commas.
    layers: int = 4  # Layers of every model.
    near: bool = True  # Attention begins near (`models.gpt`); if not, places are sines that are added.
    bytes_per_parameter: float = 20  # Bytes to train on for each parameter outside of tables and logits.
    rates: str = "0.0005,0.001,0.002,0.004,0.008,0.016,0.032,0.064,0.128"
    """Peaks of the learning rate at 48 features that may be tried, separated by commas, the first one in the middle: it
    rises over a part of the steps, then falls by a cosine."""
    warm_up: float = 0.1  # The part of the steps in which the learning rate rises.
    batch: int = 4  # Rows per step, over all workers.
    workers: int = 4  # Simulated workers.
    evaluations: int = 6  # Evaluations on the test split in a run.
    searches: int = 2  # Rungs, from the first, on which rates are searched; later ones carry the best.
    seeds: int = 3  # Runs of each method at its best rate, with the seeds 0, 1, ...
    timed_steps: int = 20  # Timed steps of one worker.
    rate: str = "100mbit"  # Speed of the links, for the seconds.
    hours: float = math.inf  # No run starts after so many hours.
    json: Path | None = None  # File for the records; those that it has are not made again.
    committed: Path | None = None  # File whose last commit must hold the prediction; that of --json if not given.
    page: Path | None = None  # Page whose tables, between its marks, are written from the records.
    figure: Path | None = None  # File for the curves, as PNG.
    data_dir: Path | None = None  # Folder of prepared datasets.


def main(config: Config) -> None:
    """Trains what is missing, prints the tables, and writes the page and the figure."""
    check(config)
    prepare_jax()
    ladder = Ladder(config, Records(config.json), settings(config))
    try:
        print(ladder.climb())
    finally:
        tables = ladder.tables()
        for title, rows in tables.items():
            print_table(title, rows)
        if config.page is not None:
            write_tables(config.page, tables)
        if config.figure is not None:
            ladder.draw(config.figure)


def check(config: Config) -> None:
    """Raises ValueError for options that cannot work."""
    if config.experiment not in ("gpt_linux", "gpt_stdlib"):
        raise ValueError(f"--experiment must be gpt_linux or gpt_stdlib; got {config.experiment!r}.")
    harness.check_least(config, 1, "layers", "batch", "workers", "evaluations", "searches", "timed_steps")
    harness.check_least(config, 2, "seeds", "stages")
    harness.check_least(config, 0, "hours")
    widths = harness.numbers("--widths", config.widths, least=1)
    if len(widths) < 4 or widths != sorted(set(widths)):
        raise ValueError(
            f"--widths must rise, and be at least 4: three to predict from, and the last; got {config.widths}. Give "
            f"{Config.widths}, say."
        )
    rates = harness.numbers("--rates", config.rates, float, 0)
    if rates != sorted(set(rates)):
        raise ValueError(f"--rates must rise; got {config.rates}. Give {Config.rates}, say.")
    harness.check_run(config.rate, config.timed_steps, one=True)
    if not 0 <= config.warm_up < 1:
        raise ValueError(f"--warm-up must be a part of the steps, from 0 to 1; got {config.warm_up}. Give 0.1, say.")
    if config.page is not None and not all(mark in config.page.read_text() for mark in MARKS):
        raise ValueError(f"--page must have the lines {MARKS[0]} and {MARKS[1]}; got {config.page} without. Add them.")
    if config.batch % config.workers:
        raise ValueError(f"--batch must be a multiple of --workers; got {config.batch} for {config.workers}.")


@dataclass(frozen=True)
class Rung:
    """A model of the ladder: its width, its parameters outside of tables and logits, and the steps of a run."""

    width: int
    size: int
    steps: int


def rungs_of(config: Config, length: int) -> list[Rung]:
    """Returns the models, for rows of `length` bytes."""
    rungs = []
    for width in harness.numbers("--widths", config.widths):
        size = body_size(config.layers, width, config.near)
        rungs.append(Rung(width, size, round(config.bytes_per_parameter * size / (length * config.batch))))
    return rungs


def settings(config: Config) -> Record:
    """Returns what all runs of a file share: the text, and options.

    Raises:
      ValueError: if a run would read rows twice.
    """
    dataset = CONFIGS[config.experiment].dataset
    info = dataset_info(dataset, config.data_dir)
    last = rungs_of(config, info.length)[-1]
    if last.steps * config.batch > info.num_train:
        raise ValueError(
            f"A run must read no row twice; got {last.steps * config.batch:,} rows for {last.size:,} parameters, of "
            f"{info.num_train:,}. Lower --bytes-per-parameter, or leave out the width {last.width}."
        )
    names = ("layers", "near", "bytes_per_parameter", "warm_up", "batch", "workers", "evaluations")
    rows = open_split(dataset, "train", config.data_dir).identity
    about = {"dataset": dataset, **rows, "length": info.length} | {name: getattr(config, name) for name in names}
    return about if config.compare == "methods" else about | {"workers": 1, "stages": config.stages}


class Ladder:
    """The rungs, and the records of their runs."""

    def __init__(self, config: Config, records: Records, about: Record):
        """Takes what `settings` returns.

        Raises:
          ValueError: if the records have other settings, or a method is unknown.
        """
        records.check_same(about, lambda record: record.get("about", {}))
        self.config, self.records, self.about = config, records, about
        known, self.is_cut = COMPARED[config.compare], config.compare == "boundaries"
        names = config.methods.split(",") if config.methods else known
        self.entries = harness.choose(known, [BASELINE, *names])
        self._settings = {name: label(entry.method) for name, entry in self.entries.items()}
        self.stop = time.monotonic() + 3600 * config.hours
        self.rates = harness.numbers("--rates", config.rates, float)
        self.rungs = rungs_of(config, about["length"])

    def climb(self) -> str:
        """Trains what is missing, rung by rung; returns why it ended.

        Raises:
          ValueError: for a baseline whose seeds differ by more than `NOISE`, or a prediction that is not committed.
        """
        late = f"Stopped after {self.config.hours:g} hours; the same command goes on."
        *first, last = self.rungs
        for rung in first:
            if not self._train(rung):
                return late
        prediction = self.records.find(self._key("prediction", last))
        if prediction is None:
            self.predict()
            return "The last rung is predicted. Commit the file of records; then the same command trains it."
        self._check_committed(prediction)
        return "The ladder is complete." if self._train(last) else late

    def _train(self, rung: Rung) -> bool:
        """Trains a rung by its methods; returns False if the time is over."""
        for name in self._entries_of(rung):
            trainer = None
            while (trial := self._next_trial(rung, name)) is not None:
                if time.monotonic() >= self.stop:
                    return False
                trainer = trainer or self._trainer(rung, name, self.about["workers"])
                rate, seed = trial
                key = self._run_key(rung, name, rate, seed)
                run = self.records.add(key | _today() | trainer.run(rate, seed, self.config.evaluations))
                print(f"{rung.size:,} {name} {rate:g} seed {seed}: {run['loss']}, {run['seconds']:.0f} s", flush=True)
            if not self.is_cut:
                key = self._key("worker's step", rung, name)
                self.records.get(key, lambda rung=rung, name=name: _today() | self._time(rung, name))
            if name == BASELINE:
                self.check_baseline(rung)
        return True

    def _entries_of(self, rung: Rung) -> list[str]:
        """Returns the names of what is trained on a rung."""
        place = self.rungs.index(rung)
        return [name for name, entry in self.entries.items() if entry.rungs is None or place < entry.rungs]

    def _next_trial(self, rung: Rung, name: str) -> tuple[float, int] | None:
        """Returns the rate and the seed to train next; None if all that the rule asks for is recorded."""
        best = self.best(rung, name)
        if best is None:
            rate = self._next_rate(rung, name)
            return rate and (rate, 0)
        keys = {seed: self._run_key(rung, name, best, seed) for seed in range(self.config.seeds)}
        return next(((best, seed) for seed, key in keys.items() if self.records.find(key) is None), None)

    def _next_rate(self, rung: Rung, name: str) -> float | None:
        """Returns the rate that the search tries next; None once the best one has a worse one on both sides."""
        place = self.rungs.index(rung)
        start = self.best(self.rungs[place - 1], name) if place else self.rates[len(self.rates) // 2]
        tried = self._tried(rung, name)
        if start not in tried:
            return start
        best = self.rates.index(min(tried, key=lambda rate: tried[rate]))
        sides = (self.rates[side] for side in (best - 1, best + 1) if 0 <= side < len(self.rates))
        return next((rate for rate in sides if rate not in tried), None)

    def _tried(self, rung: Rung, name: str) -> dict[float, float]:
        """Returns the losses of the first seed by rate."""
        losses = {rate: self.losses(rung, name, rate) for rate in self.rates}
        return {rate: own[0] for rate, own in losses.items() if own}

    def _trainer(self, rung: Rung, name: str, workers: int) -> Trainer:
        entry, all_workers = self.entries[name], self.about["workers"]
        rows = self.config.batch * workers // all_workers
        return Trainer(
            Text(self.about["dataset"], self.config.data_dir, rows),
            self.config.layers,
            rung.width,
            entry.method,
            entry.optimizer,
            workers=workers,
            steps=rung.steps,
            warm_up=round(self.config.warm_up * rung.steps),
            start=round(entry.start * rung.steps),
            near=self.about["near"],
            boundary=gpt.boundaries(rung.width)[entry.boundary],
            stages=self.about.get("stages", 1),
        )

    def _time(self, rung: Rung, name: str) -> Record:
        return self._trainer(rung, name, 1).time(self.config.timed_steps)

    def _key(self, of: str, rung: Rung, name: str | None = None) -> Record:
        key = {"of": of, "about": self.about, "width": rung.width}
        return key | ({"method": name, "setting": self._settings[name]} if name else {})

    def _run_key(self, rung: Rung, name: str, rate: float, seed: int) -> Record:
        return self._key("run", rung, name) | {"rate": rate, "seed": seed}

    def runs(self, rung: Rung, name: str, rate: float) -> list[Record]:
        """Returns the recorded runs of a rate, by seed."""
        seeds = range(self.config.seeds)
        runs = (self.records.find(self._run_key(rung, name, rate, seed)) for seed in seeds)
        return [run for run in runs if run is not None]

    def losses(self, rung: Rung, name: str, rate: float) -> list[float]:
        """Returns the losses of a rate, by seed; infinity if a run diverged."""
        return or_infinite([run["loss"] for run in self.runs(rung, name, rate)])

    def best(self, rung: Rung, name: str) -> float | None:
        """Returns the rate with the least loss of the first seed, or the carried one; None without."""
        if rung == self.rungs[-1]:
            prediction = self.records.find(self._key("prediction", rung))
            return prediction and prediction["rates"].get(name)
        place = self.rungs.index(rung)
        if place >= self.config.searches:
            return self.best(self.rungs[place - 1], name)
        tried = self._tried(rung, name)
        is_over = tried and self._next_rate(rung, name) is None
        return min(rate for rate in tried if tried[rate] <= min(tried.values()) + TIE) if is_over else None

    def final(self, rung: Rung, name: str) -> list[float] | None:
        """Returns the losses of the best rate, by seed; None before all runs are recorded."""
        rate = self.best(rung, name)
        losses = [] if rate is None else self.losses(rung, name, rate)
        return losses if len(losses) == self.config.seeds else None

    def check_baseline(self, rung: Rung) -> None:
        """Raises ValueError if the baseline's seeds differ by more than `NOISE` at its best rate."""
        losses, rate = self.final(rung, BASELINE), self.best(rung, BASELINE)
        assert losses is not None
        spread = max(losses) - min(losses)
        if not spread <= NOISE:
            raise ValueError(
                f"The seeds of the baseline must end within {NOISE} nats of each other; got {spread:.3f} with "
                f"{rung.size:,} parameters at a rate of {rate:g}. Lower --rates, or raise --warm-up, in another file."
            )

    def predict(self) -> Record:
        """Records the losses and gaps of the last rung, from the others."""
        *first, last = self.rungs
        sizes, names = [rung.size for rung in first], self._entries_of(last)
        losses = {name: [self.final(rung, name) or [] for rung in first] for name in names}
        law = PowerLaw.fit(
            sizes, {name: [statistics.fmean(seeds) for seeds in rungs] for name, rungs in losses.items()}
        )
        drawn = [PowerLaw.fit(sizes, means) for means in draws(losses)]

        def gap(law: PowerLaw, name: str) -> float:
            return law.loss(name, last.size) - law.loss(BASELINE, last.size)

        return self.records.add(
            self._key("prediction", last)
            | _today()
            | {
                "rates": {name: self.best(first[-1], name) for name in names},
                "E": law.E,
                "losses": {name: law.loss(name, last.size) for name in names},
                "loss_intervals": {name: quantiles([one.loss(name, last.size) for one in drawn]) for name in names},
                "gaps": {name: gap(law, name) for name in names},
                "gap_intervals": {name: quantiles([gap(one, name) for one in drawn]) for name in names},
            }
        )

    def _check_committed(self, prediction: Record) -> None:
        path = (self.config.committed or self.config.json or Path("ladder.json")).absolute()
        show = ["git", "-C", str(path.parent), "show", f"HEAD:./{path.name}"]
        shown = subprocess.run(show, capture_output=True, text=True) if path.parent.is_dir() else None
        if shown is None or shown.returncode or prediction not in json.loads(shown.stdout):
            raise ValueError(
                f"The prediction of the last rung must be committed before it is trained; got none in the last commit "
                f"of {path}. Commit the records there; --committed names another file."
            )

    def tables(self) -> dict[str, list[Record]]:
        """Returns the tables of what is recorded, by title."""
        tables = {}
        for rung in self.rungs[:-1][: self.config.searches]:
            tried = {name: rates for name in self.entries if (rates := self._tried(rung, name))}
            shown = [rate for rate in self.rates if any(rate in rates for rates in tried.values())]
            rows = [self._sweep(rung, name, shown) for name in tried]
            if rows:
                title = f"{rung.size:,} parameters ({rung.width} features), {rung.steps:,} steps: loss by learning rate"
                tables[title] = rows
        done = [rung for rung in self.rungs if self.final(rung, BASELINE)]
        if done:
            title = f"Loss of the best rate, minus the baseline's; bytes and time with {done[-1].size:,} parameters"
            costs = {name: self._costs(done[-1], name) for name in self.entries if self.final(done[0], name)}
            absent = dict.fromkeys(itertools.chain(*costs.values()))  # of what is not trained on all rungs
            tables[title] = [self._gaps(done, name) | absent | row for name, row in costs.items()]
        prediction = self.records.find(self._key("prediction", self.rungs[-1]))
        if prediction is not None:
            title = f"Predicted for {self.rungs[-1].size:,} parameters on {prediction['day']}, and measured"
            tables[title] = [self._outcome(prediction, name) for name in prediction["losses"]]
        return tables

    def _sweep(self, rung: Rung, name: str, rates: Sequence[float]) -> Record:
        row: Record = {"method": self.entries[name].label}
        for rate in rates:
            losses = self.losses(rung, name, rate)
            spread = f" ({max(losses) - min(losses):.3f})" if len(losses) > 1 else ""
            row[f"{rate:g}"] = f"{statistics.fmean(losses):.3f}{spread}" if losses else None
        return row | {"best": self.best(rung, name)}

    def _gaps(self, rungs: Sequence[Rung], name: str) -> Record:
        row: Record = {"method": self.entries[name].label}
        complete = [rung for rung in rungs if self.final(rung, name) and self.final(rung, BASELINE)]
        for rung in rungs:
            losses, others = (self.final(rung, n) or [] for n in (name, BASELINE))
            if rung not in complete:
                text = None
            elif name == BASELINE:
                text = f"{statistics.fmean(losses):.3f}"
            else:
                gap = Difference.of(losses, others)
                text = f"{statistics.fmean(losses):.3f} {gap.mean:+.3f} ({gap.error:.3f})"
            row[f"{rung.size:,}"] = text
        return row | {"a doubling adds": self._trend(complete, name)}

    def _trend(self, rungs: Sequence[Rung], name: str) -> str | None:
        """Returns what the gap grows by when the parameters double, and its interval; None below two rungs."""
        if len(rungs) < 2 or name == BASELINE:
            return None
        losses = {n: [self.final(rung, n) or [] for rung in rungs] for n in (name, BASELINE)}
        x = np.log2([rung.size for rung in rungs])
        weights = (x - x.mean()) / np.sum((x - x.mean()) ** 2)  # of the least squares' slope

        def slope(means: Mapping[str, Any]) -> float:
            return float(weights @ (np.asarray(means[name]) - np.asarray(means[BASELINE])))

        low, high = quantiles([slope(means) for means in draws(losses)])
        return f"{slope({n: np.mean(rows, axis=1) for n, rows in losses.items()}):+.3f} ({low:+.3f} to {high:+.3f})"

    def _seconds(self, timed: Record, steps: int, received: float) -> float:
        """Returns the seconds of steps at the link's rate: computing, then the bytes that were received."""
        return timed["seconds"] * steps + 8 * received / bits_per_second(self.config.rate)

    def _best_runs(self, rung: Rung, name: str) -> list[Record]:
        return self.runs(rung, name, self.best(rung, name) or 0.0)

    def _costs(self, rung: Rung, name: str) -> Record:
        if not self.final(rung, name):
            return {}
        own, dense = (self._best_runs(rung, n)[0]["bytes_per_step"] for n in (name, BASELINE))
        row: Record = {"bytes a step": round(own), "fewer than dense": round(dense / own, 1)}
        timed = self.records.find(self._key("worker's step", rung, name))
        if self.is_cut or not self.records.find(self._key("worker's step", rung, BASELINE)):
            return row  # boundaries are not timed here, and other methods after the rung is trained
        received = rung.steps * own
        return row | {
            "a worker's step, ms": timed and round(1e3 * timed["seconds"], 1),
            f"run at {self.config.rate}, s": timed and round(self._seconds(timed, rung.steps, received)),
        }

    def _outcome(self, prediction: Record, name: str) -> Record:
        losses, others = (self.final(self.rungs[-1], n) for n in (name, BASELINE))
        loss, (low, high) = prediction["losses"][name], prediction["loss_intervals"][name]
        row: Record = {"method": self.entries[name].label, "rate": prediction["rates"][name]}
        row |= {"loss predicted": f"{loss:.3f} ({low:.3f} to {high:.3f})"}
        row |= {"loss": f"{statistics.fmean(losses):.3f}" if losses else None}
        gap, (low, high) = prediction["gaps"][name], prediction["gap_intervals"][name]
        difference = Difference.of(losses, others) if losses and others and name != BASELINE else None
        return row | {
            "gap predicted": None if name == BASELINE else f"{gap:+.3f} ({low:+.3f} to {high:+.3f})",
            "gap": difference and f"{difference.mean:+.3f} ({difference.error:.3f})",
        }

    def draw(self, path: Path) -> None:
        """Draws losses over parameters; and over bytes and time, of the largest model.

        Of what is trained on all rungs and complete on the first one, and the rungs on which all of these are complete.
        """
        names = [name for name in self._entries_of(self.rungs[-1]) if self.final(self.rungs[0], name)]
        if not names:
            print("Nothing is drawn: no method is complete on the first rung.")
            return
        done = [rung for rung in self.rungs if all(self.final(rung, name) for name in names)]
        top = done[-1]
        runs = {name: self._best_runs(top, name) for name in names}
        timed = {name: self.records.find(self._key("worker's step", top, name)) for name in names}

        def by_size(name: str) -> tuple[list[int], list[list[float]]]:
            losses = [self.final(rung, name) or [] for rung in done]
            return [rung.size for rung in done], [list(seed) for seed in zip(*losses, strict=True)]

        def by_bytes(name: str) -> tuple[list[float], list[list[float]]]:
            return [received / 1e6 for received in runs[name][0]["received"]], [run["losses"] for run in runs[name]]

        def by_time(name: str) -> tuple[list[float], list[list[float]]]:
            run, (_, losses) = runs[name][0], by_bytes(name)
            pairs = zip(run["steps"], run["received"], strict=True)
            return [self._seconds(timed[name] or {}, *pair) for pair in pairs], losses

        title = f"{top.size:,} parameters"
        panels = {
            "The end of every run": {name: by_size(name) for name in names},
            f"{title}, by bytes": {name: by_bytes(name) for name in names},
        }
        axes = ["parameters without tables", "MB received by a device", f"seconds at {self.config.rate}"]
        if all(timed.values()):
            panels[f"{title}, by time"] = {name: by_time(name) for name in names}
        draw(path, panels, axes[: len(panels)], "validation loss, nats a byte", x_scale="log", columns=len(panels))


def write_tables(page: Path, tables: Mapping[str, Sequence[Record]]) -> None:
    """Writes tables between the marks of a page."""
    before, _, rest = page.read_text().partition(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n\n{markdown(tables)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


def markdown(tables: Mapping[str, Sequence[Record]]) -> str:
    """Returns tables as Markdown, each under its title."""
    parts = []
    for title, rows in tables.items():
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = [names, ["---"] * len(names)]
        lines += [["" if row.get(name) is None else format_cell(row[name]) for name in names] for row in rows]
        parts.append(f"{title}:\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines))
    return "\n".join(parts)


def _today() -> Record:
    return {"day": date.today().isoformat()}


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
