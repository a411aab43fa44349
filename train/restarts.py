"""`--restarts N`: a supervisor that restarts the trainer from its last checkpoint after a fault.

Every process has a supervisor of its own. All processes end when one does (`train.liveness`), so they meet again at the
coordinator.
"""

import contextlib
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

BEGUN = "JAXCOMM_BEGUN"  # variable with the path of a file, which names the folder of the run once it has begun
FINAL = (0, 2, 3, 130)  # exit codes after which there is no restart: done, bad input, dense advised, Ctrl-C
PAUSE = 1.0  # seconds before a restart
# If JAX asks the cluster who is there: the other processes need time to end, as JAX aborts those that are still up when
# one comes back.
LONG_PAUSE = 10.0


def is_supervised() -> bool:
    """Returns whether this process was started by `supervise`."""
    return BEGUN in os.environ


def begun() -> Path | None:
    """Returns the folder of the run that an earlier start of this process has begun; None if none has."""
    text = Path(os.environ[BEGUN]).read_text() if is_supervised() else ""
    return Path(text) if text else None


def note_begun(folder: Path) -> None:
    """Notes the folder of the run, for later restarts."""
    if is_supervised():
        Path(os.environ[BEGUN]).write_text(str(folder))


def supervise(
    argv: Sequence[str],
    restarts: int,
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    pause: float | None = None,
) -> int:
    """Runs `python -m train`, and restarts it after a fault at most `restarts` times; returns its last exit code.

    SIGTERM and SIGINT are passed to the trainer, which then ends as it does without a supervisor, and is not restarted.

    Args:
      argv: of the trainer.
      restarts: starts after the first.
      start: starts a process, as `subprocess.Popen`.
      pause: seconds before each restart; PAUSE if not given.
    """
    process: subprocess.Popen[bytes] | None = None
    asked: signal.Signals | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = signal.Signals(number)
        if process is not None:
            process.send_signal(number)

    with tempfile.TemporaryDirectory(prefix="jaxcomm-") as folder, _handled(hand_on):
        note = Path(folder, "begun")
        note.touch()
        code = 0
        for number in range(restarts + 1):
            if number:
                print(
                    f"train: ended with {code}; start {number + 1} of {restarts + 1} "
                    + ("goes on from the last checkpoint" if note.read_text() else "begins anew"),
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(PAUSE if pause is None else pause)
            if asked is not None:
                break
            process = start([sys.executable, "-m", "train", *argv], env={**os.environ, BEGUN: str(note)})
            if asked is not None:  # the signal came before the process was known
                process.send_signal(asked)
            code = process.wait()
            if asked is not None or code in FINAL:
                break
        if code not in FINAL and Path(note.read_text(), FILE).exists():
            print(f"train: {Goodput(Path(note.read_text())).line()}", file=sys.stderr)
        return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Passes SIGTERM and SIGINT to a handler while the block runs."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
