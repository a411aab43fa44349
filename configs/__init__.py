"""One module per experiment; `CONFIGS` holds them by name."""

import difflib
from collections.abc import Sequence

from configs import (
    alexnet_digits,
    alexnet_imagenet,
    cifar10,
    digits,
    dlrm_clicks,
    dlrm_criteo,
    dlrm_flights,
    dlrm_movielens,
    fashion,
    googlenet_digits,
    googlenet_imagenet,
    gpt_linux,
    gpt_stdlib,
    mnist,
    resnet50_imagenet,
    resnet101_cifar10,
    resnet_digits,
    transformer_catalogs,
    transformer_iwslt14,
    vgg16_imagenet,
    vgg_digits,
)
from configs.experiment import Experiment

CONFIGS: dict[str, Experiment] = {
    "digits": digits.CONFIG,
    "mnist": mnist.CONFIG,
    "fashion": fashion.CONFIG,
    "cifar10": cifar10.CONFIG,
    "alexnet_imagenet": alexnet_imagenet.CONFIG,
    "alexnet_digits": alexnet_digits.CONFIG,
    "vgg16_imagenet": vgg16_imagenet.CONFIG,
    "vgg_digits": vgg_digits.CONFIG,
    "googlenet_imagenet": googlenet_imagenet.CONFIG,
    "googlenet_digits": googlenet_digits.CONFIG,
    "resnet50_imagenet": resnet50_imagenet.CONFIG,
    "resnet101_cifar10": resnet101_cifar10.CONFIG,
    "resnet_digits": resnet_digits.CONFIG,
    "dlrm_criteo": dlrm_criteo.CONFIG,
    "dlrm_clicks": dlrm_clicks.CONFIG,
    "dlrm_flights": dlrm_flights.CONFIG,
    "dlrm_movielens": dlrm_movielens.CONFIG,
    "gpt_linux": gpt_linux.CONFIG,
    "gpt_stdlib": gpt_stdlib.CONFIG,
    "transformer_iwslt14": transformer_iwslt14.CONFIG,
    "transformer_catalogs": transformer_catalogs.CONFIG,
}


def take_config(argv: Sequence[str]) -> tuple[Experiment, list[str]]:
    """Reads an experiment's name ("digits" if it is left out); returns the experiment and the other arguments.

    Raises:
      ValueError: if there is no experiment of that name.
    """
    args = list(argv)
    name = args.pop(0) if args and not args[0].startswith("-") and ":" not in args[0] else "digits"
    if name not in CONFIGS:
        close = difflib.get_close_matches(name, CONFIGS, n=1)
        guess = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"An experiment must be one of {', '.join(CONFIGS)}; got {name!r}{guess}.")
    return CONFIGS[name], args
