"""One module per experiment; `CONFIGS` holds them by name."""

from configs import cifar10, digits, mnist
from configs.experiment import Experiment

CONFIGS: dict[str, Experiment] = {
    "digits": digits.CONFIG,
    "mnist": mnist.CONFIG,
    "cifar10": cifar10.CONFIG,
}
