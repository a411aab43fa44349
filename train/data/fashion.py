"""Prepares Fashion-MNIST: 70,000 images of clothes in 10 classes (Xiao et al., 2017, arXiv:1708.07747; MIT licence).

python -m train.data.fashion prepare --input FOLDER --out FOLDER     # the four IDX files, as published
"""

import gzip
import math
import struct
import sys
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from train.data.commands import run_command
from train.data.info import resolve_data_dir
from train.data.placing import check_new, preparing
from train.data.rows import write_records
from train.data.sources import IMAGES

FOLDER = Path("fashion", "1.0.0")
PREFIXES = {"train": "train", "test": "t10k"}  # of the files' names
UNSIGNED_BYTES = 8  # the only type of numbers in these files, in the third byte of an IDX file


def prepare_fashion(source: Path, root: Path) -> dict[str, Any]:
    """Writes the images, as PNG in the order of the files, into `root/fashion/1.0.0`, which appears when it is whole.

    Args:
      source: folder of train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, and the same of t10k.
      root: the folder of all datasets.

    Returns:
      The number of images in each split, and the CRC-32 of the pixels and labels of both.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is not one of these, or the folder is prepared already.
    """
    check_new(root / FOLDER)
    splits = {split: read_split(source, prefix) for split, prefix in PREFIXES.items()}
    crc32 = 0
    for array in (array for arrays in splits.values() for array in arrays):
        crc32 = zlib.crc32(array.tobytes(), crc32)
    facts = {**{split: len(labels) for split, (_, labels) in splits.items()}, "crc32": f"{crc32:08x}"}
    features = {
        "image": tfds.features.Image(shape=IMAGES["fashion"].image_shape, encoding_format="png"),
        "label": tfds.features.ClassLabel(num_classes=IMAGES["fashion"].num_classes),
    }
    # TFDS encodes PIL images by itself, arrays through TensorFlow.
    records = {
        split: ({"image": Image.fromarray(image), "label": int(label)} for image, label in zip(*arrays, strict=True))
        for split, arrays in splits.items()
    }
    description = "Fashion-MNIST, in the order of its files."
    with preparing(root, FOLDER, keep_first=False) as private:
        write_records(private, FOLDER, features, records, description, facts, shard=1 << 16)
    return facts


def read_split(source: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the images (n, 28, 28) and the labels (n,) of a split, both uint8; see `prepare_fashion` for errors."""
    info = IMAGES["fashion"]
    images = read_idx(source / f"{prefix}-images-idx3-ubyte.gz", 3)
    labels = read_idx(source / f"{prefix}-labels-idx1-ubyte.gz", 1)
    if images.shape[1:] != info.image_shape[:2]:
        raise ValueError(
            f"Images of Fashion-MNIST must have {info.image_shape[:2]} pixels; got {images.shape[1:]} in those of "
            f"{prefix} in {source}. Pass the folder of its files."
        )
    if len(images) != len(labels) or not len(images):
        raise ValueError(
            f"Every image must have a label; got {len(images)} images and {len(labels)} labels of {prefix} in "
            f"{source}. Copy both files again."
        )
    if labels.max() >= info.num_classes:
        raise ValueError(
            f"Labels must be in [0, {info.num_classes}); got {labels.max()} as label {labels.argmax()} of {prefix} in "
            f"{source}. Pass the folder of Fashion-MNIST's files."
        )
    return images, labels


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads an array of unsigned bytes with so many dimensions from a compressed IDX file.

    The file is a magic number (two zeros, the type, the number of dimensions), the dimensions as big-endian integers of
    32 bits, and the numbers.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is not such a file, or cut off.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"Fashion-MNIST must be four files, compressed as published; got no {path}. Pass their folder by --input."
        )
    try:
        content = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"A compressed file must be whole; got {path}, which is not ({error}). Copy it again."
        ) from error
    start = 4 * (1 + dimensions)
    magic = bytes([0, 0, UNSIGNED_BYTES, dimensions])
    if content[:4] != magic or len(content) < start:
        raise ValueError(
            f"{path.name} must begin with the magic number {magic.hex()} and {dimensions} sizes; got "
            f"{content[:start].hex()} in {path}. Copy it again."
        )
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} must hold as many bytes as its sizes {shape} say, {math.prod(shape)}; got {len(content) - start}. "
            "Copy it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


@dataclass(frozen=True)
class Prepare:
    """Prepare Fashion-MNIST as the dataset "fashion"."""

    input: Path
    """Folder of the four files, train-images-idx3-ubyte.gz and so on."""
    out: Path | None = None
    """Folder of all datasets, the trainer's --data-dir; $TFDS_DATA_DIR or ~/tensorflow_datasets if not given."""

    def run(self) -> dict[str, Any]:
        """Prepares the images; returns what there is."""
        return prepare_fashion(self.input, resolve_data_dir(self.out))


main = partial(run_command, "fashion", {"prepare": Prepare})

if __name__ == "__main__":
    sys.exit(main())
