"""DeMo: its cases and its oracle. Its bytes are those of the sparse methods, its residual is of coefficients.

Decays below 1 and the sign are tested in `test_demo.py`: here, nothing is lost.
"""

import math
from typing import Any, ClassVar

import numpy as np

import jaxcomm as jc
from tests.jaxcomm.methods.families import Sparse
from tests.jaxcomm.oracles import Watched
from tests.jaxcomm.trees import TREES
from tests.reference.common import Tensors
from tests.reference.demo import DemoReference, from_cosines


class Demo(Sparse):
    factory = staticmethod(jc.demo)
    sends_largest = False
    is_dyadic = False
    has_scales = True
    state_error = 1e-6
    sends_ones: ClassVar = {"k": 4096, "value_dtype": "float32"}
    recovers: ClassVar = {"": {}}

    @property
    def has_oracle(self) -> bool:
        """Not in bfloat16: a last bit of a coefficient may decide its rounding."""
        return super().has_oracle and self.option("value_dtype") == "float32" and not self.is_balanced

    @property
    def limit(self) -> float:
        """Some coefficient is at least the largest number over the side of its chunk."""
        return super().limit * math.isqrt(self.option("chunk"))

    def all_options(self, K: int) -> None:
        return None

    def capacity(self, n: int) -> int:
        chunk = self.option("chunk")
        return sum(math.ceil(self.option("k") * min(chunk, n - start) / chunk) for start in range(0, n, chunk))

    def reference(self, tree: str, K: int) -> Any:
        return WatchedDemo(**self.chosen("k", "chunk", "decay", "dense_below", "value_dtype"))

    def state_rows(self, tree: str, state: Any) -> dict[str, Tensors]:
        """The residual as flat coefficients, (K, N), in the oracle's order."""
        rows = super().state_rows(tree, state)["residuals"]
        return {"residuals": {name: coefficients.reshape(len(coefficients), -1) for name, coefficients in rows.items()}}

    def owed(self, tree: str, K: int, state: Any) -> Tensors:
        owed = {name: np.zeros((K, *shape)) for name, shape in TREES[tree].items()}
        return owed | momenta(super().state_rows(tree, state)["residuals"], self.option("chunk"))

    def inputs(self, tree: str, grads: Tensors, state: Any) -> tuple[Tensors, Tensors]:
        """A coefficient may be as large as the norm of its tensor, and its rounding is relative to that."""
        exact, sizes = super().inputs(tree, grads, state)
        for name in self.compressed(tree):
            norms = np.sqrt((sizes[name].reshape(len(sizes[name]), -1) ** 2).sum(1))  # (K,)
            sizes[name] = np.broadcast_to(norms.reshape(-1, *[1] * (sizes[name].ndim - 1)), sizes[name].shape)
        return exact, sizes


def momenta(coefficients: Tensors, chunk: int) -> Tensors:
    """Each worker's momentum by name, from its coefficients: (K, *shape)."""
    return {
        name: np.stack([from_cosines(row, row.shape, chunk) for row in rows]) for name, rows in coefficients.items()
    }


class WatchedDemo(Watched, DemoReference):
    def _choose(self, name: str, coefficients: np.ndarray, k: int) -> np.ndarray:
        ordered = np.append(np.sort(np.abs(coefficients))[::-1], 0.0)
        self.watch(np.array([ordered[k - 1] - ordered[k], ordered[k - 1]]), 2 * self.tolerance[name])
        return super()._choose(name, coefficients, k)


CASES = [
    Demo.row(setting=(1, "single"), k=102, chunk=1024, decay=1.0, value_dtype="float32", collective="gather"),
    Demo.variant(k=400, decay=1.0, value_dtype="bfloat16", collective="balanced"),
    Demo.variant(k=400, decay=1.0, value_dtype="bfloat16", dense_below=0, collective="gather"),
]
