"""`--restarts N`: a supervisor that restarts the trainer from its last checkpoint after a fault.

Every process has a supervisor of its own. All processes end when one does (`train.liveness`), so they meet again at the
coordinator.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from train.goodput import FILE, Goodput

# Variable with the descriptor of an open file without a name, which holds the folder of the run once it has begun.
BEGUN = "JAXCOMM_BEGUN"
FINAL = (0, 2, 3, 130)  # exit codes after which there is no restart: done, bad input, dense advised, Ctrl-C
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PAUSE = 1.0  # seconds before a restart
# If JAX asks the cluster who is there: the other processes need time to end, as JAX aborts those that are still up when
# one comes back.
LONG_PAUSE = 10.0
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def is_supervised() -> bool:
    """Returns whether this process was started by `supervise`."""
    return BEGUN in os.environ


def end_with_supervisor() -> None:
    """Has Linux send SIGTERM to this process when its supervisor ends, so that a killed one leaves no trainer."""
    if is_supervised() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def previous_run_folder() -> Path | None:
    """Returns the folder of the run that an earlier start of this process has begun; None if none has."""
    return _read(int(os.environ[BEGUN])) if is_supervised() else None


def note_begun(folder: Path | None) -> None:
    """Notes the folder of the run, for later restarts; None if it is removed again."""
    if is_supervised():
        os.ftruncate(note := int(os.environ[BEGUN]), 0)
        os.pwrite(note, b"" if folder is None else os.fsencode(folder), 0)


def _read(note: int) -> Path | None:
    text = os.pread(note, 1 << 16, 0)
    return Path(os.fsdecode(text)) if text else None


def supervise(
    argv: Sequence[str],
    restarts: int,
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    pause: float | None = None,
) -> int:
    """Runs `python -m train`, and restarts it after a fault at most `restarts` times; returns its last exit code.

    After SIGTERM, SIGINT or SIGHUP the trainer gets SIGTERM, saves and ends, and is not restarted.

    Args:
      argv: of the trainer.
      restarts: starts after the first.
      start: starts a process, as `subprocess.Popen`.
      pause: seconds before each restart; PAUSE if not given.
    """
    process: subprocess.Popen[bytes] | None = None
    is_stopped = False

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True
        if process is not None:
            process.terminate()  # also for Ctrl-C, as the terminal sends that to the trainer itself

    with tempfile.TemporaryFile() as file, handled(ENDING, hand_on):
        note, code = file.fileno(), 0
        for number in range(restarts + 1):
            if number:
                print(
                    f"train: ended with {code}; start {number + 1} of {restarts + 1} "
                    + ("goes on from the last checkpoint" if _read(note) else "begins anew"),
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(PAUSE if pause is None else pause)
            if is_stopped:
                break
            process = start(
                [sys.executable, "-m", "train", *argv], env={**os.environ, BEGUN: str(note)}, pass_fds=[note]
            )
            if is_stopped:  # the signal came before the process was known
                process.terminate()
            code = process.wait()
            if is_stopped or code in FINAL:
                break
        folder = _read(note)
        summary = Goodput(folder).line() if code not in FINAL and folder and (folder / FILE).exists() else ""
        if summary:
            print(f"train: {summary}", file=sys.stderr)
        return code if code >= 0 else 128 - code


@contextlib.contextmanager
def handled(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Passes signals to a handler while the block runs, except those that nohup ignores or that C code handles."""
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: former for number, former in before.items() if former not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
