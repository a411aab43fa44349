"""Where time passes: what waits is a generator that yields the seconds to wait, and a clock runs it.

So one thread can run many workers in simulated time, and stop one between any two requests to the store.
"""

import threading
import time
from collections.abc import Generator
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
Waiting = Generator[float, None, T]  # yields seconds to wait, and returns a result


class Task(Protocol):
    """Work beside the local steps."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def result(self) -> Any:
        """Returns what it returned, or raises what it raised; only when it is done."""
        ...


class Clock(Protocol):
    """Runs what waits."""

    def now(self) -> float:
        """Returns seconds since some moment."""
        ...

    def run(self, work: Waiting[T]) -> T:
        """Runs work to its end, here."""
        ...

    def start(self, work: Waiting[Any]) -> Task:
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

    def start(self, work: Waiting[T]) -> "ThreadTask[T]":
        """Runs work in a thread."""
        return ThreadTask(self, work)


class ThreadTask(Generic[T]):
    """Work in a thread of its own."""

    def __init__(self, clock: WallClock, work: Waiting[T]):
        self._clock, self._work = clock, work
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxcomm-rounds", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._clock.run(self._work)
        except BaseException as error:  # is raised where the result is asked for
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Returns what it returned, or raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
