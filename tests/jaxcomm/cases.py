"""The table of methods. One that joins it gets every law.

A method has an entry in `METHODS`, which says what the laws have to know of it, and rows in `CASES`. Its oracle is made
in `oracles.py`, its bytes are added up in `formulas.py`.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jaxcomm as jc
from tests.jaxcomm.trees import DTYPES, KINDS, TREES, finfo, gradients, shapes_of, to_dtype, zeros_of
from tests.jaxcomm.workers import AXIS, QUICKLY, OnMesh, Outcome, Simulated, is_per_worker

__all__ = [
    "AXIS",
    "DTYPES",
    "KINDS",
    "QUICKLY",
    "TREES",
    "OnMesh",
    "Outcome",
    "Simulated",
    "finfo",
    "gradients",
    "is_per_worker",
    "shapes_of",
    "to_dtype",
    "zeros_of",
]

EPS = 2.0**-23  # of float32
BLOCK = 1024  # a compressed tensor starts at a multiple of this in the flat vector


@dataclasses.dataclass(frozen=True)
class Method:
    """What the laws have to know of a method.

    Attributes:
      factory: makes the transformation.
      compresses: whether there is anything that is not sent densely.
      residual: whether what is not sent waits in a residual, so that nothing is lost.
      momentum: whether momentum is sent, and not gradients.
      dyadic: whether nothing is rounded where gradients are small multiples of 1/8, but what the residual keeps.
      sends_largest: whether a coordinate that is far above all others is sent by everyone who has one.
      all_options: from K to the options under which everything is sent; None where everything is rounded.
    """

    factory: Callable[..., Any]
    compresses: bool = True
    residual: bool = True
    momentum: bool = False
    dyadic: bool = True
    sends_largest: bool = True
    all_options: Callable[[int], dict[str, Any]] | None = None


def _all_of_sparse(_: int) -> dict[str, Any]:
    return {"sparsity": 0.0, "value_dtype": "float32"}


def _all_of_dgc(_: int) -> dict[str, Any]:
    return {"sparsity": 0.0, "value_dtype": "float32", "momentum": 0.0, "clip": None}


def _all_of_iwp(K: int) -> dict[str, Any]:
    # Publishers publish what is not zero to them: only all together all that is sent.
    least = {"alpha": 1e-35, "beta": 0.0, "floor": 1e-35, "density": 1.0, "random_selection": False}
    own = {"momentum": 0.0, "clip": None, "life_span": 1, "eps": 1e-3}
    return {"publishers": K, "value_dtype": "float32", **own, **least}


METHODS = {
    "plump_dp": Method(jc.plump_dp, compresses=False, residual=False),
    "topk": Method(jc.topk, all_options=_all_of_sparse),
    "dct_dp": Method(jc.dct_dp, all_options=_all_of_sparse),
    "dgc": Method(jc.dgc, momentum=True, all_options=_all_of_dgc),
    "random_k": Method(jc.random_k, sends_largest=False, all_options=_all_of_sparse),
    "iwp": Method(jc.iwp, momentum=True, sends_largest=False, all_options=_all_of_iwp),
    "sign": Method(jc.sign, dyadic=False, sends_largest=False),
    "quant_dp": Method(jc.quant_dp, residual=False, dyadic=False),
    "terngrad": Method(jc.terngrad, residual=False, dyadic=False, sends_largest=False),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One method with one setting of its arguments.

    Attributes:
      method: its name in `METHODS`.
      options: the factory's arguments.
      is_variant: whether the table has another row of the method, which is tested with every number of workers.
    """

    method: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_variant: bool = False

    def __str__(self) -> str:
        """Such as topk(0.9,bfloat16): a call, for pytest (`tests/conftest.py` reads it)."""
        return f"{self.method}({','.join(self._written())})"

    def _written(self) -> list[str]:
        short = {name: str(value) for name, value in self.options.items() if isinstance(value, str)}
        return [short.get(name, f"{name}={value}") for name, value in self.options.items()]

    def __hash__(self) -> int:
        return hash(str(self))

    def __getattr__(self, name: str) -> Any:
        """What holds for the method holds for the case."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(METHODS[self.method], name)

    def make(self, **overrides: Any) -> Any:
        return self.factory(**{**self.options, **overrides})

    def option(self, name: str) -> Any:
        """The value of an argument, be it given or the factory's default."""
        if name in self.options:
            return self.options[name]
        return inspect.signature(self.factory).parameters[name].default

    @property
    def is_dyadic(self) -> bool:
        """Whether small multiples of 1/8 stay multiples of a power of two."""
        return self.dyadic and not (self.momentum and (self.option("momentum") != 0.5 or self.option("clip")))

    @property
    def limit(self) -> float:
        """The magnitude from which a compressed coordinate counts as not finite: residuals would keep it."""
        return 2.0**100 if self.residual else math.inf

    @property
    def dense_below(self) -> int:
        return self.options.get("dense_below", 512)

    @property
    def drain_every(self) -> int | None:
        return self.options.get("drain_every")

    def drains(self, step: int) -> bool:
        """Whether a step drains, by the rule that the documentation gives."""
        if self.drain_every is None:
            return False
        key = jax.random.fold_in(jax.random.key(self.options.get("seed", 0)), step)
        return bool(jax.random.uniform(key) < 1 / self.drain_every)


def row(method: str, **options: Any) -> Case:
    return Case(method, options)


def variant(method: str, **options: Any) -> Case:
    return Case(method, options, is_variant=True)


# Payloads that are gathered. The first row of a method is tested with every number of workers, the others with fewer:
# compiling is what costs.
GATHERED = [
    row("topk", sparsity=0.9, value_dtype="bfloat16", index_codec="auto"),
    variant("topk", sparsity=0.5, value_dtype="float32", index_codec="bitmap", dense_below=0),
    variant("topk", sparsity=0.99, value_dtype="float32", index_codec="plain"),
    variant("topk", sparsity=0.9, value_dtype="bfloat16", index_codec="elias_fano", dense_below=1024),
    variant("topk", sparsity=0.9, value_dtype="float32", index_codec="rice"),
    row("dct_dp", sparsity=0.9, value_dtype="bfloat16", index_codec="auto", life_span=4, slack=1.0),
    variant(
        "dct_dp",
        sparsity=0.9,
        value_dtype="float32",
        index_codec="elias_fano",
        life_span=5,
        slack=1,
        drain_every=4,
        seed=7,
    ),
    variant("dct_dp", sparsity=0.99, value_dtype="float32", index_codec="plain", life_span=3, slack=2.0, drain_every=3),
    variant("dct_dp", sparsity=0.5, value_dtype="float32", index_codec="bitmap", life_span=1, dense_below=0),
    variant("dct_dp", sparsity=0.99, value_dtype="bfloat16", index_codec="elias_fano", life_span=100, slack=1.05),
    variant("dct_dp", sparsity=0.9, value_dtype="bfloat16", index_codec="rice", life_span=2, slack=1.5),
    row("dgc", sparsity=0.9, value_dtype="bfloat16", momentum=0.5, warmup_steps=2),
    variant("dgc", sparsity=0.99, value_dtype="float32", momentum=0.9, clip=2.0, factor_masking=False),
    # The papers' setting. In float32, since a last bit of a momentum may decide how its bfloat16 is rounded.
    variant("dgc", sparsity=0.9, value_dtype="float32", momentum=0.9, clip=2.0),
]
BALANCED = [
    row("topk", sparsity=0.9, value_dtype="bfloat16"),
    variant("dct_dp", sparsity=0.9, value_dtype="float32", life_span=4, slack=1.0),
    variant("dgc", sparsity=0.9, value_dtype="bfloat16", momentum=0.5, index_codec="plain"),
]
SHARED = [
    row("random_k", sparsity=0.9, value_dtype="bfloat16", collective="two_shot", seed=3),
    variant("random_k", sparsity=0.5, value_dtype="float32", collective="psum", dense_below=0),
    variant("random_k", sparsity=0.9, value_dtype="bfloat16", collective="ring"),
    row(
        "iwp", alpha=2.5, density=0.1, momentum=0.5, life_span=3, eps=1e-3, value_dtype="bfloat16", mask_codec="bitmap"
    ),
    variant(
        "iwp", alpha=2.5, density=0.1, momentum=0.5, publishers=2, random_selection=False, factor_masking=False,
        value_dtype="float32", mask_codec="coded",
    ),
    variant(
        "iwp", alpha=1.0, beta=0.5, C=1.5, density=0.05, momentum=0.5, eps=0.1, random_selection=False, warmup_steps=2,
        life_span=2, value_dtype="bfloat16", collective="ring", mask_codec="coded",
    ),
    variant("iwp", alpha=0.1, density=0.1, momentum=0.9, clip=2.0, value_dtype="float32", mask_codec="bitmap"),
]  # fmt: skip
CODED = [
    row("sign", collective="two_shot"),
    variant("sign", collective="gather", dense_below=0),
    row("quant_dp", bits=8, collective="two_shot", seed=5),
    variant("quant_dp", bits=4, norm="l2", bucket=128, collective="gather", dense_below=0),
    variant("quant_dp", bits=2, norm="l2", bucket=32, collective="two_shot"),
    row("terngrad", collective="two_shot", seed=5),
    variant("terngrad", clip=None, collective="gather", dense_below=0),
]


def _by(collective: str, rows: list[Case]) -> list[Case]:
    """Which is chosen depends on K, so rows name it."""
    return [dataclasses.replace(case, options={**case.options, "collective": collective}) for case in rows]


CASES = [row("plump_dp"), *_by("gather", GATHERED), *_by("balanced", BALANCED), *SHARED, *CODED]

# Every number of workers, each with the shapes that it is tried on, and those that variants are tried on.
SETTINGS = [(1, "single"), (2, "odd"), (3, "half"), (4, "pair"), (8, "odd")]
FEW = [(2, "odd")]


# What is tested of every method by `pytest` alone; the other settings, and the variants, are in the slow tier. Methods
# take them in turn, so that each setting is tried, and few programs are compiled.
USUAL = [(4, "pair"), (8, "odd"), (3, "half")]


def over(rows: list[Case], settings: list[tuple[int, str]], of_variants: list[tuple[int, str]]) -> Any:
    """Parametrizes a test over cases, numbers of workers K and trees of shapes; all but one of a method are slow."""

    def marks(case: Case, setting: tuple[int, str]) -> Any:
        first = CASES.index(case) % len(USUAL)
        usual = next((each for each in [*USUAL[first:], *USUAL[:first]] if each in settings), settings[0])
        return pytest.mark.slow if case.is_variant or setting != usual else ()

    return pytest.mark.parametrize(
        ("case", "K", "tree"),
        [
            pytest.param(case, K, tree, id=f"{case}-{K}-{tree}", marks=marks(case, (K, tree)))
            for case in rows
            for K, tree in (of_variants if case.is_variant else settings)
        ],
    )


def first_rows(rows: list[Case]) -> list[Any]:
    """Parameters of a test over cases alone; variants are slow."""
    return [pytest.param(case, id=str(case), marks=pytest.mark.slow if case.is_variant else ()) for case in rows]


def compressed(case: Case, tree: str) -> list[str]:
    """The tensors that are compressed, in the order of the flat vector."""
    if not case.compresses:
        return []
    return [name for name, s in shapes_of(tree).items() if s.size >= max(case.dense_below, 1)]


def unflatten(case: Case, tree: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Cuts rows (K, n) of a flat vector, zeros in its padding, into the compressed tensors (K, *shape)."""
    tensors, start = {}, 0
    for name in compressed(case, tree):
        shape = TREES[tree][name]
        size, end = math.prod(shape), start - -math.prod(shape) // BLOCK * BLOCK
        tensors[name] = rows[:, start : start + size].reshape(len(rows), *shape)
        assert not rows[:, start + size : end].any()
        start = end
    assert start == rows.shape[1]
    return tensors


def owed(case: Case, tree: str, K: int, state: Any) -> dict[str, np.ndarray]:
    """The residual of every tensor by name, (K, *shape) float64; zeros where a tensor has none."""
    residual = getattr(state, "residual", None)
    parts = {} if residual is None else unflatten(case, tree, np.asarray(residual.rows).reshape(K, -1))
    return {
        name: np.asarray(parts.get(name, np.zeros((K, *s.shape))), np.float64) for name, s in shapes_of(tree).items()
    }


def velocities(case: Case, tree: str, state: Any) -> dict[str, np.ndarray]:
    """The momentum of every tensor by name, (K, *shape) float32; nothing for methods without."""
    if not case.momentum:
        return {}
    rows = getattr(state.memory, "velocity", state.memory).rows
    flat = np.asarray(rows.flat)
    tensors = unflatten(case, tree, flat.reshape(len(flat), -1))
    dense = [name for name in TREES[tree] if name not in tensors]
    shapes = TREES[tree]
    return {
        **tensors,
        **{name: np.asarray(u).reshape(-1, *shapes[name]) for name, u in zip(dense, rows.dense, strict=True)},
    }


def inputs(case: Case, tree: str, grads: dict[str, np.ndarray], state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes into an exchange, given the state before it, and what its rounding is relative to.

    Returns:
      By name (K, *shape) float64: the gradient, or the new momentum; and the magnitudes that were added up for it, the
      residual's included.
    """
    K = len(next(iter(grads.values())))
    residual = owed(case, tree, K, state)
    own = {name: gradient.astype(np.float64) for name, gradient in grads.items()}
    clip = case.option("clip") if case.momentum else None
    if clip is not None:
        norm = np.sqrt(sum((g.reshape(K, -1) ** 2).sum(1) for g in own.values()))  # (K,)
        factor = np.minimum(1, clip * math.sqrt(K) / np.maximum(norm, 1e-300))
        with np.errstate(invalid="ignore"):  # of a gradient that is infinite nobody will look at it
            own = {name: g * factor.reshape(-1, *[1] * (g.ndim - 1)) for name, g in own.items()}
    sizes = {name: np.abs(g) + np.abs(residual[name]) for name, g in own.items()}
    for name, u in velocities(case, tree, state).items():
        decayed = case.option("momentum") * u.astype(np.float64)
        own[name] = own[name] + decayed
        sizes[name] = sizes[name] + np.abs(decayed)
    if case.method == "sign":  # all of a block get its mean magnitude
        largest = {name: size.reshape(K, -1).max(1) for name, size in sizes.items()}
        sizes = {name: size + largest[name].reshape(-1, *[1] * (size.ndim - 1)) for name, size in sizes.items()}
    return own, sizes


@functools.cache
def simulated(case: Case, tree: str, K: int) -> Simulated:
    """The simulation of a case of the table; compiled once for all tests."""
    return Simulated(case.make(), tree, K, _compiled(case, tree, K))


@functools.cache
def on_mesh(case: Case, tree: str, K: int) -> OnMesh:
    """The exchange of a case of the table on a mesh; compiled once for all tests."""
    return OnMesh(case.make(), tree, K, _compiled(case, tree, K))


def _compiled(case: Case, tree: str, K: int) -> dict[str, Any] | None:
    """How a program is compiled: as users have it in the settings that are usual of methods, quickly in the others."""
    return None if not case.is_variant and (K, tree) in USUAL else QUICKLY
