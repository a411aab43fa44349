"""Quant-DP: its cases, its oracle, and the words of its code."""

from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

import jaxcomm as jc
from tests.jaxcomm.formulas import Sizes, all_reduce, words
from tests.jaxcomm.methods.families import Coded
from tests.jaxcomm.oracles import numbers
from tests.reference import noise
from tests.reference.common import Tensors
from tests.reference.quant_dp import QuantDpReference


class QuantDp(Coded):
    factory = staticmethod(jc.quant_dp)
    residual = False
    rounds_at_random = True
    recovers: ClassVar = {"": {"bits": 4, "norm": "l2"}}

    def scale_and_level(self, gradients: list[np.ndarray]) -> tuple[float, float]:
        norm = {"max": lambda g: np.abs(g).max(), "l2": np.linalg.norm}[self.option("norm")]
        if self.option("collective") == "psum":
            scale = max(norm(g) for g in gradients)
            return scale, scale / ((2 ** (self.option("bits") - 1) - 1) // len(gradients))
        scales = sum(norm(g) for g in gradients)
        levels = 2 ** (self.option("bits") - 1) - 1
        shots = 1 if self.option("collective") == "gather" else 2 + self.option("bucket") ** 0.5 / levels
        return scales / len(gradients) * shots, shots * scales / levels / len(gradients)

    def reference(self, tree: str, K: int) -> Any:
        def uniform(step: int, worker: int | None, phase: int) -> Tensors:
            assert (worker is None) == (phase == 1)
            return numbers(self, tree, noise.rounding_key(self.option("seed"), step, worker))

        return QuantDpReference(uniform=uniform, **self.chosen("bits", "bucket", "norm", "dense_below", "collective"))

    @property
    def sums_numbers(self) -> bool:
        return self.option("collective") == "psum"

    @property
    def sends_largest(self) -> bool:
        """Not if all workers share the scale: a worker's own largest number may fall between two levels."""
        return not self.sums_numbers

    def compressed_bytes(self, s: Sizes) -> Fraction:
        """With psum, all-reduces of the numbers and a flag, and of the scales."""
        if self.option("collective") != "psum":
            return super().compressed_bytes(s)
        return all_reduce(s.K, s.n + 1) * self.option("bits") / 32 + all_reduce(s.K, s.n // self.option("bucket"))

    def code_words(self, n: int, of_workers: int) -> int:
        return words(n, self.option("bits")) + n // self.option("bucket")


CASES = [
    QuantDp.row(setting=(3, "half"), bits=8, collective="two_shot", seed=5),
    QuantDp.variant(bits=8, collective="psum", seed=3),
    QuantDp.variant(bits=16, collective="psum", bucket=128, norm="l2", seed=4),
    QuantDp.variant(bits=4, norm="l2", bucket=128, collective="gather", dense_below=0),
    QuantDp.variant(bits=2, norm="l2", bucket=32, collective="two_shot", checksum=True),
]
