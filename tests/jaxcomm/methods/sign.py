"""Signs with error feedback: their cases, their oracle, and the words of their code."""

from typing import Any, ClassVar

import numpy as np

import jaxcomm as jc
from tests.jaxcomm.formulas import words
from tests.jaxcomm.methods.families import Coded
from tests.jaxcomm.oracles import Watched
from tests.reference.common import StepResult, Tensors
from tests.reference.sign import SignReference


class Sign(Coded):
    factory = staticmethod(jc.sign)
    sends_largest = False
    state_error = 1e-6
    recovers: ClassVar = {"": {"collective": "gather"}, "two_shot": {"collective": "two_shot"}}

    def inputs(self, tree: str, grads: Tensors, state: Any) -> tuple[Tensors, Tensors]:
        """All numbers of a block get its mean magnitude."""
        exact, sizes = super().inputs(tree, grads, state)
        for name, size in sizes.items():
            largest = size.reshape(len(size), -1).max(1)  # (K,)
            sizes[name] = size + largest.reshape(-1, *[1] * (size.ndim - 1))
        return exact, sizes

    def reference(self, tree: str, K: int) -> Any:
        return WatchedSign(**self.chosen("dense_below", "collective"))

    def code_words(self, n: int, of_workers: int) -> int:
        return words(n, 1) + n // 1024


class WatchedSign(Watched, SignReference):
    def _compress(self, tensors: Tensors) -> Tensors:
        for name, x in tensors.items():
            self.watch(np.abs(x), 2 * self.K * self.tolerance[name])
        return super()._compress(tensors)

    def step(self, gradients: list[Tensors]) -> StepResult:
        self.K = len(gradients)  # x may be a sum over so many
        return super().step(gradients)


CASES = [
    Sign.row(setting=(8, "odd"), collective="two_shot"),
    Sign.variant(collective="gather", dense_below=0, checksum=True),
]
