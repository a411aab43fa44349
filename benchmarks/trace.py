"""The bytes that a host has received, as the kernel counts them: now, and over time. Needs only Python."""

import time
from pathlib import Path
from typing import IO, Any


def received_bytes(interface: str, counters: IO[str] | None = None) -> int:
    """Returns the bytes that an interface has received so far, in the namespace of this process or of `counters`.

    This is the kernel's count, with Ethernet, IP and TCP headers. In a lab these add about 0.5% to
    a bulk transfer, not 4.5%, since the kernel passes on segments of 16 to 64 KiB undivided. An
    unknown interface raises `ValueError`.

    Args:
      interface: its name there.
      counters: an open `/proc/PID/net/dev`, which shows the namespace of that process even after its end.
    """
    return _counts(interface, counters)[0]


def transmitted_bytes(interface: str) -> int:
    """Returns the bytes that an interface of this process's namespace has sent; see `received_bytes`."""
    return _counts(interface)[8]


def _counts(interface: str, counters: IO[str] | None = None) -> list[int]:
    if counters is None:
        text = Path("/proc/self/net/dev").read_text()
    else:
        counters.seek(0)
        text = counters.read()
    rows = text.splitlines()[2:]
    counts = {name.strip(): values for name, _, values in (row.partition(":") for row in rows)}
    if interface not in counts:
        raise ValueError(
            f"interface must be one of {', '.join(sorted(counts))}; got {interface!r}. A lab gives its processes "
            "theirs as NETLAB_INTERFACE."
        )
    return [int(value) for value in counts[interface].split()]


class Trace:
    """Samples of one host's interface, taken by `Lab.run` while the hosts' processes run.

    Attributes:
      every: least seconds between two samples.
      samples: (seconds since the first, bytes received until then), in order. The first is taken before the
        processes start and the last after they have ended, so that the series counts each byte of the run.
    """

    def __init__(self, interval: float = 0.1):
        """Starts without a sample."""
        self.every = interval
        self.samples: list[tuple[float, int]] = []

    def begin(self, counters: IO[str], interface: str) -> None:
        """Takes the first sample.

        Args:
          counters: the open `/proc/PID/net/dev` of the host; must stay open until `end`.
          interface: its name there.
        """
        self._counters, self._interface = counters, interface
        count = received_bytes(interface, counters)
        self._start = time.perf_counter()
        self.samples = [(0.0, count)]

    def sample(self) -> None:
        """Takes a sample, if one is due."""
        if time.perf_counter() - self._start >= self.samples[-1][0] + self.every:
            self.samples.append(self._read())

    def end(self) -> None:
        """Takes the last sample; it replaces one that was taken less than `every` before."""
        last = self._read()
        if len(self.samples) > 1 and last[0] < self.samples[-1][0] + self.every:
            self.samples.pop()
        self.samples.append(last)

    def _read(self) -> tuple[float, int]:
        count = received_bytes(self._interface, self._counters)
        return time.perf_counter() - self._start, count

    def records(self) -> list[dict[str, Any]]:
        """Returns the series: for each sample but the first, the mean rate since the one before, in kB/s."""
        pairs = zip(self.samples, self.samples[1:], strict=False)
        return [
            {
                "seconds": after,
                "received": count - self.samples[0][1],
                "kB_per_s": (count - earlier) / 1e3 / (after - before),
            }
            for (before, earlier), (after, count) in pairs
        ]
