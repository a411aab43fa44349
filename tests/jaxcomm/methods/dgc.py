"""DGC: its cases and its oracle. Its bytes are those of the sparse methods and of methods with momentum."""

from typing import Any, ClassVar

import numpy as np

import jaxcomm as jc
from tests.jaxcomm.methods.families import Sparse, WithMomentum
from tests.jaxcomm.oracles import Watched
from tests.reference.dgc import DgcReference


class Dgc(WithMomentum, Sparse):
    factory = staticmethod(jc.dgc)
    recovers: ClassVar = {"": {"sparsity": 0.9, "factor_masking": False}}

    @property
    def has_oracle(self) -> bool:
        """Not if it is balanced: that is DGC's own part and top-k's balanced exchange, which have their oracles."""
        return super().has_oracle and not self.is_balanced

    def all_options(self, K: int) -> dict[str, Any]:
        return {**super().all_options(K), "momentum": 0.0, "clip": None}

    def reference(self, tree: str, K: int) -> Any:
        names = ("sparsity", "momentum", "factor_masking", "clip", "warmup_steps", "dense_below", "value_dtype")
        return WatchedDgc(**self.chosen(*names))


class WatchedDgc(Watched, DgcReference):
    def _choose(self, name: str, v: np.ndarray, k: int) -> np.ndarray:
        choice = super()._choose(name, v, k)
        sizes = np.abs(v.reshape(-1))
        last = sizes[choice].min(initial=np.inf)  # of those that are sent, which have to be above 0
        remainder = np.delete(sizes, choice).max(initial=0)
        limit = 2 * self.tolerance[name]
        self.watch(np.array([last, last - remainder]), limit)
        if remainder > 0 and len(choice) < self._slots(v.size, k):
            self.watch(remainder, limit)
        return choice


CASES = [
    Dgc.row(
        setting=(3, "half"), sparsity=0.9, value_dtype="bfloat16", momentum=0.5, warmup_steps=2, collective="gather"
    ),
    Dgc.variant(
        sparsity=0.99, value_dtype="float32", momentum=0.9, clip=2.0, factor_masking=False, collective="gather"
    ),
    # The paper's setting, but in float32, since a last bit of a momentum may decide how its bfloat16 is rounded.
    Dgc.variant(sparsity=0.9, value_dtype="float32", momentum=0.9, clip=2.0, collective="gather"),
    Dgc.variant(sparsity=0.9, value_dtype="bfloat16", momentum=0.5, collective="balanced"),
]
