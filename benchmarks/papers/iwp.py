"""Importance weighted pruning's table and figures.

Source: Cheng and Xu, "Bandwidth Reduction using Importance Weighted Pruning on Ring AllReduce", 2019.

    python -m benchmarks.papers.iwp --table 1 --json docs/data/papers.json

Table I, figures 5 and 6: the small twins of AlexNet and ResNet-50, with heavy-ball momentum, L2, warm-up and local
clipping, all tensors compressed. Each threshold is tuned until the values that a worker sends have the paper's ratio;
the ratio of all bytes on the wire, with masks and empty slots, is also shown. Ratios are those after the warm-up.
"one_ratio" compares both kinds of threshold at the ratio of the fixed one. "resnet101" trains a twin of the model that
the paper names without figures.

"why" trains the row of table I that loses most four times as long, with the same threshold; and ResNet-50's twin with
twice the width, at the paper's largest threshold; and a small network with masks kept for 100 steps, of which a new one
sends all that has waited, its mean over these steps, or none of it.

"thresholds" tries the paper's four thresholds, with slots for every coordinate; "nodes" does so with 96 simulated
workers. "staleness" counts how often parameters change, and keeps masks for up to 300 steps. Figures 2 to 4 are made by
`benchmarks.importance`. Figures 7 and 8 show what a host's interface receives in a run on the hosts of
`benchmarks.netlab`.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.importance import updates
from benchmarks.papers import common
from benchmarks.papers.common import last_accuracies
from benchmarks.papers.iwp_figures import importance_figures, network
from benchmarks.papers.iwp_settings import (
    BATCH_101,
    EVERY_101,
    FORGOTTEN,
    NODES,
    RESNET_101,
    ROOM,
    STALE,
    STALE_ALPHA,
    STALE_SPANS,
    STALE_STEPS,
    STEPS_101,
    TABLE,
    THRESHOLDS,
    TOLERANCE,
    Config,
    Discounted,
    Row,
    fixed_row,
    pruning,
    steady,
    tune,
)
from benchmarks.papers.report import Difference, columns, draw, print_cause, print_claim
from configs.experiment import Architecture, Experiment
from configs.methods import Iwp, Method, PlumpDp, TernGrad
from jaxcomm import methods
from train.records import Record, Records
from train.seeds import settings_of, train_seeds
from train.tables import print_table, stdev


def _method_of(
    config: Config, records: Records, row: Row, experiment: Experiment, tolerance: float = TOLERANCE
) -> Method:
    """Returns a row's method, with its threshold tuned if it has one."""
    if row.alpha is None:
        return TernGrad() if row.method == "TernGrad" else PlumpDp()

    def at(alpha: float) -> Iwp:
        return pruning(experiment, alpha, row.beta, min(1.0, ROOM / row.ratio))

    def ratio(alpha: float) -> float:
        (run,) = train_seeds(records, experiment, at(alpha), 1)
        times = steady(run, at(alpha).warmup_steps)[0]
        print(f"{row.model}, {row.method}: alpha={alpha:.4g} sends {times:.1f} times fewer values, wanted {row.ratio}")
        return times

    return at(row.alpha if config.smoke else tune(ratio, row.ratio, row.alpha, tolerance))


def _runs(config: Config, records: Records, row: Row, tolerance: float = TOLERANCE) -> tuple[Method, list[Record]]:
    experiment = config.twin(row.twin)
    method = _method_of(config, records, row, experiment, tolerance)
    return method, train_seeds(records, experiment, method, config.seeds)


def _ratios(method: Method, runs: Sequence[Record]) -> dict[str, float | None]:
    warm = method.warmup_steps if isinstance(method, Iwp) else 0
    values, wire = zip(*(steady(run, warm) for run in runs), strict=True)
    return {
        "values_ratio": statistics.fmean(values) if isinstance(method, Iwp) else None,
        "wire_ratio": statistics.fmean(wire),
    }


def table_1(config: Config, records: Records) -> None:
    """Trains both twins with every method of the table."""
    rows: list[Record] = []
    runs: dict[tuple[str, str], list[Record]] = {}
    table = TABLE[:4] if config.smoke else TABLE
    for row in table:
        method, row_runs = _runs(config, records, row)
        base = runs.get((row.model, "Baseline"), row_runs)
        runs[row.model, row.method] = row_runs
        gain = Difference.of(last_accuracies(row_runs), last_accuracies(base))
        paper = round(row.accuracy - next(entry.accuracy for entry in TABLE if entry.model == row.model), 2)
        rows.append(
            {
                "model": row.model,
                "method": row.method,
                "alpha": method.alpha if isinstance(method, Iwp) else None,
                **columns("top1", last_accuracies(row_runs), gain, "minus_base"),
                "paper_top1": row.accuracy,
                "paper_minus_base": paper,
                **_ratios(method, row_runs),
                "paper_ratio": row.ratio,
                "overflow_per_step": statistics.fmean(run["overflow_per_step"] for run in row_runs),
            }
        )
        if row.alpha is not None:
            print_claim(
                f"{row.model}, {row.method} keeps the accuracy at {row.ratio} times fewer ({paper:+.2f} points)",
                gain.exceeds(-0.5),
                f"{gain} points at {rows[-1]['values_ratio']:.1f} times fewer values, {rows[-1]['wire_ratio']:.1f} "
                "times fewer bytes; up to half a point counts as kept",
            )
    print_table(
        f"Table I: top-1 accuracy in % of the twins on {config.dataset}, K={config.workers}, mean over {config.seeds} "
        "seeds; times fewer values sent, and bytes received, after the warm-up",
        rows,
    )


def resnet_101(config: Config, records: Records) -> None:
    """Trains a twin of ResNet-101, for which the paper has no figures, at the ratio of ResNet-50."""
    row = fixed_row("ResNet-50")
    changes = {"global_batch": BATCH_101, **({} if config.steps else {"steps": STEPS_101})}
    experiment = config.twin(row.twin, **changes, **({} if config.smoke else {"architecture": RESNET_101}))
    experiment = dataclasses.replace(experiment, eval_every=min(EVERY_101, experiment.steps))
    tuned = _method_of(config, records, row, experiment)
    base, rows = last_accuracies(train_seeds(records, experiment, PlumpDp(), config.seeds)), []
    for method in (PlumpDp(), tuned):
        runs = train_seeds(records, experiment, method, config.seeds)
        gain = Difference.of(last_accuracies(runs), base)
        rows.append(
            {
                "method": method.name,
                "alpha": method.alpha if isinstance(method, Iwp) else None,
                "parameters": runs[0]["parameters"],
                **columns("top1", last_accuracies(runs), gain, "minus_base"),
                **_ratios(method, runs),
            }
        )
    print_table(
        f"ResNet-101's twin, all its layers and a sixteenth of its width, on {config.dataset}, K={config.workers}, "
        f"{experiment.steps} steps of {experiment.global_batch} rows, mean over {config.seeds} seeds",
        rows,
    )
    print_claim(
        "pruning keeps the accuracy of ResNet-101 as of the others (it has no figures)",
        gain.exceeds(-0.5),
        f"{gain} points at {rows[-1]['values_ratio']:.1f} times fewer values; up to half a point counts as kept",
    )


def one_ratio(config: Config, records: Records) -> None:
    """Compares layer-wise thresholds, tuned to the ratio of the fixed one, with that: in table I the ratios differ."""
    rows = []
    for model in dict.fromkeys(row.model for row in TABLE[: 1 if config.smoke else None]):
        fixed, layerwise = (row for row in TABLE if row.model == model and row.alpha is not None)
        experiment, first = config.twin(fixed.twin), _runs(config, records, layerwise)[0]
        assert isinstance(first, Iwp)
        tuned = dataclasses.replace(layerwise, ratio=fixed.ratio, alpha=first.alpha)
        runs = {row.method: _runs(config, records, row, TOLERANCE / 2) for row in (fixed, tuned)}
        base = last_accuracies(train_seeds(records, experiment, PlumpDp(), config.seeds))
        for name, (method, own) in runs.items():
            gain = Difference.of(last_accuracies(own), base)
            assert isinstance(method, Iwp)
            rows.append(
                {
                    "model": model,
                    "method": name,
                    "alpha": method.alpha,
                    "beta": method.beta,
                    **columns("top1", last_accuracies(own), gain, "minus_base"),
                    **_ratios(method, own),
                }
            )
        gain = Difference.of(*(last_accuracies(own) for _, own in reversed(runs.values())))
        ratios = [row["values_ratio"] for row in rows[-2:]]
        print_claim(
            f"{model}: layer-wise is more accurate than fixed",
            gain.exceeds() if abs(ratios[1] / ratios[0] - 1) <= TOLERANCE else None,
            f"{gain} points, at {ratios[1]:.1f} and {ratios[0]:.1f} times fewer values (up to {100 * TOLERANCE:g}% "
            "apart counts as one ratio)",
        )
    print_table(
        f"Both thresholds at one ratio, with the same slots: the twins on {config.dataset}, K={config.workers}, mean "
        f"over {config.seeds} seeds",
        rows,
    )


def why(config: Config, records: Records) -> None:
    """Varies what is supposed to be why: a run's length, the network's width, and what has waited for a mask."""
    _why_accuracy(config, records)
    _why_ratio(config, records)
    _why_stale(config, records)


def _why_accuracy(config: Config, records: Records) -> None:
    """Trains the row of table I that loses most, and its baseline, for longer."""
    row = fixed_row("AlexNet")
    experiment = config.twin(row.twin)
    method = _method_of(config, records, row, experiment)
    assert isinstance(method, Iwp)
    rows, differences = [], {}
    for length in (experiment, config.longer(experiment.steps).twin(row.twin)):
        pruned = pruning(length, method.alpha, method.beta, method.density)
        runs = train_seeds(records, length, pruned, config.seeds)
        base = train_seeds(records, length, PlumpDp(), config.seeds)
        gain = Difference.of(last_accuracies(runs), last_accuracies(base))
        values = _ratios(pruned, runs)["values_ratio"]
        assert values is not None
        rows.append(
            {
                "steps": length.steps,
                "alpha": method.alpha,
                "top1": statistics.fmean(last_accuracies(runs)),
                "stdev": stdev(last_accuracies(runs)),
                "base_top1": statistics.fmean(last_accuracies(base)),
                "minus_base": gain.mean,
                "standard_error": gain.error,
                "values_ratio": values,
                "values_sent_in_the_run": length.steps / values,
            }
        )
        differences[f"{length.steps} steps"] = gain
    print_table(
        f"{row.model}'s twin with the fixed threshold, K={config.workers}, {config.seeds} seeds; how often a value is "
        "sent in the run, on average",
        rows,
    )
    print_cause(
        f"{row.model}'s twin loses accuracy since a value is sent only {rows[0]['values_sent_in_the_run']:.2g} times "
        "in the run",
        differences,
    )


def _why_ratio(config: Config, records: Records) -> None:
    """Trains ResNet-50's twin with the paper's largest threshold, as it is and twice as wide."""
    row, alpha = fixed_row("ResNet-50"), max(THRESHOLDS)
    rows, differences = [], {}
    for name, times in (("its own width", 1), ("twice that width", 2)):
        experiment = _widened(config.twin(row.twin), times)
        method = pruning(experiment, alpha)
        runs = train_seeds(records, experiment, method, config.seeds)
        ratios = [steady(run, method.warmup_steps)[0] for run in runs]
        rows.append(
            {
                "parameters": runs[0]["parameters"],
                "values_ratio": statistics.fmean(ratios),
                "stdev": stdev(ratios),
                "paper_ratio": row.ratio,
            }
        )
        differences[name] = Difference.of(ratios, [row.ratio] * config.seeds)
    print_table(
        f"{row.model}'s twin with a threshold of {alpha:g}, K={config.workers}, {config.seeds} seeds; times fewer "
        "values sent",
        rows,
    )
    print_cause(
        f"at the paper's largest threshold {row.model}'s twin sends too many values since it is narrow",
        differences,
        base=f"the paper's ratio of {row.ratio:g}",
    )


def _why_stale(config: Config, records: Records) -> None:
    """Keeps masks for 100 steps; a new one sends all that has waited, its mean over these steps, or none of it."""
    experiment, method = _stale(config)
    brief, lasting = (dataclasses.replace(method, life_span=span) for span in (1, STALE_SPANS[0]))
    base = [run["accuracy"] for run in _updates(config, records, experiment, brief)]
    accuracies = {"all that has waited": [run["accuracy"] for run in _updates(config, records, experiment, lasting)]}
    settings: dict[str, Any] = {
        attribute.name: getattr(lasting, attribute.name) for attribute in dataclasses.fields(methods.Iwp)
    }
    for name, factor in (("its mean over the steps", 1 / lasting.life_span), ("none of it", FORGOTTEN)):
        discounted: Any = Discounted(**settings, factor=factor)
        runs = train_seeds(records, experiment, discounted, config.seeds)
        accuracies[name] = last_accuracies(runs)
    differences = {name: Difference.of(values, base) for name, values in accuracies.items()}
    print_table(
        f"Masks kept for {lasting.life_span} steps: {experiment.name}, K={experiment.workers}, {experiment.steps} "
        f"steps, {config.seeds} seeds; with a mask for one step {statistics.fmean(base):.1f}%",
        [
            {
                "a_new_mask_sends": name,
                **columns("top1", values, differences[name], "minus_one_step"),
            }
            for name, values in accuracies.items()
        ],
    )
    print_cause(
        f"with a mask for {lasting.life_span} steps the model is lost since a new one sends all that has waited",
        differences,
        base="a mask for one step",
    )


def _stale(config: Config) -> tuple[Experiment, Iwp]:
    experiment = config.twin("digits", **({} if config.steps else {"steps": STALE_STEPS}))
    return experiment, pruning(experiment, STALE_ALPHA, density=min(1.0, ROOM / fixed_row("ResNet-50").ratio))


def _widened(experiment: Experiment, times: int) -> Experiment:
    architecture = experiment.architecture
    wider = {"width": times * architecture.options["width"]} if "width" in architecture.options else {}
    return dataclasses.replace(
        experiment, architecture=Architecture(architecture.name, {**architecture.options, **wider})
    )


def _try_thresholds(config: Config, records: Records, experiment: Experiment, title: str) -> None:
    base = train_seeds(records, experiment, PlumpDp(), config.seeds)
    rows: list[Record] = []
    for alpha in (None, *THRESHOLDS[: 1 if config.smoke else None]):
        method = PlumpDp() if alpha is None else pruning(experiment, alpha)
        runs = base if alpha is None else train_seeds(records, experiment, method, config.seeds)
        gain = Difference.of(last_accuracies(runs), last_accuracies(base))
        rows.append(
            {
                "threshold": alpha,
                **columns("top1", last_accuracies(runs), gain, "minus_base"),
                "values_ratio": _ratios(method, runs)["values_ratio"],
                "skipped": sum(run["skipped"] for run in runs),
            }
        )
    print_table(
        f"{title}: {experiment.name} on {experiment.dataset}, K={experiment.workers}, {experiment.steps} steps, mean "
        f"over {config.seeds} seeds; room for every coordinate, so that the threshold alone decides",
        rows,
    )
    lowest = min(row["values_ratio"] for row in rows if row["values_ratio"])
    highest = max(row["values_ratio"] for row in rows if row["values_ratio"])
    print_claim(
        "thresholds from 0.005 to 0.1 send tens of times fewer values (58.8 and 47.6 times with ResNet-50)",
        highest >= 40,
        f"{lowest:.3g} to {highest:.3g} times fewer",
    )


def staleness(config: Config, records: Records) -> None:
    """Counts how often a parameter changes, with a new mask in every step, and with masks for 100 and 300 steps."""
    experiment, pruned = _stale(config)
    spans = (None, 1, *STALE_SPANS)[: 2 if config.smoke else None]
    runs: dict[int | None, list[Record]] = {}
    rows: list[Record] = []
    for span in spans:
        method = PlumpDp() if span is None else dataclasses.replace(pruned, life_span=span)
        own = runs[span] = _updates(config, records, experiment, method)
        gain = Difference.of(*([run["accuracy"] for run in runs[key]] for key in (span, None)))
        shares = [_shares_of_counts(run["tensors"]) for run in own]
        never = [max(_shares_of_counts([tensor])[0] for tensor in run["tensors"]) for run in own]
        n = sum(tensor["n"] for tensor in own[0]["tensors"])
        rows.append(
            {
                "mask_for": span,
                **columns("top1", [run["accuracy"] for run in own], gain, "minus_base"),
                "times_fewer_changes": statistics.fmean(n * run["steps"] / run["changes"] for run in own),
                **dict(zip(STALE, (statistics.fmean(column) for column in zip(*shares, strict=True)), strict=True)),
                "never_in_a_tensor_%": statistics.fmean(never),
            }
        )
        if span == 1:
            between = Difference.of([share[STALE.index("100_to_300_%")] for share in shares], [50.0] * len(own))
            print_claim(
                "most of the parameters are updated between 100 and 300 steps",
                between.exceeds(),
                f"{50 + between.mean:.0f}% of them are",
            )
        elif span is not None:
            lost = Difference.of(*([run["accuracy"] for run in runs[key]] for key in (1, span)))
            print_claim(
                f"staleness degrades the model (a mask for {span} steps)", lost.exceeds(), f"{lost} points lost"
            )
    print_table(
        f"Staleness: {experiment.name}, K={experiment.workers}, {experiment.steps} steps, a fixed threshold of "
        f"{STALE_ALPHA:g}, mean over {config.seeds} seeds; parameters by how often they change after the warm-up; the "
        "tensor of which most never do",
        rows,
    )


def _updates(config: Config, records: Records, experiment: Experiment, method: Method) -> list[Record]:
    warm = _stale(config)[1].warmup_steps
    key = {"of": "updates", "about": settings_of(experiment, method), "seeds": config.seeds}
    return records.get(key, lambda: {"runs": updates(experiment, method, config.seeds, warm)})["runs"]


def _shares_of_counts(tensors: Sequence[Record]) -> list[float]:
    """Returns the parameters of each count, in %."""
    sums = [sum(column) for column in zip(*(tensor["counts"] for tensor in tensors), strict=True)]
    return [100 * each / sum(sums) for each in sums]


def thresholds(config: Config, records: Records) -> None:
    """Trains ResNet-50's twin with the paper's four thresholds."""
    _try_thresholds(config, records, config.twin("resnet_digits"), "The paper's thresholds")


def nodes(config: Config, records: Records) -> None:
    """Trains a small network with as many simulated workers as the paper has."""
    count = 8 if config.smoke else NODES
    experiment = config.twin(
        "digits", workers=count, global_batch=2 * count, **({} if config.steps else {"steps": 150})
    )
    _try_thresholds(config, records, experiment, f"{count} simulated nodes")


def curves(config: Config, records: Records) -> None:
    """Draws the accuracy and the loss of ResNet-50's twin, from the runs of table I: figures 5 and 6."""
    runs = {row.method: _runs(config, records, row)[1] for row in TABLE if row.model == "ResNet-50"}
    panels = {
        title: {
            method: (method_runs[0]["steps"], [run[name] for run in method_runs])
            for method, method_runs in runs.items()
        }
        for title, name in (("Fig. 5: test accuracy, %", "accuracies"), ("Fig. 6: train loss", "train_losses"))
    }
    draw(config.figure("papers_iwp_fig5_fig6.png"), panels, "step", "")
    rows = [
        {
            "method": method,
            "steps": method_runs[0]["steps"][-1],
            "accuracy": statistics.fmean(last_accuracies(method_runs)),
            "stdev": stdev(last_accuracies(method_runs)),
            "train_loss": statistics.fmean(run["train_losses"][-1] for run in method_runs),
            "test_loss": statistics.fmean(run["losses"][-1] for run in method_runs),
        }
        for method, method_runs in runs.items()
    ]
    print_table(f"Figures 5 and 6: ResNet-50's twin on {config.dataset}, {config.seeds} seeds", rows)


TABLES = {
    "1": table_1,
    "one_ratio": one_ratio,
    "resnet101": resnet_101,
    "why": why,
    "thresholds": thresholds,
    "staleness": staleness,
    **dict.fromkeys(("fig2", "fig3", "fig4"), importance_figures),
    **dict.fromkeys(("fig5", "fig6"), curves),
    **dict.fromkeys(("fig7", "fig8"), network),
    "nodes": nodes,
}
TIMED = ("fig7", "fig8")

if __name__ == "__main__":
    common.run(Config, TABLES, __doc__, timed=TIMED, devices=NODES)
