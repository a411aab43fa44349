"""DCT-DP: its cases, its oracle, and the bytes of its slots and of its drains."""

import math
from fractions import Fraction
from typing import Any, ClassVar

import jax
import numpy as np

import jaxcomm as jc
from tests.jaxcomm.formulas import Sizes
from tests.jaxcomm.methods.families import Sparse
from tests.jaxcomm.oracles import turn
from tests.reference.balanced import BalancedDctDpReference
from tests.reference.common import StepResult, Tensors
from tests.reference.dct_dp import DctDpReference


class DctDp(Sparse):
    factory = staticmethod(jc.dct_dp)
    recovers: ClassVar = {"": {"sparsity": 0.9, "life_span": 5}}

    @property
    def can_overflow(self) -> bool:
        """What exact thresholds in every step select fits."""
        return self.option("life_span") > 1

    def drains(self, step: int) -> bool:
        drain_every = self.option("drain_every")
        if drain_every is None:
            return False
        key = jax.random.fold_in(jax.random.key(self.option("seed")), step)
        return bool(jax.random.uniform(key) < 1 / drain_every)

    def reference(self, tree: str, K: int) -> Any:
        return (BalancedDctDpReference if self.is_balanced else DctDpReference)(
            turn=turn(self.option("seed")),
            **self.chosen("sparsity", "life_span", "early", "slack", "dense_below", "value_dtype"),
        )

    def ask(self, reference: Any, gradients: list[Tensors], step: int, tree: str) -> StepResult:
        return reference.step(gradients, drain=self.drains(step))

    def check_memory(self, reference: Any, tree: str, state: Any) -> None:
        rows = np.asarray(state.memory.threshold.rows)
        for row, thresholds in zip(rows.reshape(len(rows), -1), reference.thresholds, strict=True):
            expected = [thresholds[name] for name in self.compressed(tree)]
            np.testing.assert_array_equal(row, np.asarray(expected, np.float32))

    def capacity(self, n: int) -> int:
        selected = n - math.floor(n * Fraction(str(self.option("sparsity")))) + 1
        # The threshold is the floor(n * sparsity)-th smallest.
        return min(n, math.ceil(Fraction(str(self.option("slack"))) * selected))

    def rare_bytes(self, s: Sizes) -> Fraction:
        return s.everything if self.option("drain_every") else Fraction(0)


CASES = [
    DctDp.row(
        sparsity=0.9, value_dtype="bfloat16", life_span=4, slack=1.0, collective="gather"
    ),
    DctDp.variant(
        sparsity=0.9, value_dtype="float32", life_span=5, slack=1, drain_every=4, seed=7,
        collective="gather",
    ),
    DctDp.variant(
        sparsity=0.99, value_dtype="float32", life_span=3, slack=2.0, drain_every=3,
        collective="gather",
    ),
    DctDp.variant(
        sparsity=0.5, value_dtype="float32", life_span=1, dense_below=0, collective="gather"
    ),
    DctDp.variant(
        sparsity=0.99, value_dtype="bfloat16", life_span=100, slack=1.05, collective="gather"
    ),
    DctDp.variant(
        sparsity=0.9, value_dtype="bfloat16", life_span=2, slack=1.5, collective="gather"
    ),
    DctDp.variant(sparsity=0.9, value_dtype="float32", life_span=4, slack=1.0, collective="balanced"),
    DctDp.variant(sparsity=0.9, value_dtype="float32", life_span=4, early=False, collective="gather"),
]  # fmt: skip
