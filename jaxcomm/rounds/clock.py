"""Where time passes: what waits is a generator that yields the seconds to wait, and a clock runs it.

So one thread can run many workers in simulated time, and stop one between any two requests to the store.
"""

import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")
Waiting = Generator[float, None, T]  # yields seconds to wait, and returns a result


class Clock(Protocol):
    """Runs what waits."""

    def now(self) -> float:
        """Returns seconds since some moment."""
        ...

    def run(self, work: Waiting[T]) -> T:
        """Runs work to its end, here."""
        ...

    def start(self, work: Waiting[T]) -> Future[T]:
        """Runs work beside what comes next."""
        ...


class WallClock:
    """Real time, and a thread for each task. A thread does not keep a process alive."""

    def now(self) -> float:
        """Returns the seconds of the system's steady clock."""
        return time.monotonic()

    def run(self, work: Waiting[T]) -> T:
        """Runs work to its end, here."""
        try:
            while True:
                if (seconds := next(work)) > 0:
                    time.sleep(seconds)
        except StopIteration as end:
            return end.value

    def start(self, work: Waiting[T]) -> Future[T]:
        """Runs work in a thread."""
        future = Future[T]()

        def run() -> None:
            try:
                future.set_result(self.run(work))
            except BaseException as error:  # is raised where the result is asked for
                future.set_exception(error)

        threading.Thread(target=run, name="jaxcomm-rounds", daemon=True).start()
        return future
