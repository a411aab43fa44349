"""The methods that can be trained: options of `python -m train NAME method:METHOD`, after `--method.`.

A method's options, their help and their checks are those of its class in `jaxcomm.methods`. Here are only the defaults
that differ, to suit runs of a few hundred steps on small data, and options for arguments that a command line cannot
express.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from tyro.conf import Suppress

from jaxcomm import methods
from jaxcomm.checks import check_range, positive
from jaxcomm.exchange import Exchange
from jaxcomm.methods.local_sgd import LocalExchange


@dataclass(frozen=True, kw_only=True)
class Trained(Exchange):
    """A method of the command line. Suppressed fields are not options: the trainer sets them, or leaves the default."""

    where: Suppress[Any] = None
    others: Suppress[Any] = field(default=None, compare=False)
    axis_name: Suppress[Any] = "data"

    def options(self) -> dict[str, Any]:
        """Returns its options by name, as a run records them."""
        names = [
            attribute.name for attribute in fields(self) if Suppress not in getattr(attribute.type, "__metadata__", ())
        ]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PlumpDp(Trained, methods.PlumpDp):
    """Dense all-reduce of gradients, or of models if p is above 1."""


@dataclass(frozen=True)
class TopK(Trained, methods.TopK):
    """The largest coordinates of every tensor in every step, with error feedback."""

    sparsity: float = 0.98


@dataclass(frozen=True)
class Ef21(Trained, methods.Ef21):
    """EF21: the largest differences between every gradient and an estimate of it that all workers keep."""

    sparsity: float = 0.98


@dataclass(frozen=True)
class DctDp(Trained, methods.DctDp):
    """Coordinates above a threshold that is refreshed every life_span steps, with error feedback."""

    sparsity: float = 0.98
    life_span: int = 10
    seed: Suppress[int] = 0


@dataclass(frozen=True)
class RandomK(Trained, methods.RandomK):
    """Random coordinates, the same on all workers, with error feedback."""

    sparsity: float = 0.9
    seed: Suppress[int] = 0


@dataclass(frozen=True)
class Dgc(Trained, methods.Dgc):
    """Deep Gradient Compression: the largest coordinates of accumulated momentum; uses the experiment's momentum."""

    sparsity: float = 0.98
    momentum: Suppress[float] = 0.9


@dataclass(frozen=True)
class Demo(Trained, methods.Demo):
    """DeMo: the largest components of every worker's momentum in a basis of cosines; parameters change by the sign.

    Attributes:
      sign_size: the size of an update's elements, up or down, before the learning rate.
    """

    sign_size: Annotated[float, positive("1 for the learning rate alone")] = 0.2


@dataclass(frozen=True)
class Iwp(Trained, methods.Iwp):
    """Importance weighted pruning: coordinates that change their weights most; uses the experiment's momentum.

    Attributes:
      alpha: the fixed threshold of the importance, or the first term of the layer-wise threshold. One number, or one
        for each period between the steps of change_at. The paper tries 0.005, 0.01, 0.05 and 0.1, on 96 workers.
      beta: the factor of variance over mean in the layer-wise threshold; 0 for the fixed one. One number, or several,
        as for alpha.
      change_at: steps at which alpha and beta change to their next value, if they have several.
    """

    alpha: float | tuple[float, ...] = 25.0
    beta: float | tuple[float, ...] = 0.0
    change_at: tuple[int, ...] = ()
    C: float = 0.25
    density: float = 0.05
    momentum: Suppress[float] = 0.9
    seed: Suppress[int] = 0

    def __post_init__(self) -> None:
        self.scheduled()  # for its errors
        if self.change_at and not (isinstance(self.alpha, tuple) or isinstance(self.beta, tuple)):
            raise ValueError(
                f"change_at must go with several values of alpha or beta; got {self.change_at} with alpha={self.alpha} "
                f"and beta={self.beta}. Give --method.alpha 0.005 0.01 --method.change-at 1000, say."
            )

    def transform(self) -> optax.GradientTransformation:
        """Returns the Optax transformation of the library's method."""
        return self.scheduled().transform()

    def scheduled(self) -> methods.Iwp:
        """Returns the library's method; if alpha or beta has several values, it becomes a function of the step."""
        settings = {attribute.name: getattr(self, attribute.name) for attribute in fields(methods.Iwp)}
        return methods.Iwp(**settings | {name: self._by_step(name) for name in ("alpha", "beta")})

    def _by_step(self, name: str) -> float | Callable[[jax.Array], jax.Array]:
        setting = getattr(self, name)
        values = setting if isinstance(setting, tuple) else (setting,)
        places = (0, *self.change_at)
        if len(values) not in (1, len(places)) or sorted(set(places)) != list(places):
            raise ValueError(
                f"{name} must be one number, or one more than change_at has steps, which must rise; got {setting} with "
                f"change_at={self.change_at}. Give --method.{name} 0.005 0.01 --method.change-at 1000, say."
            )
        if len(values) == 1:
            return values[0]
        is_alpha = name == "alpha"
        if not all((value > 0 if is_alpha else value >= 0) and value < math.inf for value in values):
            raise ValueError(
                f"{name} must be {'above' if is_alpha else 'at least'} 0 at all times; got {setting}. See jaxcomm.iwp."
            )
        return lambda step: jnp.asarray(values)[jnp.searchsorted(jnp.asarray(self.change_at), step, side="right")]


@dataclass(frozen=True)
class QuantDp(Trained, methods.QuantDp):
    """Every coordinate rounded at random to a few levels (QSGD)."""

    seed: Suppress[int] = 0


@dataclass(frozen=True)
class TernGrad(Trained, methods.TernGrad):
    """Every coordinate rounded at random to -s, 0 or s."""

    seed: Suppress[int] = 0


@dataclass(frozen=True)
class Sign(Trained, methods.Sign):
    """The sign of every coordinate and a scale for every block, with error feedback."""


@dataclass(frozen=True)
class PowerSgd(Trained, methods.PowerSgd):
    """Low-rank matrices, with error feedback."""

    seed: Suppress[int] = 0


@dataclass(frozen=True)
class SlimDp(Trained, methods.SlimDp):
    """Local steps; then the most significant parameters, and random others, are merged."""

    q: int = 20
    seed: Suppress[int] = 0


@dataclass(frozen=True)
class _LocalSteps(Trained, LocalExchange):
    """Local steps, then an exchange, by a factory of the library.

    Attributes:
      steps: local steps from one exchange to the next.
      fragments: number of parts of the parameters, which are exchanged in turn; divides steps.
      overlap: steps from an exchange to its use, below steps. Streaming DiLoCo: 5.
      mix: the share of a worker's own parameters when they are merged with the model. Streaming DiLoCo: 0.5.
    """

    steps: int = 10
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.transform()  # for its errors

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return self.steps // self.fragments

    @property
    def turns(self) -> int:
        """Exchanges in which all parameters are exchanged once."""
        return self.fragments

    def streaming(self) -> dict[str, Any]:
        """Returns the arguments that all factories of local methods share."""
        return {"fragments": self.fragments, "overlap": self.overlap, "mix": self.mix, "axis_name": self.axis_name}


@dataclass(frozen=True)
class LocalSgd(_LocalSteps):
    """Local steps, then an outer optimizer on their changes: DiLoCo.

    Attributes:
      steps: local steps from one exchange to the next. DiLoCo: 500.
      exchange: the coordinates that a sparse exchange sends: topk, the largest changes; or pulse, those that change a
        weight in bfloat16. pulse with an outer learning rate of 1, and without outer momentum, is PULSELoCo.
      exchange_sparsity: the fraction of coordinates that an exchange does not send; None for a dense one.
      outer_learning_rate: learning rate of the outer optimizer.
      outer_momentum: Nesterov momentum of the outer optimizer.
    """

    steps: int = 10
    exchange: Literal["topk", "pulse"] = "topk"
    exchange_sparsity: float | None = None
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.5

    name: ClassVar[str] = methods.LocalSgd.name

    def transform(self) -> optax.GradientTransformation:
        """Returns the Optax transformation, which is that of the library's method."""
        axis, sparsity = self.axis_name, self.exchange_sparsity
        if sparsity is None:
            holds = self.exchange == "topk"
            check_range("exchange_sparsity", sparsity, "given with exchange='pulse'", holds, "Take 0.95, say")
            inner = methods.plump_dp(axis_name=axis)
        elif self.exchange == "topk":
            inner = methods.topk(sparsity, axis_name=axis)
        else:
            inner = methods.pulse(sparsity, learning_rate=self.outer_learning_rate, axis_name=axis)
        outer = optax.sgd(self.outer_learning_rate, momentum=self.outer_momentum, nesterov=True)
        return methods.local_sgd(self.steps, exchange=inner, outer=outer, **self.streaming())


@dataclass(frozen=True)
class SparseLoco(_LocalSteps):
    """Local steps, then their largest changes in 2 bits a value: SparseLoCo.

    Attributes:
      steps: local steps from one exchange to the next. Covenant-72B: 30.
      chunk: elements of a chunk, of which 64 are sent.
      decay: the factor of the residual from one exchange to the next.
      outer_learning_rate: learning rate of the outer SGD.
    """

    steps: int = 10
    chunk: int = 4096
    decay: float = 0.95
    outer_learning_rate: float = 1.0

    name: ClassVar[str] = "sparse_loco"

    def transform(self) -> optax.GradientTransformation:
        """Returns the Optax transformation, which is that of the library's method."""
        return methods.sparse_loco(
            self.steps,
            chunk=self.chunk,
            decay=self.decay,
            learning_rate=self.outer_learning_rate,
            **self.streaming(),
        )


Method = (
    PlumpDp
    | TopK
    | Ef21
    | DctDp
    | RandomK
    | Dgc
    | Demo
    | Iwp
    | QuantDp
    | TernGrad
    | Sign
    | PowerSgd
    | SlimDp
    | LocalSgd
    | SparseLoco
)
