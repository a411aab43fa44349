"""What the modules of Slim-DP share: its models and settings, the paper's numbers, speed-ups, and runs."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from benchmarks.papers import common, timing
from benchmarks.shapes import count, shapes_of
from configs import CONFIGS
from configs.experiment import Experiment
from configs.methods import Method, PlumpDp, QuantDp, SlimDp
from train.records import Record, Records
from train.seeds import train_seeds

METHODS = ("plump_dp", "quant_dp", "slim_dp")
HOURS = 10_000 / 3.6e6  # hours of 10,000 mini-batches, per millisecond of one


@dataclass(frozen=True)
class Model:
    """One of the paper's two models.

    Attributes:
      name: the paper's.
      shapes: the option of `benchmarks.exchange`.
      imagenet: the experiment with the paper's settings.
      timed: the experiment whose step is timed for T_comp.
      twin: the experiment that trains.
      steps: of the twin, unless --steps says otherwise.
      rows: of a worker when T_comp is timed.
      exchange: the entry of its Slim-DP in `benchmarks.exchange`.
      is_large: whether its exchanges are timed for only a part of its elements, for lack of memory.
    """

    name: str
    shapes: str
    imagenet: str
    timed: str
    twin: str
    steps: int
    rows: int
    exchange: str
    is_large: bool = False

    @property
    def slim(self) -> SlimDp:
        """The paper's alpha, beta and q."""
        method = CONFIGS[self.imagenet].method
        assert isinstance(method, SlimDp)
        return method

    @property
    def exchanges(self) -> dict[str, str]:
        """Each method's entry in `benchmarks.exchange`."""
        return {"plump_dp": "plump_dp", "quant_dp": "quant_dp_gather", "slim_dp": self.exchange}


_GOOGLENET, _VGG = "googlenet_imagenet", "vgg16_imagenet"
MODELS = (
    Model("GoogLeNet", "googlenet", _GOOGLENET, _GOOGLENET, "googlenet_digits", 800, 32, "slim_dp_30_15"),
    Model("VGG-16", "vgg16", _VGG, _VGG, "vgg_digits", 400, 8, "slim_dp", is_large=True),
)
SMALLEST = Model("GoogLeNet", "1e4", _GOOGLENET, "digits", "digits", 400, 4, "slim_dp_30_15")  # of --smoke
WORKERS = (4, 8)

# Table 1, hours for 10,000 mini-batches: T_comp, and T_comm of the three methods, by model and K.
PAPER_TIMES: dict[tuple[str, int], tuple[float, tuple[float, float, float]]] = {
    ("GoogLeNet", 4): (2.28, (0.40, 0.20, 0.18)),
    ("VGG-16", 4): (7.83, (4.09, 1.47, 1.18)),
    ("GoogLeNet", 8): (2.32, (0.57, 0.29, 0.25)),
    ("VGG-16", 8): (7.82, (5.51, 1.93, 1.65)),
}
# Table 2: top-5 accuracy in %, Speed_d and Speed_a of each method, by model and K.
PAPER_SPEEDS: dict[tuple[str, int], tuple[tuple[float, float, float], ...]] = {
    ("GoogLeNet", 4): ((88.06, 1, 1), (88.02, 1.08, 1.08), (88.29, 1.09, 1.16)),
    ("VGG-16", 4): ((86.53, 1, 1), (86.55, 1.28, 1.30), (87.03, 1.32, 1.45)),
    ("GoogLeNet", 8): ((88.03, 1, 1), (88.08, 1.11, 1.16), (88.26, 1.13, 1.23)),
    ("VGG-16", 8): ((86.48, 1, 1), (86.53, 1.37, 1.39), (86.91, 1.41, 1.51)),
}
# Figure 4, on GoogLeNet with 4 workers: alpha, beta and the entry in `benchmarks.exchange`.
TRADE_OFFS = {
    (0.3, 0.0): "slim_dp_30_0",
    (0.3, 0.15): "slim_dp_30_15",
    (0.3, 0.3): "slim_dp_30_30",
    (0.2, 0.1): "slim_dp",
    (0.5, 0.25): "slim_dp_50_25",
}
FAILED = 10.0  # points below Plump-DP from which a run counts as not converged


@dataclass(frozen=True)
class Config(common.Config):
    """Slim-DP's tables 1 and 2, and figures 3 and 4."""

    rate: str = "1gbit"  # Speed of the hosts' links when exchanges are timed.
    timed_steps: int = 5  # Timed steps of each exchange and of T_comp.
    workers: tuple[int, ...] = WORKERS  # Numbers of workers, out of the paper's two.
    part: int = 8
    """VGG-16's exchanges are timed for 1/PART of its elements, and their times multiplied by PART. For Slim-DP, 1 takes
    8 GB per host."""
    dataset: str = "digits"  # Dataset that the twins are trained on: images of 10 classes.

    SMALLEST: ClassVar = {"rate": "none", "timed_steps": 1, "workers": WORKERS[:1]}

    @property
    def models(self) -> tuple[Model, ...]:
        """The models of the tables; with --smoke only one, with a short vector and a small network."""
        return (SMALLEST,) if self.smoke else MODELS

    def parts(self, model: Model) -> int:
        """Returns the divisor of a model's elements that are timed: 8 for an eighth."""
        return self.part if model.is_large else 1

    def shapes(self, model: Model) -> str:
        """Returns the option of `benchmarks.exchange`: all tensors, or a part of their elements as one vector."""
        parts = self.parts(model)
        return model.shapes if parts == 1 else str(count(shapes_of(model.shapes)) // parts)

    def hosts(self, K: int) -> int:
        """Returns the hosts that are timed for K workers."""
        return 2 if self.smoke else K


def averaged(usual: float, rare: float, period: int) -> float:
    """Returns the mean over a period in which one step is the rare one."""
    return ((period - 1) * usual + rare) / period


def communication(record: Record, period: int) -> float:
    """Returns the milliseconds of an exchange, averaged over its period if one exchange of it selects a core."""
    rare = record["ms_refresh"]
    return record["ms_median"] if rare is None else averaged(record["ms_median"], rare, period)


class Times(NamedTuple):
    """Milliseconds of a step: computing, and the average exchange."""

    compute: float
    exchange: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return (self.compute + self.exchange) / 1e3


def speed_d(dense: Times, method: Times) -> float:
    """Returns how many times faster than Plump-DP a method processes the same data."""
    return dense.seconds / method.seconds


def speed_a(dense: Record, method: Record, times: tuple[Times, Times]) -> float | None:
    """Returns how many times sooner than Plump-DP a run reaches the accuracy that Plump-DP ends with.

    Args:
      dense: Plump-DP's run with the same seed.
      method: the method's run.
      times: of both.

    Returns:
      None if the run never reaches it.
    """
    target = dense["accuracies"][-1]
    before, after = common.first_reaching(dense, target), common.first_reaching(method, target)
    return before * times[0].seconds / (after * times[1].seconds) if before and after else None


def exchange_times(config: Config, records: Records, model: Model, K: int) -> dict[str, Record]:
    """Returns the timed exchanges of a model, including figure 4's settings if it is that figure's model and K."""
    methods = list(model.exchanges.values())
    if (model, K) == (MODELS[0], WORKERS[0]):
        methods = list(dict.fromkeys([*methods, *TRADE_OFFS.values()]))
    return timing.time_exchanges(
        records,
        shapes=config.shapes(model),
        hosts=config.hosts(K),
        rate=config.rate,
        methods=methods,
        steps=config.timed_steps,
    )


def compute_ms(config: Config, records: Records, model: Model) -> float:
    """Returns the milliseconds of a step of one worker."""
    return timing.time_compute(records, model.timed, model.rows, config.timed_steps)["ms_median"]


def times_of(config: Config, records: Records, model: Model, K: int, exchange: str) -> Times | None:
    """Returns the times of a step from the records of table 1; None if they are missing."""
    key = {"of": "exchange", "shapes": config.shapes(model), "hosts": config.hosts(K), "rate": config.rate}
    record = records.find(key | {"method": exchange, "steps": config.timed_steps})
    compute = records.find(timing.compute_key(model.timed, model.rows, config.timed_steps))
    if record is None or compute is None:
        return None
    return Times(compute["ms_median"], config.parts(model) * communication(record, model.slim.q))


def experiment_of(config: Config, model: Model, K: int) -> Experiment:
    """Returns what a twin's workers train, with the paper's settings."""
    return config.experiment(
        model.twin,
        dataset=config.dataset,
        workers=K,
        **({} if config.steps else {"steps": model.steps}),
        nesterov=False,
        decay="l2",
        augment=False,
        mean="pixel",
    )


def period_of(model: Model, steps: int) -> int:
    """Returns the q with which a run of the twin selects as many cores as the experiment on ImageNet."""
    return max(1, round(steps * model.slim.q / CONFIGS[model.imagenet].steps))


def methods_of(model: Model, steps: int) -> dict[str, Method]:
    """Returns the three methods of the tables, for a run of a twin."""
    slim = dataclasses.replace(model.slim, q=period_of(model, steps))
    quant = QuantDp(bits=8, bucket=512, collective="gather")  # the paper's at every K: sums are not rounded again
    return dict(zip(METHODS, (PlumpDp(), quant, slim), strict=True))


def train_all(config: Config, records: Records, model: Model, K: int) -> dict[str, list[Record]]:
    """Returns the runs of all seeds, by method."""
    experiment = experiment_of(config, model, K)
    return {
        name: train_seeds(records, experiment, method, config.seeds)
        for name, method in methods_of(model, experiment.steps).items()
    }
