"""Hard thresholds: their cases and their oracle. Their bytes are those of the sparse methods."""

from typing import Any

import jaxcomm as jc
from tests.jaxcomm.methods.families import Sparse
from tests.jaxcomm.oracles import turn
from tests.reference.hard_threshold import HardThresholdReference


class HardThreshold(Sparse):
    factory = staticmethod(jc.hard_threshold)
    can_overflow = True
    sends_largest = False

    def all_options(self, K: int) -> dict[str, Any]:
        return {"sparsity": 0.0, "threshold": 1e-30, "value_dtype": "float32"}

    def reference(self, tree: str, K: int) -> Any:
        chosen = self.chosen("sparsity", "threshold", "dense_below", "value_dtype")
        return HardThresholdReference(turn=turn(0), **chosen)


CASES = [HardThreshold.row(sparsity=0.8, threshold=1.0, value_dtype="bfloat16", collective="gather")]
