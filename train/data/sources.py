"""Images by name: random access to the examples that TFDS has prepared on disk, and batches of them.

The digits are built on first use. The others are read where the user has prepared them, because
TFDS needs TensorFlow to download and build them; to read them it does not.
"""

import dataclasses
import os
import shlex
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import tensorflow_datasets as tfds
from google.protobuf.json_format import ParseError

from train.data import digits, images
from train.data.info import Batch, ImageInfo, check_split, resolve_data_dir
from train.data.placing import check_files, readable

SPLITS = ("train", "test")
MEAN_SAMPLE = 10_000  # JPEG files from which pixel means are computed: all of ImageNet would take an hour
Mean = Literal["channel", "pixel"]
IMAGES = {
    "digits": ImageInfo("digits", 1_347, 450, (8, 8, 1), 10),
    "mnist": ImageInfo("mnist", 60_000, 10_000, (28, 28, 1), 10),
    "fashion": ImageInfo("fashion", 60_000, 10_000, (28, 28, 1), 10),
    "cifar10": ImageInfo("cifar10", 50_000, 10_000, (32, 32, 3), 10),
    "imagenet2012": ImageInfo("imagenet2012", 1_281_167, 50_000, (224, 224, 3), 1_000),
}


class EncodedSource:
    """Random access to examples with encoded images, `{"image": bytes, "label": int32 ()}`."""

    def __init__(self, builder: tfds.core.DatasetBuilder, split: str):
        skip = {"image": tfds.decode.SkipDecoding()}
        self._examples = builder.as_data_source(split, decoders=skip)
        self.version = str(builder.info.version)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> images.Example:
        example = self._examples[index]
        return {"image": example["image"], "label": np.int32(example["label"])}


class CachedSource:
    """Random access to decoded images, kept after first use, for small datasets.

    Examples are `{"image": uint8 (H, W, C), "label": int32 ()}`. Memory grows to one copy of the
    split: 0.1 MB for digits, 47 MB for MNIST and Fashion-MNIST, 154 MB for CIFAR-10. Threads may read at the same
    time: at worst two of them decode the same image.
    """

    def __init__(self, encoded: EncodedSource, image_shape: tuple[int, int, int]):
        self._encoded = encoded
        self.version = encoded.version
        self._images = np.empty((len(encoded), *image_shape), np.uint8)
        self._labels = np.empty(len(encoded), np.int32)
        self._is_decoded = np.zeros(len(encoded), bool)

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, index: int) -> images.Example:
        if not self._is_decoded[index]:
            example = self._encoded[index]
            self._images[index] = images.decode(example["image"])
            self._labels[index] = example["label"]
            self._is_decoded[index] = True  # last, so that no other thread reads an unfinished row
        return {"image": self._images[index], "label": self._labels[index]}


class ImageSplit:
    """Batches of one split: examples, augmented or prepared, then standardised.

    Attributes:
      identity: the version of TFDS's builder.
    """

    def __init__(self, source: EncodedSource | CachedSource, preprocessing: images.Preprocessing):
        self._source = source
        self._preprocessing = preprocessing
        self.identity = {"version": source.version}

    def __len__(self) -> int:
        return len(self._source)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Reads rows (b,) as "image" (b, H, W, C) float32 and "label" (b,) int32; augmented where seeds are given."""
        examples = [self._source[row] for row in rows.tolist()]
        change = self._preprocessing
        if seeds is not None and change.augment:
            examples = [change.augment(e, np.random.default_rng(s)) for e, s in zip(examples, seeds, strict=True)]
        if seeds is None and change.prepare:
            examples = [change.prepare(example) for example in examples]
        batch = {key: np.stack([example[key] for example in examples]) for key in ("image", "label")}
        return change.standardise(batch)


def open_images(name: str, split: str, root: Path, mean: Mean = "channel") -> ImageSplit:
    """Opens one split of a dataset of images; see `open_source`.

    Args:
      name: one of `IMAGES`.
      split: "train" or "test".
      root: the folder of all datasets.
      mean: what is subtracted: the mean of each channel, or of each pixel, see `pixel_mean`.
    """
    change = images.PREPROCESSING[name]
    if mean == "pixel":
        change = dataclasses.replace(change, mean=pixel_mean(name, root) / change.scale)
    return ImageSplit(open_source(name, split, root), change)


@lru_cache(maxsize=1)
def pixel_mean(name: str, root: Path) -> np.ndarray:
    """Computes the mean of each pixel over the training images, prepared as in evaluation: (H, W, C) float64.

    Small images are averaged over the whole split, ImageNet's over 10,000 drawn with a fixed seed, the same in every
    process: this takes a minute and has a standard error of 0.6 of 255, as a pixel's standard deviation is about 60.
    """
    source, prepare = open_source(name, "train", root), images.PREPROCESSING[name].prepare
    numbers = np.arange(len(source))
    if isinstance(source, EncodedSource) and len(source) > MEAN_SAMPLE:
        numbers = np.sort(np.random.default_rng(0).choice(len(source), MEAN_SAMPLE, replace=False))

    def total(part: np.ndarray) -> np.ndarray:
        pixel_sum = np.zeros(IMAGES[name].image_shape, np.int64)
        for number in part.tolist():
            pixel_sum += (prepare(source[number]) if prepare else source[number])["image"]
        return pixel_sum

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(total, np.array_split(numbers, 64)), np.zeros(())) / len(numbers)


def open_source(name: str, split: str, data_dir: str | os.PathLike[str] | None = None) -> EncodedSource | CachedSource:
    """Opens one split for random access; builds the digits if they are missing.

    Warns when the split does not have its published number of examples.

    Args:
      name: one of `IMAGES`.
      split: "train" or "test" (imagenet2012's "test" reads TFDS's "validation").
      data_dir: see `resolve_data_dir`.

    Returns:
      A sequence of uint8 images and labels; of JPEG files and labels for imagenet2012.

    Raises:
      ValueError: if the split is unknown, or the format has no random access.
      FileNotFoundError: if the dataset is not prepared, or its files are not all there.
    """
    info = IMAGES[name]
    check_split(split, SPLITS)
    root = resolve_data_dir(data_dir)
    with readable(root / name, ParseError, AssertionError):
        builder = digits.prepare_digits(root) if name == "digits" else _open_prepared(name, root)
    stored_split = "validation" if (name, split) == ("imagenet2012", "test") else split
    check_files(builder, stored_split)
    if name == "imagenet2012":
        source = EncodedSource(builder, stored_split)
    else:
        stored_shape = builder.info.features["image"].shape
        if stored_shape != info.image_shape:
            raise ValueError(
                f"Images of {name} must have the shape {info.image_shape}; got {stored_shape} in {builder.data_path}. "
                "Is it another dataset of this name? Pass another data_dir."
            )
        prepared = (Path(builder.data_path) / "dataset_info.json").stat().st_mtime_ns
        source = cached_source(str(builder.data_path), prepared, stored_split, info.image_shape)
    if len(source) != info.num_examples(split):
        warnings.warn(
            f"the {split} split of {name} has {info.num_examples(split)} examples, "
            f"but {builder.data_path} holds {len(source)} of them; all of these are used",
            stacklevel=2,
        )
    return source


@lru_cache(maxsize=2)  # the two splits of one dataset
def cached_source(folder: str, prepared: int, split: str, image_shape: tuple[int, int, int]) -> CachedSource:
    """Opens a split that a process has not opened yet: all runs of a comparison share the decoded images.

    Args:
      folder: of the prepared dataset.
      prepared: when it was prepared, so that other contents of the same folder are read anew.
      split: as it is stored.
      image_shape: (H, W, C).
    """
    return CachedSource(EncodedSource(tfds.builder_from_directory(folder), split), image_shape)


def _open_prepared(name: str, root: Path) -> tfds.core.DatasetBuilder:
    """Opens the newest version under `root/name` that TFDS has prepared as array_record."""
    infos = (root / name).glob("*/dataset_info.json")
    versions = [path.parent for path in infos if tfds.core.Version.is_valid(path.parent.name)]
    if not versions:
        raise FileNotFoundError(
            f"{name} must be prepared before it is used; got no {root / name}/<version>/dataset_info.json. "
            + _how_to_prepare(name, root)
        )
    newest = max(versions, key=lambda path: tfds.core.Version(path.name))
    builder = tfds.builder_from_directory(newest)
    stored_as = builder.info.file_format.value
    if stored_as != "array_record":
        raise ValueError(
            f"A dataset must be stored as array_record, for random access; got {newest}, stored as {stored_as}. Move "
            f"it away and prepare it anew. {_how_to_prepare(name, root)}"
        )
    return builder


def _how_to_prepare(name: str, root: Path) -> str:
    if name == "fashion":
        return f"Prepare it by\n  python -m train.data.fashion prepare --input FOLDER --out {shlex.quote(str(root))}"
    command = f"tfds build {name} --file_format=array_record --data_dir={shlex.quote(str(root))}"
    manual = ""
    if name == "imagenet2012":
        manual = (
            "First put ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, from "
            f"https://image-net.org/download-images, into {root}/downloads/manual. "
        )
    return (
        "Prepare it by the command below, which needs TensorFlow (`pip install tensorflow`; reading"
        f" what it prepared does not):\n  {command}\n{manual}If the dataset lies elsewhere, pass "
        "data_dir or set TFDS_DATA_DIR."
    )
