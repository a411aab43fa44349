"""Tables and figures of every paper at their smallest size, by the commands of `benchmarks.papers --all --smoke`.

Of those that are timed on hosts there is one of each kind, an exchange and a step: all would take longer than CI
should, and the benchmarks that make them have tests of their own.
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
TIMED = {"slim_dp": "1", "practical_lessons": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "table"), [*((paper, "all") for paper in COMMANDS), *TIMED.items()])
def test_all_tables_of_a_paper_are_made(paper, table):
    figures = ROOT / "docs" / "figures"
    before = sorted((path.name, path.stat().st_mtime) for path in figures.iterdir())
    command = [*COMMANDS[paper], "--table", table]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "The paper:" in done.stdout
    assert f"--table {table}: " in done.stdout or table == "all"
    assert sorted((path.name, path.stat().st_mtime) for path in figures.iterdir()) == before  # figures are kept


def test_every_paper_is_made():
    assert set(COMMANDS) == set(papers()) == {"dct", "iwp", "practical_lessons", "slim_dp"}
