"""Dataset folders in TFDS's layout that appear whole: they are built under another root, then renamed."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds


def is_complete(folder: Path) -> bool:
    """Returns whether a folder holds a dataset, and not only half of a copy."""
    return (folder / "dataset_info.json").exists()


def check_new(folder: Path) -> None:
    """Refuses to prepare a dataset that is there already; commands call it before they read anything.

    Raises:
      ValueError: if the folder holds a dataset.
    """
    if is_complete(folder):
        raise ValueError(
            f"Data must be prepared into a new folder; got {folder}, which holds some already. Remove it, or pass "
            "another."
        )


def check_files(builder: tfds.core.DatasetBuilder, split: str) -> None:
    """Finds shards that a copy left out, which would otherwise fail in the middle of an epoch.

    Raises:
      FileNotFoundError: if one is missing.
    """
    gaps = [path for path in builder.info.splits[split].filepaths if not Path(path).exists()]
    if gaps:
        raise FileNotFoundError(
            f"Every shard listed in dataset_info.json must exist; got {len(gaps)} of the {split} split missing, "
            f"such as {gaps[0]}. Copy them again, or delete {builder.data_path} and prepare the dataset anew."
        )


@contextlib.contextmanager
def readable(folder: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Turns an error in reading a dataset's description into one that names the folder and the remedy.

    Raises:
      ValueError: for errors of these kinds, or for any error if no kind is given, as TFDS raises many kinds.
    """
    kinds = kinds or (Exception,)
    try:
        yield
    except kinds as error:
        raise ValueError(
            f"{folder} must hold a dataset as it was prepared; got {error!r}. Copy it again, or remove it and prepare "
            "it anew."
        ) from error


@contextlib.contextmanager
def preparing(root: Path, folder: Path, *, keep_first: bool) -> Iterator[Path]:
    """Yields a private root on the same disk; what is built there as `folder` is moved to `root` at the end.

    It appears there by one rename. A killed process leaves at most a hidden `.NAME-*` folder behind. An incomplete
    target, such as half of a copy, is replaced.

    Args:
      root: the folder of all datasets; created if missing.
      folder: of this dataset, below `root`: NAME/VERSION or NAME/CONFIG/VERSION.
      keep_first: whether another process may prepare the same folder at the same time; the first one is kept.

    Raises:
      ValueError: if the folder is there already, and not `keep_first`.
    """
    target = root / folder
    if not keep_first:
        check_new(target)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.parts[0]}-", dir=root) as private:
        yield Path(private)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not is_complete(target):
            with contextlib.suppress(FileNotFoundError):  # another process moved it first
                os.rename(target, Path(private, "incomplete"))
        try:
            os.rename(Path(private) / folder, target)
        except OSError:  # another process was first: a rename cannot replace a filled directory
            if not is_complete(target):
                raise
            if not keep_first:
                check_new(target)
