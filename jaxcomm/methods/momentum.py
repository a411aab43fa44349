"""Momentum correction, which Deep Gradient Compression and importance weighted pruning share.

Gradients wait in a residual for many steps. Momentum after the exchange would see such a gradient late and all at once,
and continue in its direction for as long again. So each worker keeps the momentum u of its own gradients, and
accumulates u instead of g: u = m u + g; v = v + u; v is what is selected and sent.

Source: Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR
2018.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.checks import check_range, count, number, positive
from jaxcomm.collectives import axis_size
from jaxcomm.collectives.axis import to_varying
from jaxcomm.collectives.sparse import Accumulated
from jaxcomm.exchange import Exchange, Gradient, keep_unless, own_row
from jaxcomm.kernels.bits import unpack
from jaxcomm.kernels.numerics import divide, wide_type, widened
from jaxcomm.kernels.vectors import add_at
from jaxcomm.layout import Layout
from jaxcomm.types import Params, PerWorker


class Velocity(NamedTuple):
    """The momentum u of one worker.

    Attributes:
      flat: (1, n) float32, of the compressed tensors, laid out like the residual.
      dense: (1, *shape) float32 for every dense tensor, float64 for one of float64.
    """

    flat: jax.Array
    dense: list[jax.Array]


@dataclass(frozen=True, kw_only=True)
class MomentumCorrection(Exchange):
    """Momentum correction, momentum factor masking, local clipping and warm-up.

    If some worker's u or v is not finite, or its u has a number of 2^100 or more, the exchange is skipped, and u stays
    as well. Memory: 8 bytes a parameter. Use plain SGD after it.

    Attributes:
      momentum: m, 0 <= m < 1.
      factor_masking: whether u is set to zero where v was sent, so that old directions do not continue.
      clip: target norm of the mean gradient: each worker clips its own gradient to sqrt(K) times it (DGC: K^-1/2 times,
        for gradients already divided by K). None for no clipping.
      warmup_steps: T, steps in which the sent fraction falls exponentially to its final value. Each sends by one dense
        all-reduce. DGC: four epochs.
    """

    momentum: Annotated[
        float, number("at least 0 and below 1", lambda x: 0 <= x < 1, "0.9 is usual, 0 turns it off")
    ] = 0.9
    factor_masking: bool = True
    clip: Annotated[float | None, positive("None does not clip", or_none=True)] = None
    warmup_steps: Annotated[int, count(0, "0 starts with the final sparsity")] = 0

    start_remedy: ClassVar[str | None] = "Pass warmup_steps=, which keeps the momentum"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, holds = "0 where some gradients bypass the exchange", self.where is None or self.others is not None
        check_range("momentum", self.momentum, rule, holds or self.momentum == 0, "They would have none of it")

    @property
    def momentum_inside(self) -> float:
        return self.momentum

    @property
    def reads_whole_tensors(self) -> bool:
        return self.clip is not None

    @property
    def final_density(self) -> float:
        """The fraction that is sent after the warm-up."""
        raise NotImplementedError

    def first_memory(self, params: Params, layout: Layout) -> Any:
        _, dense = layout.split(list(zip(layout.shapes, layout.dtypes, strict=True)))
        rows = [jnp.zeros((1, *shape), wide_type(dtype)) for shape, dtype in dense]
        return self.per_worker(Velocity(jnp.zeros((1, layout.n), jnp.float32), rows))

    def correct(self, gradient: Gradient, velocity: PerWorker) -> tuple[Gradient, Accumulated, Velocity]:
        """Adds a worker's gradient to its momentum: u = m u + g.

        Returns:
          The gradient with its dense leaves replaced by their momentum; u + v of the compressed leaves; and the new u,
          to be kept if the step is ok.
        """
        layout = gradient.layout
        rows = jax.tree.map(lambda row: to_varying(row, self.axes), velocity.rows)
        flat = own_row(self.per_worker(rows.flat), layout.n)
        compressed, dense = layout.split(self.clipped(gradient.leaves))
        new_flat = self.momentum * flat[0] + layout.flatten(compressed)  # (n,)
        new_dense = [self.momentum * u + g[None] for u, g in zip(rows.dense, dense, strict=True)]
        _, dtypes = layout.split(layout.dtypes)
        sends = [u[0].astype(dtype) for u, dtype in zip(new_dense, dtypes, strict=True)]
        assert gradient.residual is not None, "methods with momentum keep a residual"
        vector = Accumulated(new_flat, gradient.residual)
        return gradient._replace(leaves=layout.join(compressed, sends)), vector, Velocity(new_flat[None], new_dense)

    def clipped(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Scales a worker's gradient down to a norm of at most clip * sqrt(K): float32 leaves; float64 ones stay.

        The mean of K independent gradients has K^-1/2 of their norm, so that its norm is then at most about `clip`.
        """
        leaves = list(map(widened, leaves))
        if self.clip is None:
            return leaves
        # In units of the largest magnitude: squares of large finite numbers overflow, and even the norm may.
        largest = jnp.stack([jnp.max(jnp.abs(leaf), initial=0.0) for leaf in leaves]).max()
        unit = jnp.where(largest > 0, largest, 1.0)
        scaled = [divide(leaf, unit) for leaf in leaves]
        squares = jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in scaled]).sum()  # at least 1, or all are zeros
        bound = self.clip * math.sqrt(axis_size(self.axis_name)) / jnp.sqrt(jnp.maximum(squares, 1.0))
        pairs = zip(scaled, leaves, strict=True)
        return [jnp.where(unit > bound, (part * bound).astype(leaf.dtype), leaf) for part, leaf in pairs]

    def masked(self, velocity: jax.Array, position: jax.Array, filled: jax.Array) -> jax.Array:
        """Sets the momentum (1, n) to zero at the coordinates that were sent."""
        if not self.factor_masking:
            return velocity
        return add_at(velocity, position, jnp.where(filled, -velocity[0, position], 0.0))

    def masked_by(self, velocity: jax.Array, mask: jax.Array) -> jax.Array:
        """Sets the momentum (1, n) to zero where a mask (n/32,) is set."""
        return jnp.where(unpack(mask), 0.0, velocity) if self.factor_masking else velocity

    def kept(self, ok: jax.Array, new: Velocity, flat: jax.Array, old: PerWorker) -> PerWorker:
        """Returns the new momentum, with its masked `flat`, if the step is ok, else the old."""
        return self.per_worker(keep_unless(ok, new._replace(flat=flat), old.rows))

    def warm_counts(self, step: jax.Array, layout: Layout) -> jax.Array:
        """Returns how many coordinates the warm-up sends of every segment: (S,) int32.

        The fraction is density^((step + 1) / (T + 1)).
        """
        steps = np.arange(1, self.warmup_steps + 1) / (self.warmup_steps + 1)
        table = np.power(np.float64(self.final_density), steps).astype(np.float32)
        fraction = jnp.asarray(table)[jnp.minimum(step, self.warmup_steps - 1)]
        share = fraction * layout.elements().astype(np.float32)
        return jnp.clip(share.astype(jnp.int32), layout.rooms(), layout.elements())
