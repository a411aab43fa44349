"""Every table and figure of every paper at its smallest size: the processes of `benchmarks.papers --all --smoke`."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.papers.__main__ import Config, commands

ROOT = Path(__file__).parents[3]
COMMANDS = {command[2].rpartition(".")[2]: command for command in commands(Config(all=True, smoke=True))}


@pytest.mark.slow
@pytest.mark.parametrize("paper", ["dct", "iwp", "practical_lessons", "slim_dp"])
def test_all_tables_of_a_paper_are_made(paper):
    figures = ROOT / "docs" / "figures"
    before = sorted((path.name, path.stat().st_mtime) for path in figures.iterdir())
    done = subprocess.run(COMMANDS[paper], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "The paper:" in done.stdout
    assert sorted((path.name, path.stat().st_mtime) for path in figures.iterdir()) == before  # figures are kept
