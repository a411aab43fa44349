"""Dynamic communication thresholding's tables and figures.

Source: Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism", KDD
2021.

    python -m benchmarks.papers.dct --table 1 --json docs/data/papers.json

Tables 1 to 3, 6 and 7: the DLRM with the paper's MLPs on generated clicks, by `benchmarks.dct`; compare losses relative
to the dense run's. "cuts": the same by DCT-MP, with up to 5 cuts. "feedback": table 7 without error feedback. Table 4:
the small transformer on Django's messages. Table 5: losses from table 1 and the time of a step in stages, by
`benchmarks.boundary`. Figures 2 and 5: thresholds while the DLRM trains, by `benchmarks.thresholds`, which also
measures what theorem 1 assumes ("theorem"). Figure 7: losses of the DLRM, and times by `benchmarks.exchange`. "hybrid":
a step of workers with stages on hosts, by `benchmarks.hybrid_dct`. "why": the setting of table 1 that fails first, on
four times as many rows; and table 4's, where all activations are sent in 4 bits, or learned numbers.
"""

import dataclasses
import statistics
from collections.abc import Callable
from functools import partial

from benchmarks import dct
from benchmarks.conditions import headed, heading
from benchmarks.papers import common, timing
from benchmarks.papers.common import LONGER
from benchmarks.papers.dct_figures import figure_2, figure_5, figure_7, theorem
from benchmarks.papers.dct_settings import (
    CUTS,
    NO_FEEDBACK,
    SAME,
    START,
    STEPS,
    SYSTEMS,
    TABLE_4,
    TABLE_5,
    Config,
    Hybrid,
    percent_of,
    topk_alone,
    trained,
)
from benchmarks.papers.report import Difference, all_hold, print_cause, print_claim
from configs.experiment import BoundaryFields
from configs.methods import PlumpDp
from train.data.click_parser import first_test_row
from train.data.click_store import GENERATED_ROWS
from train.records import Record, Records
from train.seeds import train_seeds
from train.tables import print_table, stdev

# What may cross between the stages of the small transformer.
TRANSLATED = {
    "the largest 10%": BoundaryFields(0.9),
    "two linear layers alone: 64 numbers": BoundaryFields(rank=64),
    "16 learned numbers": BoundaryFields(rank=16),
    "8 learned numbers": BoundaryFields(rank=8),
    "4 learned numbers": BoundaryFields(rank=4),
    "8 learned numbers of 4 bits": BoundaryFields(value_dtype="int4", rank=8),
    "all of them in 4 bits": BoundaryFields(value_dtype="int4"),
}


def _settings(config: Config, system: str) -> list[dct.Setting]:
    settings = [setting for setting in dct.SETTINGS if setting.system == system]
    return settings[:1] if config.smoke else settings


def _losses(table: str, config: Config, records: Records) -> None:
    """Trains the dense DLRM, and the table's system at every sparsity."""
    base = dct.SETTINGS[0]
    dense = trained(config, records, base)
    rows: list[Record] = []
    for setting in [base, *_settings(config, SYSTEMS[table])]:
        row_of_setting, paper = trained(config, records, setting), setting.paper
        gain = percent_of(row_of_setting["losses"], dense["losses"])
        theirs = 100 * (paper.loss / base.paper.loss - 1)
        rows.append(
            {
                "system": setting.system,
                "workers_of_a_model": setting.stages,
                "sparsity": setting.sparsity,
                "train_loss": row_of_setting["train_loss"],
                "paper_train_loss": paper.train_loss,
                "train_accuracy": row_of_setting["train_accuracy"],
                "paper_train_accuracy": paper.train_accuracy,
                "test_loss": row_of_setting["test_loss"],
                "stdev": row_of_setting["stdev"],
                "paper_test_loss": paper.loss,
                "over_dense_%": gain.mean,
                "standard_error": gain.error,
                "paper_over_dense_%": theirs,
                "test_accuracy": row_of_setting["accuracy"],
                "paper_test_accuracy": paper.accuracy,
                "bytes_per_step": row_of_setting["bytes_per_step"],
            }
        )
        if setting is not base:
            print_claim(
                f"{setting.system}, {setting.stages} workers of a model, {100 * setting.sparsity:g}%: the test loss is "
                f"{theirs:+.2f}% over dense",
                gain.agrees(theirs, SAME),
                f"{gain}% (up to {SAME:g}% from the paper's counts as the same)",
            )
    print_table(
        f"Table {table}: the DLRM on generated clicks, {dense['steps']} steps, mean over {config.seeds} seeds; the "
        "paper's is trained on Criteo's log",
        rows,
    )
    if table in ("2", "3"):
        print(dct.embeddings_note())


def cuts(config: Config, records: Records) -> None:
    """Cuts the DLRM in more places than tables 1 and 3, whose rows are beside these, by DCT-MP."""
    dense = trained(config, records, dct.SETTINGS[0])
    of_three = [setting for setting in dct.SETTINGS if (setting.system, setting.stages) == ("DCT-MP", 3)]
    rows, losses = [], {}
    for stages in CUTS[: 1 if config.smoke else None]:
        for setting in of_three[: 1 if config.smoke else None]:
            row = trained(config, records, dataclasses.replace(setting, stages=stages))
            gain = losses[stages, setting.sparsity] = percent_of(row["losses"], dense["losses"])
            rows.append({"workers_of_a_model": stages, **_over_dense(row, gain)})
    print_table(
        f"DCT-MP with more cuts: the DLRM on generated clicks, {dense['steps']} steps, mean over {config.seeds} seeds",
        rows,
    )
    stages, others = rows[-1]["workers_of_a_model"], sorted({sparsity for _, sparsity in losses})
    for sparsity in others:
        theirs, ours = -TABLE_5[sparsity][1], losses[stages, sparsity]
        print_claim(
            f"with 12 splits of its large model, DCT-MP at {100 * sparsity:g}% has a test loss {theirs:+g}% over dense",
            ours.agrees(theirs, SAME),
            f"{ours}% with {stages} workers of a model (up to {SAME:g}% from the paper's counts as the same)",
        )


def _over_dense(record: Record, gain: Difference) -> Record:
    names = ("sparsity", "test_loss", "stdev", "accuracy", "auc", "bytes_per_step")
    return {name: record[name] for name in names} | {"over_dense_%": gain.mean, "standard_error": gain.error}


def feedback(config: Config, records: Records) -> None:
    """Trains table 7's settings without error feedback too: "training without error feedback can cause divergence"."""
    dense, rows = trained(config, records, dct.SETTINGS[0]), []
    for setting in _settings(config, SYSTEMS["7"]):
        memory_row = trained(config, records, setting)
        plain_row = trained(config, records, dataclasses.replace(setting, system=NO_FEEDBACK, scheme=topk_alone))
        for name, row in (("yes", memory_row), ("no", plain_row)):
            gain = percent_of(row["losses"], dense["losses"])
            rows.append({"error_feedback": name, **_over_dense(row, gain)})
        worse = percent_of(plain_row["losses"], memory_row["losses"])
        print_claim(
            f"at {100 * setting.sparsity:g}%, training without error feedback can cause divergence",
            any(loss is None or not loss < START for loss in plain_row["losses"]),
            f"losses are {worse}% above those with it, and a run that diverges would end above {START:.3f}, that of "
            "guessing",
        )
    print_table(
        f"Top-k activation gradients with and without error feedback: the DLRM on generated clicks, {dense['steps']} "
        f"steps, mean over {config.seeds} seeds",
        rows,
    )


def why(config: Config, records: Records) -> None:
    """Varies what two claims that fail here are supposed to depend on: the rows, and the activations left out."""
    _why_rows(config, records)
    _why_translation(config, records)


def _why_rows(config: Config, records: Records) -> None:
    """Trains DCT-MP at the sparsity at which the paper's claim fails first on more rows, in as many passes."""
    (setting,) = (s for s in dct.SETTINGS if (s.system, s.stages, s.sparsity) == ("DCT-MP", 2, 0.95))
    rows, differences = [], {}
    for times, length in ((1, config), (LONGER, config.longer(config.steps or STEPS))):
        sparse, dense = (trained(length, records, choice, times) for choice in (setting, dct.SETTINGS[0]))
        gain = percent_of(sparse["losses"], dense["losses"])
        rows.append(
            {
                "train_rows": times * first_test_row(GENERATED_ROWS),
                "steps": sparse["steps"],
                "test_loss": sparse["test_loss"],
                "stdev": sparse["stdev"],
                "dense_test_loss": dense["test_loss"],
                "over_dense_%": gain.mean,
                "standard_error": gain.error,
            }
        )
        differences[f"{rows[-1]['train_rows']:,} rows"] = gain
    name = f"{setting.system} at {100 * setting.sparsity:g}%, {setting.stages} workers of a model"
    print_table(f"{name}, {config.seeds} seeds", rows)
    print_cause(f"{name} is above dense since there are few rows", differences)


def _why_translation(config: Config, records: Records) -> None:
    """Trains the small transformer in stages, which send the largest activations, learned numbers, or all in 4 bits.

    What is learned crosses one block later, where 64 features of a token do: after the ReLU it is 192.
    """
    dense = _translate(config, records, 1, BoundaryFields())
    for stages in (3,) if config.smoke else sorted({row.stages for row in TABLE_4} - {1}):
        rows, differences = [], {}
        for boundary_name, boundary in TRANSLATED.items():
            boundary_runs = _translate(config, records, stages, boundary)
            gain, differences[boundary_name] = _against(boundary_runs, dense)
            rows.append(
                {
                    "activations": boundary_name,
                    "test_loss": statistics.fmean(run["losses"][-1] for run in boundary_runs),
                    "over_dense_%": gain.mean,
                    "standard_error": gain.error,
                    "bleu_lower": statistics.fmean(_bleu(boundary_runs)),
                    "stdev": stdev(_bleu(boundary_runs)),
                    "bleu_lower_minus_dense": differences[boundary_name].mean,
                    "bytes_per_step": boundary_runs[0]["bytes_per_step"],
                }
            )
        name = f"the small transformer in {stages} stages"
        print_table(f"{name[0].upper()}{name[1:]}, {config.seeds} seeds", rows)
        print_cause(f"{name} loses BLEU since it needs the activations that DCT-MP leaves out", differences)


def table_4(config: Config, records: Records) -> None:
    """Trains the small transformer in 2, 3 and 5 stages."""
    table = TABLE_4[1:2] if config.smoke else TABLE_4
    runs = {row: _translate(config, records, row.stages, BoundaryFields(row.sparsity)) for row in table}
    base, rows = runs[table[0]], []
    for row, row_runs in runs.items():
        gain, better = _against(row_runs, base)
        theirs = 100 * (row.test_loss / table[0].test_loss - 1)
        rows.append(
            {
                "sparsity": row.sparsity,
                "workers_of_a_model": row.stages,
                "train_loss": statistics.fmean(run["train_losses"][-1] for run in row_runs),
                "paper_train_loss": row.train_loss,
                "test_loss": statistics.fmean(run["losses"][-1] for run in row_runs),
                "paper_test_loss": row.test_loss,
                "over_dense_%": gain.mean,
                "standard_error": gain.error,
                "paper_over_dense_%": theirs,
                "bleu": statistics.fmean(run["scores"]["bleu"] for run in row_runs),
                "bleu_lower": statistics.fmean(_bleu(row_runs)),
                "stdev": stdev(_bleu(row_runs)),
                "paper_bleu": row.bleu,
                "bleu_lower_minus_dense": better.mean,
                "bytes_per_step": row_runs[0]["bytes_per_step"],
            }
        )
        if row.stages > 1:
            print_claim(
                f"{100 * row.sparsity:g}%, {row.stages} workers of a model: the test loss is {theirs:+.2f}% over "
                f"dense, and BLEU {row.bleu - table[0].bleu:+.2f}",
                all_hold(gain.agrees(theirs, SAME), better.agrees(row.bleu - table[0].bleu, SAME)),
                f"{gain}% and {better} (up to {SAME:g}% and {SAME:g} BLEU from the paper's count as the same)",
            )
    print_table(
        f"Table 4: the small transformer on Django's messages, {base[0]['steps'][-1]} steps, mean over {config.seeds} "
        "seeds",
        rows,
    )
    print(
        "Ours is sacreBLEU of plain text, cased and lower case, on short messages; the paper's is fairseq's, of "
        "tokenized lower case on IWSLT'14: the two are not comparable, and of ours only differences mean something."
    )


def _translate(config: Config, records: Records, stages: int, boundary: BoundaryFields) -> list[Record]:
    steps = {} if config.steps else {"steps": 300}
    experiment = config.experiment("transformer_catalogs", workers=1, stages=stages, boundary=boundary, **steps)
    return train_seeds(records, experiment, PlumpDp(), config.seeds)


def _bleu(runs: list[Record]) -> list[float]:
    return [run["scores"]["bleu_lower"] for run in runs]


def _against(runs: list[Record], dense: list[Record]) -> tuple[Difference, Difference]:
    """Returns how much larger the test loss is than the dense runs', in %, and how much larger BLEU is."""
    gain = percent_of([run["losses"][-1] for run in runs], [run["losses"][-1] for run in dense])
    return gain, Difference.of(_bleu(runs), _bleu(dense))


def table_5(config: Config, records: Records) -> None:
    """Adds the time of a step on hosts to the losses of table 1, for models on three workers."""
    settings = [setting for setting in dct.SETTINGS if setting.system == "DCT-MP" and setting.stages == 3]
    settings = settings[: 1 if config.smoke else None]
    dense = trained(config, records, dct.SETTINGS[0])
    timed = timing.time_benchmark(
        records,
        "boundary",
        sparsity=",".join(f"{x:g}" for x in (0, *(setting.sparsity for setting in settings))),
        rate=config.rate,
        steps=config.timed_steps,
        batch=config.rows,
    )
    base, rows = timed[0], []
    for setting in settings:
        sparse, (paper_train, paper_test, paper_time) = trained(config, records, setting), TABLE_5[setting.sparsity]
        (step,) = (row for row in timed if row["sparsity"] == setting.sparsity)
        worse, time_saved = (
            percent_of(sparse["losses"], dense["losses"]),
            100 * (1 - step["ms_median"] / base["ms_median"]),
        )
        rows.append(
            {
                "sparsity": setting.sparsity,
                "train_improved_%": 100 * (1 - sparse["train_loss"] / dense["train_loss"]),
                "paper_train_improved_%": paper_train,
                "test_improved_%": -worse.mean,
                "standard_error": worse.error,
                "paper_test_improved_%": paper_test,
                "ms": step["ms_median"],
                "ms_min": step["ms_min"],
                "ms_max": step["ms_max"],
                "time_saved_%": time_saved,
                "paper_time_saved_%": paper_time,
            }
        )
        name, holds = (
            f"DCT-MP at {100 * setting.sparsity:g}%",
            Difference(time_saved, 0.0).agrees(paper_time, or_more=True),
        )
        print_claim(f"{name} saves {paper_time:g}% of the time", holds, f"{time_saved:.1f}% of a step at {config.rate}")
        print_claim(
            f"{name}: the test loss is {-paper_test:+g}% over dense",
            worse.agrees(-paper_test, SAME),
            f"{worse}% (up to {SAME:g}% from the paper's counts as the same)",
        )
    about = (
        f"Table 5: the DLRM in {base['stages']} stages, not the paper's large model with 12 splits; a step of "
        f"{base['batch']} rows without compression takes {base['ms_median']:.1f} ms ({base['ms_min']:.1f} to "
        f"{base['ms_max']:.1f}) at {config.rate}, medians of {config.timed_steps}"
    )
    print_table(heading(about, [base]), rows)


def hybrid(config: Config, records: Records) -> None:
    """Times a step of two workers with two stages each, one host per stage, without and with both methods."""
    before, after = timing.time_benchmark(
        records, "hybrid_dct", rate=config.rate, steps=config.timed_steps, batch=config.rows
    )
    paper = Hybrid()
    time_saved = 100 * (1 - after["ms_median"] / before["ms_median"])
    rows = [
        {
            **row,
            "paper_network_%": network,
            "paper_cpu_%": cpu,
            "time_saved_%": None if row is before else time_saved,
            "paper_time_saved_%": None if row is before else paper.time_saved,
        }
        for row, network, cpu in zip((before, after), paper.network, paper.cpu, strict=True)
    ]
    title = f"Hybrid training on hosts at {config.rate}, medians of {config.timed_steps} steps"
    print_table(*headed(title, rows))
    print_claim(
        f"both methods together save {paper.time_saved:g}% of the time",
        Difference(time_saved, 0.0).agrees(paper.time_saved, or_more=True),
        f"{time_saved:.1f}% of a step",
    )
    for name, theirs in (("network", paper.network), ("cpu", paper.cpu)):
        ours = [row[f"{name}_%"] for row in (before, after)]
        is_known = None not in ours
        print_claim(
            f"the use of the {name} goes from {theirs[0]}% to {theirs[1]}%",
            Difference(ours[1] - ours[0], 0.0).agrees(theirs[1] - theirs[0], or_more=True) if is_known else None,
            f"from {ours[0]:.1f}% to {ours[1]:.1f}% (what is compared is the change)"
            if is_known
            else "links without a limit, or that are not isolated, have no use",
        )


_TABLES: dict[str, Callable[[Config, Records], None]] = {table: partial(_losses, table) for table in SYSTEMS}
TABLES = {
    **_TABLES,
    "cuts": cuts,
    "feedback": feedback,
    "why": why,
    "4": table_4,
    "5": table_5,
    "fig2": figure_2,
    "fig5": figure_5,
    "fig7": figure_7,
    "theorem": theorem,
    "hybrid": hybrid,
}
TIMED = ("5", "fig7", "hybrid")

if __name__ == "__main__":
    common.run(Config, TABLES, __doc__, timed=TIMED, devices=6)
