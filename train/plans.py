"""Training by a plan: `python -m train NAME --plan FILE`."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jax
import optax

from configs.experiment import Experiment
from jaxcomm.exchange import Exchange
from jaxcomm.placement import Plan, read_plan

FAR = 0.2  # how far a step may be from its prediction before a run says so
_FIRST, _LAST = 6, 20  # the steps that are timed


@dataclass(frozen=True)
class Planned(Exchange):
    """The exchanges of a plan, in one transformation. It takes the place of a method.

    Attributes:
      file: of the plan.
    """

    file: Path

    name: ClassVar[str] = "plan"

    @cached_property
    def contents(self) -> Plan:
        """The plan in the file."""
        return read_plan(self.file)

    def options(self) -> dict[str, Any]:
        """Returns what a run records of the plan."""
        return {"tensors": dict(self.contents.tensors), "exchanges": dict(self.contents.exchanges)}

    def transform(self) -> optax.GradientTransformation:
        """Returns the transformation of the plan.

        Raises:
          ValueError: if some parameters bypass the exchange, as a plan is for all of them.
        """
        if self.where is not None or self.others is not None:
            raise ValueError(
                "A plan must be for all parameters; got some that are exchanged in another way. Leave out --compress "
                "and --embeddings."
            )
        return self.contents.transformation(self.axis_name)


def check_plan(method: Exchange, experiment: Experiment, params: Any) -> None:
    """Refuses a plan that was made for another model, or for another mesh. Other methods pass.

    Raises:
      ValueError: naming what differs.
    """
    if not isinstance(method, Planned):
        return
    plan = method.contents
    plan.check(params, experiment.workers)
    expected = {"stages": len(plan.cuts) + 1, "cuts": plan.cuts or None, "micro_batches": plan.micro_batches}
    expected |= {"dense_layers": plan.dense_layers, "embeddings": "exchange"}
    for name, value in expected.items():
        actual = getattr(experiment, name)
        if actual != value:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} must be {value} by {method.file}; got {actual}. Pass it, or make another plan.")


class Watch:
    """Times the first steps of a run, and compares them with what was predicted."""

    def __init__(self, method: Exchange):
        """Does nothing if the method is not a plan."""
        self.predicted = method.contents.step if isinstance(method, Planned) else None
        self._steps, self._seconds = 0, list[float]()

    def run(self, step: Callable[[], Any]) -> tuple[Any, str | None]:
        """Runs a step; returns its result, and after the last timed step a line, otherwise None."""
        self._steps += 1
        if self.predicted is None or self._steps > _LAST:
            return step(), None
        begin = time.perf_counter()
        out = jax.block_until_ready(step())
        if self._steps >= _FIRST:
            self._seconds.append(time.perf_counter() - begin)
        return out, compare(self.predicted, self._seconds) if self._steps == _LAST else None


def compare(predicted: float, seconds: list[float]) -> str:
    """Returns a line that says how far steps are from their prediction."""
    median = statistics.median(seconds)
    line = f"A step takes {1e3 * median:,.1f} ms, predicted were {1e3 * predicted:,.1f}"
    if abs(median / predicted - 1) <= FAR:
        return f"{line}."
    return f"{line}: more than {FAR:.0%} off. Make another plan on these machines: --advise --plan FILE."
