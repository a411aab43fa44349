"""A world of machines that are folders here, with stand-ins for gcloud, ssh and Slurm on the PATH."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"


class World:
    """A checkout to launch from, and the machines that the stand-ins run commands on."""

    def __init__(self, folder):
        self.folder = folder
        self.checkout = folder / "check out"  # a path with a space
        shutil.copytree(ROOT / "tpu_scripts", self.checkout / "tpu_scripts")
        (self.checkout / ".gitignore").write_text("runs/\n")
        subprocess.run(["git", "init", "--quiet"], cwd=self.checkout, check=True)
        self.environment = {
            "PATH": f"{STAND_INS}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "WORLD": str(folder),
            "TMPDIR": str(folder),
            "REAL_PYTHON": sys.executable,
        }
        for name in ("calls", "tpu"):
            (folder / name).touch()
        (folder / "states").write_text("READY\n")
        (folder / "workers").write_text("w0 w1\n")

    def script(self, name, *arguments, **environment):
        """Starts one of the scripts; its output ends when it does."""
        return subprocess.Popen(
            [self.checkout / "tpu_scripts" / name, *arguments],
            cwd=self.checkout,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def call(self, name, *arguments, timeout=30, **environment):
        process = self.script(name, *arguments, **environment)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def calls(self):
        """How the stand-ins were called since the last look, one command line per line."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines()
        path.write_text("")
        return lines

    def files(self):
        """All files, links as links, except the list of calls."""
        return {path: path.lstat().st_mtime_ns for path in self.folder.rglob("*") if path.name != "calls"}

    def machine(self, name):
        return self.folder / "machines" / name / "jaxcomm"

    def install(self, *names):
        """Puts the launchers' scripts and a Python that trains nothing on machines."""
        for name in names:
            machine = self.machine(name)
            shutil.copytree(self.checkout / "tpu_scripts", machine / "tpu_scripts")
            self.give_python(name)

    def give_python(self, name, python=STAND_INS / "trainer"):
        place = self.machine(name) / ".venv" / "bin" / "python"
        place.parent.mkdir(parents=True)
        place.symlink_to(python)

    def behave(self, name, text):
        (self.machine(name) / "behave").write_text(text)

    def trained(self, name, task=""):
        """The trainer's arguments and its JAXCOMM_... variables on a machine."""
        arguments = (self.machine(name) / f"arguments{task}").read_text().split("\0")[:-1]
        lines = (self.machine(name) / f"environment{task}").read_text().splitlines()
        return arguments, dict(line.split("=", 1) for line in lines)


def without_file(text):
    """A text with a fixed name for the temporary file, whose name changes in every call."""
    return re.sub(r"/jaxcomm\.\w{10}", "/FILE", text)


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
