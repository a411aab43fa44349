"""Plump-DP: the dense mean, in float32 or with every value in 16 bits."""

import math
from fractions import Fraction
from typing import Any

import jaxcomm as jc
from tests.jaxcomm.formulas import words
from tests.jaxcomm.methods.case import Case
from tests.jaxcomm.trees import TREES
from tests.reference.plump_dp import PlumpDpReference


class PlumpDp(Case):
    factory = staticmethod(jc.plump_dp)
    compresses = False
    residual = False

    @property
    def conserves(self) -> bool:
        return self.option("value_dtype") == "float32"

    @property
    def sums_numbers(self) -> bool:
        return self.option("value_dtype") != "bfloat16"

    def reference(self, tree: str, K: int) -> Any:
        return PlumpDpReference(self.option("value_dtype"))

    def received_bytes(self, tree: str, K: int) -> tuple[Fraction, Fraction]:
        if self.option("value_dtype") == "float32":
            return super().received_bytes(tree, K)
        numbers = sum(math.prod(shape) for shape in TREES[tree].values())
        if self.option("value_dtype") == "float16":
            half = Fraction(2 * (K - 1), K) * 2 * numbers
            return half, half
        part = math.ceil(numbers / (K * 32)) * 32
        # An all-to-all and an all-gather, or one message to the only other worker, with a flag in each message.
        payload = words(numbers, 16) + 1 + self.sealed if K == 2 else 2 * (K - 1) * (words(part, 16) + 1 + self.sealed)
        messages = Fraction(4 * payload) + self.vote(K)
        return messages, messages


CASES = [
    PlumpDp.row(),
    PlumpDp.row(setting=(3, "half"), value_dtype="bfloat16"),
    PlumpDp.row(setting=(1, "single"), value_dtype="float16"),
]
