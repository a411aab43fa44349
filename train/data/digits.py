"""Digits: scikit-learn's 1,797 handwritten digits as a TFDS dataset, built without a download.

The images (8x8, values 0..16) ship inside the scikit-learn wheel. They are the test part of UCI's
"Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, doi:10.24432/C50P49).
"""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from train.data.placing import is_complete, preparing

TEST_PER_CLASS = 45


class Digits(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of scikit-learn's digits: 1,347 images to train on, 450 to test on.

    The split is a fixed function of scikit-learn's order, free of random numbers (`is_test_image`):
    45 test images of each class, spread evenly over the class. So both splits hold images by the
    same 13 writers: test accuracy is for new images, not for new writers. Within a split the rows
    keep scikit-learn's order.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits, 8x8 pixels of 0..16, as in scikit-learn.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://doi.org/10.24432/C50P49",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # nothing to download
        return {"train": self._generate_examples(False), "test": self._generate_examples(True)}

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        from sklearn import datasets  # here, because only the first use of the data needs it

        images, labels = datasets.load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8).astype(np.uint8)  # (1797, 8, 8)
        in_test = is_test_image(labels)
        for row in np.flatnonzero(in_test == test).tolist():
            # TFDS encodes PIL images by itself, arrays through TensorFlow.
            yield row, {"image": Image.fromarray(images[row]), "label": int(labels[row])}


def is_test_image(labels: np.ndarray) -> np.ndarray:
    """Marks the test images: 45 of each class, evenly spaced.

    Image `i` of the `n` of its class is a test image if `45 * (i + 1) // n > 45 * i // n`.

    Args:
      labels: the classes, (n,) integers, in the order of the file.

    Returns:
      (n,) booleans with exactly 45 marks in each class that has at least 45 images.
    """
    marks = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)  # (n of this class,)
        i = np.arange(len(rows))
        marks[rows] = TEST_PER_CLASS * (i + 1) // len(rows) > TEST_PER_CLASS * i // len(rows)
    return marks


def prepare_digits(data_dir: str | os.PathLike[str]) -> tfds.core.DatasetBuilder:
    """Opens the digits under `data_dir`, after building them (1 s) if they are missing.

    Several processes may call this at the same moment: one of the identical builds is kept, see `preparing`.

    Args:
      data_dir: the directory of all TFDS datasets; created if missing.

    Returns:
      The builder of the prepared dataset.
    """
    folder = Path("digits", str(Digits.VERSION))
    if not is_complete(Path(data_dir, folder)):
        with preparing(Path(data_dir), folder, keep_first=True) as private:
            builder = Digits(data_dir=private, file_format="array_record")
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                builder.download_and_prepare()  # prints progress bars and the private path
    return Digits(data_dir=data_dir)
