"""Tables and figures of every paper at their smallest size: a quick one of each kind.

`python -m benchmarks.papers --all --smoke` runs them all; together they would take longer than CI should.
"""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.papers.__main__ import Config, commands

# Timed on the lab, trained, or counted; by the module and --table.
QUICK = {
    "dct-1",
    "dct-fig2",
    "iwp-fig2",
    "practical_lessons-1",
    "practical_lessons-placement",
    "slim_dp-1",
}
COMMANDS = {f"{c[2].rpartition('.')[2]}-{c[4]}": c for c in commands(Config(smoke=True))}


def test_the_quick_ones_are_there():
    assert COMMANDS.keys() >= QUICK
    assert {name.partition("-")[0] for name in QUICK} == {name.partition("-")[0] for name in COMMANDS}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_table_is_made(name):
    figures = Path(__file__).parents[3] / "docs" / "figures"
    before = sorted((path.name, path.stat().st_mtime) for path in figures.iterdir())
    root = Path(__file__).parents[3]
    done = subprocess.run(COMMANDS[name], cwd=root, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "The paper:" in done.stdout or "Drawn:" in done.stdout or "Table" in done.stdout
    assert sorted((path.name, path.stat().st_mtime) for path in figures.iterdir()) == before  # figures are kept
