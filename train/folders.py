"""Where a run writes."""

from pathlib import Path


def run_folder(out: Path, name: str, *, resume: bool) -> Path:
    """Returns the folder of a run: out/name, or out/name-2, out/name-3, ... where the earlier ones are taken.

    Args:
      out: the folder of all runs.
      name: the experiment's name.
      resume: take the newest of the existing folders, instead of the first free one.

    Raises:
      ValueError: if there is nothing to resume.
    """
    number, newest = 1, None
    while (folder := out / (name if number == 1 else f"{name}-{number}")).exists():
        number, newest = number + 1, folder
    if not resume:
        return folder
    if newest is None:
        raise ValueError(f"--resume goes on with a run that has begun, got no {out / name}: leave --resume out.")
    return newest
