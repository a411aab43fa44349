"""Figures of runs as one HTML file: `python -m train report RUN [RUN ...]`."""

import datetime
import html
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import tyro

from train.figures import BYTES, Line, draw_panels
from train.folders import METRICS, SETTINGS, check_steps, read_lines
from train.folders import read_runs as run_names
from train.tables import display_name, format_cell, reading, write_whole

POINTS = 400  # of a line at most; more steps are averaged

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 66rem; padding: 0 1rem; }
body { color: #222; background: #fff; color-scheme: light dark; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 0; }
p { margin: .3rem 0; color: #555; }
figure { margin: 0; display: flex; flex-wrap: wrap; background: #fff; } svg { height: auto; }
svg { flex: 1 1 22rem; max-width: min(100%, 36rem); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 2px; }
.differs { background: #fff6d5; }
summary { cursor: pointer; margin: 1rem 0 0; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #1a1a1a; } p { color: #aaa; } th, td { border-color: #444; }
  .differs { background: #4a4020; } figure { border-radius: 6px; }
}
"""


@dataclass(frozen=True)
class Report:
    """Draw accuracy against bytes, and loss, bytes, density, overflow and skipped steps over steps and over time."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs (runs/digits), or of one method in a run (runs/digits/dct_dp). All share the same figures."""
    out: Path | None = None
    """The file; report.html in the first folder if not given."""


@dataclass(frozen=True)
class Curve:
    """One trained model.

    Attributes:
      label: what figures and tables call it.
      run: the name of the run's folder.
      lines: of `metrics.jsonl`, one a step; a number that was not finite is NaN.
      settings: of `settings.json`; empty if the run was made before there was such a file.
    """

    label: str
    run: str
    lines: Sequence[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the places of the lines that have a number, and the numbers."""
        places = [place for place, line in enumerate(self.lines) if name in line]
        return places, [float(self.lines[place][name]) for place in places]


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 0, or 2 for folders without a run."""
    config = tyro.cli(Report, args=argv, prog="python -m train report")
    try:
        curves = read_runs(config.runs)
        out = config.out or config.runs[0] / "report.html"
        if out.is_dir():
            raise ValueError(f"--out must be a file; got the folder {out}. Name a file in it.")
        out.parent.mkdir(parents=True, exist_ok=True)
        origin = f"Made on {datetime.date.today()} by jaxcomm {metadata.version('jaxcomm')}."
        write_whole(out, page(curves, origin))
    except (ValueError, OSError) as error:
        print(f"train report: {error}", file=sys.stderr)
        return 2
    print(f"{len(curves)} {'runs' if len(curves) != 1 else 'run'} in {out}")
    return 0


def read_runs(folders: Sequence[Path]) -> list[Curve]:
    """Reads every method of every run.

    Raises:
      ValueError: if a folder holds no run, or one without a step.
    """
    if not folders:
        raise ValueError("A report must be of at least one run; got none. Name a folder, such as runs/digits.")
    metrics_files = []
    for folder in folders:
        files = [folder / METRICS] if (folder / METRICS).exists() else _methods_of(folder)
        if not files:
            raise ValueError(
                f"RUN must be the folder of a run, with {METRICS} in it or in its methods' folders; got {folder}. "
                "Name one that `python -m train` has made, such as runs/digits."
            )
        metrics_files += files
    return [_read(file, label) for file, label in zip(metrics_files, _labels(metrics_files), strict=True)]


def _methods_of(folder: Path) -> list[Path]:
    """Returns the files of a run's methods, in the order in which they were trained."""
    first = [folder / name / METRICS for name in run_names(folder) or ()]
    unlisted = sorted(set(folder.glob(f"*/{METRICS}")) - set(first))
    return [file for file in [*first, *unlisted] if file.exists()]


def _labels(files: Sequence[Path]) -> list[str]:
    """Returns the names of the methods' folders, with as many parent folders as it takes to tell them apart."""
    parts = [file.resolve().parent.parts for file in files]
    depth = 1
    while depth < max(map(len, parts)) and len({path_parts[-depth:] for path_parts in parts}) < len(set(parts)):
        depth += 1
    return ["/".join([*path_parts[-depth:-1], display_name(path_parts[-1])]) for path_parts in parts]


def _read(file: Path, label: str) -> Curve:
    lines = read_lines(file)
    if not lines:
        raise ValueError(
            f"A run must have taken a step before it is drawn; got none in {file}. Wait for the first one."
        )
    check_steps(file, lines, len(lines))
    path, settings = file.parent / SETTINGS, {}
    if path.exists():
        with reading(path, "the settings of a run", "Remove it."):
            settings = json.loads(path.read_text())
            _ = 1.0 * settings.get("workers", 1) * settings.get("dense_bytes", 0)
    return Curve(label, file.resolve().parent.parent.name, lines, settings)


# The lines of a curve in a figure: places, values and style of each.
Drawn = Callable[[Curve], list[tuple[list[int], list[float], str]]]


def _column(name: str, scale: float = 1.0, style: str = "line") -> Drawn:
    def lines(curve: Curve) -> list[tuple[list[int], list[float], str]]:
        places, values = curve.column(name)
        return [(places, [scale * value for value in values], style)]

    return lines


def _pair(name: str, scale: float = 1.0) -> Drawn:
    """Draws a score of the training batches as a thin line, and that of the test split with marks."""
    return lambda curve: _column(name, scale, "thin")(curve) + _column(f"test_{name}", scale, "marks")(curve)


def _density(curve: Curve) -> list[tuple[list[int], list[float], str]]:
    n_values = curve.settings.get("parameters", 0) * curve.settings.get("workers", 0)
    places, n_sent = curve.column("sent")
    return [(places, [100 * value / n_values for value in n_sent], "line")] if n_values else []


def _overflow(curve: Curve) -> list[tuple[list[int], list[float], str]]:
    places, n_dropped = curve.column("overflow")
    _, n_sent = curve.column("sent")
    return [(places, [100 * a / (a + b) if a + b else 0.0 for a, b in zip(n_dropped, n_sent, strict=True)], "line")]


def _skipped(curve: Curve) -> list[tuple[list[int], list[float], str]]:
    places, skipped = curve.column("skipped")
    total, sums = 0.0, []
    for value in skipped:
        total += value
        sums.append(total)
    return [(places, sums, "line")]


AGAINST_BYTES = "Accuracy against bytes"
# The x axes of the first panel, and of the others: the label, and the name in a line.
X_AXES = {BYTES: "bytes_received"}, {"step": "step", "seconds": "seconds"}

# Title, caption, label of the y axis, whether that axis is logarithmic, and what is drawn.
PANELS: tuple[tuple[str, str, str, bool, Drawn], ...] = (
    (
        AGAINST_BYTES,
        "On the test split, over the bytes that each worker has received.",
        "test accuracy, %",
        False,
        _column("test_accuracy", 100.0, "marks"),
    ),
    (
        "Loss",
        "Thin: of each training batch, before its update. With marks: on the test split.",
        "loss",
        False,
        _pair("loss"),
    ),
    ("Accuracy", "Thin: of each training batch. With marks: on the test split.", "%", False, _pair("accuracy", 100.0)),
    (
        "Bytes received",
        "By each worker since the start, losses and metrics included, as reckoned from the compiled step.",
        "bytes",
        True,
        _column("bytes_received"),
    ),
    (
        "Density",
        "Coordinates that the method sent, over the parameters of all workers. Tensors that are too small to be "
        "compressed are not counted.",
        "%",
        True,
        _density,
    ),
    (
        "Overflow",
        "Selected coordinates without a slot, over all that were selected; they stay in the residual.",
        "%",
        False,
        _overflow,
    ),
    (
        "Skipped steps",
        "Steps since the start in which a gradient was not finite, and nothing was changed.",
        "steps",
        False,
        _skipped,
    ),
)


def page(curves: Sequence[Curve], origin: str) -> str:
    """Returns the report as one HTML document that loads nothing else; `origin` says when and by what."""
    sections = []
    for title, caption, label, logarithmic, curves_of in PANELS:
        axes = X_AXES[title != AGAINST_BYTES]
        panels: dict[str, list[Line]] = {label: [] for label in axes}
        averaged = 1
        for number, curve in enumerate(curves):
            for places, values, style in curves_of(curve):
                for name, lines in panels.items():
                    axis = axes[name]
                    if not all(axis in curve.lines[place] for place in places):
                        continue  # the run was made before lines had their time
                    at = [float(curve.lines[place][axis]) for place in places]
                    x, y, span = thinned(at, values)
                    averaged = max(averaged, span)
                    lines.append(Line(x, y, curve.label, number, style))
        if averaged > 1:
            caption += f" A point of the longest line is the mean of {averaged} steps."
        svg = draw_panels(panels, label, logarithmic=logarithmic, salt=title)
        name = html.escape(title)
        sections.append(
            f'<h2>{name}</h2>\n<p>{html.escape(caption)}</p>\n<figure role="img" aria-label="{name}">{svg}</figure>'
        )
    runs = ", ".join(dict.fromkeys(curve.run for curve in curves))
    title = f"{runs}: {', '.join(curve.label for curve in curves)}"
    heading = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(origin)}</p>"]
    body = [*heading, _summary(curves), *sections, _settings(curves)]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}<style>{STYLE}</style></head>\n<body>\n' + "\n".join(
        [*body, "</body>\n</html>\n"]
    )


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float], int]:
    """Averages neighbours, so that a line has at most `POINTS` points; also returns how many a point is the mean of."""
    span = -(-len(x) // POINTS) or 1
    groups = [slice(start, start + span) for start in range(0, len(x), span)]
    return [statistics.fmean(x[group]) for group in groups], [statistics.fmean(y[group]) for group in groups], span


def _summary(curves: Sequence[Curve]) -> str:
    rows = []
    for curve in curves:
        last, settings = curve.lines[-1], curve.settings
        per_step = last["bytes_received"] / last["step"]
        dense = settings.get("dense_bytes")
        tests = [line for line in curve.lines if "test_accuracy" in line]
        rows.append(
            {
                "run": curve.label,
                "workers": settings.get("workers"),
                "steps": last["step"],
                "test accuracy, %": 100 * tests[-1]["test_accuracy"] if tests else None,
                "test loss": tests[-1].get("test_loss") if tests else None,
                "bytes a step": per_step,
                "times fewer than dense": dense / per_step if dense and per_step else None,
                "skipped": int(sum(line["skipped"] for line in curve.lines)),
                "seconds": last.get("seconds"),
            }
        )
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    lines = []
    for number, row in enumerate(rows):
        key = f'<span class="key" style="background: {Line.colour(number)}"></span>'
        cells = [html.escape(format_cell(value)) for value in row.values()]
        lines.append(f"<tr><td>{key}{cells[0]}</td>" + "".join(f"<td>{cell}</td>" for cell in cells[1:]) + "</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>\n' + "\n".join(lines) + "</table></div>"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _settings(curves: Sequence[Curve]) -> str:
    """Returns the table of settings, one column per run; those that are the same in all are folded."""
    names = list(dict.fromkeys(name for curve in curves for name in curve.settings))
    if not names:
        return ""
    texts = {
        name: [_text(curve.settings[name]) if name in curve.settings else "" for curve in curves] for name in names
    }
    names.sort(key=lambda name: len(set(texts[name])) == 1)
    head = "".join(f"<th>{html.escape(curve.label)}</th>" for curve in curves)
    differing, equal = [], []
    for name in names:
        differs = len(set(texts[name])) > 1
        marked = ' class="differs"' if differs else ""
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts[name])
        (differing if differs else equal).append(f"<tr{marked}><td>{html.escape(name)}</td>{cells}</tr>")

    def table(lines: Sequence[str]) -> str:
        return f'<div class="scroll"><table><tr><th>setting</th>{head}</tr>\n' + "\n".join(lines) + "</table></div>"

    parts = ["<h2>Settings</h2>"]
    parts += [table(differing)] if differing else []
    if equal:
        parts.append(f"<details><summary>The same in all runs: {len(equal)}</summary>{table(equal)}</details>")
    return "\n".join(parts)
