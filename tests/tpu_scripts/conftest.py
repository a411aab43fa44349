"""The world of every test of the launchers."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.tpu_scripts.world import World

# A shell cannot trap what it was started to ignore: a job in the background ignores SIGINT, and under nohup SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def world(tmp_path):
    yield World(tmp_path)
    # What a failing test has left in the background ends with it: whoever lives in its folders.
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(tmp_path):
                os.kill(int(process.name), signal.SIGKILL)
