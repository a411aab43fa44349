"""Top-k: its cases and its oracle. Its bytes are those of the sparse methods."""

from typing import Any, ClassVar

import jaxcomm as jc
from tests.jaxcomm.methods.families import Sparse
from tests.jaxcomm.oracles import turn
from tests.reference.balanced import BalancedTopKReference
from tests.reference.topk import TopKReference


class TopK(Sparse):
    factory = staticmethod(jc.topk)
    recovers: ClassVar = {"": {"sparsity": 0.9}, "balanced": {"sparsity": 0.9, "collective": "balanced"}}

    def reference(self, tree: str, K: int) -> Any:
        options = self.chosen("sparsity", "dense_below", "value_dtype")
        return BalancedTopKReference(turn=turn(0), **options) if self.is_balanced else TopKReference(**options)


CASES = [
    TopK.row(setting=(8, "odd"), sparsity=0.9, value_dtype="bfloat16", collective="gather"),
    TopK.variant(sparsity=0.5, value_dtype="float32", dense_below=0, collective="gather"),
    TopK.variant(sparsity=0.99, value_dtype="float32", collective="gather"),
    TopK.variant(sparsity=0.9, value_dtype="bfloat16", dense_below=1024, collective="gather"),
    TopK.variant(sparsity=0.9, value_dtype="float32", collective="gather", checksum=True),
    TopK.row(sparsity=0.9, value_dtype="bfloat16", collective="balanced"),
]
