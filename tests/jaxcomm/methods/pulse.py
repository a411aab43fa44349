"""PULSELoCo's exchange: its cases and its oracle. Its bytes are those of the sparse methods."""

from typing import Any, ClassVar

import numpy as np

import jaxcomm as jc
from tests.jaxcomm.methods.families import Sparse
from tests.jaxcomm.oracles import turn
from tests.jaxcomm.trees import params_of
from tests.reference.common import StepResult, Tensors
from tests.reference.pulse import PulseReference


class Pulse(Sparse):
    factory = staticmethod(jc.pulse)
    can_overflow = True
    sends_ones: ClassVar = {"sparsity": 0.0}

    @property
    def sends_largest(self) -> bool:
        """If a change of 1/8 is visible in any weight here."""
        return self.option("learning_rate") == 1.0

    @property
    def has_oracle(self) -> bool:
        return super().has_oracle and not self.is_balanced

    def all_options(self, K: int) -> None:
        """None: invisible changes are never sent."""
        return None

    def reference(self, tree: str, K: int) -> Any:
        options = self.chosen("sparsity", "learning_rate", "dense_below", "value_dtype")
        return PulseReference(turn=turn(self.option("seed")), **options)

    def ask(self, reference: Any, gradients: list[Tensors], step: int, tree: str) -> StepResult:
        return reference.step(gradients, {name: np.asarray(w, np.float32) for name, w in params_of(tree).items()})


CASES = [
    # With normal gradients and weights, about half are visible.
    Pulse.row(setting=(8, "odd"), sparsity=0.6, learning_rate=2.0**-8, value_dtype="bfloat16", collective="gather"),
    Pulse.variant(sparsity=0.2, learning_rate=2.0**-8, value_dtype="float32", seed=3, collective="gather"),
    Pulse.variant(sparsity=0.9, value_dtype="float32", dense_below=0, collective="gather"),
    Pulse.variant(sparsity=0.9, value_dtype="bfloat16", collective="balanced", checksum=True),
]
