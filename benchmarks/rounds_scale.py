"""Requests, bytes and dollars of `jaxcomm.rounds` with up to a thousand workers.

    python -m benchmarks.rounds_scale --json docs/data/rounds_scale.json

Simulated workers, without a model, run the library's own log against a store in memory, in simulated time: requests are
counted, not estimated. The largest number of workers that is simulated is --most; beyond it, requests follow the line
through the two largest, which is exact for a protocol whose requests are a constant and some for every worker.
Dollars are those of S3's list prices as typed here, from memory: a PUT or LIST, and a GET. There is no charge for bytes
inside of the region; over the internet they cost --egress a GB.

"merged" is on paper: a rotating worker reads all payloads, and writes their sum as one object, dense in 8 bits, that
the others read. It is not built: it saves requests and bytes, and adds an upload and a download to every round.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from obstore.store import MemoryStore

from benchmarks import harness
from jaxcomm.rounds import records
from jaxcomm.rounds.log import Log
from jaxcomm.rounds.store import Objects

WORDS, ROUNDS, FIRST = 4, 9, 4  # of a simulated payload; simulated rounds, and the first that counts
PUT, GET = 5e-6, 4e-7  # dollars a request; LIST costs as much as PUT
DENSE = {"create": PUT, "list": PUT, "read": GET, "remove": 0.0}


@dataclass(frozen=True)
class Config(harness.Options):
    """Show what a store is asked for, and what that costs."""

    workers: str = "4,16,64,256,1000"  # Numbers of workers, separated by commas.
    most: int = 64  # The most workers that are simulated.
    parameters: float = 1e9  # Of the model.
    words_a_parameter: float = 1 / 197  # Of a payload: SparseLoCo's.
    seconds: float = 300.0  # Of a round's local steps.
    egress: float = 0.09  # Dollars a GB that leaves the region.


class Clock:
    """Simulated time, in which all workers run."""

    def __init__(self) -> None:
        self.time, self._queue, self._order = 0.0, list[Any](), itertools.count()

    def now(self) -> float:
        """Returns the simulated time."""
        return self.time

    def run(self, work: Any) -> Any:
        """Is not used: nothing runs alone."""
        raise NotImplementedError

    def start(self, work: Generator[float, None, Any]) -> Any:
        """Begins work."""
        heapq.heappush(self._queue, (self.time, next(self._order), work))

    def loop(self) -> None:
        """Runs all work to its end; every request takes 20 ms."""
        while self._queue:
            self.time, _, work = heapq.heappop(self._queue)
            try:
                delay = next(work)
            except StopIteration:
                continue
            heapq.heappush(self._queue, (self.time + max(delay, 0.01), next(self._order), work))


class Counted(Objects):
    """Counts requests by their kind."""

    def __init__(self, store: Any, clock: Clock, counts: Counter[str]):
        """Takes the counter of all workers."""
        super().__init__(store, clock, 60.0)
        self._counts = counts

    def _tried(self, verb: str, path: str, request: Callable[[], Any]) -> Any:
        self._counts[verb] += 1
        return super()._tried(verb, path, request)


def simulated(workers: int, seconds: float) -> Counter[str]:
    """Returns the requests of a round, of all workers together."""
    clock, store, counts, rng = Clock(), MemoryStore(), Counter[str](), np.random.default_rng(0)
    begun = Counter[str]()

    def worker(name: str) -> Generator[float, None, None]:
        log = Log(Counted(store, clock, counts), name, WORDS, lambda words, number: 1.0, 2, None, 30, 100.0, ROUNDS)
        number = 0
        while number < ROUNDS:
            if number >= FIRST and not begun:
                begun.update(counts)
            yield seconds * rng.uniform(0.97, 1.03)
            header = records.Header(name, number, "0" * 32, 32, 30, seconds / 30)
            raw = records.write_payload(header, np.zeros(WORDS, np.uint32))
            news = yield from log.take_part(number, 0, lambda _, raw=raw: raw)
            number += len(news.rounds)

    for index in range(workers):
        clock.start(worker(f"w{index}"))
    clock.loop()
    manifests = [item for page in store.list("manifests") for item in page]
    assert len(manifests) == ROUNDS
    return Counter({verb: (counts[verb] - begun[verb]) // (ROUNDS - FIRST) for verb in counts})


def main(config: Config) -> None:
    """Prints the table."""
    numbers = harness.numbers("--workers", config.workers, least=2)
    known = {k: simulated(k, config.seconds) for k in numbers if k <= config.most}
    if len(known) < 2:
        raise ValueError(f"--workers must have two numbers up to --most {config.most}; got {config.workers}.")
    (k0, first), (k1, second) = sorted(known.items())[-2:]
    payload, rows = 4 * config.parameters * config.words_a_parameter, []
    for k in numbers:
        each = {}
        for verb in DENSE:
            slope = (second[verb] / k1 - first[verb] / k0) / (k1 - k0)
            each[verb] = known[k][verb] / k if k in known else second[verb] / k1 + slope * (k - k1)
        price = k * sum(cost * each[verb] for verb, cost in DENSE.items())
        received, merged = k * payload, config.parameters  # a byte a parameter
        merged_price = k * (each["create"] * PUT + each["list"] * PUT + 4 * GET) + k * GET + PUT
        rounds_a_day = 86400 / config.seconds
        rows.append(
            {
                "workers": k,
                "is": "simulated" if k in known else "on the line",
                "requests of a worker": sum(each.values()),
                "requests a second, all": k * sum(each.values()) / config.seconds,
                "dollars a day": price * rounds_a_day,
                "dollars a day, merged": merged_price * rounds_a_day,
                "MB received by a worker": received / 1e6,
                "MB, merged": merged / 1e6,
                "seconds at 1 Gbit/s": received / 125e6,
                "seconds, merged": (received + 2 * merged) / 125e6,
                "egress dollars a day": k * received / 1e9 * config.egress * rounds_a_day,
            }
        )
    title = f"{config.parameters:.0e} parameters, payloads of {payload / 1e6:.1f} MB, rounds of {config.seconds:.0f} s"
    harness.report(config.json, (title, rows))


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
