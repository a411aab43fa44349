"""Random-k: its cases and its oracle. Its bytes are those of the methods with shared coordinates."""

import math
from typing import Any

import numpy as np

import jaxcomm as jc
from tests.jaxcomm.methods.families import Shared, WithSparsity
from tests.jaxcomm.trees import TREES
from tests.reference import noise
from tests.reference.common import Tensors, n_kept
from tests.reference.random_k import RandomKReference


class RandomK(WithSparsity, Shared):
    factory = staticmethod(jc.random_k)

    def reference(self, tree: str, K: int) -> Any:
        sizes = {name: math.prod(TREES[tree][name]) for name in self.compressed(tree)}
        slots = [n_kept(n, self.option("sparsity")) for n in sizes.values()]

        def uniform(step: int) -> Tensors:
            flat = noise.uniform(noise.make_key(self.option("seed"), step), sum(slots))
            return dict(zip(sizes, np.split(flat, np.cumsum(slots)[:-1]), strict=True))

        def offsets(step: int) -> dict[str, int]:
            key = noise.make_key(self.option("seed"), step)
            draws = noise.integers(key, list(sizes.values()), start=sum(slots))
            return dict(zip(sizes, draws.tolist(), strict=True))

        options = self.chosen("sparsity", "dense_below", "value_dtype", "collective")
        return RandomKReference(uniform=uniform, offsets=offsets, **options)


CASES = [
    RandomK.row(setting=(1, "single"), sparsity=0.9, value_dtype="bfloat16", collective="two_shot", seed=3),
    RandomK.variant(sparsity=0.5, value_dtype="float32", collective="psum", dense_below=0),
    RandomK.variant(sparsity=0.9, value_dtype="bfloat16", collective="ring", checksum=True),
]
