"""What happens to an image between the file and the model: decoding, augmentation, standardisation.

Everything works on one example, `{"image": uint8 (H, W, C) or encoded bytes, "label": int32 ()}`,
except `standardise`, which turns the uint8 images of a batch into float32 at once.
"""

import dataclasses
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

Example = dict[str, Any]
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels

PADDING = 4  # pixels of zeros on each side before CIFAR's random crop
IMAGENET_SIZE = 224
IMAGENET_RESIZE = 256  # the short side before the centre crop
CROP_AREA = (0.08, 1.0)  # of the image's area
CROP_RATIO = (3 / 4, 4 / 3)  # width / height


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How one dataset is turned into the model's input.

    Attributes:
      scale: divisor of the pixel values.
      mean: of each channel, or of each pixel (H, W, C), after the division.
      std: of each channel, after the division.
      augment: random change of a training example, given its own generator; None for no change.
      prepare: fixed change of an evaluation example; None for no change.
    """

    scale: float
    mean: tuple[float, ...] | np.ndarray
    std: tuple[float, ...]
    augment: Callable[[Example, np.random.Generator], Example] | None = None
    prepare: Callable[[Example], Example] | None = None

    def standardise(self, batch: Example) -> Example:
        """Maps a batch's pixels to `(pixel / scale - mean) / std`, (n, H, W, C) float32."""
        factor = (1 / (self.scale * np.array(self.std))).astype(np.float32)  # (C,)
        offset = (np.array(self.mean) / np.array(self.std)).astype(np.float32)  # (C,) or (H, W, C)
        return batch | {"image": batch["image"] * factor - offset}


def decode(encoded: bytes) -> np.ndarray:
    """Decodes a PNG or JPEG file to uint8 (H, W, C).

    Uses PIL on all machines; TFDS would use OpenCV where it is installed, which decodes JPEG differently.
    """
    pixels = np.asarray(Image.open(io.BytesIO(encoded)))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def crop_and_flip(example: Example, rng: np.random.Generator) -> Example:
    """CIFAR's augmentation: pads by 4, crops the old size at a random place, flips half the images.

    He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2. The padding is
    black, as it is added before the standardisation.
    """
    image = example["image"]
    height, width, _ = image.shape
    y_offset, x_offset = rng.integers(0, 2 * PADDING + 1, size=2)
    padded = np.pad(image, ((PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    image = padded[y_offset : y_offset + height, x_offset : x_offset + width]
    if rng.random() < 0.5:
        image = image[:, ::-1]
    return example | {"image": image}


def random_resized_crop(example: Example, rng: np.random.Generator) -> Example:
    """ImageNet's augmentation: resizes a random box of 8% to 100% of the area to 224x224, and flips half of them.

    Szegedy et al., "Going Deeper with Convolutions", 2015, section 6. As in torchvision's
    `RandomResizedCrop`, ten boxes are tried; if none fits, the largest centred box of an allowed
    ratio is taken.
    """
    image = Image.open(io.BytesIO(example["image"]))
    pixels = _resize(image, _random_box(*image.size, rng))
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    return example | {"image": pixels}


def centre_crop(example: Example) -> Example:
    """ImageNet's evaluation: short side to 256, then the central 224x224, done in one resize."""
    image = Image.open(io.BytesIO(example["image"]))
    side = min(image.size) * IMAGENET_SIZE / IMAGENET_RESIZE
    return example | {"image": _resize(image, _centred_box(*image.size, side, side))}


def _random_box(width: int, height: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """A random box (left, top, right, bottom) in an image of `width` x `height` pixels."""
    for _ in range(10):
        area = width * height * rng.uniform(*CROP_AREA)
        ratio = math.exp(rng.uniform(math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            x_offset = int(rng.integers(0, width - box_width + 1))
            y_offset = int(rng.integers(0, height - box_height + 1))
            return x_offset, y_offset, x_offset + box_width, y_offset + box_height
    ratio = min(max(width / height, CROP_RATIO[0]), CROP_RATIO[1])
    return _centred_box(width, height, min(width, height * ratio), min(height, width / ratio))


def _centred_box(width: int, height: int, box_width: float, box_height: float) -> tuple[float, float, float, float]:
    x_offset, y_offset = (width - box_width) / 2, (height - box_height) / 2
    return x_offset, y_offset, x_offset + box_width, y_offset + box_height


def _resize(image: Image.Image, box: Box) -> np.ndarray:
    """Resizes a box of the image to uint8 (224, 224, 3)."""
    size = (IMAGENET_SIZE, IMAGENET_SIZE)
    return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BILINEAR, box=box))


# Mean and deviation of the training pixels in 0..1; ImageNet's from torchvision.
PREPROCESSING = {
    "digits": Preprocessing(scale=16, mean=(0,), std=(1,)),
    "mnist": Preprocessing(scale=255, mean=(0.1307,), std=(0.3081,)),
    "fashion": Preprocessing(scale=255, mean=(0.2860,), std=(0.3530,)),
    "cifar10": Preprocessing(
        scale=255,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        augment=crop_and_flip,
    ),
    "imagenet2012": Preprocessing(
        scale=255,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        augment=random_resized_crop,
        prepare=centre_crop,
    ),
}
