"""Slim-DP's tables and figures (Sun et al., "Slim-DP: A Light Communication Data Parallelism for DNN", AAAI 2018).

    python -m benchmarks.papers.slim_dp --table 1 --json docs/data/papers.json

Table 1 and times: one exchange of gradients of the published shapes, on the hosts of `benchmarks.netlab`; for VGG-16,
of an eighth of the elements, times 8, unless --part says otherwise. Slim-DP's time is the mean over its period q, in
which one exchange selects a core. Quant-DP is its paper's: one shot, whose sums are not rounded again. Every worker
receives K - 1 payloads of it, with 8 workers as many bytes as dense. T_comp is timed with one worker alone on this
machine, and used for every K.

Table 2 and figures 3 and 4: the small twins of `configs/` on a dataset of 10 classes, so accuracy is top-1: the paper's
top-5 has no meaning there. As in the paper, the mean of each pixel is subtracted from images, which are not augmented,
with heavy-ball momentum and L2. A run selects as many cores as those of `configs/*_imagenet.py` do with the paper's q.
Seconds, and Speed_d and Speed_a, are steps times the step times of table 1, if --json has them. "why" trains
GoogLeNet's twin at half of the learning rate.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.conditions import heading
from benchmarks.papers import common
from benchmarks.papers.common import last_accuracies
from benchmarks.papers.report import Difference, all_hold, columns, draw, print_cause, print_claim
from benchmarks.papers.slim_dp_settings import (
    FAILED,
    HOURS,
    METHODS,
    PAPER_SPEEDS,
    PAPER_TIMES,
    TRADE_OFFS,
    WORKERS,
    Config,
    Times,
    communication,
    compute_ms,
    exchange_times,
    experiment_of,
    methods_of,
    period_of,
    speed_a,
    speed_d,
    times_of,
    train_all,
)
from configs.methods import PlumpDp
from train.records import Record, Records
from train.seeds import train_seeds
from train.tables import print_table, stdev

SAME = 1.0  # points of accuracy up to which two methods have the same
_QUANT = 'Quant-DP in one shot (collective="gather"), whose sums are not rounded again'


def table_1(config: Config, records: Records) -> None:
    """Times 10,000 mini-batches of every method."""
    rows, records_timed = list[Record](), list[Record]()
    for model in config.models:
        parts = config.parts(model)
        for K in config.workers:
            timed = exchange_times(config, records, model, K)
            records_timed += timed.values()
            compute = compute_ms(config, records, model)
            paper_compute, paper = PAPER_TIMES[model.name, K]
            for name, theirs in zip(METHODS, paper, strict=True):
                record = timed[model.exchanges[name]]
                ms, dense = (
                    parts * communication(timed_record, model.slim.q) for timed_record in (record, timed["plump_dp"])
                )
                rows.append(
                    {
                        "model": model.name,
                        "K": K,
                        "method": name,
                        "T_comp": compute * HOURS,
                        "paper_T_comp": paper_compute,
                        "T_comm": ms * HOURS,
                        "paper_T_comm": theirs,
                        "of_plump": ms / dense,
                        "paper_of_plump": theirs / paper[0],
                        "of_all": ms / (compute + ms),
                        "paper_of_all": theirs / (paper_compute + theirs),
                        "timed_part": f"1/{parts}" if parts > 1 else "all",
                        "timed_ms": record["ms_median"],
                        "ms_min": record["ms_min"],
                        "ms_max": record["ms_max"],
                        "ms_core_selection": record["ms_refresh"],
                        "bytes": record["bytes_compiled"],
                    }
                )
    title = (
        f"Table 1: hours for 10,000 mini-batches; T_comm at {config.rate}, medians of {config.timed_steps}; {_QUANT}; "
        f"T_comp of {', '.join(f'{model.rows} rows ({model.name})' for model in config.models)} a worker, alone here"
    )
    print_table(heading(title, records_timed), rows)
    for model in config.models:
        for K in config.workers:
            share = {row["method"]: row["of_plump"] for row in rows if (row["model"], row["K"]) == (model.name, K)}
            dense, *paper_times = PAPER_TIMES[model.name, K][1]
            quant, slim = (100 * (1 - theirs / dense) for theirs in paper_times)
            ours = {name: Difference(100 * (1 - share[name]), 0.0) for name in METHODS[1:]}
            print_claim(
                f"{model.name}, K={K}: Slim-DP saves {slim:.0f}% of the communication time, Quant-DP {quant:.0f}%",
                all_hold(
                    ours["slim_dp"].agrees(slim, or_more=True),
                    ours["quant_dp"].agrees(quant, or_more=True),
                    share["slim_dp"] < share["quant_dp"],
                ),
                f"{ours['slim_dp'].mean:.0f}% and {ours['quant_dp'].mean:.0f}%",
            )


def table_2(config: Config, records: Records) -> None:
    """Trains the twins: accuracy, and both speed-ups."""
    rows: list[Record] = []
    for model in config.models:
        for K in config.workers:
            runs = train_all(config, records, model, K)
            entries = model.exchanges.items()
            times = {name: times_of(config, records, model, K, entry) for name, entry in entries}
            for name, paper in zip(METHODS, PAPER_SPEEDS[model.name, K], strict=True):
                gain = Difference.of(last_accuracies(runs[name]), last_accuracies(runs["plump_dp"]))
                dense, method_times = times["plump_dp"], times[name]
                time_pair = None if method_times is None or dense is None else (dense, method_times)
                pairs = zip(runs["plump_dp"], runs[name], strict=True)
                speeds = [
                    speed for one, method_run in pairs if time_pair and (speed := speed_a(one, method_run, time_pair))
                ]
                rows.append(
                    {
                        "model": model.name,
                        "K": K,
                        "method": name,
                        **columns("top1", last_accuracies(runs[name]), gain, "minus_plump"),
                        "paper_top5": paper[0],
                        "paper_minus_plump": round(paper[0] - PAPER_SPEEDS[model.name, K][0][0], 2),
                        "speed_d": time_pair and speed_d(*time_pair),
                        "paper_speed_d": paper[1],
                        "speed_a": statistics.fmean(speeds) if speeds else None,
                        "speed_a_stdev": stdev(speeds) if speeds else None,
                        "reached": f"{len(speeds)} of {len(runs[name])}" if time_pair else "-",
                        "paper_speed_a": paper[2],
                    }
                )
                if name != "plump_dp":
                    print_claim(
                        f"{model.name}, K={K}: {name} has {paper[0]}%, Plump-DP {PAPER_SPEEDS[model.name, K][0][0]}%",
                        gain.agrees(rows[-1]["paper_minus_plump"], SAME),
                        f"{gain} points",
                    )
                if speeds and name == "slim_dp":
                    faster, ours = Difference.of(speeds, [1.0] * len(speeds)), rows[-1]["speed_d"]
                    is_known = len(speeds) == len(runs[name])  # of seeds that do not reach it, no time is known
                    print_claim(
                        f"{model.name}, K={K}: Slim-DP is {paper[2]} times faster to Plump-DP's accuracy, and "
                        f"{paper[1]} times for the same data",
                        all_hold(
                            faster.agrees(paper[2] - 1, or_more=True) if is_known else None,
                            Difference(ours - 1, 0.0).agrees(paper[1] - 1, or_more=True),
                        ),
                        f"{1 + faster.mean:.2f} and {ours:.2f} times",
                    )
    print_table(
        f"Table 2: top-1 accuracy in % of the twins on {config.dataset}, mean over {config.seeds} seeds; {_QUANT}; "
        "seconds from table 1; speed_a over the seeds that reached Plump-DP's last accuracy",
        rows,
    )
    print("The paper's accuracy is top-5 of 1,000 classes; of 10 classes top-5 has no meaning, and ours is top-1.")
    if any(row["speed_d"] is None for row in rows):
        print("Speed_d and Speed_a need the times of --table 1, which --json does not have: run that first.")


def _axis(config: Config, times: Mapping[Any, Times | None]) -> tuple[str, dict[Any, float]]:
    """Returns what the x axis shows, and for every curve the units of it per step."""
    seconds = {name: time_of_step.seconds for name, time_of_step in times.items() if time_of_step is not None}
    if len(seconds) == len(times):
        return f"seconds at {config.rate}, steps times table 1", seconds
    print("Drawn against steps: --json has not all times of --table 1.")
    return "steps", dict.fromkeys(times, 1.0)


def _lines(runs: Mapping[str, Sequence[Record]], units: Mapping[str, float]) -> dict[str, Any]:
    return {
        name: ([units[name] * step for step in seeds[0]["steps"]], [run["accuracies"] for run in seeds])
        for name, seeds in runs.items()
    }


def figure_3(config: Config, records: Records) -> None:
    """Draws accuracy against time, from the runs of table 2."""
    cells = [(model, K) for model in config.models for K in config.workers]
    runs = {cell: train_all(config, records, *cell) for cell in cells}
    times = {
        (model, K, name): times_of(config, records, model, K, entry)
        for model, K in cells
        for name, entry in model.exchanges.items()
    }
    x, units = _axis(config, times)
    panels = {
        f"{model.name}, K={K}": _lines(runs[model, K], {name: units[model, K, name] for name in METHODS})
        for model, K in cells
    }
    draw(config.figure("papers_slim_dp_fig3.png"), panels, x, "top-1 accuracy, %")


def figure_4(config: Config, records: Records) -> None:
    """Trains GoogLeNet's twin with the five (alpha, beta); the one without exploration also with longer periods."""
    model, K = config.models[0], WORKERS[0]
    experiment = experiment_of(config, model, K)
    q = period_of(model, experiment.steps)
    # With as many selections as the paper; with a quarter of them; and with the first core for the whole run.
    periods = [q, experiment.steps + 1] if config.smoke else [q, 4 * q, experiment.steps + 1]
    dense, method = train_seeds(records, experiment, PlumpDp(), config.seeds), model.slim
    runs, rows = {}, []
    for alpha, beta in TRADE_OFFS:
        for period in periods if alpha == beta else periods[:1]:
            setting = dataclasses.replace(method, alpha=alpha, beta=beta, q=period)
            runs[alpha, beta, period] = train_seeds(records, experiment, setting, config.seeds)
    for (alpha, beta, period), seeds in runs.items():
        gain = Difference.of(last_accuracies(seeds), last_accuracies(dense))
        timed = times_of(config, records, model, K, TRADE_OFFS[alpha, beta])
        rows.append(
            {
                "alpha": alpha,
                "beta": beta,
                "q": period,
                **columns("top1", last_accuracies(seeds), gain, "minus_plump"),
                "bytes_per_step": seeds[0]["bytes_per_step"],
                "seconds_per_step": timed and timed.seconds,
            }
        )
    print_table(f"Figure 4: {experiment.name} on {config.dataset}, K={K}, {experiment.steps} steps", rows)
    _claims_of_figure_4(dense, runs, q)
    entries = {"plump_dp": "plump_dp"} | {f"({a}, {b})": entry for (a, b), entry in TRADE_OFFS.items()}
    x, units = _axis(config, {name: times_of(config, records, model, K, entry) for name, entry in entries.items()})
    labelled = {f"({a}, {b})": seeds for (a, b, period), seeds in runs.items() if period == q}
    halves = {
        "Exploration and exploitation": ("plump_dp", "(0.3, 0.0)", "(0.3, 0.15)", "(0.3, 0.3)"),
        "Accuracy and speed": ("plump_dp", "(0.2, 0.1)", "(0.3, 0.15)", "(0.5, 0.25)"),
    }
    panels = {
        title: _lines({name: ({"plump_dp": dense} | labelled)[name] for name in keys}, units)
        for title, keys in halves.items()
    }
    unexplored = {f"(0.3, 0.3), q={period}": seeds for (a, b, period), seeds in runs.items() if a == b}
    panels["No exploration"] = _lines(
        {"plump_dp": dense} | unexplored, units | dict.fromkeys(unexplored, units["(0.3, 0.3)"])
    )
    draw(config.figure("papers_slim_dp_fig4.png"), panels, x, "top-1 accuracy, %", columns=3)


def _claims_of_figure_4(dense: Sequence[Record], runs: Mapping[Any, Sequence[Record]], q: int) -> None:
    best, plump = last_accuracies(runs[0.3, 0.15, q]), last_accuracies(dense)
    better = [Difference.of(best, last_accuracies(runs[0.3, beta, q])) for beta in (0.0, 0.3)]
    print_claim(
        "(0.3, 0.15) is better than (0.3, 0) and (0.3, 0.3)",
        all_hold(*(difference.exceeds() for difference in better)),
        f"by {better[0]} and {better[1]} points",
    )
    gain = Difference.of(last_accuracies(runs[0.3, 0.0, q]), plump)
    print_claim("(0.3, 0) is slightly better than Plump-DP", gain.exceeds(), f"{gain} points")
    for (alpha, beta, period), seeds in runs.items():
        if alpha == beta:
            loss = Difference.of(plump, last_accuracies(seeds))
            print_claim(
                f"(0.3, 0.3) fails to converge (here with q={period}; failed: {FAILED:g} points below Plump-DP)",
                loss.exceeds(FAILED),
                f"{loss} points below",
            )
    shortfall = Difference.of(plump, last_accuracies(runs[0.2, 0.1, q]))
    print_claim("(0.2, 0.1) does not reach Plump-DP's accuracy", shortfall.exceeds(), f"{shortfall} points below")
    surplus = Difference.of(last_accuracies(runs[0.5, 0.25, q]), best)
    print_claim(
        "(0.5, 0.25) has the accuracy of (0.3, 0.15)",
        surplus.agrees(0.0, SAME),
        f"{surplus} points; up to {SAME:g} counts as the same",
    )


def why(config: Config, records: Records) -> None:
    """Trains GoogLeNet's twin, of which one seed falls to 10% with Slim-DP, at half of the learning rate."""
    model, K = config.models[0], WORKERS[0]
    experiment = experiment_of(config, model, K)
    method = methods_of(model, experiment.steps)["slim_dp"]
    rows, differences = [], {}
    for rate in (experiment.learning_rate, experiment.learning_rate / 2):
        slower = dataclasses.replace(experiment, learning_rate=rate)
        runs, dense = (train_seeds(records, slower, choice, config.seeds) for choice in (method, PlumpDp()))
        gain = Difference.of(last_accuracies(runs), last_accuracies(dense))
        rows.append(
            {
                "learning_rate": rate,
                "top1": statistics.fmean(last_accuracies(runs)),
                "min": min(last_accuracies(runs)),
                "stdev": stdev(last_accuracies(runs)),
                "plump_top1": statistics.fmean(last_accuracies(dense)),
                "minus_plump": gain.mean,
                "standard_error": gain.error,
            }
        )
        differences[f"a learning rate of {rate:g}"] = gain
    print_table(f"Slim-DP and Plump-DP, {experiment.name} on {config.dataset}, K={K}, {experiment.steps} steps", rows)
    print_cause(
        f"a seed of {model.name}'s twin fails since the learning rate is at the edge of what trains", differences
    )


TABLES = {"1": table_1, "2": table_2, "fig3": figure_3, "fig4": figure_4, "why": why}
TIMED = ("1",)

if __name__ == "__main__":
    common.run(Config, TABLES, __doc__, timed=TIMED, devices=max(WORKERS))
