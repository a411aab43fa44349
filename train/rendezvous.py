"""Before JAX connects: the processes of a run meet at the coordinator's address, and learn who has not come.

JAX's coordination service cannot say who is there before all are. So process 0 listens at its port first; when all have
come, it closes that socket, and JAX's service takes the port. The connections stay open: when they end, the others know
that process 0 is gone. Messages are lines of JSON.
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
LONGEST = 4096  # bytes of a line


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


def _lead(
    listener: socket.socket, count: int, seconds: float, fits: Callable[[int], bool] | None, patience: float
) -> Meeting:
    came: dict[int, socket.socket] = {}
    begin, said = time.monotonic(), time.monotonic() + FIRST - SAY
    place = written(listener.getsockname()[:2])
    while missing := [other for other in range(1, count) if other not in came]:
        now = time.monotonic()
        if fits is not None and now >= begin + patience:
            most = max(filter(fits, range(1, len(came) + 2)), default=0)
            if most:
                return _go(came, count, most)
        if now >= begin + seconds:
            message = f"{_named(missing)} did not come to {place} within {seconds:g} s: look at what they have printed"
            raise TimeoutError(_end(came.values(), message, is_late=True))
        if now >= said + SAY:
            said, waiting = now, f"waiting for {_named(missing)} at {place}"
            _say(waiting)
            for line in came.values():
                _send(line, {"wait": waiting})
        ready, _, _ = select.select([listener, *came.values()], [], [], 0.2)
        for other in [other for other, line in came.items() if line in ready]:
            came.pop(other).close()  # a waiting process sends nothing: this one has ended
        if listener in ready:
            _take(listener.accept()[0], came, count)
    return _go(came, count, count)


def _take(line: socket.socket, came: dict[int, socket.socket], count: int) -> None:
    """Takes in a process that has come; closes the connection if it is not one.

    Raises:
      ValueError: if its count differs, or its number is another's or out of range.
    """
    line.settimeout(2.0)
    hello = _receive(line)
    if hello is None or not all(isinstance(hello.get(key), int) for key in ("process", "count")):
        line.close()
        return
    other, reason = hello["process"], None
    if hello["count"] != count:
        reason = f"--num-processes {count} in process 0 and {hello['count']} in process {other}"
    elif other in came or not 0 < other < count:
        reason = f"two processes with --process-id {other}"
    if reason is not None:
        message = (
            f"Processes must have different numbers, and the same count; got {reason}. Start each with its own number."
        )
        raise ValueError(_end([line, *came.values()], message))
    came[other] = line


def _go(came: dict[int, socket.socket], count: int, most: int) -> Meeting:
    """Tells the first `most` of those that have come how many they are from now on, and the rest to end."""
    present = [0, *sorted(came)]
    missing = tuple(other for other in range(count) if other not in present[:most])
    for other in present[most:]:
        _end([came[other]], f"the others go on as {most} processes, and without process {other}")
    for place, other in enumerate(present[1:most], 1):
        _send(came[other], {"go": [place, most, missing]})
    return Meeting(0, most, missing, tuple(came[other] for other in present[1:most]))


def _follow(address: tuple[str, int], index: int, count: int, seconds: float) -> Meeting:
    begin = time.monotonic()
    said, reason = begin + FIRST - SAY, ""
    while (now := time.monotonic()) < begin + seconds:
        try:
            line = socket.create_connection(address, timeout=SAY)
            _send(line, {"process": index, "count": count})
            answer = _answer(line)
        except OSError as error:
            answer, reason = None, error.strerror or str(error)
        else:
            reason = "another run, or one before this, is there"
        if answer and "go" in answer:
            line.settimeout(None)
            place, found, missing = answer["go"]
            return Meeting(place, found, tuple(missing), (line,))
        if answer:
            line.close()
            raise (TimeoutError if answer["is_late"] else ValueError)(answer["end"])
        if now >= said + SAY:
            said = now
            _say(f"waiting for process 0 at {written(address)} ({reason})")
        time.sleep(PAUSE)
    raise TimeoutError(f"process 0 did not come to {written(address)} within {seconds:g} s: {reason}")


def _answer(line: socket.socket) -> dict[str, Any] | None:
    """Waits for process 0's decision and returns it; None if something else answers."""
    line.settimeout(3 * SAY)
    while answer := _receive(line):
        if "wait" not in answer:
            return answer if answer.keys() in ({"go"}, {"end", "is_late"}) else None
        _say(answer["wait"])
    line.close()
    return None


def _end(lines: Iterable[socket.socket], message: str, *, is_late: bool = False) -> str:
    """Tells processes why they must end; returns the message."""
    for line in lines:
        _send(line, {"end": message, "is_late": is_late})
    return message


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a process that is gone is noticed by its closed connection
        line.sendall(json.dumps(message).encode() + b"\n")


def _receive(line: socket.socket) -> dict[str, Any] | None:
    """Returns the next message; None at the end of the connection, or for anything else."""
    text = b""
    try:
        while not text.endswith(b"\n"):  # byte by byte: what follows is not part of this message
            byte = line.recv(1)
            if not byte or len(text) >= LONGEST:
                return None
            text += byte
        found = json.loads(text)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _named(numbers: Sequence[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def written(address: tuple[str, int]) -> str:
    """Returns HOST:PORT."""
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"


def _say(line: str) -> None:
    print(f"train: {line}", file=sys.stderr, flush=True)
