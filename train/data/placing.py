"""Folders that appear whole: built under another name, then renamed."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def private_folder(root: Path, name: str) -> Iterator[Path]:
    """Gives a folder of this process beside the final one, on the same disk, and removes what is left in it.

    A killed process leaves at most this hidden `.NAME-*` folder behind.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as private:
        yield Path(private)


def move_into_place(
    built: str | os.PathLike[str], target: Path, private: Path, is_complete: Callable[[Path], bool]
) -> bool:
    """Renames `built` to `target`, if no other process has filled it.

    Args:
      built: the finished folder, inside `private`.
      target: its name from now on. What is there and not complete, such as half of a copy, is replaced.
      private: the folder of this process, which is removed afterwards.
      is_complete: whether a folder holds everything.

    Returns:
      False if another process was first, and what it built stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not is_complete(target):
        with contextlib.suppress(FileNotFoundError):  # another process moved it first
            os.rename(target, private / "incomplete")
    try:
        os.rename(built, target)
    except OSError:  # another process was first: a rename cannot replace a filled directory
        if not is_complete(target):
            raise
        return False
    return True
