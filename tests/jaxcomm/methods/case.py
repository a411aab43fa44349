"""What the laws ask of a method. Each is a subclass of `Case` in a file of its own; its settings are the instances."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar, Self

import numpy as np

from tests.jaxcomm.formulas import Sizes, all_reduce
from tests.jaxcomm.trees import TREES, cut, shapes_of
from tests.reference.common import StepResult, Tensors


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One method with one setting of its arguments.

    Attributes:
      options: the factory's arguments.
      usual: the workers K and the tree that it is tested with by `pytest` alone, where a test has them (`cases.over`);
        None for a variant of another row, which is slow.
      factory: makes the transformation.
      compresses: whether there is anything that is not sent densely.
      residual: whether what is not sent waits in a residual, so that nothing is lost.
      momentum: whether momentum is sent, and not gradients.
      sends_largest: whether a coordinate that is far above all others is sent by everyone who has one.
      is_dyadic: whether nothing is rounded where gradients are small multiples of 1/8, but what the residual keeps.
      has_scales: whether values are sent relative to a scale, which is a sum, or shared with others.
      rounds_at_random: whether values are rounded at random; `scale_and_level` says how far.
      can_overflow: whether more may be selected than has slots.
      has_oracle: whether `reference` knows all that happens.
      state_error: what a step adds to the distance of the oracle's state, relative to the largest number of a tensor; 0
        where it is the library's to the bit.
      sends_ones: options under which a gradient of ones is sent at once.
      recovers: options with which training goes on after a bad step, by what is special about them.
    """

    options: dict[str, Any]
    usual: tuple[int, str] | None = None

    factory: ClassVar[Callable[..., Any]]
    compresses: ClassVar[bool] = True
    residual: ClassVar[bool] = True
    momentum: ClassVar[bool] = False
    sends_largest: ClassVar[bool] = True
    is_dyadic: ClassVar[bool] = True
    has_scales: ClassVar[bool] = False
    rounds_at_random: ClassVar[bool] = False
    can_overflow: ClassVar[bool] = False
    has_oracle: ClassVar[bool] = True
    state_error: ClassVar[float] = 0.0
    sends_ones: ClassVar[dict[str, Any]] = {}
    recovers: ClassVar[dict[str, dict[str, Any]]] = {"": {}}

    @classmethod
    def row(cls, usual: tuple[int, str] = (4, "pair"), **options: Any) -> Self:
        return cls(options, usual)

    @classmethod
    def variant(cls, **options: Any) -> Self:
        return cls(options)

    @property
    def is_variant(self) -> bool:
        """Whether the table has another row of the method, which is tested with every number of workers."""
        return self.usual is None

    @property
    def name(self) -> str:
        return self.factory.__name__

    def __str__(self) -> str:
        """Such as topk(0.9,bfloat16): a call, for pytest (`tests/conftest.py` reads it)."""
        written = [value if isinstance(value, str) else f"{name}={value}" for name, value in self.options.items()]
        return f"{self.name}({','.join(written)})"

    def make(self, **overrides: Any) -> Any:
        return self.factory(**{**self.options, **overrides})

    def option(self, name: str) -> Any:
        """The value of an argument, be it given or the factory's default."""
        if name in self.options:
            return self.options[name]
        return inspect.signature(self.factory).parameters[name].default

    def chosen(self, *names: str) -> dict[str, Any]:
        return {name: self.option(name) for name in names}

    @property
    def conserves(self) -> bool:
        """Whether mean and residuals add up to what went in."""
        return self.residual

    @property
    def sums_numbers(self) -> bool:
        """Whether all that travels is summed on its way, so that nobody could check it."""
        return False

    @property
    def limit(self) -> float:
        """The magnitude from which a compressed coordinate counts as not finite: residuals would keep it."""
        return 2.0**100 if self.residual else math.inf

    @property
    def dense_below(self) -> int:
        return self.options.get("dense_below", 512)

    @property
    def is_balanced(self) -> bool:
        """Whether payloads go to the owners of regions, which may have no room for all."""
        return self.options.get("collective") == "balanced"

    # What a method may know better.

    def all_options(self, K: int) -> dict[str, Any] | None:
        """The options under which everything is sent; None where everything is rounded."""
        return None

    def drains(self, step: int) -> bool:
        """Whether a step drains, by the rule that the documentation gives."""
        return False

    def scale_and_level(self, own: list[np.ndarray]) -> tuple[float, float]:
        """Bounds of a tensor's mean, and of what one level more or less in every rounding changes in it."""
        raise NotImplementedError

    # Its oracle: an algorithm of `tests/reference`, on draws by the keys that the transformation documents.

    def reference(self, tree: str, K: int) -> Any:
        raise NotImplementedError

    def ask(self, reference: Any, own: list[Tensors], step: int, tree: str) -> StepResult:
        """Takes a step of the reference with each worker's gradients."""
        return reference.step(own)

    def adopt(self, reference: Any, tree: str, state: Any) -> None:
        """Lets the reference go on from the library's state."""
        for attribute, tensors in self.state_rows(tree, state).items():
            K = len(getattr(reference, attribute))
            setattr(reference, attribute, [{name: np.array(u[w]) for name, u in tensors.items()} for w in range(K)])

    def check_memory(self, reference: Any, tree: str, state: Any) -> None:
        """Compares what is no row of `state_rows`."""

    # Its bytes, by hand.

    @property
    def sealed(self) -> int:
        """Words more in every payload for its checksum."""
        return int(self.option("checksum"))

    def vote(self, K: int) -> Fraction:
        """The all-reduce by which workers that have checked payloads agree."""
        return all_reduce(K, 1) if self.sealed else Fraction(0)

    def capacity(self, n: int) -> int:
        """Slots of a tensor of n elements; the options are decimal numbers, and so is the arithmetic."""
        raise NotImplementedError

    def compressed_bytes(self, s: Sizes) -> Fraction:
        """What a worker receives of the compressed tensors in a usual step."""
        raise NotImplementedError

    def rare_bytes(self, s: Sizes) -> Fraction:
        """What a worker receives in a step that is dense now and then."""
        return Fraction(0)

    def received(self, s: Sizes) -> tuple[Fraction, Fraction]:
        """(in a usual step, at most), where a tensor is compressed."""
        usual = s.dense + self.compressed_bytes(s)
        return usual, max(usual, self.rare_bytes(s))

    def received_bytes(self, tree: str, K: int) -> tuple[Fraction, Fraction]:
        """What a worker receives, (in a usual step, at most)."""
        inside = [math.prod(TREES[tree][name]) for name in self.compressed(tree)]
        total = sum(math.prod(shape) for shape in TREES[tree].values())
        s = Sizes(K, total, inside, [self.capacity(size) for size in inside])
        return self.received(s) if inside else (s.everything, s.everything)

    # Its state, by tensor.

    def compressed(self, tree: str) -> list[str]:
        """The tensors that are compressed, in the order of the flat vector."""
        if not self.compresses:
            return []
        return [name for name, s in shapes_of(tree).items() if s.size >= max(self.dense_below, 1)]

    def unflatten(self, tree: str, rows: Any, is_padded: bool = True) -> Tensors:
        """Cuts rows (K, ...) of a flat vector into the compressed tensors (K, *shape)."""
        return cut(rows, {name: TREES[tree][name] for name in self.compressed(tree)}, is_padded)

    def state_rows(self, tree: str, state: Any) -> dict[str, Tensors]:
        """What the state keeps of each compressed tensor, (K, *shape), by the reference's name of it."""
        return {"residuals": self.unflatten(tree, state.residual.rows)} if self.residual else {}

    def owed(self, tree: str, K: int, state: Any) -> Tensors:
        """The residual of every tensor by name, (K, *shape) float64; zeros where a tensor has none."""
        parts = self.state_rows(tree, state).get("residuals", {})
        return {
            name: np.asarray(parts.get(name, np.zeros((K, *s.shape))), np.float64)
            for name, s in shapes_of(tree).items()
        }

    def inputs(self, tree: str, grads: Tensors, state: Any) -> tuple[Tensors, Tensors]:
        """What goes into an exchange, given the state before it, and what its rounding is relative to.

        Returns:
          By name (K, *shape) float64: the gradient, or the new momentum; and the magnitudes that were added up for it,
          the residual's included.
        """
        residual = self.owed(tree, len(next(iter(grads.values()))), state)
        own = {name: gradient.astype(np.float64) for name, gradient in grads.items()}
        return own, {name: np.abs(g) + np.abs(residual[name]) for name, g in own.items()}
