"""What methods have in common, by the families of `jaxcomm/methods`: sparse, shared, coded, and with momentum."""

import math
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from tests.jaxcomm.formulas import BITS, Sizes, all_reduce, index_words, words
from tests.jaxcomm.methods.case import Case
from tests.jaxcomm.trees import TREES, blocks
from tests.reference.common import Tensors

HEADER_WORDS = 3  # of a gathered payload or a region's: the status, sent, overflow


class WithSparsity(Case):
    """A method that drops a fraction of the coordinates."""

    sends_ones: ClassVar = {"sparsity": 0.0}
    recovers: ClassVar = {"": {"sparsity": 0.9}}

    def all_options(self, K: int) -> dict[str, Any]:
        return {"sparsity": 0.0, "value_dtype": "float32"}

    def capacity(self, n: int) -> int:
        return max(1, n - math.floor(n * Fraction(str(self.option("sparsity")))))


class Sparse(WithSparsity):
    """A payload of each worker's own coordinates."""

    def compressed_bytes(self, s: Sizes) -> Fraction:
        gathered, balanced = self._gathered_bytes(s), self._balanced_bytes(s)
        if self.option("collective") == "auto":
            few = gathered <= all_reduce(s.K, s.n) / 4
            return self.vote(s.K) + (gathered if few else min(gathered, balanced))
        return self.vote(s.K) + {"gather": gathered, "balanced": balanced}[self.option("collective")]

    def _gathered_bytes(self, s: Sizes) -> Fraction:
        """(K-1) payloads."""
        return Fraction(4 * (s.K - 1) * self._payload_words(s.n, sum(s.slots)))

    def _balanced_bytes(self, s: Sizes) -> Fraction:
        """One payload to the owner of every region and one from it, each with 5/4 of the fullest region's slots.

        Or with five standard deviations more than its slots, if that is more.
        """
        region = blocks(math.ceil(s.n / s.K))
        pairs = zip(s.inside, s.slots, strict=True)
        spread = np.concatenate([np.pad(np.full(n, slots / n), (0, -n % 1024)) for n, slots in pairs])
        share = max(spread[start : start + region].sum() for start in range(0, s.n, region))
        room = math.ceil(round(max(5 / 4 * share, share + 5 * math.sqrt(share)), 6))
        slots = min(region, sum(s.slots), room)
        return Fraction(2 * 4 * (s.K - 1) * self._payload_words(region, slots))

    def _payload_words(self, n: int, slots: int) -> int:
        values = words(slots, BITS[self.option("value_dtype")])
        return HEADER_WORDS + values + index_words("auto", n, slots) + self.sealed


class Shared(Case):
    """Values at coordinates that all workers agree on."""

    sends_largest = False

    @property
    def sums_numbers(self) -> bool:
        is_auto = self.option("collective") == "auto" and self.option("value_dtype") == "float32"
        return is_auto or self.option("collective") == "psum"

    def compressed_bytes(self, s: Sizes) -> Fraction:
        """Values, and a flag in every message."""
        slots, bits = sum(s.slots), BITS[self.option("value_dtype")]
        if self.sums_numbers:
            return all_reduce(s.K, slots + 1)
        if s.K == 2 and self.option("collective") != "ring":  # one message to the only other worker
            return Fraction(4 * (words(slots, bits) + 1 + self.sealed)) + self.vote(2)
        part = math.ceil(slots / (s.K * 32)) * 32  # slots
        # Two shots: all-to-all, then all-gather. Ring: K-1 hops, then all-gather.
        return Fraction(2 * 4 * (s.K - 1) * (words(part, bits) + 1 + self.sealed)) + self.vote(s.K)


class Coded(Case):
    """A few bits for every coordinate."""

    is_dyadic = False
    has_scales = True

    def capacity(self, n: int) -> int:
        return n

    def code_words(self, n: int, of_workers: int) -> int:
        """Words of n numbers, or of their sums over some workers."""
        raise NotImplementedError

    def compressed_bytes(self, s: Sizes) -> Fraction:
        part = blocks(math.ceil(s.n / s.K))
        first, second = self.code_words(part, 1), self.code_words(part, s.K)
        gathered = Fraction(4 * (s.K - 1) * (self.code_words(s.n, 1) + 1 + self.sealed))
        two_shot = Fraction(4 * (s.K - 1) * (first + second + 2 * (1 + self.sealed)))
        ways = {"gather": gathered, "two_shot": two_shot, "auto": min(gathered, two_shot)}
        return ways[self.option("collective")] + self.vote(s.K)


class WithMomentum(Case):
    """Momentum before the compressor, with clipping and a warm-up."""

    momentum = True

    @property
    def is_dyadic(self) -> bool:
        return self.option("momentum") == 0.5 and not self.option("clip")

    @property
    def state_error(self) -> float:
        return 0.0 if self.is_dyadic else 1e-6

    def rare_bytes(self, s: Sizes) -> Fraction:
        """A dense exchange, with a flag, and a count for the metrics."""
        return all_reduce(s.K, s.total + 1) + all_reduce(s.K, 1) if self.option("warmup_steps") else Fraction(0)

    def adopt(self, reference: Any, tree: str, state: Any) -> None:
        super().adopt(reference, tree, state)
        reference.momentum_dense = self.dense_momentum(tree, state)

    def state_rows(self, tree: str, state: Any) -> dict[str, Tensors]:
        return {**super().state_rows(tree, state), "velocities": self.unflatten(tree, self._velocity(state).flat)}

    def dense_momentum(self, tree: str, state: Any) -> Tensors:
        """The mean of the workers' momentum for the dense tensors, which is what they receive."""
        rows = self._dense_velocities(tree, state)
        return {name: u.astype(np.float64).mean(0).astype(np.float32) for name, u in rows.items()}

    def inputs(self, tree: str, grads: Tensors, state: Any) -> tuple[Tensors, Tensors]:
        exact, sizes = super().inputs(tree, self._clipped(grads), state)
        velocities = {**self.state_rows(tree, state)["velocities"], **self._dense_velocities(tree, state)}
        for name, u in velocities.items():
            decayed = self.option("momentum") * u.astype(np.float64)
            exact[name] = exact[name] + decayed
            sizes[name] = sizes[name] + np.abs(decayed)
        return exact, sizes

    def _clipped(self, grads: Tensors) -> Tensors:
        clip = self.option("clip")
        if clip is None:
            return grads
        exact = {name: gradient.astype(np.float64) for name, gradient in grads.items()}
        K = len(next(iter(exact.values())))
        norm = np.sqrt(sum((g.reshape(K, -1) ** 2).sum(1) for g in exact.values()))  # (K,)
        factor = np.minimum(1, clip * math.sqrt(K) / np.maximum(norm, 1e-300))
        with np.errstate(invalid="ignore"):  # for an infinite gradient, the result is not used
            return {name: g * factor.reshape(-1, *[1] * (g.ndim - 1)) for name, g in exact.items()}

    def _velocity(self, state: Any) -> Any:
        return getattr(state.memory, "velocity", state.memory).rows

    def _dense_velocities(self, tree: str, state: Any) -> Tensors:
        """The momentum of every dense tensor by name, (K, *shape) float32."""
        dense = [name for name in TREES[tree] if name not in self.compressed(tree)]
        rows = zip(dense, self._velocity(state).dense, strict=True)
        return {name: np.asarray(u).reshape(-1, *TREES[tree][name]) for name, u in rows}
