"""What the processes of a run tell each other outside JAX's programs: that they are alive, and why one ends.

They use the key-value store of JAX's coordination service, which runs in process 0 and is there before any device is.
Otherwise, a process that fails would leave the others waiting in a collective.
"""

import contextlib
import os
import re
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from train.pace import Pace, slowest
from train.processes import Processes

# If a program fails, JAX raises JaxRuntimeError, or sometimes a ValueError whose text begins with one of these.
_STATUS = re.compile(r"(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): ")
PERIOD = 1.0  # seconds between two signs of life
SILENCE = 5.0  # once a collective has failed, seconds without a sign after which a process counts as gone


def is_of_jax(error: BaseException) -> bool:
    """Returns whether an error is a program's failure on or between devices, as when another process has ended."""
    is_status = isinstance(error, ValueError) and _STATUS.match(str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError) or is_status


class Store(Protocol):
    """Strings by key, shared by all processes."""

    def put(self, key: str, value: str) -> None:
        """Sets a key; an earlier value is replaced."""
        ...

    def get(self, key: str, seconds: float) -> str:
        """Waits for a key.

        Raises:
          TimeoutError: if it is not set in time.
        """
        ...

    def under(self, prefix: str) -> dict[str, str]:
        """Returns the values of all keys `prefix/NAME`, by name."""
        ...


class JaxStore:
    """The store of `jax.distributed`."""

    def __init__(self) -> None:
        """Takes the client of this process, which is connected; JAX has no public name for it."""
        from jax._src import distributed

        assert distributed.global_state.client is not None
        self._client = distributed.global_state.client

    def put(self, key: str, value: str) -> None:
        """See `Store`."""
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str, seconds: float) -> str:
        """See `Store`."""
        try:
            return self._client.blocking_key_value_get(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(key) from None
            raise

    def under(self, prefix: str) -> dict[str, str]:
        """See `Store`."""
        return {key.rpartition("/")[2]: value for key, value in self._client.key_value_dir_get(f"{prefix}/")}


@dataclass
class Signs:
    """The signs of life of all processes, as this one has seen them.

    Attributes:
      count: of processes.
      seen: the last sign of each, and when it came.
      moved: what each is doing, and since when.
    """

    count: int
    seen: dict[int, tuple[str, float]] = field(default_factory=dict)
    moved: dict[int, tuple[str, float]] = field(default_factory=dict)

    def update(self, values: Mapping[str, str], clock: float) -> None:
        """Takes in the signs "NUMBER DOING" of the processes."""
        for index in range(self.count):
            sign = values.get(str(index), " ")
            if index not in self.seen or self.seen[index][0] != sign:
                self.seen[index] = (sign, clock)
            doing = sign.partition(" ")[2]
            if index not in self.moved or self.moved[index][0] != doing:
                self.moved[index] = (doing, clock)

    def silent(self, clock: float, seconds: float) -> str | None:
        """Says which processes have given no sign for so long; None if each has given one or is done."""
        processes = [
            f"process {index} ({int(clock - last)} s)"
            for index, (_, last) in self.seen.items()
            if clock - last > seconds and self.moved[index][0] != "done"
        ]
        return f"no sign of life from {', '.join(processes)}" if processes else None

    def stuck(self, clock: float, seconds: float) -> str | None:
        """Says what the processes are doing if none has made progress for so long; None if one has, or is done."""
        if any(clock - last <= seconds or doing in ("", "done") for doing, last in self.moved.values()):
            return None
        doings = ", ".join(f"process {index}: {doing}" for index, (doing, _) in sorted(self.moved.items()))
        return f"no process has gone on for {seconds:g} s ({doings})"


class Liveness:
    """Signs of life, as a context: while it is open, this process gives one a second, and reads those of the others.

    If a process gives none for `timeout` seconds, or fails, all processes end: each prints one line that names it, and
    exits with the same code, 1 for a fault. If no process makes progress for `deadline` seconds, all end as well.
    """

    def __init__(
        self,
        store: Store,
        processes: Processes,
        timeout: float,
        deadline: float,
        exit_process: Callable[[int], None] = os._exit,
    ):
        """Starts nothing yet.

        Args:
          store: of all processes.
          processes: this one among the others.
          timeout: seconds without a sign after which a process counts as gone.
          deadline: seconds without progress of any process, after which all end.
          exit_process: ends this process, whatever its other threads do.
        """
        self._store, self._processes, self._exit = store, processes, exit_process
        self._timeout, self._deadline = timeout, deadline
        self._doing, self._number = "starting", 0
        self._pace, self._slow = Pace(), set[int]()
        self._closed, self._broken = threading.Event(), threading.Event()
        self._answered = time.monotonic()
        watches = (self._watch, self._guard, *([self._listen] if processes.index and processes.lines else []))
        self._threads = [threading.Thread(target=watch, daemon=True) for watch in watches]

    def __enter__(self) -> "Liveness":
        self._give_sign()
        self._answered = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=2 * PERIOD)
        self._doing = "done"
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._give_sign()

    def doing(self, activity: str, step: int = 0, ready: Any = None) -> None:
        """Tells the others what this process does from now on; costs nothing, but for a measurement now and then.

        Args:
          activity: it does.
          step: that is next, if this is between two steps.
          ready: arrays of the step before: see `Pace`.
        """
        self._doing = activity
        seconds = None if ready is None else self._pace.measure(step, ready)
        if seconds is not None:
            self._store.put(f"jaxcomm/pace/{self._processes.index}", repr(seconds))

    def fail(self, error: BaseException, code: int) -> None:
        """Ends all processes because of an error in this one.

        A collective also fails when another process has ended. So after an error of JAX, it first waits some seconds
        for that process to be found.

        Args:
          error: what happened.
          code: with which all processes exit.
        """
        if is_of_jax(error):
            self._broken.set()
            if self._closed.wait(SILENCE + 3 * PERIOD):
                for thread in self._threads:  # one has named the cause, and ends this process: nothing more is printed
                    thread.join()
                return
        if code == 1 and error.__traceback__ is not None and not isinstance(error, TimeoutError):
            traceback.print_exception(error)
        kind = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        message = str(error).strip()
        self._end(
            f"process {self._processes.index} has ended: {kind}{': ' + message if message else ''}", code, is_local=True
        )

    def _watch(self) -> None:
        signs = Signs(self._processes.count)
        while not self._closed.wait(PERIOD):
            try:
                self._give_sign()
                endings = self._store.under("jaxcomm/ended")
                signs.update(self._store.under("jaxcomm/alive"), time.monotonic())
                if self._processes.index == 0:
                    self._name_slow(self._store.under("jaxcomm/pace"))
            except jax.errors.JaxRuntimeError:
                self._end("process 0, through which the others speak, is gone", 1)
                return
            clock = self._answered = time.monotonic()
            timeout = min(self._timeout, SILENCE) if self._broken.is_set() else self._timeout
            reason = signs.silent(clock, timeout) or signs.stuck(clock, self._deadline)
            if reason or "first" in endings:
                self._end(reason or "", 1)
                return

    def _name_slow(self, paces: Mapping[str, str]) -> None:
        """Names a process once for which the others wait in every step."""
        slow_process = slowest({int(index): float(seconds) for index, seconds in paces.items()})
        if slow_process is not None and slow_process[0] not in self._slow and len(paces) == self._processes.count:
            index, ratio = slow_process
            self._slow.add(index)
            self._say(
                f"process {index} takes {ratio:.1f} times as long as the others for the same work: these wait for it "
                f"for about {1 - 1 / ratio:.0%} of the time that a step computes"
            )

    def _guard(self) -> None:
        """Ends this process if the store does not answer: a call to it may wait for ever."""
        while not self._closed.wait(PERIOD):
            seconds = time.monotonic() - self._answered
            if seconds > self._timeout + 3 * PERIOD:
                self._closed.set()
                self._say(f"process 0, through which the others speak, has not answered for {int(seconds)} s")
                self._exit(1)

    def _listen(self) -> None:
        """Ends this process as soon as process 0 has ended, before JAX does so with many lines and no name."""
        (line,) = self._processes.lines
        while not self._closed.is_set():
            if select.select([line], [], [], PERIOD)[0] and not self._closed.is_set():
                self._closed.set()
                self._say("process 0, through which the others speak, is gone")
                self._exit(1)

    def _give_sign(self) -> None:
        self._number += 1
        self._store.put(f"jaxcomm/alive/{self._processes.index}", f"{self._number} {self._doing}")

    def _end(self, line: str, code: int, *, is_local: bool = False) -> None:
        self._closed.set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            first = self._store.under("jaxcomm/ended").get("first")
            if first is None:
                self._store.put("jaxcomm/ended/first", f"{code} {line.splitlines()[0]}")
            elif not is_local:
                text, _, line = first.partition(" ")
                code = int(text)
        self._say(line)
        if self._processes.index == 0:
            time.sleep(3 * PERIOD)  # the others read the reason from this process
        self._exit(code)

    def _say(self, line: str) -> None:
        sys.stdout.flush()
        print(f"train: {line}", file=sys.stderr, flush=True)
