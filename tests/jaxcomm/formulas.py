"""The documented bytes that a worker receives in a step, by hand.

A ring all-reduce of m bytes costs 2 (K-1)/K * m, an all-gather (K-1) * m, and an all-to-all of parts of m bytes too.
The bytes of a method are in its own file of `tests/jaxcomm/methods`, or in that of its family.
"""

import dataclasses
import math
from fractions import Fraction
from typing import Any

from tests.jaxcomm.trees import blocks

BITS = {"float32": 32, "bfloat16": 16}


def words(numbers: int, bits: int) -> int:
    return math.ceil(numbers * bits / 32)


def all_reduce(K: int, numbers: int) -> Fraction:
    return Fraction(2 * (K - 1), K) * 4 * numbers


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The numbers that bytes depend on.

    Attributes:
      K: workers.
      total: elements of all tensors.
      inside: elements of every compressed tensor.
      slots: of every compressed tensor, in a payload.
    """

    K: int
    total: int
    inside: list[int]
    slots: list[int]

    @property
    def n(self) -> int:
        """Elements of the flat vector, in whole blocks."""
        return sum(map(blocks, self.inside))

    @property
    def dense(self) -> Fraction:
        """Bytes of the tensors that are not compressed."""
        return all_reduce(self.K, self.total - sum(self.inside))

    @property
    def everything(self) -> Fraction:
        """Bytes of a dense exchange."""
        return all_reduce(self.K, self.total)


def index_words(codec: Any, n: int, slots: int) -> int:
    """Words of the indices of `slots` of n coordinates."""
    if codec == "plain":
        return slots
    if codec == "bitmap":
        return n // 32
    if codec == "elias_fano":  # upper parts as a bitmap, the lower l bits as planes, for the best l
        return min(math.ceil((((n - 1) >> low) + slots) / 32) + low * math.ceil(slots / 32) for low in range(31))
    assert codec == "auto"
    return min(index_words(codec, n, slots) for codec in ("plain", "bitmap", "elias_fano"))
