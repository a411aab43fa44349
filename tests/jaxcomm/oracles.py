"""The papers' algorithms of `tests/reference`, with the options of a case, on the random numbers of the library.

An oracle never draws by itself. It gets what the library draws, by the keys that the transformations document, cut into
tensors: that the numbers are random is tested elsewhere.
"""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from jaxcomm import noise
from jaxcomm.selectors import draw_turn
from jaxcomm.transforms.iwp import draw_publishers
from jaxcomm.transforms.quant_dp import rounding_keys
from tests.jaxcomm import cases
from tests.jaxcomm.cases import Case
from tests.jaxcomm.trees import TREES, params_of
from tests.reference.balanced import BalancedDctDpReference, BalancedTopKReference
from tests.reference.common import StepResult, Tensors
from tests.reference.dct_dp import DctDpReference
from tests.reference.dgc import DgcReference
from tests.reference.iwp import IwpReference
from tests.reference.plump_dp import PlumpDpReference
from tests.reference.quant_dp import QuantDpReference
from tests.reference.random_k import RandomKReference
from tests.reference.sign import SignReference
from tests.reference.terngrad import TernGradReference
from tests.reference.topk import TopKReference

STATE = ("residuals", "velocities")  # a dict of tensors for every worker


class Oracle:
    """A reference, and how it is asked.

    Attributes:
      reference: of `tests/reference`.
      error: 0 where its state is the library's to the bit, else how much is left to the order of float32 operations,
        relative to the largest number of a tensor. Every step then starts from the library's state, so that differences
        do not add up.
      closest: by how much, relative to a threshold, the closest call of the last step was decided.
    """

    def __init__(self, case: Case, tree: str, K: int):
        self.case, self.tree, self.K = case, tree, K
        self.error = 0.0
        is_scaled = case.momentum and (case.option("momentum") != 0.5 or case.option("clip"))
        if is_scaled or case.method == "sign" or (case.method == "iwp" and case.option("beta")):
            self.error = 1e-5
        self.reference = MAKERS[case.method](case, tree, K)

    @property
    def closest(self) -> float:
        return 0.0 if self.is_tiny else getattr(self.reference, "closest", math.inf)

    def step(self, own: list[Tensors], i: int) -> StepResult:
        self.is_tiny = False
        if self.case.momentum and self.case.option("clip"):
            # What is clipped with a number of 1e30 may be smaller than float32's normal numbers, which XLA makes zero.
            self.is_tiny = max(np.abs(g).max() for tensors in own for g in tensors.values()) > 1e30
        if self.case.drain_every:
            return self.reference.step(own, drain=self.case.drains(i))
        if self.case.method == "iwp":
            params = {name: np.asarray(w, np.float32) for name, w in params_of(self.tree).items()}
            return self.reference.step(own, params)
        return self.reference.step(own)

    def adopt(self, state: Any) -> None:
        """Goes on from the library's state."""
        for attribute in STATE:
            if hasattr(self.reference, attribute):
                rows = state_rows(self.case, self.tree, attribute, state)
                own = [{name: np.array(part[w]) for name, part in rows.items()} for w in range(self.K)]
                setattr(self.reference, attribute, own)
        if self.case.momentum:
            self.reference.momentum_dense = dense_momentum(self.case, self.tree, state)
        if self.case.method == "iwp":
            self._adopt_mask(state)

    def _adopt_mask(self, state: Any) -> None:
        bits = np.unpackbits(np.asarray(state.mask).view(np.uint8), bitorder="little")
        overflow = 0
        for name, (mask,) in cases.unflatten(self.case, self.tree, bits[None]).items():
            flat = np.flatnonzero(mask)
            warm_up = self.reference.k <= self.case.option("warmup_steps")
            slots = mask.size if warm_up else math.ceil(Fraction(repr(self.case.option("density"))) * mask.size)
            self.reference.mask[name] = np.isin(np.arange(mask.size), flat[:slots]).reshape(mask.shape)
            overflow += max(0, len(flat) - slots)
        self.reference.mask_overflow = overflow


def state_rows(case: Case, tree: str, attribute: str, state: Any) -> dict[str, np.ndarray]:
    """The compressed tensors' residuals or velocities by name, (K, *shape)."""
    rows = state.residual.rows if attribute == "residuals" else state.velocity.rows.flat
    rows = np.asarray(rows)
    return cases.unflatten(case, tree, rows.reshape(len(rows), -1))


def dense_momentum(case: Case, tree: str, state: Any) -> dict[str, np.ndarray]:
    """The mean of the workers' momentum of the dense tensors, which is what they receive."""
    inside = cases.compressed(case, tree)
    rows = cases.velocities(case, tree, state)
    return {name: u.astype(np.float64).mean(0).astype(np.float32) for name, u in rows.items() if name not in inside}


def _known(case: Case, *names: str) -> dict[str, Any]:
    return {name: case.option(name) for name in names}


@functools.partial(jax.jit, static_argnums=1)
def _uniform(key: jax.Array, n: int) -> jax.Array:
    return noise.uniform(key, n)


def _numbers(case: Case, tree: str, key: jax.Array) -> Tensors:
    """The random numbers of a key by name, in the tensors' shapes."""
    n = sum(-(-math.prod(TREES[tree][name]) // cases.BLOCK) * cases.BLOCK for name in cases.compressed(case, tree))
    flat, start, parts = np.asarray(_uniform(key, n)), 0, {}
    for name in cases.compressed(case, tree):
        size = math.prod(TREES[tree][name])
        parts[name] = flat[start : start + size].reshape(TREES[tree][name])
        start += -(-size // cases.BLOCK) * cases.BLOCK
    return parts


def _turn(seed: int) -> Callable[[int], float]:
    return lambda step: float(draw_turn(seed, step))


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


def _dgc(case: Case, tree: str, K: int) -> Any:
    known = ("sparsity", "momentum", "factor_masking", "clip", "warmup_steps", "dense_below", "value_dtype")
    return DgcReference(**_known(case, *known))


def _random_k(case: Case, tree: str, K: int) -> Any:
    def slots(name: str) -> int:
        n = math.prod(TREES[tree][name])
        return max(1, n - math.floor(n * case.options["sparsity"] + 1e-9))

    def uniform(step: int) -> Tensors:
        names = cases.compressed(case, tree)
        flat = np.asarray(_uniform(noise.make_key(case.option("seed"), step), sum(map(slots, names))))
        ends = np.cumsum([slots(name) for name in names])
        return dict(zip(names, np.split(flat, ends[:-1]), strict=True))

    known = _known(case, "sparsity", "dense_below", "value_dtype", "collective")
    return RandomKReference(uniform=uniform, **known)


class _WatchedIwp(IwpReference):
    """Notes how close the decisions were that depend on a variance, which float32 and float64 round differently."""

    def _publisher_mask(self, v: np.ndarray, w: np.ndarray, k: int, u: np.ndarray | None) -> np.ndarray:
        with np.errstate(over="ignore"):
            importance = np.abs(v) / (np.abs(w) + np.float32(self.eps))
        importance = np.minimum(importance, np.finfo(np.float32).max).astype(np.float64)
        q = importance.var() / max(importance.mean(), 1e-300)
        against_threshold = np.abs(importance / float(self._threshold(importance.astype(np.float32), k)) - 1)
        self.closest = min(self.closest, float(against_threshold.min()), abs(q / self.C - 1))
        return super()._publisher_mask(v, w, k, u)

    def step(self, gradients: list[Tensors], params: Tensors) -> StepResult:
        self.closest = math.inf
        return super().step(gradients, params)


def _iwp(case: Case, tree: str, K: int) -> Any:
    def publishers(step: int) -> list[int]:
        return np.asarray(draw_publishers(case.option("seed"), step, K, case.option("publishers"))).tolist()

    def uniform(step: int, worker: int) -> Tensors:
        return _numbers(case, tree, noise.make_key(case.option("seed"), step, worker))

    known = ("alpha", "beta", "C", "floor", "density", "random_selection", "eps", "momentum", "factor_masking", "clip")
    known = (*known, "warmup_steps", "life_span", "dense_below", "value_dtype", "mask_codec")
    collective = case.option("collective")
    if collective == "auto":
        collective = {"float32": "psum", "bfloat16": "two_shot"}[case.options["value_dtype"]]
    reference = _WatchedIwp if case.option("beta") else IwpReference
    return reference(
        publishers=publishers,
        uniform=uniform,
        turn=_turn(case.option("seed")),
        collective=collective,
        **_known(case, *known),
    )


def _sign(case: Case, tree: str, K: int) -> Any:
    return SignReference(**_known(case, "dense_below", "collective"))


def _quant_dp(case: Case, tree: str, K: int) -> Any:
    def uniform(step: int, worker: int | None, phase: int) -> Tensors:
        return _numbers(case, tree, rounding_keys(case.option("seed"), step, worker or 0)[phase])

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
