"""What a round costs a worker whose next local steps run meanwhile.

    python -m benchmarks.rounds_overlap

Two workers, threads of one process, against a store in memory whose every request takes --latency. Local steps only
wait, so that nothing else is measured. Prints the time of a round for several numbers of steps that may run ahead.
"""

import itertools
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from obstore.store import MemoryStore

import jaxcomm as jc
from benchmarks import harness
from benchmarks.conditions import machine


@dataclass(frozen=True)
class Config(harness.Options):
    """Time rounds with more and more steps ahead."""

    latency: float = 0.05  # Seconds of a request.
    step: float = 0.05  # Seconds of a local step.
    steps: int = 30  # Local steps of a round.
    overlaps: str = "0,5,10,20,29"  # Steps that may run ahead, separated by commas.
    rounds: int = 6  # Of each, the first of which does not count.


class Slow:
    """A store whose requests take time."""

    def __init__(self, store: Any, seconds: float):
        """Takes the seconds of a request."""
        self._store, self._seconds = store, seconds

    def __getattr__(self, verb: str) -> Any:
        request = getattr(self._store, verb)

        def late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self._seconds)
            return request(*args, **kwargs)

        return late


def seconds_of_rounds(config: Config, overlap: int) -> list[float]:
    """Returns the seconds of each round but the first, as worker a sees them."""
    store, times = Slow(MemoryStore(), config.latency), list[float]()

    def step(params: Any, local: Any, batch: Any) -> Any:
        time.sleep(config.step)
        return {"w": params["w"] * 0.999}, local, {}

    def work(name: str) -> None:
        settings = {"exchange": jc.topk(0.99), "outer": optax.sgd(1.0), "total": config.rounds, "worker": name}
        worker = jc.rounds(store, step, {"w": jnp.ones((64, 64))}, steps=config.steps, overlap=overlap, **settings)
        number = 0
        while not worker.done:
            worker(np.zeros((8, 1)))
            if name == "a" and worker.round != number:
                number = worker.round
                times.append(time.monotonic())

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [after - before for before, after in itertools.pairwise(times)]


def main(config: Config) -> None:
    """Prints the table."""
    rows, conditions, alone = [], machine(), config.steps * config.step
    for overlap in harness.numbers("--overlaps", config.overlaps, least=0):
        seconds = seconds_of_rounds(config, overlap)
        row = {"overlap": overlap, "s a round": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
        rows.append(row | {"s of its steps": alone, "beyond them": statistics.median(seconds) / alone - 1} | conditions)
    harness.report(config.json, ("Rounds whose exchange runs beside the next steps", rows))


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
