"""Where a run writes."""

import contextlib
import errno
import fcntl
import itertools
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.goodput import FILE
from train.restarts import note_begun
from train.tables import reading, write_whole

RUNS, LOCK = "runs.json", "lock"  # files of a run's folder
METRICS, SETTINGS = "metrics.jsonl", "settings.json"  # files of a method's folder in it
LINE = {"step", "loss", "sent", "overflow", "skipped", "bytes_received"}  # what every line of METRICS has


@contextlib.contextmanager
def run_folder(out: Path, name: str, *, resume: bool | Path, runs: Sequence[str] = ()) -> Iterator[Path]:
    """Yields the folder of a run, locked against other runs: out/name, or out/name-2, ... if that is taken.

    With several processes, process 0 takes it and tells the others. A new folder is removed again if the block fails
    before it has written anything there.

    Args:
      out: the folder of all runs.
      name: the experiment's name.
      resume: the folder to take; True for the one that was written last, which is printed; False for the first free
        one.
      runs: the names of what is trained, in order; a resumed run must have the same.

    Raises:
      ValueError: if there is nothing to resume, it is of other runs, or another process is using it.
      OSError: if the folder cannot be made.
    """
    with contextlib.ExitStack() as stack:
        number = 0
        if jax.process_index() == 0:
            if not resume and not out.exists():
                stack.enter_context(_removed_if_empty(out, of_runs=True))
            if isinstance(resume, Path):
                number = next(number for number in itertools.count(1) if _folder(out, name, number) == resume)
            else:
                number = _last(out, name) if resume else _take(out, name)
            folder = _folder(out, name, number)
            if not resume:
                stack.enter_context(_removed_if_empty(folder))
            stack.enter_context(_locked(folder))
            _check_runs(folder, runs, bool(resume))
        if jax.process_count() > 1:
            number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
        yield _folder(out, name, number)


def check_fresh(folder: Path, checkpoint_every: int) -> None:
    """Refuses to begin in a folder whose run was past its first checkpoint, if no checkpoint is left.

    Args:
      folder: of one method, with `metrics.jsonl` and `checkpoints/`.
      checkpoint_every: steps between checkpoints.

    Raises:
      ValueError: if it is such a folder.
    """
    metrics, checkpoints = folder / METRICS, folder / "checkpoints"
    steps = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
    if steps > checkpoint_every and not any(checkpoints.iterdir() if checkpoints.exists() else ()):
        raise ValueError(
            f"--resume must find the checkpoints of a run; got {steps} steps in {metrics} and nothing in "
            f"{checkpoints}. Put the checkpoints back, or begin anew without --resume."
        )


def _folder(out: Path, name: str, number: int) -> Path:
    return out / (name if number == 1 else f"{name}-{number}")


@contextlib.contextmanager
def _removed_if_empty(folder: Path, *, of_runs: bool = False) -> Iterator[None]:
    """On an error, removes a new folder that holds no files but this module's; one of runs, if no run is left in it."""
    try:
        yield
    except BaseException:
        if of_runs:
            with contextlib.suppress(OSError):
                folder.rmdir()
        elif folder.is_dir() and {path.name for path in folder.rglob("*") if path.is_file()} <= {RUNS, LOCK}:
            shutil.rmtree(folder)
            note_begun(None)  # the next start begins anew
        raise


def _take(out: Path, name: str) -> int:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                _folder(out, name, number).mkdir()
                return number
    except OSError as error:
        raise OSError(
            f"--out must be a folder in which folders can be made; got {str(out)!r}: {error.strerror}. Name another."
        ) from None
    raise AssertionError


def _last(out: Path, name: str) -> int:
    """Returns the number of the run that wrote last: the one that was stopped last, whatever its number."""
    names = [path.name for path in out.iterdir() if path.is_dir()] if out.is_dir() else []
    pattern = re.compile(rf"{re.escape(name)}(?:-([2-9]|[1-9]\d+))?")
    numbers = [int(match[1] or 1) for folder_name in names if (match := pattern.fullmatch(folder_name))]
    if not numbers:
        raise ValueError(f"--resume must go on with a run that has begun; got no {out / name}. Leave --resume out.")
    last = max(numbers, key=lambda number: (_write_time(_folder(out, name, number)), number))
    print(
        f"train: --resume goes on with {_folder(out, name, last)}"
        + (f", which was written last of {len(numbers)} runs" if len(numbers) > 1 else ""),
        file=sys.stderr,
    )
    return last


def _write_time(folder: Path) -> float:
    files = [folder / file for file in (RUNS, FILE)]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"A run's folder must be used by one run at a time; got {folder}, in which another process trains. "
                "Wait for it, or begin another run without --resume."
            ) from None
        except OSError as error:  # a file system without locks
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                raise
        yield


def read_runs(folder: Path) -> list[str] | None:
    """Returns the names of a run's methods, which are folders in its own; None if it has not noted them.

    Raises:
      ValueError: if the file holds something else.
    """
    path = folder / RUNS
    if not path.exists():
        return None
    with reading(path, "the names of a run's methods", "Remove it."):
        names = json.loads(path.read_text())
        if not isinstance(names, list) or any(Path(name).name != name for name in names):
            raise ValueError(names)
    return names


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a method's metrics, one a step, with NaN for null.

    A half line at the end is left out: a run is writing it, or was killed.

    Raises:
      ValueError: naming the line that is not one of a step.
    """
    records = []
    with path.open(newline="\n", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                continue
            with reading(path, "a JSON object of numbers a line", f"Remove line {number}, and those after it."):
                line = {name: math.nan if value is None else value for name, value in json.loads(text).items()}
                if not all(isinstance(value, int | float) for value in line.values()):
                    raise ValueError(line)
                if not isinstance(line["step"], int) or line["step"] < 1 or not line.keys() >= LINE:
                    raise ValueError(line)
            records.append(line)
    return records


def check_steps(path: Path, lines: Sequence[Mapping[str, Any]], last: int) -> None:
    """Refuses lines of METRICS that are not those of the steps 1 to `last`: what is summed over them would be wrong.

    Raises:
      ValueError: naming the first step that is not in its place.
    """
    steps = [line["step"] for line in lines]
    place = next((at for at in range(max(last, len(steps))) if steps[at : at + 1] != [at + 1]), None)
    if place is not None:
        got = f"step {steps[place]}" if place < len(steps) else "its end"
        raise ValueError(
            f"{path} must have a line for every step until {last}; got {got} in the place of step {place + 1}. Put the "
            "file back, or begin anew without --resume."
        )


def _check_runs(folder: Path, runs: Sequence[str], resume: bool) -> None:
    before = read_runs(folder) if resume else None
    if before is not None and before != list(runs):
        raise ValueError(
            f"--resume must go on with the methods that the run began with; got {', '.join(runs)} for {folder}, "
            f"which has {', '.join(before)}. Give the same method and options, or leave --resume out."
        )
    write_whole(folder / RUNS, json.dumps(list(runs)) + "\n")
