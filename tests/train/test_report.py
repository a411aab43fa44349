"""`python -m train report`: what is drawn of hand-written runs, also in a browser."""

import datetime
import json
import math
import re
import shutil
import warnings
from html.parser import HTMLParser

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest

from tests.browser import browse, screenshot
from train.__main__ import main
from train.report import POINTS, read_runs, thinned

TITLES = ["Accuracy against bytes", "Loss", "Accuracy", "Bytes received", "Density", "Overflow", "Skipped steps"]


def line(step, loss, bytes_sent, overflow=0.0, skipped=0, **fields):
    """A line as the trainer writes it: half of a second, and 1,000 bytes, a step."""
    first = {
        "step": step,
        "loss": loss,
        "accuracy": step / 10,
        "sent": bytes_sent,
        "overflow": overflow,
        "skipped": skipped,
    }
    return first | {"drained": 0, "bytes_received": 1000.0 * step, "seconds": step / 2} | fields


DENSE = [line(1, 4.0, 0.0), line(2, 2.0, 0.0, test_loss=1.5, test_accuracy=0.75)]
SPARSE = [
    line(1, 4.0, 20.0),
    line(2, None, 0.0, skipped=1),
    line(3, 3.0, 30.0, 10.0, test_loss=2.5, test_accuracy=0.5),
]
SETTINGS = {"workers": 2, "parameters": 500, "dense_bytes": 4000.0, "seed": 0}


@pytest.fixture
def folder(tmp_path):
    """A run of two methods, as the trainer leaves it."""
    run = tmp_path / "digits"
    for name, lines, seed in (("plump_dp", DENSE, 0), ("<dct> & dp", SPARSE, 1)):
        (run / name).mkdir(parents=True)
        (run / name / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
        (run / name / "settings.json").write_text(json.dumps(SETTINGS | {"seed": seed}))
    (run / "runs.json").write_text('["plump_dp", "<dct> & dp"]')
    return run


class Texts(HTMLParser):
    """The text of a page, by the element that has it, and the elements."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.found = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if data.strip() and self.open:
            self.found.append((self.open[-1], data.strip()))

    def of(self, tag):
        return [text for name, text in self.found if name == tag]


def drawn(axes):
    """The lines of a panel: colour, whether it has marks, and the points."""
    colour = matplotlib.colors.to_hex
    return [(colour(entry.get_color()), entry.get_marker() == "o", entry.get_xydata().tolist()) for entry in axes.lines]


def test_a_page_in_a_browser(folder, tmp_path, capsys):
    assert main(["report", str(folder)]) == 0
    page = folder / "report.html"
    assert capsys.readouterr().out == f"2 runs in {page}\n"
    output = Texts(browse(page, "--dump-dom"))
    assert [text for text in output.of("h2") if text != "Settings"] == TITLES
    assert [attrs["aria-label"] for tag, attrs in output.tags if tag == "figure"] == TITLES
    assert len([tag for tag, _ in output.tags if tag == "svg"]) == 13
    texts = output.of("text")
    assert texts.count("step") == texts.count("seconds") == 6
    assert texts.count("dense (plump_dp)") == texts.count("<dct> & dp") >= 7
    (title,) = output.of("title")
    assert title == "digits: dense (plump_dp), <dct> & dp" == output.of("h1")[0]
    assert output.of("p")[0].startswith(f"Made on {datetime.date.today()} by jaxcomm ")
    assert output.of("summary") == ["The same in all runs: 3"]
    cells = output.of("td")
    # Steps, test accuracy and loss, bytes a step, times fewer than dense, skipped, seconds.
    first = ["dense (plump_dp)", "2", "2", "75", "1.5", "1000", "4", "0", "1"]
    second = ["<dct> & dp", "2", "3", "50", "2.5", "1000", "4", "1", "1.5"]
    assert cells[:18] == first + second
    settings = cells[18:]  # what differs comes first
    assert settings[:3] == ["seed", "0", "1"]
    assert settings[3:] == ["workers", "2", "2", "parameters", "500", "500", "dense_bytes", "4000.0", "4000.0"]

    pixels = matplotlib.image.imread(screenshot(page, tmp_path / "page.png", height=3000))[..., :3]
    for colour in ("tab:blue", "tab:orange"):
        near = np.abs(pixels - matplotlib.colors.to_rgb(colour)).max(axis=-1) < 0.02
        rows = np.flatnonzero(near.any(axis=1))
        assert rows.min() < 260  # the key in the table
        assert rows.max() > 1600  # and lines in the last figures


def test_no_loads_and_no_double_names(folder):
    main(["report", str(folder)])
    page = (folder / "report.html").read_text()
    for tag, attrs in Texts(page).tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "image")
        assert "src" not in attrs
        assert attrs.get("xlink:href", "#").startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    assert "@import" not in page
    names = re.findall(r' id="([^"]*)"', page)
    assert len(names) == len(set(names)) > 0
    assert {
        name[1:] for name in re.findall(r'url\((#[^)]*)\)|xlink:href="(#[^"]*)"', page) for name in name if name
    } <= set(names)


def test_lines_over_steps_and_time(folder, figures):
    main(["report", str(folder)])
    blue, orange = (matplotlib.colors.to_hex(name) for name in ("tab:blue", "tab:orange"))
    against = figures.pop(0).axes[0]
    assert drawn(against) == [(blue, True, [[2000.0, 75.0]]), (orange, True, [[3000.0, 50.0]])]
    assert (against.get_xlabel(), against.get_xscale()) == ("bytes received by each worker", "log")
    assert against.get_ylabel() == "test accuracy, %"
    expected = {  # over steps, as numbers of the two runs; one step is half a second
        "Loss": [
            (blue, True, [(2, 1.5)]),
            (orange, True, [(3, 2.5)]),
            (blue, False, [(1, 4.0), (2, 2.0)]),
            (orange, False, [(1, 4.0), (2, math.nan), (3, 3.0)]),
        ],
        "Accuracy": [
            (blue, True, [(2, 75.0)]),
            (orange, True, [(3, 50.0)]),
            (blue, False, [(1, 10.0), (2, 20.0)]),
            (orange, False, [(1, 10.0), (2, 20.0), (3, 30.0)]),
        ],
        "Bytes received": [
            (blue, False, [(1, 1000.0), (2, 2000.0)]),
            (orange, False, [(1, 1000.0), (2, 2000.0), (3, 3000.0)]),
        ],
        # Of 2 workers with 500 parameters each. No line on a logarithmic axis where nothing was sent.
        "Density": [
            (blue, False, [(1, math.nan), (2, math.nan)]),
            (orange, False, [(1, 2.0), (2, math.nan), (3, 3.0)]),
        ],
        "Overflow": [(blue, False, [(1, 0.0), (2, 0.0)]), (orange, False, [(1, 0.0), (2, 0.0), (3, 25.0)])],
        "Skipped steps": [(blue, False, [(1, 0.0), (2, 0.0)]), (orange, False, [(1, 0.0), (2, 1.0), (3, 1.0)])],
    }
    assert len(figures) == 12
    for pair, (title, lines) in zip(zip(figures[::2], figures[1::2], strict=True), expected.items(), strict=True):
        (over_steps,), (over_time,) = (figure.axes for figure in pair)
        assert over_steps.get_ylim() == over_time.get_ylim()
        for axes, unit in ((over_steps, 1.0), (over_time, 0.5)):
            curves = drawn(axes)
            assert [line[:2] for line in curves] == [line[:2] for line in lines], title
            for (*_, points), (*_, target) in zip(curves, lines, strict=True):
                np.testing.assert_allclose(points, [(unit * x, y) for x, y in target], rtol=1e-12, err_msg=title)
        assert (over_steps.get_xlabel(), over_time.get_xlabel()) == ("step", "seconds")
        assert (over_steps.get_yscale() == "log") == (title in ("Bytes received", "Density"))


def test_long_runs_are_averaged():
    x, y, mean = thinned([float(step) for step in range(1, 1201)], [float(step % 3) for step in range(1200)])
    assert mean == 3
    assert len(x) == len(y) == 400 == POINTS
    assert x == [3.0 * group + 2.0 for group in range(400)]
    assert set(y) == {1.0}
    assert thinned([1.0, 2.0], [5.0, 7.0]) == ([1.0, 2.0], [5.0, 7.0], 1)


def test_words_of_a_long_run(folder):
    lines = [line(step, 1.0, 5.0) for step in range(1, 901)]
    (folder / "plump_dp" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(["report", str(folder)])
    assert "A point of the longest line is the mean of 3 steps." in (folder / "report.html").read_text()


def test_several_runs(folder, tmp_path):
    second = tmp_path / "digits-2" / "plump_dp"
    second.mkdir(parents=True)
    (second / "metrics.jsonl").write_text(json.dumps(line(1, 1.0, 0.0)) + '\n{"step": 2, "lo')  # it is writing
    curves = read_runs([folder, second])
    assert [curve.label for curve in curves] == [
        "digits/dense (plump_dp)",
        "digits/<dct> & dp",
        "digits-2/dense (plump_dp)",
    ]
    assert [len(curve.lines) for curve in curves] == [2, 3, 1]
    odd = tmp_path / "digits-2" / r"$\frac{$"  # no mathematics
    shutil.copytree(second, odd)
    (odd / "metrics.jsonl").write_text(json.dumps(line(1, 1e308, 0.0)) + "\n" + json.dumps(line(2, -1e308, 0.0)) + "\n")
    runs = [str(folder), str(second), str(odd)]
    assert main(["report", *runs, "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert "digits-2/dense (plump_dp)" in (tmp_path / "new" / "page.html").read_text()


def test_lines_over_steps_alone(folder, figures):
    """As in a run from before these were written."""
    for name in ("plump_dp", "<dct> & dp"):
        (folder / name / "settings.json").unlink()
        path = folder / name / "metrics.jsonl"
        path.write_text(re.sub(r', "seconds": [\d.]+', "", path.read_text()))
    assert main(["report", str(folder)]) == 0
    has_lines = [len(figure.axes[0].lines) > 0 for figure in figures]
    assert has_lines == [True] + [has for title in TITLES[1:] for has in (title != "Density", False)]


@pytest.mark.parametrize("name", ["_hidden", "x" * 200])
def test_any_name_of_a_folder_is_in_the_legend(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / METRICS).write_text(LINE)
    with warnings.catch_warnings(action="error"):
        assert main(["report", str(tmp_path)]) == 0
    legends = re.findall(r"<text [^>]*>([^<]*)</text>", (tmp_path / "report.html").read_text())
    assert any(name[:50] in text for text in legends)


METRICS = "metrics.jsonl"
LINE = '{"step": 1, "loss": 1.0, "sent": 5, "overflow": 0, "skipped": 0, "bytes_received": 100.0}\n'


def damage(path, name, text):
    (path / "dct_dp").mkdir()
    (path / "dct_dp" / METRICS).write_text(LINE)
    place = path if name == "runs.json" else path / "dct_dp"
    (place / name).write_text(text, errors="surrogateescape")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "RUN must be the folder of a run, with metrics.jsonl in it or in its methods' folders"),
        (lambda path: (path / "metrics.jsonl").write_text(""), "A run must have taken a step before it is drawn"),
        *(
            (
                lambda path, text=text: damage(path, METRICS, LINE + text),
                "a JSON object of numbers a line; got .* line 2",
            )
            for text in ("no\n", "[1]\n", "5\n", "{}\n", "\0\0\n", "[" * 9999 + "\n", "\udcff\n", '{"step": 2}\n')
        ),
        *(
            (
                lambda path, step=step: damage(path, METRICS, LINE + LINE.replace("1", step, 1)),
                f"a line for every step until 2; got step {step} in the place of step 2",
            )
            for step in ("1", "3")
        ),
        *(
            (
                lambda path, text=text: damage(path, METRICS, LINE.replace("1", text, 1)),
                "got ValueError.* Remove line 1",
            )
            for text in ('"one"', "0", "1e300", '1, "note": "x"')
        ),
        *(
            (
                lambda path, text=text: damage(path, "settings.json", text),
                "settings.json must hold the settings of a run",
            )
            for text in ("[]", "{", '{"workers": "two"}', '{"dense_bytes": "x"}')
        ),
        *(
            (
                lambda path, text=text: damage(path, "runs.json", text),
                "runs.json must hold the names of a run's methods",
            )
            for text in ("5", "{", "[1, 2]", '{"a": 1}', '["../other"]')
        ),
    ],
)
def test_no_run(make, message, tmp_path, capsys):
    make(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert text.startswith("train report: ")
    assert re.search(message, text)
    assert len(text.splitlines()) == 1
    assert not (tmp_path / "report.html").exists()
