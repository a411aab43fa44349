"""Every method with several seeds: `python -m train compare [NAME] [options]`.

A method is compiled once, and its seeds share the program. With --json, each run is recorded in that file as soon as it
ends; a later call, after one that was stopped or with more methods or seeds, trains only what is missing.

Time to finish is modelled: steps * (compute + bytes / rate), where compute is the median step of the dense run on this
machine (its workers are simulated, and exchange through memory) and bytes are what a worker receives per step. It
includes neither a method's own computation nor the latency of the link.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scipy.stats
import tyro

from configs import take_config
from configs.comparison import DENSE, SETTINGS, Comparison
from configs.experiment import Experiment, check
from configs.methods import Method
from jaxcomm.planner.links import bits_per_second
from train.processes import prepare_jax
from train.records import Record, Records
from train.seeds import settings_of, train_seeds
from train.tables import WIDTH, print_table, setting_of, stdev, write_records

CONFIDENCE = 0.95


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 0."""
    experiment, args = take_config(argv)
    config = tyro.cli(Comparison, args=args, prog=f"python -m train compare {experiment.name}")
    experiment = dataclasses.replace(
        experiment,
        steps=experiment.steps if config.steps is None else config.steps,
        workers=experiment.workers if config.workers is None else config.workers,
        data_dir=config.data_dir,
    )
    check(experiment, 1)
    prepare_jax(experiment.devices)
    compare(experiment, config)
    return 0


def compare(experiment: Experiment, config: Comparison, settings: Sequence[tuple[str, Method]] = SETTINGS) -> None:
    """Trains the chosen settings, and writes a table and a figure.

    Args:
      experiment: what is trained; its method and its seed are ignored.
      config: which methods, with how many seeds.
      settings: the methods to choose from, each with the label of its setting.

    Raises:
      ValueError: for an unknown method, an invalid rate, fewer than one seed, settings of the experiment that cannot
        work, or a --json file of other settings.
      SystemExit: if a signal stops it.
    """
    from train.folders import run_folder
    from train.methods import make_chain

    bits = bits_per_second(config.rate)
    if config.seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {config.seeds}.")
    if not 0 <= config.margin < math.inf:
        raise ValueError(f"--margin must be at least 0 and finite; got {config.margin}. 0.5 is half a point, say.")
    # One evaluation and one checkpoint, at the end; a method that diverges is a result.
    steps = experiment.steps
    experiment = dataclasses.replace(experiment, eval_every=steps, checkpoint_every=steps, max_skipped=steps + 1)
    check(experiment, 1)
    selected = choose(config.methods, {(method.name, label): method for label, method in settings})
    if config.delay:
        late = {key: method for key, method in selected.items() if method.period is None}
        selected = {("plump_dp", "at once"): DENSE} | late
    check(dataclasses.replace(experiment, delay=config.delay), 1)
    for method in selected.values():
        make_chain(experiment, method)  # raises its errors before anything is trained
    records = Records(config.json)
    shared_settings = {"experiment": experiment.name, **_shared(settings_of(experiment, DENSE))}
    records.check_same(shared_settings, lambda record: {**record, **_shared(record.get("about", {}))})
    with run_folder(config.out, f"{experiment.name}-compare", resume=False) as folder:
        _compare_in(folder, experiment, config, selected, records, bits)


def _compare_in(
    folder: Path,
    experiment: Experiment,
    config: Comparison,
    selected: dict[tuple[str, str], Method],
    records: Records,
    bits: float,
) -> None:
    from train.figures import draw_comparison

    compute, rows, begin = 0.0, [], time.monotonic()
    seeds = f"{config.seeds} seed{'s' * (config.seeds > 1)}"
    print(f"{len(selected)} settings with {seeds} each; --methods topk,powersgd trains fewer", flush=True)
    for (name, label), method in selected.items():
        delay = config.delay if rows else 0  # dense comes first, without delay
        runs = train_seeds(records, dataclasses.replace(experiment, delay=delay), method, config.seeds, prints=False)
        seconds = statistics.median(run["seconds_per_step"] for run in runs)
        compute = compute or seconds
        row = summarise(runs, dense=rows[0]["accuracies"] if rows else None, margin=config.margin)
        row |= {
            "method": name,
            "setting": label,
            "delay": delay,
            "workers": experiment.workers,
            "steps": experiment.steps,
            "compute_seconds_per_step": compute,
            "seconds_to_finish": experiment.steps * (compute + 8 * row["bytes_per_step"] / bits),
            "rate": config.rate,
            "measured_seconds_per_step": seconds,
            "fields": method.options(),
        }
        rows.append(row)
        minutes = (time.monotonic() - begin) / len(rows) * (len(selected) - len(rows)) / 60
        print(
            f"{len(rows)}/{len(selected)} {setting_of(row)}: {row['accuracy_mean']:.2f}%, "
            f"{row['bytes_per_step']:,.0f} bytes a step{f'; {minutes:.0f} minutes left' if minutes >= 0.5 else ''}",
            flush=True,
        )
        write_records(folder / "comparison.json", rows)  # keeps what is done so far
    print_table(
        f"{experiment.name}: test accuracy in % over {seeds}; points below dense, paired by seed, with "
        f"their 95% interval (worse: by more than {config.margin:g}); bytes received per worker and step; seconds "
        f"to finish at {config.rate}, modelled as steps * ({1000 * compute:.2f} ms + bytes / rate)",
        [_columns(row) for row in rows],
        width=WIDTH,
    )
    draw_comparison(folder / "comparison.png", rows)
    print(f"comparison.json and comparison.png are in {folder}")


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of the table, which fits a terminal; comparison.json has the other numbers."""
    high, difference = row["below_high"], row["points_below_dense"]
    return {
        "method": setting_of(row),
        "accuracy, %": f"{row['accuracy_mean']:.2f}",
        "below dense": f"{difference:.2f}" + (f" ± {high - difference:.2f}" if high is not None else ""),
        "bytes a step": row["bytes_per_step"],
        "times fewer": row["ratio_to_dense"],
        "s to finish": row["seconds_to_finish"],
        "verdict": row["verdict"],
    }


def _shared(about: Mapping[str, Any]) -> Record:
    """Returns the settings that all runs of a comparison share."""
    excluded = ("seed", "delay")
    return {name: value for name, value in about.items() if name not in excluded and not name.startswith("method")}


def choose(names: str, settings: dict[tuple[str, str], Method]) -> dict[tuple[str, str], Method]:
    """Returns the settings of some methods, dense first.

    Args:
      names: of methods, separated by commas; "all" for all of them. Dashes and underscores are interchangeable.
      settings: by the name of the method and the label of the setting.

    Raises:
      ValueError: for a method that has no setting.
    """
    names_of_methods = list(dict.fromkeys(name for name, _ in settings))
    requested = names_of_methods if names == "all" else [name.strip().replace("-", "_") for name in names.split(",")]
    plain = {name.replace("_", ""): name for name in names_of_methods}
    for name in requested:
        if name.replace("_", "") not in plain:
            raise ValueError(
                f"--methods must be some of {', '.join(names_of_methods)}, or all; got {name!r}. Name those to train."
            )
    names_wanted = {plain[name.replace("_", "")] for name in requested}
    dense = {key: method for key, method in settings.items() if method == DENSE}
    return dense | {key: method for key, method in settings.items() if key[0] in names_wanted}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of the interval of a mean, by Student's t; there must be two values or more."""
    quantile = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def summarise(runs: Sequence[Record], *, dense: Sequence[float] | None, margin: float) -> dict[str, Any]:
    """Makes a row of the table from the runs of one setting.

    The points below dense are the mean over pairs of runs with the same seed; their interval is Student's t.

    Args:
      runs: of `train_seeds`.
      dense: accuracies in % of the dense runs with the same seeds; None if `runs` are the dense ones.
      margin: points below dense that do not count as worse.
    """
    accuracies = [100 * run["scores"]["accuracy"] for run in runs]
    losses = [math.inf if run["scores"]["loss"] is None else run["scores"]["loss"] for run in runs]
    mean, first = statistics.fmean(accuracies), runs[0]
    pairs = [0.0] if dense is None else [base - accuracy for base, accuracy in zip(dense, accuracies, strict=True)]
    difference, low, high, verdict = statistics.fmean(pairs), None, None, ""
    if len(pairs) > 1:
        low, high = interval(pairs)
        verdict = "not worse" if high <= margin else "worse" if low > margin else "not told apart"
    return {
        "seeds": len(runs),
        "accuracy_mean": mean,
        "accuracy_stdev": stdev(accuracies),
        "accuracy_min": min(accuracies),
        "accuracy_max": max(accuracies),
        "accuracies": accuracies,
        "points_below_dense": difference,
        "below_low": low,
        "below_high": high,
        "margin": margin,
        "verdict": verdict,
        "loss_mean": statistics.fmean(losses),
        "loss_stdev": stdev(losses) if math.inf not in losses else None,
        "bytes_per_step": statistics.fmean(run["bytes_per_step"] for run in runs),
        "ratio_to_dense": first["dense_bytes"] / first["bytes_per_step"] if first["bytes_per_step"] else None,
        "overflow_per_step": statistics.fmean(run["overflow_per_step"] for run in runs),
        "skipped": sum(run["skipped"] for run in runs),
    }
