"""How fast each process is: in every step all wait for the slowest, and nothing else tells which that is."""

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PAUSE = 2.0  # seconds between two measurements, each of about ten milliseconds
COUNT = 30  # measurements of which a process gives the mean, so that one that is stopped now and then is found as well
SLOW = 2.0  # times as long as the others, from which on a process is named


class Pace:
    """Times a fixed piece of work on this process's first device, between steps.

    All processes do it at the same steps, the multiples of a power of two: then they wait for each other once.
    """

    def __init__(self):
        """Compiles nothing yet."""
        self._array: jax.Array | None = None
        self._every, self._last = 8, (0, 0.0)
        self._seconds: list[float] = []

    def measure(self, step: int, ready: Any) -> float | None:
        """Measures, if it is time to; returns the mean seconds after the last of COUNT measurements, otherwise None.

        Args:
          step: that is next.
          ready: arrays of the step before. It waits for them, so that nothing else runs on the device.
        """
        if step % self._every:
            return None
        jax.block_until_ready(ready)
        if self._array is None:
            self._array = jax.device_put(np.full((128, 128), 1 / 128, np.float32), jax.local_devices()[0])
            jax.block_until_ready(_work(self._array))
        begin, (last, last_time) = time.monotonic(), self._last
        jax.block_until_ready(_work(self._array))
        self._seconds.append(time.monotonic() - begin)
        if last:
            steps = PAUSE * (step - last) / max(begin - last_time, 1e-9)
            self._every = 1 << max(0, math.ceil(math.log2(steps)))
        self._last = step, begin
        if len(self._seconds) < COUNT:
            return None
        mean, self._seconds = statistics.fmean(self._seconds), []
        return mean


@jax.jit
def _work(array: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ array), array)


def slowest(seconds: Mapping[int, float]) -> tuple[int, float] | None:
    """Returns the process that is SLOW, and how many times as long as the others it takes; None if there is none.

    Args:
      seconds: of the same work, by process.
    """
    if len(seconds) < 2:
        return None
    index = max(seconds, key=seconds.__getitem__)
    median = statistics.median(value for process, value in seconds.items() if process != index)
    return (index, seconds[index] / median) if seconds[index] >= SLOW * median else None
