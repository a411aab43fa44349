"""Before JAX connects: the processes of a run meet at the coordinator's address, and learn who has not come.

JAX's coordination service cannot say who is there before all are. So process 0 listens at its port first; when all have
come, it closes that socket, and JAX's service takes the port. The connections stay open: when they end, the others know
that process 0 is gone.

Messages are lines of JSON. A process says its number and the count, and repeats that whenever process 0 sends "wait": a
connection that does not answer is no process, or one whose host is gone, and another may take its number.
"""

import contextlib
import json
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

SAY = 5.0  # seconds between two lines that say who is missing; the first comes after FIRST
FIRST = 2.0
PAUSE = 0.3  # seconds between two attempts to reach process 0
LATE = 15.0  # seconds that the others wait longer than process 0, so that it can name who is missing
ANSWER = 10.0  # seconds within which a connection must show that a process is there
LONGEST = 1 << 16  # bytes of a message
MOST = 100  # connections at a time that have not shown it yet


@dataclass(frozen=True)
class Meeting:
    """What the processes have agreed on.

    Attributes:
      index: this process from now on, from 0.
      count: how many there are from now on.
      missing: the processes that the run goes on without, by the numbers that they were started with.
      lines: open connections: to process 0, or from process 0 to all others.
    """

    index: int
    count: int
    missing: tuple[int, ...]
    lines: tuple[socket.socket, ...]


def meet(
    address: tuple[str, int],
    index: int,
    count: int,
    seconds: float,
    fits: Callable[[int], bool] | None = None,
    patience: float = 0.0,
) -> Meeting:
    """Waits for all processes.

    Args:
      address: where process 0 listens.
      index: this process, from 0.
      count: of processes.
      seconds: to wait for all.
      fits: (count) -> whether so many processes can go on without the others; called in process 0. None: all must come.
      patience: seconds after which process 0 goes on with as many of the processes that have come as `fits` allows.

    Raises:
      TimeoutError: on all, naming the processes that have not come.
      ValueError: on all, if two have the same number or their counts differ; on those that the others go on without.
      OSError: if process 0 cannot listen.
    """
    if index:
        return _follow(address, index, count, seconds + LATE)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.create_server(address, family=family, backlog=count) as listener:
        return _lead(listener, count, seconds, fits, patience)


class _Line:
    """A connection, read without waiting."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection, self._text = connection, b""
        self.hello: dict[str, Any] | None = None  # what the process has said that it is
        self.asked: float | None = time.monotonic()  # since when it owes an answer
        self.is_contested = False  # another connection has its number

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a process that is gone is noticed by its closed connection
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns the messages that are there; None at the end of the connection, or for anything else."""
        try:
            text = self.connection.recv(LONGEST)
            *lines, self._text = (self._text + text).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except BlockingIOError:
            return []
        except (OSError, ValueError, RecursionError):
            return None
        if not text or len(self._text) > LONGEST or not all(isinstance(message, dict) for message in messages):
            return None
        return messages

    def ask(self, text: str = "") -> None:
        """Asks a process whether it is still there."""
        self.asked = self.asked or time.monotonic()
        self.send({"wait": text})

    def hears(self) -> bool:
        """Takes in what a process has sent; returns whether it is one."""
        for message in (messages := self.receive()) or ():
            if message.keys() != {"process", "count"} or not all(type(value) is int for value in message.values()):
                return False
            if self.hello is None:
                self.hello = message
                self.ask()
            elif message == self.hello:
                self.asked = None
        return messages is not None

    def is_gone(self, ready: Sequence[Any]) -> bool:
        """Returns whether the connection has ended, is no process's, or owes an answer for too long; then closes it."""
        owes = self.asked is not None and time.monotonic() > self.asked + ANSWER
        is_gone = (self in ready and not self.hears()) or owes
        if is_gone:
            self.connection.close()
        return is_gone


def _lead(
    listener: socket.socket, count: int, seconds: float, fits: Callable[[int], bool] | None, patience: float
) -> Meeting:
    came: dict[int, _Line] = {}
    newcomers: list[_Line] = []  # that have not yet shown to be processes, or whose number another one has
    begin, last_notice, all_came = time.monotonic(), time.monotonic() + FIRST - SAY, False
    place = host_port(listener.getsockname()[:2])
    while True:
        gaps, clock = [index for index in range(1, count) if index not in came], time.monotonic()
        if not gaps and all_came and all(line.asked is None for line in came.values()):
            return _go(came, count, count)
        if not gaps and not all_came:
            for line in came.values():  # one may have gone since it came
                line.ask()
        all_came = not gaps
        if fits is not None and clock >= begin + patience:
            size = max(filter(fits, range(1, len(came) + 2)), default=0)
            if size:
                return _go(came, count, size)
        if gaps and clock >= begin + seconds:
            message = (
                f"{_process_names(gaps)} did not come to {place} within {seconds:g} s: look at what they have printed"
            )
            raise TimeoutError(_end([*came.values(), *newcomers], message, is_late=True))
        if gaps and clock >= last_notice + SAY:
            last_notice, waiting = clock, f"waiting for {_process_names(gaps)} at {place}"
            say(waiting)
            for line in came.values():
                line.ask(waiting)
        listens = [listener] if len(newcomers) < MOST else []
        ready, _, _ = select.select([*listens, *came.values(), *newcomers], [], [], 0.2)
        came = {index: line for index, line in came.items() if not line.is_gone(ready)}
        newcomers = [line for line in newcomers if not line.is_gone(ready)]
        if listener in ready:
            with contextlib.suppress(OSError):  # it has gone again
                newcomers.append(_Line(listener.accept()[0]))
        for line in [line for line in newcomers if line.asked is None]:
            _take(line, came, newcomers, count)


def _take(line: _Line, came: dict[int, _Line], newcomers: list[_Line], count: int) -> None:
    """Takes in a process that has come. If another has its number, that one must answer first, or lose it.

    Raises:
      ValueError: if its count differs, or its number is another's or out of range.
    """
    assert line.hello is not None
    index, reason = line.hello["process"], None
    if line.hello["count"] != count:
        reason = f"--num-processes {count} in process 0 and {line.hello['count']} in process {index}"
    elif not 0 < index < count or (line.is_contested and index in came and came[index].asked is None):
        reason = f"two processes with --process-id {index}"
    if reason is not None:
        message = (
            f"Processes must have different numbers, and the same count; got {reason}. Start each with its own number."
        )
        raise ValueError(_end([*came.values(), *newcomers], message))
    if index not in came:
        came[index] = line
        newcomers.remove(line)
    elif not line.is_contested:
        line.is_contested = True
        came[index].ask()


def _go(came: dict[int, _Line], count: int, size: int) -> Meeting:
    """Tells the first `size` of those that have come how many they are from now on, and the rest to end."""
    present = [0, *sorted(came)]
    gaps = tuple(index for index in range(count) if index not in present[:size])
    for index in present[size:]:
        _end([came[index]], f"the others go on as {size} processes, and without process {index}")
    for place, index in enumerate(present[1:size], 1):
        came[index].send({"go": [place, size, gaps]})
        came[index].connection.settimeout(None)
    return Meeting(0, size, gaps, tuple(came[index].connection for index in present[1:size]))


def _follow(address: tuple[str, int], index: int, count: int, seconds: float) -> Meeting:
    begin = time.monotonic()
    last_notice, reason = begin + FIRST - SAY, ""
    while (clock := time.monotonic()) < begin + seconds:
        try:
            line = _Line(socket.create_connection(address, timeout=SAY))
            answer = _answer(line, {"process": index, "count": count}, begin + seconds)
        except OSError as error:
            answer, reason = None, error.strerror or str(error)
        else:
            reason = "another run, or one before this, is there"
        match answer:
            case {"go": [int(place), int(new_count), [*gaps]]} if 0 < place < new_count <= count and all(
                isinstance(number, int) for number in gaps
            ):
                line.connection.settimeout(None)
                return Meeting(place, new_count, tuple(gaps), (line.connection,))
            case {"end": str(text), "is_late": bool(is_late)} if text.isprintable():
                line.connection.close()
                raise (TimeoutError if is_late else ValueError)(text)
        if clock >= last_notice + SAY:
            last_notice = clock
            say(f"waiting for process 0 at {host_port(address)} ({reason})")
        time.sleep(PAUSE)
    raise TimeoutError(f"process 0 did not come to {host_port(address)} within {seconds:g} s: {reason}")


def _answer(line: _Line, hello: dict[str, Any], deadline: float) -> dict[str, Any] | None:
    """Waits for process 0's decision and returns it; None if something else answers."""
    line.send(hello)
    answer_deadline = time.monotonic() + 3 * SAY
    while select.select([line], [], [], max(min(answer_deadline, deadline) - time.monotonic(), 0))[0]:
        messages = line.receive()
        if messages is None:
            break
        for message in messages:
            match message:
                case {"wait": str(text)} if text.isprintable():
                    if text:
                        say(text)
                    line.send(hello)
                    answer_deadline = time.monotonic() + 3 * SAY
                case _:
                    return message
    line.connection.close()
    return None


def _end(lines: Iterable[_Line], message: str, *, is_late: bool = False) -> str:
    """Tells processes why they must end; returns the message."""
    for line in lines:
        line.send({"end": message, "is_late": is_late})
    return message


def _process_names(numbers: Sequence[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def host_port(address: tuple[str, int]) -> str:
    """Returns HOST:PORT."""
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"


def say(line: str) -> None:
    """Prints what a process waits for."""
    print(f"train: {line}", file=sys.stderr, flush=True)
