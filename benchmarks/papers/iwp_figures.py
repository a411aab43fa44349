"""Figures 2, 3, 4, 7 and 8 of importance weighted pruning: importance, and what a host receives."""

import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.conditions import check_control, heading
from benchmarks.importance import EDGES, measure
from benchmarks.netlab import Lab, parse_rate
from benchmarks.papers.iwp_settings import ROOM, Config, fixed_row, pruning
from benchmarks.papers.report import draw, print_claim
from benchmarks.trace import Trace
from configs.experiment import Architecture
from train.loop import describe
from train.records import Record, Records
from train.tables import print_table, stdev


def importance_figures(config: Config, records: Records) -> None:
    """Trains ResNet-50's twin, and draws the importance of its gradients: figures 2, 3 and 4."""
    runs = _importance_runs(config, records)
    tensors, centres = runs[0]["tensors"], ((EDGES[1:] + EDGES[:-1]) / 2).tolist()
    rows: list[Record] = []
    panels = {}
    kinds = {"convolution": "Fig. 2: convolutions", "normalisation": "Fig. 3: batch normalisation, scales"}
    for kind, title in kinds.items():
        # The biases of batch normalisation start at 0, relative to which every gradient is infinitely important.
        places = [i for i, tensor in enumerate(tensors) if tensor["kind"] == kind and "bias" not in tensor["name"]]
        rows += [_importance_row(runs, i) for i in places]
        if places:
            samples = dict.fromkeys(places[round(part * (len(places) - 1) / 3)] for part in range(4))
            panels[title] = {
                tensors[i]["name"]: (centres, [_shares(run["tensors"][i]) for run in runs]) for i in samples
            }
    print_table(
        f"Importance on {config.dataset}, mean over {config.seeds} seeds: in the first and the last tenth of the "
        f"{runs[0]['steps'][-1]} steps, means over the tensor, and variance over mean",
        rows,
    )
    _claims_of_importance(runs)
    draw(config.figure("papers_iwp_fig2_fig3.png"), panels, "importance, log10", "% of the coordinates")
    place = _downsample(runs[0])
    lines = {tensors[place]["name"]: (runs[0]["steps"], [run["tensors"][place]["spreads"] for run in runs])}
    panels = {"Fig. 4: the first downsample": lines}
    draw(config.figure("papers_iwp_fig4.png"), panels, "step", "variance over mean of the importance", scale="log")


def _importance_runs(config: Config, records: Records) -> list[Record]:
    """Returns a record of `benchmarks.importance` per seed; histograms are after a tenth, half and all of the steps."""
    kind = {"architecture": Architecture("cnn")} if config.smoke else {}  # the panels are of convolutions
    experiment, row = config.twin("resnet_digits", **kind), fixed_row("ResNet-50")
    assert row.alpha is not None
    method = pruning(experiment, row.alpha, density=min(1.0, ROOM / row.ratio))
    steps, interval = experiment.steps, experiment.eval_every
    marks = (max(1, steps // 10), steps // 2, steps)
    seeds = [dataclasses.replace(experiment, seed=seed) for seed in range(config.seeds)]
    about = [describe(seeded, method) | {"marks": marks, "every": interval} for seeded in seeds]
    keys = [{"of": "importance", "experiment": experiment.name, "about": description} for description in about]
    gaps = [seed for seed, key in enumerate(keys) if records.find(key) is None]
    if gaps:
        for seed, record_of_seed in zip(
            gaps, measure(experiment, method.scheduled(), interval, marks, gaps), strict=True
        ):
            records.add(keys[seed] | record_of_seed)
    return [record for key in keys if (record := records.find(key)) is not None]


def _shares(tensor: Record) -> list[float]:
    """Returns the histogram after half of the steps, in % of the coordinates."""
    return [100 * count / tensor["n"] for count in tensor["histograms"][1]]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Returns the means of the first and of the last tenth."""
    tenth = max(1, len(values) // 10)
    return statistics.fmean(values[:tenth]), statistics.fmean(values[-tenth:])


def _importance_row(runs: Sequence[Record], index: int) -> Record:
    series = [run["tensors"][index] for run in runs]
    means, spreads = ([_ends(entry[name]) for entry in series] for name in ("means", "spreads"))
    return {
        "tensor": series[0]["name"],
        "kind": series[0]["kind"],
        "n": series[0]["n"],
        **{
            f"{name}_{moment}": statistics.fmean(pair[place] for pair in pairs)
            for name, pairs in (("mean", means), ("var/mean", spreads))
            for place, moment in enumerate(("first", "last"))
        },
        "stdev_of_last_mean": stdev([pair[1] for pair in means]),
    }


def _claims_of_importance(runs: Sequence[Record]) -> None:
    ratios = []
    for run in runs:
        means = [_ends(tensor["means"])[1] for tensor in run["tensors"] if tensor["kind"] == "convolution"]
        ratios.append(max(means) / min(means))
    print_claim(
        "the importance of different layers has different means",
        min(ratios) > 2,
        f"the convolutions' means are {min(ratios):.3g} to {max(ratios):.3g} times apart, by seed; twice counts",
    )
    changes = []
    for run in runs:
        first, last = _ends(run["tensors"][_downsample(run)]["spreads"])
        changes.append(last / first)
    print_claim(
        "variance over mean of the first downsample changes drastically over training",
        all(not 0.5 < change < 2 for change in changes),
        f"by {min(changes):.3g} to {max(changes):.3g} times, by seed; twice counts",
    )


def _downsample(run: Record) -> int:
    """Returns the place of the first shortcut convolution; with --smoke, whose network has none, 0."""
    return next((i for i, tensor in enumerate(run["tensors"]) if "shortcut.convolution" in tensor["name"]), 0)


def network(config: Config, records: Records) -> None:
    """Trains ResNet-50's twin on hosts, densely and pruned, and draws what one receives: figures 7 and 8."""
    bits = parse_rate(config.rate)
    row = fixed_row("ResNet-50")
    density = ROOM / row.ratio
    pruned = ["--method.alpha", str(row.alpha), "--method.density", str(density), "--method.dense-below", "0"]
    traces = {
        "Fig. 7: baseline": _trace(config, records, ["method:plump-dp"]),
        "Fig. 8: importance weighted pruning": _trace(config, records, ["method:iwp", *pruned]),
    }
    check_control(traces.values())
    rows = []
    for title, record in traces.items():
        rates = active(record["kB_per_s"])
        rows.append(
            {
                "figure": title,
                "seconds": record["seconds"][-1],
                "received_kB": record["received_kB"],
                "kB_per_s_mean": statistics.fmean(rates),
                "kB_per_s_90%": statistics.quantiles(rates, n=10)[-1] if len(rates) > 1 else rates[0],
                "of_the_link_90%": 8e3 * statistics.quantiles(rates, n=10)[-1] / bits if bits and rates[1:] else None,
                "isolated": str(record["isolated"]),
            }
        )
    title = f"Figures 7 and 8: what host 0 of {config.hosts} receives while it trains, at {config.rate}"
    print_table(heading(title, traces.values()), rows)
    base, ours = rows
    print_claim(
        "the baseline's network I/O is close to full load, and that of pruning far below",
        None if base["of_the_link_90%"] is None else base["of_the_link_90%"] > 0.8 and ours["of_the_link_90%"] < 0.4,
        f"{base['kB_per_s_mean']:.0f} and {ours['kB_per_s_mean']:.0f} kB/s on average while training",
    )
    panels = {title: {"host 0": (record["seconds"], [record["kB_per_s"]])} for title, record in traces.items()}
    draw(config.figure("papers_iwp_fig7_fig8.png"), panels, "seconds", "received, kB/s")


def active(rates: Sequence[float]) -> list[float]:
    """Returns the samples in which the middle 90% of the bytes arrive; before them, programs are compiled."""
    totals = list(itertools.accumulate(rates))
    samples = [rate for rate, sum_ in zip(rates, totals, strict=True) if 0.05 * totals[-1] < sum_ <= 0.95 * totals[-1]]
    return samples or [0.0]


def _trace(config: Config, records: Records, method: list[str]) -> Record:
    """Returns the series of one run on hosts: seconds, and kB/s since the previous sample."""
    experiment = config.twin("resnet_digits", workers=config.hosts)
    steps = experiment.steps
    options = {"steps": steps, "workers": config.hosts, "eval-every": steps, "checkpoint-every": steps}
    options |= {"warmup-steps": experiment.warmup_steps, "dataset": config.dataset, "decay": "l2"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = ["train", experiment.name, "--no-baseline", "--no-nesterov", *words]
    key = {"of": "trace", "command": " ".join([*command, *method]), "hosts": config.hosts, "rate": config.rate}
    return records.get(key, lambda: _traced(config, [*command, *method]))


def _traced(config: Config, command: list[str]) -> Record:
    trace = Trace()
    with tempfile.TemporaryDirectory() as scratch, Lab(config.hosts, config.rate) as lab:
        name, *options = command
        place = options.index(next(word for word in options if word.startswith("method:")))
        data = ["--data-dir", str(config.data_dir)] if config.data_dir else []
        options[place:place] = ["--out", scratch, *data]
        conditions = lab.conditions()
        results = lab.run([sys.executable, "-m", name, *options], env=dict(os.environ), trace=trace)
        isolated = lab.isolated
    failed = [result for result in results if result.returncode]
    if failed:
        raise ValueError(f"host {failed[0].host} failed:\n{failed[0].stderr[-2000:]}")
    series = trace.records()
    return {
        **conditions,
        "isolated": isolated,
        "received_kB": series[-1]["received"] / 1e3,
        "seconds": [round(sample["seconds"], 3) for sample in series],
        "kB_per_s": [round(sample["kB_per_s"], 2) for sample in series],
    }
