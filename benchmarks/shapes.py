"""The shapes of models' gradients, made from their published architectures."""

import itertools
import math
from collections.abc import Callable


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


def alexnet() -> list[tuple[int, ...]]:
    """AlexNet in one tower for ImageNet: 16 tensors, 61,100,840 parameters (Krizhevsky, 2014, as in torchvision)."""
    kernels = [(11, 11, 3, 64), (5, 5, 64, 192), (3, 3, 192, 384), (3, 3, 384, 256), (3, 3, 256, 256)]
    return with_biases([*kernels, (6 * 6 * 256, 4096), (4096, 4096), (4096, 1000)])


def vgg16() -> list[tuple[int, ...]]:
    """VGG-16 for ImageNet: 32 tensors, 138,357,544 parameters (Simonyan and Zisserman, ICLR 2015)."""
    widths = [3, *[64] * 2, *[128] * 2, *[256] * 3, *[512] * 6]
    kernels: list[tuple[int, ...]] = [(3, 3, inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]
    return with_biases([*kernels, (7 * 7 * 512, 4096), (4096, 4096), (4096, 1000)])


def googlenet() -> list[tuple[int, ...]]:
    """GoogLeNet for ImageNet with both auxiliary heads: 128 tensors, 13,378,280 parameters.

    Szegedy et al., "Going Deeper with Convolutions", CVPR 2015.
    """
    from models.googlenet import STAGES

    kernels: list[tuple[int, ...]] = [(7, 7, 3, 64), (1, 1, 64, 64), (3, 3, 64, 192)]
    width = 192
    for index, (a, b, c, d, e, f) in enumerate(itertools.chain(*STAGES)):
        kernels += [(1, 1, width, a), (1, 1, width, b), (3, 3, b, c), (1, 1, width, d), (5, 5, d, e), (1, 1, width, f)]
        width = a + c + e + f
        if index in (2, 5):  # 4a and 4d
            kernels += [(1, 1, width, 128), (4 * 4 * 128, 1024), (1024, 1000)]
    return with_biases([*kernels, (width, 1000)])


def dlrm(rows: int = 10_000) -> list[tuple[int, ...]]:
    """DLRM for Criteo's 13 dense features and 26 tables: 508,753 parameters and 416 for every row of a table.

    The model of `configs/dlrm_criteo.py` (Naumov et al., 2019, with the sizes of Gupta et al., KDD 2021), whose tables
    are one array.

    Args:
      rows: of a table.
    """
    products = 16 + 27 * 26 // 2  # of pairs of embeddings and dense features, and the dense features
    bottom, top = (13, 512, 256, 64, 16), (products, 512, 256, 128, 1)
    return [
        *with_biases(list(itertools.pairwise(bottom))),
        (26 * rows, 16),
        *with_biases(list(itertools.pairwise(top))),
    ]


def transformer() -> list[tuple[int, ...]]:
    """The untied transformer for IWSLT'14: 42,864,640 parameters, with fairseq's 8,848 and 6,632 tokens.

    The model of `configs/transformer_iwslt14.py` (Vaswani et al., NeurIPS 2017).
    """
    width, hidden = 512, 1024
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    attention = [*with_biases([(width, width)] * 4), *norm]
    feed_forward = [*with_biases([(width, hidden), (hidden, width)]), *norm]
    encoder, decoder = [*attention, *feed_forward] * 6, [*attention, *attention, *feed_forward] * 6
    return [(8848, width), *encoder, (6632, width), *decoder, (width, 6632)]


def with_biases(kernels: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the kernels, each followed by a bias of its outputs."""
    return [shape for kernel in kernels for shape in (kernel, kernel[-1:])]


MODELS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "resnet50": resnet50,
    "alexnet": alexnet,
    "vgg16": vgg16,
    "googlenet": googlenet,
    "dlrm": dlrm,
    "transformer": transformer,
}


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """Returns the shapes of one of `MODELS`, such as "resnet50", or one vector for a number such as "1e6".

    Raises:
      ValueError: for anything else.
    """
    if name in MODELS:
        return MODELS[name]()
    try:
        size = int(float(name))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(
            f"--shapes must be one of {', '.join(MODELS)}, or a number of elements of at least 1; got {name!r}. Try "
            "--shapes 1e6."
        )
    return [(size,)]


def count(shapes: list[tuple[int, ...]]) -> int:
    """Returns the number of elements of all shapes."""
    return sum(math.prod(shape) for shape in shapes)
