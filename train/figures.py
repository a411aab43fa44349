"""Figures of runs, as PNG files, and as SVG for a page."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.metrics import Evaluation
from train.tables import setting_of

HUGE = 1e100  # a value that no axis can show
LONGEST = 60  # characters of a line's name in a figure
BYTES = "bytes received by each worker"


def draw_accuracy(path: Path, curves: dict[str, Sequence[Evaluation]]) -> None:
    """Draws test accuracy against bytes received per worker, one curve a method, as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    drawn = {label: [e for e in evaluations if e.bytes_received > 0] for label, evaluations in curves.items()}
    for label, points in drawn.items():
        axes.plot([e.bytes_received for e in points], [100 * e.accuracy for e in points], marker=".", label=label)
    axes.set(xlabel="bytes received per worker", ylabel="test accuracy, %", xscale="log")
    if len(ends := [(label, points[-1]) for label, points in drawn.items() if points]) == 2:
        (_, first), (label, last) = ends
        fewer = first.bytes_received / last.bytes_received
        axes.set_title(f"{label}: {100 * (last.accuracy - first.accuracy):+.1f} points, {fewer:.0f} times fewer bytes")
    axes.grid(alpha=0.3)
    label_ends(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_comparison(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Draws mean accuracy, with its standard deviation, against bytes received and against the modelled time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    names = list(dict.fromkeys(record["method"] for record in records))
    colours = {name: plt.get_cmap("tab20")(index % 20) for index, name in enumerate(names)}
    rate = records[0]["rate"]
    panels = {
        "bytes_per_step": "bytes received per worker and step",
        "seconds_to_finish": f"seconds to finish at {rate}, modelled",
    }
    figure, axes = plt.subplots(1, 2, figsize=(16, 8), sharey=True)
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.08, top=0.98, wspace=0.03)
    for panel, (column, title) in zip(axes, panels.items(), strict=True):
        records_of_panel = [record for record in records if record[column] > 0]
        for record in records_of_panel:
            x, y, colour = record[column], record["accuracy_mean"], colours[record["method"]]
            panel.errorbar(x, y, yerr=record["accuracy_stdev"] or 0.0, elinewidth=0.8, alpha=0.35, color=colour)
            panel.plot(x, y, "o", markersize=5, color=colour)
        panel.axhline(records[0]["accuracy_mean"], color="grey", linewidth=0.8, linestyle="--")
        panel.set(xlabel=title, xscale="log")
        panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(ticker.EngFormatter())
        panel.xaxis.set_minor_formatter(ticker.NullFormatter())
        panel.margins(x=0.12, y=0.08)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel(f"test accuracy, % (mean and standard deviation, {records[0]['seeds']} seeds)")
    figure.canvas.draw()  # fixes where the points are, before labels are placed
    for panel, column in zip(axes, panels, strict=True):
        records_of_panel = [record for record in records if record[column] > 0]
        points = [(record[column], record["accuracy_mean"]) for record in records_of_panel]
        texts = [setting_of(record) for record in records_of_panel]
        label_points(panel, points, texts, [colours[record["method"]] for record in records_of_panel])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def label_points(
    axes: Any, points: Sequence[tuple[float, float]], texts: Sequence[str], colours: Sequence[Any]
) -> None:
    """Writes a text next to every point, at the nearest place that covers no other text and no point."""
    from matplotlib.transforms import Bbox

    renderer, frame = axes.figure.canvas.get_renderer(), axes.get_window_extent()
    places = axes.transData.transform(points)
    boxes = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in places]
    pixels = axes.figure.dpi / 72  # of a point
    angles = [side + turn for turn in (0.0, 0.5, -0.5, 1.0, -1.0, 1.4, -1.4) for side in (0.0, math.pi)]
    offsets = [(r * math.cos(angle), r * math.sin(angle)) for r in range(8, 240, 4) for angle in angles]
    for point, (x, y), text, colour in zip(points, places, texts, colours, strict=True):
        line = {"arrowstyle": "-", "linewidth": 0.5, "color": colour, "shrinkA": 0, "shrinkB": 2}
        label = axes.annotate(
            text, point, xytext=(0, 0), textcoords="offset points", fontsize=8, va="center", arrowprops=line
        )
        size = label.get_window_extent(renderer)
        for right, up in offsets:
            x_offset = x + pixels * right - (0 if right >= 0 else size.width)
            box = Bbox.from_bounds(x_offset, y + pixels * up - size.height / 2, size.width, size.height)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(placed) for placed in boxes):
                label.set(position=(right, up), ha="left" if right >= 0 else "right")
                boxes.append(box)
                break


def label_ends(axes: Any) -> None:
    """Writes the label of every line of `axes` where the line ends, in its colour; texts are moved apart vertically."""
    lines = [line for line in axes.lines if not line.get_label().startswith("_") and len(line.get_xdata())]
    transform = axes.xaxis.get_transform()
    left, right = transform.transform(axes.get_xlim())
    axes.set_xlim(right=transform.inverted().transform(right + 0.25 * (right - left)))  # room for the texts
    axes.figure.canvas.draw()  # fixes where the lines end
    pixels = axes.figure.dpi / 72  # of a point
    ends = [axes.transData.transform((line.get_xdata()[-1], line.get_ydata()[-1])) for line in lines]
    height, below = 10 * pixels, -math.inf
    for (_, up), line in sorted(zip(ends, lines, strict=True), key=lambda pair: pair[0][1]):
        below = max(up, below + height)
        axes.annotate(
            line.get_label(),
            (line.get_xdata()[-1], line.get_ydata()[-1]),
            xytext=(5, (below - up) / pixels),
            textcoords="offset points",
            fontsize=8,
            va="center",
            color=line.get_color(),
        )


@dataclass(frozen=True)
class Line:
    """A line of a panel.

    Attributes:
      x: ascending.
      y: as many values; NaN and what is above HUGE leave a gap.
      label: of its run.
      number: of its run, which has the same colour in all panels.
      style: "line", "thin" or "marks".
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str
    number: int
    style: str

    @staticmethod
    def colour(number: int) -> str:
        """Returns the colour of a run, as "#rrggbb"."""
        import matplotlib
        import matplotlib.colors

        return matplotlib.colors.to_hex(matplotlib.colormaps["tab10"](number % 10))


def draw_panels(panels: Mapping[str, Sequence[Line]], label: str, *, logarithmic: bool, salt: str) -> str:
    """Draws lines in panels, each with its own x axis, and returns an SVG element for each.

    Args:
      panels: by the label of the x axis; that of bytes is logarithmic.
      label: of the y axis, whose range all share.
      logarithmic: whether the y axis is. Zeros are then left out; if there is nothing else, the axis is linear.
      salt: makes the ids inside the elements different from those of other elements on the page.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {
        "line": {"linewidth": 1.4},
        "thin": {"linewidth": 0.7, "alpha": 0.45},
        "marks": {"linewidth": 1.4, "marker": "o", "markersize": 3.5},
    }
    settings = {"svg.fonttype": "none", "font.family": "sans-serif", "text.parse_math": False}
    y_values = [y for lines in panels.values() for line in lines for y in line.y]
    is_logarithmic = logarithmic and any(y > 0 for y in y_values)
    elements, limits = [], None
    for name, lines in panels.items():
        with matplotlib.rc_context(settings | {"svg.hashsalt": f"{salt} {name}"}):
            figure, panel = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
            labelled = set()
            for line in sorted(lines, key=lambda line: line.style == "thin"):  # the legend shows the bold ones
                y = [y if abs(y) < HUGE and (y > 0 or not is_logarithmic) else math.nan for y in line.y]
                # Matplotlib hides labels with a leading "_", and has no room for long ones.
                text = line.label if len(line.label) <= LONGEST else f"{line.label[: LONGEST - 3]}..."
                line_label = None if line.label in labelled else f"\u200b{text}" if text.startswith("_") else text
                labelled.add(line.label)
                panel.plot(line.x, y, label=line_label, color=Line.colour(line.number), **styles[line.style])
            has_bytes = name == BYTES and any(x > 0 for line in lines for x in line.x)
            panel.set(xlabel=name, ylabel=label, yscale="log" if is_logarithmic else "linear")
            panel.set(xscale="log" if has_bytes else "linear")
            if limits is not None and panel.lines:
                panel.set_ylim(limits)
            limits = panel.get_ylim() if panel.lines else limits
            panel.grid(alpha=0.3)
            if panel.lines:
                panel.legend(fontsize="small")
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)
        svg = file.getvalue()
        svg = svg[svg.index("<svg") :]  # without the XML declaration, which an HTML page does not have
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        elements.append(re.sub(r' id="[\w.]+_\d+"', "", svg))  # figure_1, axes_1, ...: the same in every element
    return "".join(elements)
