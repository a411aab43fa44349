"""Figures show the numbers that they are given: these are read back from matplotlib's objects and the file."""

import warnings

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest

from train.figures import draw_accuracy, draw_comparison
from train.metrics import Evaluation
from train.tables import display_name as called

CURVE = [Evaluation(step, step * 1e5, {"loss": 1.0, "accuracy": step / 100}) for step in (10, 20)]
OTHER = [Evaluation(step, step * 1e3, {"loss": 2.0, "accuracy": step / 200}) for step in (10, 20, 30)]
# One worker receives nothing.
SILENT = [Evaluation(step, 0.0, {"loss": 1.0, "accuracy": step / 100}) for step in (10, 20)]


def is_painted(path, colour):
    """Whether a file has pixels of a colour."""
    pixels = matplotlib.image.imread(path)[..., :3]
    return bool((np.abs(pixels - matplotlib.colors.to_rgb(colour)).max(axis=-1) < 0.01).any())


@pytest.mark.parametrize("curves", [{"plump_dp": CURVE, "dct_dp": CURVE}, {"dct_dp": SILENT}, {"dct_dp": []}])
def test_the_figure(curves, tmp_path):
    path = tmp_path / "new" / "figure.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_accuracy(path, curves)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert matplotlib.image.imread(path).shape[2] in (3, 4)


def test_curves_over_bytes(figures, tmp_path):
    draw_accuracy(tmp_path / "figure.png", {"plump_dp": CURVE, "dct_dp": OTHER, "alone": SILENT})
    ((axes,),) = [figure.axes for figure in figures]
    lines = {line.get_label(): line for line in axes.lines}
    points = {name: line.get_xydata().tolist() for name, line in lines.items()}
    assert points == {"plump_dp": [[1e6, 10], [2e6, 20]], "dct_dp": [[1e4, 5], [2e4, 10], [3e4, 15]], "alone": []}
    ends = {text.get_text(): (text.xy, text.get_color()) for text in axes.texts}  # a label where its line ends
    assert ends == {name: (tuple(xy[-1]), lines[name].get_color()) for name, xy in points.items() if xy}

    assert len({line.get_color() for line in axes.lines}) == 3
    assert all(is_painted(tmp_path / "figure.png", lines[name].get_color()) for name in ("plump_dp", "dct_dp"))
    assert (axes.get_xlabel(), axes.get_xscale()) == ("bytes received per worker", "log")
    assert (axes.get_ylabel(), axes.get_yscale()) == ("test accuracy, %", "linear")


def record(method, setting, accuracy, stdev, size, seconds):
    columns = ("method", "setting", "accuracy_mean", "accuracy_stdev", "bytes_per_step", "seconds_to_finish")
    row = dict(zip(columns, (method, setting, accuracy, stdev, size, seconds), strict=True))
    return row | {"rate": "100mbit", "seeds": 3}


RECORDS = [
    record("plump_dp", "", 91.0, 0.5, 1e6, 80.0),
    record("dct_dp", "98%", 90.0, 0.25, 2e4, 5.0),
    record("dct_dp", "99%", 89.0, None, 1e4, 4.0),
    record("alone", "", 70.0, 1.0, 0.0, 2.0),  # no point on a logarithmic axis of bytes
]


def test_figures_of_a_comparison(figures, tmp_path):
    draw_comparison(tmp_path / "figure.png", RECORDS)
    ((left, right),) = [figure.axes for figure in figures]
    for panel, column, records in ((left, "bytes_per_step", RECORDS[:3]), (right, "seconds_to_finish", RECORDS)):
        at = {f"{called(r['method'])} {r['setting']}".rstrip(): (r[column], r["accuracy_mean"]) for r in records}
        points = [line for line in panel.lines if line.get_marker() == "o"]
        assert [tuple(line.get_xydata()[0]) for line in points] == list(at.values())
        assert {text.get_text(): text.xy for text in panel.texts} == at
        bars = [bar.get_segments()[0].tolist() for bar in panel.collections]
        assert bars == [
            [[r[column], r["accuracy_mean"] + sign * (r["accuracy_stdev"] or 0.0)] for sign in (-1, 1)] for r in records
        ]
        (dense,) = [line for line in panel.lines if line.get_linestyle() == "--"]
        assert set(dense.get_ydata()) == {91.0}
        assert [line.get_color() == points[1].get_color() for line in points[:3]] == [False, True, True]
        assert all(is_painted(tmp_path / "figure.png", line.get_color()) for line in points)
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "linear")
    assert left.get_xlabel() == "bytes received per worker and step"
    assert right.get_xlabel() == "seconds to finish at 100mbit, modelled"
    assert left.get_ylabel() == "test accuracy, % (mean and standard deviation, 3 seeds)"


def test_titles(figures, tmp_path):
    draw_accuracy(tmp_path / "figure.png", {"dense": CURVE, "dct_dp": OTHER})
    ((axes,),) = [figure.axes for figure in figures]
    assert axes.get_title() == "dct_dp: -5.0 points, 67 times fewer bytes"  # 15% and 20%, 3e4 and 2e6 bytes
