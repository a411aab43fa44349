"""Tables and figures of every paper at their smallest size, by the commands of `benchmarks.papers --all --smoke`.

All of them would take too long for CI. Most of those that are timed on hosts are left out, as their benchmarks have
tests of their own, and so are those of dynamic communication thresholding that only train other settings than table 1.
"""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.papers.__main__ import Config, commands, papers

ROOT = Path(__file__).parents[3]
COMMANDS = {
    command[2].rpartition(".")[2]: command for command in commands(Config(all=True, smoke=True, only="untimed"))
}
TABLES = [
    *(("dct", table) for table in ("1", "fig2")),
    *((paper, "all") for paper in ("iwp", "practical_lessons", "slim_dp")),
    *((paper, "1") for paper in ("practical_lessons", "slim_dp")),  # timed: a step, and an exchange
]


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "table"), TABLES)
def test_tables(paper, table):
    figures = ROOT / "docs" / "figures"
    before = sorted((path.name, path.stat().st_mtime) for path in figures.iterdir())
    command = [*COMMANDS[paper], "--table", table]
    process = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    assert "The paper:" in process.stdout
    assert f"--table {table}: " in process.stdout or table == "all"
    assert sorted((path.name, path.stat().st_mtime) for path in figures.iterdir()) == before  # figures are kept


def test_every_paper():
    names = {"dct", "iwp", "practical_lessons", "slim_dp"}
    assert {paper for paper, _ in TABLES} == set(COMMANDS) == set(papers()) == names
