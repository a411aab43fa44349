"""What a run prints at its end: a table of its methods, and what a link would make of it."""

import textwrap
from collections.abc import Sequence
from typing import Any

import jaxcomm as jc
from configs.experiment import Experiment
from jaxcomm.planner.links import bits_per_second, given_links
from train.metrics import Summary
from train.tables import WIDTH, display_name, print_table

LINK = "100mbit"  # an Ethernet for which the exchange is predicted
USUAL = ("accuracy", "loss")  # scores of every task


def print_results(
    experiment: Experiment, runs: Sequence[tuple[Summary, jc.accounting.WireReport]], *, on_a_link: bool
) -> None:
    """Prints the table of all runs, and a line on a slow link if nothing has crossed one.

    Args:
      experiment: the fields.
      runs: summary and bytes of each.
      on_a_link: whether the workers are in several processes, so that the time of a step has the link's in it.
    """
    title = (
        f"{experiment.name}: {experiment.workers} worker{'s' * (experiment.workers > 1)}, {experiment.steps} steps, "
        f"seed {experiment.seed}; bytes received by each worker"
    )
    print_table(title, table_rows([summary for summary, _ in runs]), width=WIDTH)
    one_each = experiment.devices == experiment.workers > 1 and experiment.slices == 1
    is_timed = all(summary.seconds_per_step for summary, _ in runs)
    if one_each and is_timed and not on_a_link and not experiment.delay:
        print(textwrap.fill(link_line(runs), WIDTH))


def table_rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """Returns the columns that fit a terminal; `--json` and `train report` have all of them."""
    has_skipped = any(summary.skipped for summary in summaries)
    rows = []
    for run in summaries:
        scores = {name.replace("_", " "): score for name, score in run.scores.items() if name not in USUAL}
        rows.append(
            {
                "method": display_name(run.method),
                "accuracy, %": 100 * run.accuracy,
                **scores,
                "bytes a step": run.bytes_per_step,
                "times fewer": run.ratio_to_dense,
                "ms a step": None if run.seconds_per_step is None else 1e3 * run.seconds_per_step,
                **({"skipped": run.skipped} if has_skipped else {}),
            }
        )
    return rows


def link_line(runs: Sequence[tuple[Summary, jc.accounting.WireReport]]) -> str:
    """Returns the time of a step on a slow link: its time here and, by `jaxcomm.planner`, its bytes' on the wire."""
    links, steps, wires = given_links(LINK), [], []
    for summary, report in runs:
        wire = links.wire(report).seconds
        steps.append(f"{_ms((summary.seconds_per_step or 0.0) + wire)} ms with {display_name(summary.method)}")
        wires.append(_ms(wire))
    rate = f"{bits_per_second(LINK) / 1e6:g} Mbit/s"
    return (
        f"Nothing crossed a link here. At {rate} a step would take {', '.join(steps)}: the time above, and "
        f"{' and '.join(wires)} ms on the wire, as jaxcomm.planner predicts. `python -m benchmarks.netlab` makes such "
        "a link on this machine."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
