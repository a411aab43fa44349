"""The fields of every method: options of `python -m train NAME method:METHOD`, after `--method.`.

The defaults suit runs of a few hundred steps on small data. What they mean in full is in the docstring of the
transformation of the same name.
"""

from dataclasses import dataclass
from typing import Literal

ValueDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class PlumpDp:
    """Dense all-reduce of float32 gradients; of models, where p is above 1."""

    p: int = 1
    """Local steps from one communication to the next. Above 1 the workers' models are averaged."""


@dataclass(frozen=True)
class TopK:
    """The largest coordinates of every tensor in every step, with error feedback."""

    sparsity: float = 0.98
    """Fraction of coordinates that is not sent."""
    dense_below: int = 512
    """Tensors with fewer elements are sent dense."""
    value_dtype: ValueDtype = "bfloat16"
    """Type of a value on the wire."""


@dataclass(frozen=True)
class Ef21:
    """EF21: the largest differences between every gradient and its estimate, which all workers keep."""

    sparsity: float = 0.98
    """Fraction of coordinates that is not sent."""
    dense_below: int = 512
    """Tensors with fewer elements are sent dense."""
    value_dtype: ValueDtype = "bfloat16"
    """Type of a value on the wire."""


@dataclass(frozen=True)
class DctDp:
    """Coordinates above a threshold that is renewed every life_span steps, with error feedback."""

    sparsity: float = 0.98
    """Fraction of coordinates that is not sent."""
    life_span: int = 10
    """Steps between two refreshes of the thresholds."""
    slack: float = 1.05
    """Capacity of a payload over the expected number of coordinates."""
    drain_every: int | None = None
    """Send everything in a random one of so many steps; None for never."""
    dense_below: int = 512
    """Tensors with fewer elements are sent dense."""
    value_dtype: ValueDtype = "bfloat16"
    """Type of a value on the wire."""


@dataclass(frozen=True)
class RandomK:
    """Random coordinates, the same on all workers, with error feedback."""

    sparsity: float = 0.9
    """Fraction of coordinates that is not sent."""
    dense_below: int = 512
    """Tensors with fewer elements are sent dense."""
    value_dtype: ValueDtype = "bfloat16"
    """Type of a value on the wire."""


@dataclass(frozen=True)
class Dgc:
    """Deep Gradient Compression: the largest coordinates of accumulated momentum; the experiment's momentum is its."""

    sparsity: float = 0.98
    """Fraction of coordinates that is not sent."""
    factor_masking: bool = True
    """Empty the momentum where it was sent."""
    clip: float | None = None
    """Norm of the mean gradient that clipping aims at; None for no clipping."""
    warmup_steps: int = 0
    """Steps in which the fraction that is sent falls to its end; they cost as much as dense ones."""
    dense_below: int = 512
    """Tensors with fewer elements are sent dense."""
    value_dtype: ValueDtype = "bfloat16"
    """Type of a value on the wire."""


@dataclass(frozen=True)
class Iwp:
    """Importance weighted pruning: coordinates that change their weights most; the experiment's momentum is its."""

    alpha: float | tuple[float, ...] = 25.0
    """Threshold of the importance, or the first term of the layer-wise one; or one for each of the times that change_at
    parts."""
    beta: float | tuple[float, ...] = 0.0
    """Factor of variance over mean in the layer-wise threshold; 0 for the fixed one. One, or several as of alpha."""
    change_at: tuple[int, ...] = ()
    """Steps from which alpha and beta have their next value, where they have several."""
    C: float = 0.25
    """Variance over mean of the importance above which the layer-wise threshold rises with it."""
    density: float = 0.05
    """Slots of the compact buffer over coordinates."""
    publishers: int = 1
    """Workers whose masks are united."""
    random_selection: bool = True
    """Let coordinates below the threshold enter by chance."""
    factor_masking: bool = True
    """Empty the momentum where it was sent."""
    clip: float | None = None
    """Norm of the mean gradient that clipping aims at; None for no clipping."""
    warmup_steps: int = 0
    """Steps in which the fraction that is sent falls to its end; they cost as much as dense ones."""
    dense_below: int = 512
    """Tensors with fewer elements are sent dense."""
    value_dtype: ValueDtype = "bfloat16"
    """Type of a value on the wire."""


@dataclass(frozen=True)
class QuantDp:
    """Every coordinate rounded at random to a few levels (QSGD)."""

    bits: Literal[2, 4, 8] = 8
    """Bits a coordinate."""
    bucket: int = 512
    """Coordinates that share a scale, a power of two from 32 to 1024."""
    norm: Literal["max", "l2"] = "max"
    """What the scale of a bucket is."""
    dense_below: int = 512
    """Tensors with fewer elements are sent dense."""


@dataclass(frozen=True)
class TernGrad:
    """Every coordinate rounded at random to -s, 0 or s."""

    clip: float | None = 2.5
    """Standard deviations to which a tensor is clipped; None for no clipping."""
    dense_below: int = 512
    """Tensors with fewer elements are sent dense."""


@dataclass(frozen=True)
class Sign:
    """The sign of every coordinate and a scale for every block, with error feedback."""

    dense_below: int = 512
    """Tensors with fewer elements are sent dense."""


@dataclass(frozen=True)
class PowerSgd:
    """Matrices of low rank, with error feedback."""

    rank: int = 4
    """Rank of what is sent."""
    dense_below: int = 512
    """Tensors with fewer elements are sent dense."""


@dataclass(frozen=True)
class SlimDp:
    """Local steps; the most significant parameters and random others are merged."""

    alpha: float = 0.3
    """Size of the communication set over the parameters."""
    beta: float = 0.15
    """Size of the core, which all workers share, over the parameters."""
    p: int = 1
    """Local steps from one communication to the next."""
    q: int = 20
    """Communications from one core to the next."""
    c: float | None = None
    """Weight of the gradient in the significance; None for mean |w| / mean |g|."""
    server_rate: float | None = None
    """Rate of the global model's updates; None for 1/K, which averages."""
    unsent: Literal["local", "carry"] = "local"
    """What becomes of updates that were not pushed: stay on their worker, or grow until they are pushed."""


@dataclass(frozen=True)
class LocalSgd:
    """Local steps, then an outer optimizer on what they changed: DiLoCo; with exchange_sparsity SparseLoCo."""

    steps: int = 10
    """Local steps from one exchange to the next."""
    exchange_sparsity: float | None = None
    """Fraction of coordinates that top-k does not send in an exchange; None for a dense one."""
    outer_learning_rate: float = 0.7
    """Learning rate of the outer optimizer."""
    outer_momentum: float = 0.5
    """Nesterov momentum of the outer optimizer."""


Method = PlumpDp | TopK | Ef21 | DctDp | RandomK | Dgc | Iwp | QuantDp | TernGrad | Sign | PowerSgd | SlimDp | LocalSgd
