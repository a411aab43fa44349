"""The repository, and whether this machine can make network namespaces: root in a container may lack the right to."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CAN_ISOLATE = (
    all(shutil.which(tool) for tool in ("ip", "tc", "unshare"))
    and os.geteuid() == 0
    and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
)
