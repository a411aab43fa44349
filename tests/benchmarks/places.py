"""How benchmarks are run; and whether this machine can make network namespaces, for which root may lack the right."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CAN_ISOLATE = (
    all(shutil.which(tool) for tool in ("ip", "tc", "unshare"))
    and os.geteuid() == 0
    and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
)


def run(module, *argv, code=0, env=None, timeout=300):
    """Runs a benchmark's command line to its end, which must be with this code."""
    command, pipe = [sys.executable, "-m", f"benchmarks.{module}", *argv], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # not kill, which would leave the hosts
            out, err = process.communicate()
    assert process.returncode == code, out[-2000:] + err[-2000:]
    return out, err
