"""Figures 2, 5 and 7 of dynamic communication thresholding: thresholds, and the costs of life-span and sparsity."""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks import thresholds
from benchmarks.conditions import check_control
from benchmarks.papers import timing
from benchmarks.papers.dct_settings import (
    DEVIATION,
    FIG_2,
    FIG_5,
    LIFE_SPAN,
    LIFE_SPANS,
    PAPER_TIME_SAVED,
    SAME,
    SPARSITIES,
    Config,
    methods_of_figure_7,
    percent_of,
)
from benchmarks.papers.report import Difference, all_hold, draw, print_claim
from benchmarks.papers.slim_dp_settings import averaged
from configs.experiment import BoundaryFields, Experiment
from configs.methods import PlumpDp
from train.loop import describe
from train.records import Record, Records
from train.seeds import train_seeds
from train.tables import print_table, stdev

_LAYER = "1"  # the second layer of the bottom MLP, 512 x 256; the paper does not say which one it shows
_SMALLEST_MEAN = 1e-12  # of a threshold; below it, the logarithm is meaningless


def _key(kind: str, experiment: Experiment, seeds: int, **extra: Any) -> Record:
    return {"of": kind, "about": describe(experiment, PlumpDp()), "seeds": seeds, **extra}


def figure_2(config: Config, records: Records) -> None:
    """Trains by DCT-DP at every sparsity with thresholds renewed in every step, and draws those of a layer."""
    experiment = config.dlrm(workers=2)
    skipped, interval = experiment.steps // 10, max(1, experiment.steps // 100)
    lines, rows = {}, []
    for sparsity in FIG_2[2:3] if config.smoke else FIG_2:
        key = _key("gradient thresholds", experiment, config.seeds, sparsity=sparsity)
        runs = records.get(key, lambda s=sparsity: _gradients(config, experiment, s, skipped, interval))["runs"]
        name = f"{100 * sparsity:g}%"
        steps = [interval * (1 + i) for i in range(len(runs[0]["thresholds"]))]
        lines[name] = (steps, [run["thresholds"] for run in runs])
        of_layer = [run["deviations"][_LAYER] for run in runs]
        rows.append(
            {
                "sparsity": sparsity,
                "mean_threshold": statistics.fmean(run["mean"] for run in runs),
                "stdev": stdev([run["mean"] for run in runs]),
                "deviation_%": statistics.fmean(of_layer),
                "deviation_max_%": max(of_layer),
                "deviation_all_layers_%": max(max(run["deviations"].values()) for run in runs),
                "paper_deviation_%": DEVIATION if sparsity == 0.95 else None,
            }
        )
    print_table(
        f"Figure 2: the threshold of a layer's gradient and residual in {experiment.steps} steps, {config.seeds} "
        f"seeds; its largest deviation from the running mean, from step {skipped + 1} on",
        rows,
    )
    (row,) = (entry for entry in rows if entry["sparsity"] == 0.95)
    print_claim(
        f"at 95% the threshold deviates by at most {DEVIATION:g}% from its running mean",
        row["deviation_max_%"] <= DEVIATION,
        f"by {row['deviation_max_%']:.0f}% in this layer, and by {row['deviation_all_layers_%']:.0f}% in one of all 8",
    )
    means = [entry["mean_threshold"] for entry in rows]
    print_claim(
        "the threshold rises with the sparsity",
        None if len(means) == 1 else means == sorted(means),
        ", ".join(f"{100 * entry['sparsity']:g}%: {entry['mean_threshold']:.3g}" for entry in rows),
    )
    draw(config.figure("papers_dct_fig2.png"), {"Fig. 2": lines}, "step", "threshold", scale="log")


def _gradients(config: Config, experiment: Experiment, sparsity: float, skipped: int, interval: int) -> Record:
    runs = []
    for run in thresholds.of_gradients(experiment, sparsity, config.seeds):
        series: Mapping[str, list[float]] = run["thresholds"]
        layer_series = series[_LAYER]
        runs.append(
            {
                "thresholds": [float(f"{value:.4g}") for value in layer_series[interval - 1 :: interval]],
                "mean": statistics.fmean(layer_series[skipped:]),
                "deviations": {name: thresholds.deviation(each, skipped) for name, each in series.items()},
            }
        )
    return {"runs": runs}


def figure_5(config: Config, records: Records) -> None:
    """Trains without compression and by DCT-MP, and draws the threshold of the activations at the cut."""
    dense = config.dlrm(workers=1)
    dense_runs = _activations(config, records, dense, FIG_5)
    lines, rows = {}, []
    for place, sparsity in enumerate(FIG_5):
        if config.smoke and place:
            break
        sparse = dataclasses.replace(dense, stages=2, boundary=BoundaryFields(sparsity))
        dense_means = [run["thresholds"][place] for run in dense_runs]
        with_it = [run["thresholds"][0] for run in _activations(config, records, sparse, (sparsity,))]
        steps, name = dense_runs[0]["steps"], f"{100 * sparsity:g}%"
        lines |= {f"{name}, without": (steps, dense_means), f"{name}, by DCT-MP": (steps, with_it)}
        ends = [[series[-1] for series in runs] for runs in (dense_means, with_it)]
        change = _logarithms(ends[1], ends[0])
        rows.append(
            {
                "sparsity": sparsity,
                "first_without": statistics.fmean(series[0] for series in dense_means),
                "last_without": statistics.fmean(ends[0]),
                "first_by_dct_mp": statistics.fmean(series[0] for series in with_it),
                "last_by_dct_mp": statistics.fmean(ends[1]),
                "last_quotient": None if change is None else math.exp(change.mean),
            }
        )
        fell = None if change is None else change.exceeds()
        print_claim(
            f"at {name}, thresholds of activations fall significantly faster with DCT-MP",
            None if fell is None else not fell,
            "some are 0"
            if change is None
            else f"at the end they are {math.exp(change.mean):.2f} times those of the run without it",
        )
    print_table(
        f"Figure 5: mean thresholds of 256 activations a sample, {dense.steps} steps, mean over {config.seeds} seeds",
        rows,
    )
    draw(config.figure("papers_dct_fig5.png"), {"Fig. 5": lines}, "step", "mean threshold of the activations")


def _activations(config: Config, records: Records, experiment: Experiment, sparsities: tuple[float, ...]) -> Any:
    def make() -> Record:
        measure = thresholds.of_activations
        return {"runs": measure(experiment, PlumpDp(), sparsities, experiment.eval_every, config.seeds)}

    key = _key("activation thresholds", experiment, config.seeds, sparsities=sparsities)
    return records.get(key, make)["runs"]


def theorem(config: Config, records: Records) -> None:
    """Trains by DCT-MP, and measures the assumption of the paper's theorem 1, and the gradients that it equates."""
    rows = []
    for sparsity in FIG_5[: 1 if config.smoke else None]:
        experiment = config.dlrm(workers=1, stages=2, boundary=BoundaryFields(sparsity))
        key = _key("theorem", experiment, config.seeds)

        def make(experiment: Experiment = experiment, sparsity: float = sparsity) -> Record:
            return {"runs": thresholds.of_theorem(experiment, PlumpDp(), sparsity, config.seeds)}

        runs = records.get(key, make)["runs"]
        of_runs = {name: [run[name] for run in runs] for name in runs[0]}
        rows.append(
            {"sparsity": sparsity}
            | {f"{name}_%": statistics.fmean(values) for name, values in of_runs.items()}
            | {f"{name}_stdev": stdev(values) for name, values in of_runs.items()}
        )
        for name, claim in (
            ("activations", "mean activations are equal with a row's threshold and with the mean one, assumption (1)"),
            ("gradient", "so are mean gradients"),
            ("without", "and mean gradients are equal with thresholds and without any"),
        ):
            apart = Difference.of(of_runs[name], [0.0] * len(runs))
            print_claim(
                f"at {100 * sparsity:g}%, {claim}",
                apart.agrees(0.0, SAME),
                f"they are {apart}% apart (up to {SAME:g}% counts as the same)",
            )
    print_table(
        f"Theorem 1: the DLRM in two stages after {experiment.steps} steps, all training rows, mean over "
        f"{config.seeds} seeds; norms of differences, and the spread of the rows' thresholds",
        rows,
    )


def _logarithms(ours: list[float], theirs: list[float]) -> Difference | None:
    """Returns the differences of the logarithms; None if a threshold is 0, as where few activations are nonzero."""
    if min(*ours, *theirs) < _SMALLEST_MEAN:
        return None
    return Difference.of([math.log(mean) for mean in ours], [math.log(mean) for mean in theirs])


def figure_7(config: Config, records: Records) -> None:
    """Trains by DCT-DP with every life-span and sparsity, and times an exchange of each sparsity.

    A run is twice as long as the life-span of 1000, so that it differs from one with 10,000.
    """
    steps = {} if config.steps else {"steps": 2 * LIFE_SPAN}
    experiment, settings = config.dlrm(workers=2, **steps), methods_of_figure_7()
    settings_of_run = dict(list(settings.items())[: 1 if config.smoke else None])
    dense = train_seeds(records, experiment, PlumpDp(), config.seeds)
    runs = {key: train_seeds(records, experiment, method, config.seeds) for key, method in settings_of_run.items()}
    baseline, times = step_times(config, records, sorted({sparsity for _, sparsity in settings_of_run}))
    rows: dict[tuple[int, float], Record] = {}
    for (span, sparsity), span_runs in runs.items():
        train, test = (
            percent_of([run[name][-1] for run in span_runs], [run[name][-1] for run in dense])
            for name in ("train_losses", "losses")
        )
        ms = averaged(*times[sparsity], span)
        rows[span, sparsity] = {
            "life_span": span,
            "sparsity": sparsity,
            "ms": ms,
            "time_saved_%": 100 * (1 - ms / baseline),
            "paper_time_saved_%": PAPER_TIME_SAVED.get(span) if sparsity == 0.95 else None,
            "train_over_dense_%": train.mean,
            "test_over_dense_%": test.mean,
            "standard_error": test.error,
        }
        print_claim(
            f"life-span {span}, {100 * sparsity:g}%: the test loss is that of the baseline",
            test.agrees(0.0, SAME),
            f"{test}% over dense (up to {SAME:g}% counts as the same)",
        )
    print_table(
        f"Figure 7: {experiment.name}, K={experiment.workers}, {experiment.steps} steps, mean over {config.seeds} "
        f"seeds; ms of a step of {config.hosts} hosts at {config.rate}, {baseline:.1f} without compression",
        list(rows.values()),
    )
    print(
        "Thresholds are refreshed once in each life-span, as in Algorithm 1: a run with a life-span of at least "
        f"{experiment.steps} steps keeps those of its first step, and what they select beyond the capacity waits."
    )
    _claims_of_figure_7({span: rows[span, 0.95]["time_saved_%"] for span in LIFE_SPANS if (span, 0.95) in rows})
    _draw_figure_7(config, rows)


def step_times(
    config: Config, records: Records, sparsities: list[float]
) -> tuple[float, dict[float, tuple[float, float]]]:
    """Returns the milliseconds of a step, computing and exchange, of a DLRM with 26 tables of 10,000 rows.

    Returns:
      The time with the dense exchange; and by sparsity, those with DCT-DP: (a usual step, one that renews thresholds).
    """
    shapes, steps = "1e4" if config.smoke else "dlrm", config.timed_steps
    options: dict[str, Any] = {"shapes": shapes, "hosts": config.hosts, "rate": config.rate, "steps": steps}
    compute = timing.time_compute(records, "dlrm_clicks", 128, steps)["ms_median"]
    dense = timing.time_exchanges(records, methods=["plump_dp"], **options)["plump_dp"]
    times = {}
    for sparsity in sparsities:
        timed = timing.time_exchanges(records, methods=["dct_dp"], sparsity=sparsity, **options)["dct_dp"]
        check_control([dense, timed])
        times[sparsity] = (compute + timed["ms_median"], compute + timed["ms_refresh"])
    return compute + dense["ms_median"], times


def _claims_of_figure_7(savings: Mapping[int, float]) -> None:
    texts = {span: f"{saving:+.1f}%" for span, saving in savings.items()}
    holds = Difference(savings[1], 0.0).agrees(PAPER_TIME_SAVED[1])
    print_claim("a life-span of 1 takes 11% longer than the baseline", holds, f"it saves {texts[1]} here")
    if LIFE_SPAN in savings:
        print_claim(
            f"a life-span of {LIFE_SPAN} saves 23%, and 10,000 nothing more",
            all_hold(
                Difference(savings[LIFE_SPAN], 0.0).agrees(PAPER_TIME_SAVED[LIFE_SPAN], or_more=True),
                savings[10_000] - savings[LIFE_SPAN] < 1,
            ),
            f"{texts[LIFE_SPAN]} and {texts[10_000]}; up to one point counts as nothing",
        )


def _draw_figure_7(config: Config, rows: Mapping[tuple[int, float], Record]) -> None:
    panels: dict[str, Any] = {}
    spans = [span for span in LIFE_SPANS if (span, 0.95) in rows]
    sparsities = [sparsity for sparsity in SPARSITIES if (LIFE_SPAN, sparsity) in rows]
    for title, axis, keys in (
        ("L (log10), at 95%", [math.log10(span) for span in spans], [(span, 0.95) for span in spans]),
        (f"sparsity, %, L={LIFE_SPAN}", [100 * s for s in sparsities], [(LIFE_SPAN, s) for s in sparsities]),
    ):
        if keys:
            panels[f"Time, by {title}"] = {"saved, %": (axis, [[rows[key]["time_saved_%"] for key in keys]])}
            names = {"train": "train_over_dense_%", "test": "test_over_dense_%"}
            panels[f"Loss over dense, by {title}"] = {
                name: (axis, [[rows[key][column] for key in keys]]) for name, column in names.items()
            }
    draw(config.figure("papers_dct_fig7.png"), panels, "", "%")
