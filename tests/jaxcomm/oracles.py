"""The papers' algorithms of `tests/reference`, with the options of a case and the documented random numbers.

An oracle makes its own draws, with `tests/reference/noise.py` and by the keys that the transformations document, cut
into tensors. Nothing here asks the library for a number, unless `Oracle.adopt` says so.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.jaxcomm.methods.case import Case
from tests.jaxcomm.trees import TREES, blocks
from tests.reference import noise
from tests.reference.common import StepResult, Tensors

TINY = 2.0**-120  # below it, float32 intermediates may have been subnormal, which XLA flushes to zero


class Oracle:
    """A reference, and how it is called.

    It goes on from its own state, over all steps of a test. If the order of float32 operations is open, its state may
    drift from the library's: in every step by the case's `state_error` of a tensor's largest number. A decision that
    is closer than that may fall either way. Only then may a test go on from the library's state.

    Attributes:
      reference: of `tests/reference`.
      tolerance: by name, how far the state may be from the library's by now.
      adopted: how often the library's state was adopted.
    """

    def __init__(self, case: Case, tree: str, K: int):
        self.case, self.tree = case, tree
        self.tolerance = dict.fromkeys(TREES[tree], 0.0)
        self.adopted = 0
        self.reference = case.reference(tree, K)

    @property
    def is_close(self) -> bool:
        """Whether the last step made a decision that might have fallen the other way."""
        return getattr(self.reference, "is_close", False)

    def step(self, gradients: list[Tensors], i: int, sizes: Tensors) -> StepResult:
        """Does step i with a dict of gradients for each worker; `sizes` are the magnitudes that were summed."""
        tolerance = dict(self.tolerance)
        if self.case.state_error:
            for name in tolerance:
                tolerance[name] += self.case.state_error * float(sizes[name].max()) + TINY
        self.reference.is_close, self.reference.tolerance = False, tolerance
        result = self.case.ask(self.reference, gradients, i, self.tree)
        if not result.skipped:
            self.tolerance = tolerance
        return result

    def adopt(self, state: Any) -> None:
        """Goes on from the library's state."""
        self.adopted += 1
        self.tolerance = dict.fromkeys(self.tolerance, 0.0)
        self.case.adopt(self.reference, self.tree, state)


class Watched:
    """A reference that notes decisions closer than its tolerance, by name of the tensor."""

    is_close: bool
    tolerance: dict[str, float]

    def watch(self, distances: np.ndarray, limits: Any) -> None:
        self.is_close = self.is_close or bool(np.any(distances < limits))


def numbers(case: Case, tree: str, key: int) -> Tensors:
    """The random numbers of a key by name, in the tensors' shapes: one for each coordinate of the flat vector."""
    rows = noise.uniform(key, sum(blocks(math.prod(TREES[tree][name])) for name in case.compressed(tree)))[None]
    return {name: part for name, (part,) in case.unflatten(tree, rows, is_padded=False).items()}


def turn(seed: int) -> Callable[[int], float]:
    return functools.partial(noise.turn, seed)
