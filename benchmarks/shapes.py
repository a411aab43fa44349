"""The shapes of models' gradients, made from their published architectures."""

import math


def resnet50() -> list[tuple[int, ...]]:
    """ResNet-50 for ImageNet: 161 tensors, 25,557,032 parameters (He et al., CVPR 2016)."""
    shapes: list[tuple[int, ...]] = [(7, 7, 3, 64), (64,), (64,)]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(1, 1, width_in, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                convolutions.append((1, 1, width_in, 4 * width))
            for kernel in convolutions:
                shapes += [kernel, kernel[-1:], kernel[-1:]]  # batch norm's scale and bias
            width_in = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def named(name: str) -> list[tuple[int, ...]]:
    """Returns the shapes of "resnet50", or one vector for a number such as "1e6".

    Raises:
      ValueError: for anything else.
    """
    if name == "resnet50":
        return resnet50()
    try:
        size = int(float(name))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"shapes is 'resnet50' or a number of elements of at least 1, got {name!r}: try --shapes 1e6.")
    return [(size,)]


def count(shapes: list[tuple[int, ...]]) -> int:
    """Returns the number of elements of all shapes."""
    return sum(math.prod(shape) for shape in shapes)
