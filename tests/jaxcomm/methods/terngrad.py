"""TernGrad: its cases, its oracle, and the bytes of its code and its scalers."""

import math
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

import jaxcomm as jc
from tests.jaxcomm.formulas import Sizes, all_reduce, words
from tests.jaxcomm.methods.families import Coded
from tests.jaxcomm.oracles import numbers
from tests.reference import noise
from tests.reference.common import Tensors
from tests.reference.terngrad import TernGradReference


class TernGrad(Coded):
    factory = staticmethod(jc.terngrad)
    residual = False
    sends_largest = False
    rounds_at_random = True
    sends_ones: ClassVar = {"clip": None}

    def scale_and_level(self, gradients: list[np.ndarray]) -> tuple[float, float]:
        scale = max(np.abs(g).max() for g in gradients)
        return scale, scale / len(gradients)

    def reference(self, tree: str, K: int) -> Any:
        def uniform(step: int, worker: int) -> Tensors:
            return numbers(self, tree, noise.make_key(self.option("seed"), step, worker))

        return FiniteTernGrad(uniform=uniform, **self.chosen("clip", "dense_below", "collective"))

    def code_words(self, n: int, of_workers: int) -> int:
        return words(n, math.ceil(math.log2(2 * of_workers + 1)))

    def compressed_bytes(self, s: Sizes) -> Fraction:
        """The scalers have an all-reduce of their own."""
        return super().compressed_bytes(s) + all_reduce(s.K, len(s.inside))


class FiniteTernGrad(TernGradReference):
    """With a sigma that is finite even where float32's squares are not, like the library's."""

    def _clip(self, g: np.ndarray) -> np.ndarray:
        if self.clip is None:
            return g
        limit = np.float32(min(self.clip * np.std(g.astype(np.float64)), float(np.finfo(np.float32).max)))
        return np.clip(g, -limit, limit)


CASES = [
    TernGrad.row(setting=(1, "single"), collective="two_shot", seed=5),
    TernGrad.variant(clip=None, collective="gather", dense_below=0),
]
