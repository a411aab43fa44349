"""What the laws ask of a method. Each method is a subclass of `Case` in its own file; instances are its settings."""

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
      setting: the workers K and the tree with which it is tested besides two workers, if a test has them
        (`cases.over`); None for a variant of another row, which is slow.
      factory: makes the transformation.
      compresses: whether anything is not sent densely.
      residual: whether what is not sent stays in a residual, so that nothing is lost.
      momentum: whether momentum is sent instead of gradients.
      sends_largest: whether a coordinate far above all others is sent by every worker that has one.
      is_dyadic: whether gradients that are small multiples of 1/8 are exact, except for what the residual keeps.
      has_scales: whether values are sent relative to a scale that is a sum or is shared.
      rounds_at_random: whether values are rounded at random; `scale_and_level` says how far.
      can_overflow: whether more may be selected than there are slots.
      has_oracle: whether `reference` knows all that happens.
      state_error: how far a step may move the oracle's state from the library's, relative to a tensor's largest number;
        0 if they are equal to the bit.
      sends_ones: options under which a gradient of ones is sent at once.
      recovers: options with which training must go on after a bad step, by what is special about them.
    """

    options: dict[str, Any]
    setting: tuple[int, str] | None = None

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
    def row(cls, setting: tuple[int, str] = (4, "pair"), **options: Any) -> Self:
        return cls(options, setting)

    @classmethod
    def variant(cls, **options: Any) -> Self:
        return cls(options)

    @property
    def is_variant(self) -> bool:
        """Whether another row of the method is the one that is tested with several numbers of workers."""
        return self.setting is None

    @property
    def name(self) -> str:
        return self.factory.__name__

    def __str__(self) -> str:
        """A call such as topk(0.9,bfloat16), for pytest (`tests/conftest.py` reads it)."""
        fields = [value if isinstance(value, str) else f"{name}={value}" for name, value in self.options.items()]
        return f"{self.name}({','.join(fields)})"

    def make(self, **overrides: Any) -> Any:
        return self.factory(**{**self.options, **overrides})

    def option(self, name: str) -> Any:
        """The value of an argument, given or the factory's default."""
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
        """Whether all that is sent is summed on its way, so that no payload could be checked."""
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
        """Whether payloads go to the owners of regions, which may not have slots for all."""
        return self.options.get("collective") == "balanced"

    # A method may override these.

    def all_options(self, K: int) -> dict[str, Any] | None:
        """The options under which everything is sent; None if everything is rounded."""
        return None

    def drains(self, step: int) -> bool:
        """Whether a step drains, by the documented rule."""
        return False

    def scale_and_level(self, gradients: list[np.ndarray]) -> tuple[float, float]:
        """Bounds of a tensor's mean, and of the change in it if every rounding differs by one level."""
        raise NotImplementedError

    # Its oracle: an algorithm of `tests/reference`, with draws by the documented keys.

    def reference(self, tree: str, K: int) -> Any:
        raise NotImplementedError

    def ask(self, reference: Any, gradients: list[Tensors], step: int, tree: str) -> StepResult:
        """Does a step of the reference with each worker's gradients."""
        return reference.step(gradients)

    def adopt(self, reference: Any, tree: str, state: Any) -> None:
        """Makes the reference go on from the library's state."""
        for attribute, tensors in self.state_rows(tree, state).items():
            K = len(getattr(reference, attribute))
            setattr(reference, attribute, [{name: np.array(u[w]) for name, u in tensors.items()} for w in range(K)])

    def check_memory(self, reference: Any, tree: str, state: Any) -> None:
        """Compares the parts of the state that are not in `state_rows`."""

    # Its bytes, by hand.

    @property
    def sealed(self) -> int:
        """Additional words in every payload, for its checksum."""
        return int(self.option("checksum"))

    def vote(self, K: int) -> Fraction:
        """The bytes of the all-reduce by which workers agree after checking payloads."""
        return all_reduce(K, 1) if self.sealed else Fraction(0)

    def capacity(self, n: int) -> int:
        """Slots of a tensor of n elements, by decimal arithmetic on the options."""
        raise NotImplementedError

    def compressed_bytes(self, s: Sizes) -> Fraction:
        """The bytes that a worker receives for compressed tensors in a usual step."""
        raise NotImplementedError

    def rare_bytes(self, s: Sizes) -> Fraction:
        """The bytes that a worker receives in one of the rare dense steps."""
        return Fraction(0)

    def received(self, s: Sizes) -> tuple[Fraction, Fraction]:
        """The bytes (in a usual step, at most) if a tensor is compressed."""
        usual = s.dense + self.compressed_bytes(s)
        return usual, max(usual, self.rare_bytes(s))

    def received_bytes(self, tree: str, K: int) -> tuple[Fraction, Fraction]:
        """The bytes that a worker receives (in a usual step, at most)."""
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
        """The state of each compressed tensor, (K, *shape), by the reference's name for it."""
        return {"residuals": self.unflatten(tree, state.residual.rows)} if self.residual else {}

    def owed(self, tree: str, K: int, state: Any) -> Tensors:
        """The residual of every tensor by name, (K, *shape) float64; zeros where a tensor has none."""
        parts = self.state_rows(tree, state).get("residuals", {})
        return {
            name: np.asarray(parts.get(name, np.zeros((K, *s.shape))), np.float64)
            for name, s in shapes_of(tree).items()
        }

    def inputs(self, tree: str, grads: Tensors, state: Any) -> tuple[Tensors, Tensors]:
        """The input of an exchange, given the state before it, and the magnitudes that its rounding is relative to.

        Returns:
          By name, (K, *shape) float64: the gradient, or the new momentum; and the sum of the magnitudes that were added
          for it, including the residual's.
        """
        residual = self.owed(tree, len(next(iter(grads.values()))), state)
        gradients = {name: gradient.astype(np.float64) for name, gradient in grads.items()}
        return gradients, {name: np.abs(g) + np.abs(residual[name]) for name, g in gradients.items()}
