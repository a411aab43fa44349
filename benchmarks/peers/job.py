"""What every host of every peer does: the model, its data, and the loop that is timed. Needs only NumPy."""

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.trace import received_bytes

WIDTH = 1024  # of the inputs, and of each of the hidden layers
HIDDEN = 3
CLASSES = 10
MOMENTUM = 0.9

Weights = list[np.ndarray]  # a kernel (inputs, outputs) and a bias (outputs,) for each layer, in order


@dataclass(frozen=True)
class Job:
    """One training run, the same for every peer.

    Attributes:
      method: its name in `python -m benchmarks.peers`, without the peer's.
      learning_rate: of SGD with momentum.
      segment: steps between two readings of the clock, and between two evaluations.
      weights: the initial weights.
      images: (N, 1024), uint8; see `pixels`.
      labels: (N,), int64.
      test_images: like images; empty if nothing is evaluated.
      test_labels: like labels.
      order: (steps, global batch), the rows of every step. Host i has the i-th part of them.
    """

    method: str
    learning_rate: float
    segment: int
    weights: Weights
    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    order: np.ndarray

    def save(self, path: Path) -> None:
        """Writes the job into an NPZ file."""
        variables = dict(vars(self))
        arrays = {f"weights{index}": array for index, array in enumerate(variables.pop("weights"))}
        np.savez(path, **variables, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Job":
        """Reads a job that `save` has written."""
        with np.load(path) as file:
            variables = dict(file)
        weights = [variables.pop(f"weights{index}") for index in range(2 * (HIDDEN + 1))]
        numbers = {"method": str, "learning_rate": float, "segment": int}
        return cls(weights=weights, **{name: numbers.get(name, np.asarray)(value) for name, value in variables.items()})


def initial_weights(seed: int) -> Weights:
    """Draws He's normal weights and zero biases: 3,159,050 numbers."""
    rng = np.random.default_rng(seed)
    weights: Weights = []
    for outputs in (*[WIDTH] * HIDDEN, CLASSES):
        kernel = rng.standard_normal((WIDTH, outputs), np.float32) * np.float32(np.sqrt(2 / WIDTH))
        weights += [kernel, np.zeros(outputs, np.float32)]
    return weights


def pixels(images: np.ndarray) -> np.ndarray:
    """Returns uint8 pixels as float32 in 0 to 1."""
    return images.astype(np.float32) / np.float32(255)


def accuracy(weights: Weights, images: np.ndarray, labels: np.ndarray) -> float:
    """Returns the fraction of images whose largest logit is their label's."""
    x = pixels(images)
    for index in range(0, len(weights), 2):
        x = x @ weights[index] + weights[index + 1]
        if index + 2 < len(weights):
            np.maximum(x, 0, out=x)
    return float((x.argmax(axis=1) == labels).mean())


def train(
    job: Job,
    host: int,
    hosts: int,
    *,
    step: Callable[[np.ndarray, np.ndarray], Any],
    loss_of: Callable[[Any], float],
    weights: Callable[[], Weights],
    barrier: Callable[[], Any],
) -> None:
    """Trains, and prints a JSON record of every segment.

    A segment's seconds and bytes (received by this host) are of its steps only; its loss is that of its last step,
    over all rows; host 0 adds the accuracy after it. The first step, which compiles and connects, is its own segment.

    Args:
      job: what to do.
      host: this process, from 0.
      hosts: the number of hosts.
      step: trains on this host's images (b, 1024), float32, and labels (b,); returns a result to wait for.
      loss_of: waits for that result, and returns the loss.
      weights: returns the model's current weights.
      barrier: waits until all hosts are here.
    """
    interface = os.environ["NETLAB_INTERFACE"]
    rows = job.order.shape[1] // hosts
    host_order = job.order[:, host * rows : (host + 1) * rows]
    cuts = [0, *range(1, len(host_order), job.segment), len(host_order)]
    for first, last in itertools.pairwise(cuts):
        barrier()
        bytes_in, begin = received_bytes(interface), time.perf_counter()
        result = None
        for indices in host_order[first:last]:
            result = step(pixels(job.images[indices]), job.labels[indices])
        loss = loss_of(result)
        seconds = time.perf_counter() - begin
        bytes_in = received_bytes(interface) - bytes_in
        record: dict[str, Any] = {"steps": last - first, "seconds": seconds, "received": bytes_in, "loss": loss}
        if host == 0 and len(job.test_labels):
            record["accuracy"] = accuracy(weights(), job.test_images, job.test_labels)
        print(json.dumps(record), flush=True)
