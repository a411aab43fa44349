"""The papers' algorithms of `tests/reference`, with the options of a case, on the random numbers that are documented.

An oracle makes its own draws, with `tests/reference/noise.py` and by the keys that the transformations document, cut
into tensors. Nothing here asks the library for a number, unless `Oracle.adopt` says so.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.jaxcomm import cases
from tests.jaxcomm.cases import Case
from tests.jaxcomm.trees import TREES, params_of
from tests.reference import noise
from tests.reference.balanced import BalancedDctDpReference, BalancedTopKReference
from tests.reference.common import StepResult, Tensors, n_kept
from tests.reference.dct_dp import DctDpReference
from tests.reference.dgc import DgcReference
from tests.reference.iwp import IwpReference
from tests.reference.plump_dp import PlumpDpReference
from tests.reference.quant_dp import QuantDpReference
from tests.reference.random_k import RandomKReference
from tests.reference.sign import SignReference
from tests.reference.terngrad import TernGradReference
from tests.reference.topk import TopKReference

TINY = 2.0**-120  # where float32's numbers may have become subnormal on the way, which XLA makes zero
STATE = ("residuals", "velocities")  # a dict of tensors for every worker


class Oracle:
    """A reference, and how it is asked.

    It goes on from its own state, over all steps of a test. Where float32 leaves the order of operations open, its
    state may be off from the library's by more and more: by `error` of a tensor's largest number for every step. A
    decision that is closer than that may fall either way. Only then may a test go on from the library's state.

    Attributes:
      reference: of `tests/reference`.
      error: what a step adds to the tolerance, relative to the largest number of a tensor; 0 where the state is the
        library's to the bit.
      tolerance: by name, how far the state may be from the library's by now.
      adopted: the steps after which the library's state was adopted.
    """

    def __init__(self, case: Case, tree: str, K: int):
        self.case, self.tree, self.K = case, tree, K
        is_scaled = case.momentum and (case.option("momentum") != 0.5 or case.option("clip"))
        self.error = 1e-6 if is_scaled or case.method == "sign" else 0.0
        self.tolerance = dict.fromkeys(TREES[tree], 0.0)
        self.adopted = 0
        self.reference = MAKERS[case.method](case, tree, K)

    @property
    def is_close(self) -> bool:
        """Whether the last step made a decision that might have fallen otherwise."""
        return getattr(self.reference, "is_close", False)

    def step(self, own: list[Tensors], i: int, sizes: Tensors) -> StepResult:
        """Takes step i with a dict of gradients for each worker; what was added up for them is up to `sizes`."""
        tolerance = dict(self.tolerance)
        if self.error:
            for name in tolerance:
                tolerance[name] += self.error * float(sizes[name].max()) + TINY
        self.reference.is_close, self.reference.tolerance = False, tolerance
        result = self._step(own, i)
        if not result.skipped:
            self.tolerance = tolerance
        return result

    def _step(self, own: list[Tensors], i: int) -> StepResult:
        if self.case.drain_every:
            return self.reference.step(own, drain=self.case.drains(i))
        if self.case.method == "iwp":
            params = {name: np.asarray(w, np.float32) for name, w in params_of(self.tree).items()}
            return self.reference.step(own, params)
        return self.reference.step(own)

    def adopt(self, state: Any) -> None:
        """Goes on from the library's state."""
        self.adopted += 1
        self.tolerance = dict.fromkeys(self.tolerance, 0.0)
        for attribute in STATE:
            if hasattr(self.reference, attribute):
                rows = state_rows(self.case, self.tree, attribute, state)
                own = [{name: np.array(part[w]) for name, part in rows.items()} for w in range(self.K)]
                setattr(self.reference, attribute, own)
        if self.case.momentum:
            self.reference.momentum_dense = dense_momentum(self.case, self.tree, state)
        if self.case.method == "iwp":
            self.reference.mask = union_mask(self.case, self.tree, state)


def union_mask(case: Case, tree: str, state: Any) -> dict[str, np.ndarray]:
    """The union of the publishers' masks by name, with all of its coordinates, of which the slots take some in turn."""
    bits = np.unpackbits(np.asarray(state.memory.mask).view(np.uint8), bitorder="little")
    return {name: mask.astype(bool) for name, (mask,) in cases.unflatten(case, tree, bits[None]).items()}


def state_rows(case: Case, tree: str, attribute: str, state: Any) -> dict[str, np.ndarray]:
    """The compressed tensors' residuals or velocities by name, (K, *shape)."""
    rows = (
        state.residual.rows if attribute == "residuals" else getattr(state.memory, "velocity", state.memory).rows.flat
    )
    rows = np.asarray(rows)
    return cases.unflatten(case, tree, rows.reshape(len(rows), -1))


def dense_momentum(case: Case, tree: str, state: Any) -> dict[str, np.ndarray]:
    """The mean of the workers' momentum of the dense tensors, which is what they receive."""
    inside = cases.compressed(case, tree)
    rows = cases.velocities(case, tree, state)
    return {name: u.astype(np.float64).mean(0).astype(np.float32) for name, u in rows.items() if name not in inside}


def _known(case: Case, *names: str) -> dict[str, Any]:
    return {name: case.option(name) for name in names}


def _numbers(case: Case, tree: str, key: int) -> Tensors:
    """The random numbers of a key by name, in the tensors' shapes: one for each coordinate of the flat vector."""
    n = sum(-(-math.prod(TREES[tree][name]) // cases.BLOCK) * cases.BLOCK for name in cases.compressed(case, tree))
    flat, start, parts = noise.uniform(key, n), 0, {}
    for name in cases.compressed(case, tree):
        size = math.prod(TREES[tree][name])
        parts[name] = flat[start : start + size].reshape(TREES[tree][name])
        start += -(-size // cases.BLOCK) * cases.BLOCK
    return parts


def _turn(seed: int) -> Callable[[int], float]:
    return functools.partial(noise.turn, seed)


class _Watched:
    """A reference that notes decisions closer than the tolerance, by name of the tensor, that it is given."""

    is_close: bool
    tolerance: dict[str, float]

    def _watch(self, distances: np.ndarray, limits: Any) -> None:
        self.is_close = self.is_close or bool(np.any(distances < limits))


def _topk(case: Case, tree: str, K: int) -> Any:
    known = _known(case, "sparsity", "dense_below", "value_dtype")
    if case.option("collective") == "balanced":
        return BalancedTopKReference(turn=_turn(0), **known)
    return TopKReference(**known)


def _dct_dp(case: Case, tree: str, K: int) -> Any:
    balanced = case.option("collective") == "balanced"
    return (BalancedDctDpReference if balanced else DctDpReference)(
        turn=_turn(case.option("seed")),
        **_known(case, "sparsity", "life_span", "slack", "dense_below", "value_dtype"),
    )


class _WatchedDgc(_Watched, DgcReference):
    def _choose(self, name: str, v: np.ndarray, k: int) -> np.ndarray:
        chosen = super()._choose(name, v, k)
        sizes = np.abs(v.reshape(-1))
        last = sizes[chosen].min(initial=np.inf)  # of those that are sent, which have to be above 0
        others = np.delete(sizes, chosen).max(initial=0)
        limit = 2 * self.tolerance[name]
        self._watch(np.array([last, last - others]), limit)
        if others > 0 and len(chosen) < self._slots(v.size, k):
            self._watch(others, limit)
        return chosen


def _dgc(case: Case, tree: str, K: int) -> Any:
    known = ("sparsity", "momentum", "factor_masking", "clip", "warmup_steps", "dense_below", "value_dtype")
    return _WatchedDgc(**_known(case, *known))


def _random_k(case: Case, tree: str, K: int) -> Any:
    sizes = {name: math.prod(TREES[tree][name]) for name in cases.compressed(case, tree)}
    slots = [n_kept(n, case.options["sparsity"]) for n in sizes.values()]

    def uniform(step: int) -> Tensors:
        flat = noise.uniform(noise.make_key(case.option("seed"), step), sum(slots))
        return dict(zip(sizes, np.split(flat, np.cumsum(slots)[:-1]), strict=True))

    def offsets(step: int) -> dict[str, int]:
        key = noise.make_key(case.option("seed"), step)
        drawn = noise.integers(key, list(sizes.values()), start=sum(slots))
        return dict(zip(sizes, drawn.tolist(), strict=True))

    known = _known(case, "sparsity", "dense_below", "value_dtype", "collective")
    return RandomKReference(uniform=uniform, offsets=offsets, **known)


class _WatchedIwp(_Watched, IwpReference):
    def _publisher_mask(
        self, name: str, v: np.ndarray, w: np.ndarray, K: int, k: int, u: np.ndarray | None
    ) -> np.ndarray:
        importance = self._importance(v, w, K).astype(np.float64)
        rounding = 1e-6
        if self.beta:  # the variance is a sum of squares, in float32 or in float64
            rounding = 1e-4
            q = importance.var() / max(importance.mean(), 1e-300)
            self._watch(np.abs(q - self.C), rounding * self.C)
        off = 2 * self.tolerance[name] / K / (np.abs(w) + self.eps)
        threshold = np.float64(self._threshold(importance.astype(np.float32), k))
        bound = threshold if u is None else threshold * u
        if k < self.warmup_steps:
            tau = np.float64(self._warmup_threshold(importance.astype(np.float32), k))
            self._watch(np.abs(tau - threshold), rounding * threshold)
            if tau <= threshold:
                bound = tau
                importance = np.where(importance == tau, np.inf, importance)  # which that is, is no decision
        self._watch(np.abs(importance - bound), off + rounding * bound)
        return super()._publisher_mask(name, v, w, K, k, u)


def _iwp(case: Case, tree: str, K: int) -> Any:
    seed, names = case.option("seed"), cases.compressed(case, tree)

    def publishers(step: int) -> dict[str, list[int]]:
        drawn = noise.publishers(seed, step, len(names), K, case.option("publishers"))
        return dict(zip(names, drawn, strict=True))

    def uniform(step: int, worker: int) -> Tensors:
        return _numbers(case, tree, noise.make_key(seed, step, worker))

    known = ("alpha", "beta", "C", "floor", "density", "random_selection", "eps", "momentum", "factor_masking", "clip")
    known = (*known, "warmup_steps", "life_span", "dense_below", "value_dtype", "mask_codec")
    collective = case.option("collective")
    if collective == "auto":
        collective = {"float32": "psum", "bfloat16": "two_shot"}[case.options["value_dtype"]]
    return _WatchedIwp(
        publishers=publishers,
        uniform=uniform,
        turn=_turn(seed),
        collective=collective,
        **_known(case, *known),
    )


class _WatchedSign(_Watched, SignReference):
    def _compress(self, tensors: Tensors) -> Tensors:
        for name, x in tensors.items():
            self._watch(np.abs(x), 2 * self.K * self.tolerance[name])
        return super()._compress(tensors)

    def step(self, gradients: list[Tensors]) -> StepResult:
        self.K = len(gradients)  # x may be a sum over so many
        return super().step(gradients)


def _sign(case: Case, tree: str, K: int) -> Any:
    return _WatchedSign(**_known(case, "dense_below", "collective"))


def _quant_dp(case: Case, tree: str, K: int) -> Any:
    def uniform(step: int, worker: int | None, phase: int) -> Tensors:
        assert (worker is None) == (phase == 1)
        return _numbers(case, tree, noise.rounding_key(case.option("seed"), step, worker))

    return QuantDpReference(uniform=uniform, **_known(case, "bits", "bucket", "norm", "dense_below", "collective"))


class _TernGrad(TernGradReference):
    """With a sigma that is finite where float32's squares are not, as the library's is."""

    def _clip(self, g: np.ndarray) -> np.ndarray:
        if self.clip is None:
            return g
        limit = np.float32(min(self.clip * np.std(g.astype(np.float64)), float(np.finfo(np.float32).max)))
        return np.clip(g, -limit, limit)


def _terngrad(case: Case, tree: str, K: int) -> Any:
    def uniform(step: int, worker: int) -> Tensors:
        return _numbers(case, tree, noise.make_key(case.option("seed"), step, worker))

    return _TernGrad(uniform=uniform, **_known(case, "clip", "dense_below", "collective"))


MAKERS = {
    "plump_dp": lambda case, tree, K: PlumpDpReference(),
    "topk": _topk,
    "dct_dp": _dct_dp,
    "dgc": _dgc,
    "random_k": _random_k,
    "iwp": _iwp,
    "sign": _sign,
    "quant_dp": _quant_dp,
    "terngrad": _terngrad,
}


def has_oracle(case: Case) -> bool:
    """Rice code has room for evenly spread positions; what it leaves out the algorithms know nothing of.

    Balanced DGC is DGC's own part and top-k's balanced exchange, which have oracles each.
    """
    return case.options.get("index_codec") != "rice" and not (
        case.method == "dgc" and case.option("collective") == "balanced"
    )
