"""The world of every test of the launchers."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.tpu_scripts.world import World

# A shell cannot trap signals that it was started to ignore: SIGINT in a background job, SIGHUP under nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def world(tmp_path):
    yield World(tmp_path)
    # Ends what a failing test has left in the background: every process with a folder of the test.
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(tmp_path):
                os.kill(int(process.name), signal.SIGKILL)
