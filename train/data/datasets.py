"""The datasets by name: the info of each, and how its splits are opened.

Nothing is downloaded. Datasets that need no file of the user's are built on first use: digits (in scikit-learn's
wheel), clicks (generated), catalogs (in Django's wheel) and stdlib (in Python).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from train.data.click_store import CLICKS
from train.data.corpus_store import CORPORA
from train.data.info import DatasetInfo, Split, resolve_data_dir
from train.data.sources import IMAGES, Mean, open_images
from train.data.table_store import TABLES
from train.data.text_store import TRANSLATIONS, Text, translation_text


@dataclass(frozen=True)
class Dataset:
    """A name in `DATASETS`.

    Attributes:
      info: (folder of all datasets) -> the info of this one.
      open: (split, folder of all datasets) -> its rows.
      threads: most threads that prepare batches. Large JPEG files gain from several, as PIL decodes outside the
        interpreter's lock; cached or mapped data do not. Each thread prepares a batch, so more threads also take more
        memory.
    """

    info: Callable[[Path], DatasetInfo]
    open: Callable[[str, Path], Split]
    threads: int = 1


def _images(name: str, threads: int = 1) -> Dataset:
    return Dataset(lambda root: IMAGES[name], partial(open_images, name), threads)


DATASETS = {
    "digits": _images("digits"),
    "mnist": _images("mnist"),
    "fashion": _images("fashion"),
    "cifar10": _images("cifar10"),
    "imagenet2012": _images("imagenet2012", threads=8),
    **{
        name: Dataset(prepared.info, prepared.open)
        for name, prepared in (CLICKS | TABLES | TRANSLATIONS | CORPORA).items()
    },
}


def dataset_info(name: str, data_dir: str | os.PathLike[str] | None = None) -> DatasetInfo:
    """Looks a dataset up by name: an `ImageInfo`, `ClickInfo`, `TranslationInfo` or `TextInfo`.

    Args:
      name: one of `DATASETS`.
      data_dir: the folder of all datasets, see `resolve_data_dir`. The info of images does not need it; that of the
        others is read there. A dataset that needs no file of the user's is built there.

    Raises:
      ValueError: if there is no dataset of this name.
      FileNotFoundError: if it is not prepared.
    """
    return _dataset(name).info(resolve_data_dir(data_dir))


def open_split(name: str, split: str, data_dir: str | os.PathLike[str] | None = None, mean: Mean = "channel") -> Split:
    """Opens one split for random access.

    Args:
      name: one of `DATASETS`.
      split: "train" or "test"; "valid" of translations.
      data_dir: see `resolve_data_dir`.
      mean: what is subtracted from images: the mean of each "channel" or "pixel".

    Raises:
      ValueError: if the name or the split is unknown, the files are not what they should be, or pixel means are asked
        of a dataset without images.
      FileNotFoundError: if the dataset is not prepared, or its files are not all there.
    """
    dataset, root = _dataset(name), resolve_data_dir(data_dir)
    if mean == "channel":
        return dataset.open(split, root)
    if name not in IMAGES:
        raise ValueError(f"--mean pixel must go with images, {', '.join(IMAGES)}; got {name!r}. Leave it out.")
    return open_images(name, split, root, mean)


def open_text(name: str, split: str, data_dir: str | os.PathLike[str] | None = None) -> Text:
    """Reads the text of a split of a translation, for BLEU, and the subwords that turn numbers into text.

    Raises:
      ValueError: if the dataset is not a translation, there is none of this name, or its subwords cannot be read.
    """
    _dataset(name)
    if name not in TRANSLATIONS:
        raise ValueError(f"A dataset must be a translation to have text; got {name!r}.")
    return translation_text(name, split, resolve_data_dir(data_dir))


def _dataset(name: str) -> Dataset:
    if name not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join(DATASETS)}; got {name!r}.")
    return DATASETS[name]
