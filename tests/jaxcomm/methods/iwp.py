"""IWP: its cases, its oracle, and the bytes of its masks."""

import math
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

import jaxcomm as jc
from tests.jaxcomm.formulas import Sizes, all_reduce, index_words
from tests.jaxcomm.methods.families import Shared, WithMomentum
from tests.jaxcomm.oracles import Watched, numbers, turn
from tests.jaxcomm.trees import params_of
from tests.reference import noise
from tests.reference.common import StepResult, Tensors
from tests.reference.iwp import IwpReference


class Iwp(WithMomentum, Shared):
    factory = staticmethod(jc.iwp)
    can_overflow = True
    sends_ones: ClassVar = {"density": 1.0}
    recovers: ClassVar = {
        "": {"alpha": 0.05, "density": 0.1},
        "layer-wise": {"alpha": 0.05, "beta": 0.01, "density": 0.1, "publishers": 2, "value_dtype": "float32"},
    }

    def all_options(self, K: int) -> dict[str, Any]:
        # A publisher publishes its nonzero coordinates: only all publishers together cover what is sent.
        least = {"alpha": 1e-35, "beta": 0.0, "floor": 1e-35, "density": 1.0, "random_selection": False}
        defaults = {"momentum": 0.0, "clip": None, "life_span": 1, "eps": 1e-3}
        return {"publishers": K, "value_dtype": "float32", **defaults, **least}

    def reference(self, tree: str, K: int) -> Any:
        seed, names = self.option("seed"), self.compressed(tree)

        def publishers(step: int) -> dict[str, list[int]]:
            draws = noise.publishers(seed, step, len(names), K, self.option("publishers"))
            return dict(zip(names, draws, strict=True))

        def uniform(step: int, worker: int) -> Tensors:
            return numbers(self, tree, noise.make_key(seed, step, worker))

        collective = self.option("collective")
        if collective == "auto":
            collective = {"float32": "psum", "bfloat16": "two_shot"}[self.option("value_dtype")]
        return WatchedIwp(
            publishers=publishers,
            uniform=uniform,
            turn=turn(seed),
            collective=collective,
            **self.chosen("alpha", "beta", "C", "floor", "density", "random_selection", "eps", "life_span"),
            **self.chosen("momentum", "factor_masking", "clip", "warmup_steps"),
            **self.chosen("dense_below", "value_dtype", "mask_codec"),
        )

    def ask(self, reference: Any, gradients: list[Tensors], step: int, tree: str) -> StepResult:
        return reference.step(gradients, {name: np.asarray(w, np.float32) for name, w in params_of(tree).items()})

    def adopt(self, reference: Any, tree: str, state: Any) -> None:
        """With the union of the publishers' masks: all of its coordinates, of which those with a slot are sent."""
        super().adopt(reference, tree, state)
        bits = np.unpackbits(np.asarray(state.memory.mask).view(np.uint8), bitorder="little")
        reference.mask = {name: mask.astype(bool) for name, (mask,) in self.unflatten(tree, bits[None]).items()}

    def capacity(self, n: int) -> int:
        return max(1, math.ceil(Fraction(str(self.option("density"))) * n))

    def received(self, s: Sizes) -> tuple[Fraction, Fraction]:
        """A mask in every step, or every `life_span` steps, and its values."""
        codec = self.option("mask_codec")
        mask = {"bitmap": self._bitmaps(s), "coded": self._positions(s)}
        mask["auto"] = min(mask.values())
        rarest = max(mask[codec], mask["bitmap"]) if self.option("warmup_steps") else mask[codec]
        values = s.dense + self.compressed_bytes(s)
        usual = values + (mask[codec] if self.option("life_span") == 1 else 0)
        return usual, rarest + max(values, self.rare_bytes(s))

    def _positions(self, s: Sizes) -> Fraction:
        """A row per publisher in an all-reduce or per worker in an all-gather, with counts of slots and overflow.

        What an all-reduce sums has no checksum.
        """
        slots = sum(s.slots)
        coded = min(index_words(codec, s.n, slots) for codec in ("plain", "elias_fano"))
        row, r = coded + len(s.slots) + 1 + self.sealed, self.option("publishers")
        gathered = Fraction((s.K - 1) * 4 * row)
        return gathered if self.sealed else min(all_reduce(s.K, r * row), gathered)

    def _bitmaps(self, s: Sizes) -> Fraction:
        """To the owners of parts of a word or more, and back."""
        return Fraction(2 * 4 * (s.K - 1) * (math.ceil(s.n / 32 / s.K) + self.sealed))


class WatchedIwp(Watched, IwpReference):
    def _publisher_mask(
        self, name: str, v: np.ndarray, w: np.ndarray, K: int, k: int, u: np.ndarray | None
    ) -> np.ndarray:
        importance = self._importance(v, w, K).astype(np.float64)
        rounding = 1e-6
        if self.beta:  # the variance is a sum of squares, in float32 or in float64
            rounding = 1e-4
            q = importance.var() / max(importance.mean(), 1e-300)
            self.watch(np.abs(q - self.C), rounding * self.C)
        off = 2 * self.tolerance[name] / K / (np.abs(w) + self.eps)
        threshold = np.float64(self._threshold(importance.astype(np.float32), k))
        bound = threshold if u is None else threshold * u
        if k < self.warmup_steps:
            tau = np.float64(self._warmup_threshold(importance.astype(np.float32), k))
            self.watch(np.abs(tau - threshold), rounding * threshold)
            if tau <= threshold:
                bound = tau
                importance = np.where(importance == tau, np.inf, importance)  # the tie itself is no decision
        self.watch(np.abs(importance - bound), off + rounding * bound)
        return super()._publisher_mask(name, v, w, K, k, u)


CASES = [
    Iwp.row(
        alpha=2.5, density=0.1, momentum=0.5, life_span=3, eps=1e-3, value_dtype="bfloat16", mask_codec="bitmap"
    ),
    Iwp.variant(
        alpha=2.5, density=0.1, momentum=0.5, publishers=2, random_selection=False, factor_masking=False,
        value_dtype="float32", mask_codec="coded",
    ),
    Iwp.variant(
        alpha=1.0, beta=0.5, C=1.5, density=0.05, momentum=0.5, eps=0.1, random_selection=False, warmup_steps=2,
        life_span=2, value_dtype="bfloat16", collective="ring", mask_codec="coded", checksum=True,
    ),
    Iwp.variant(alpha=0.1, density=0.1, momentum=0.9, clip=2.0, value_dtype="float32", mask_codec="bitmap"),
]  # fmt: skip
