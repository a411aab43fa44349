"""The exchanges that code every coordinate in a few bits: quant_dp, terngrad, sign."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.checks import check_count
from jaxcomm.codecs.quantize import PartCodec
from jaxcomm.collectives import axis_size, dense_mean
from jaxcomm.collectives.coded_sum import COLLECTIVES, check_collective, coded_sum, integer_sum
from jaxcomm.exchange import Exchange, Exchanged, ExchangeState, Gradient, zeros_unless
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.numerics import is_finite, is_finite_narrow
from jaxcomm.types import ExchangeMetrics


@dataclass(frozen=True, kw_only=True)
class CodedExchange(Exchange):
    """Base of the methods that send every coordinate, coded in a few bits.

    Attributes:
      dense_below: tensors with fewer elements are sent dense, as float32.
      collective: "gather" (each worker receives the K-1 other workers' codes, and sums are not coded again), "two_shot"
        (the owner of each part codes its sum again; each worker receives 2 (K-1)/K codes), or "auto" for fewer bytes.
        `quant_dp` also has "psum".
    """

    dense_below: int = 512
    collective: str = "auto"

    keeps_residual: ClassVar[bool] = False
    collectives: ClassVar[tuple[str, ...]] = COLLECTIVES  # allowed values of `collective`

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("dense_below", self.dense_below, 0, "0 compresses every tensor")
        check_collective(self.collective, self.collectives)

    @property
    def instead_of_checksum(self) -> str | None:
        return None

    def summands(self, vector: jax.Array, layout: Layout, step: jax.Array) -> tuple[jax.Array, jax.Array, int] | None:
        """Returns integers (n,) for `integer_sum`, scales (m,) of n / m numbers each, and the integer that a scale is.

        None if the codes are summed by `coded_sum`.
        """
        del vector, layout, step
        return None

    def codecs(self, layout: Layout, step: jax.Array) -> tuple[PartCodec, PartCodec]:
        """Returns the codecs for a worker's vector and for a sum of vectors."""
        raise NotImplementedError

    def scaled(self, vector: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
        """Returns the vector (n,) to code, and scales (m,) of n / m numbers each, for the mean."""
        del layout
        return vector, jnp.ones(1, jnp.float32)

    def plan(self, tree: Any) -> Layout:
        return plan_layout(tree, dense_below=self.dense_below, capacity=lambda n: n)

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        layout = gradient.layout
        means, ok = dense_mean(gradient.dense, self.axis_name)
        residual = gradient.residual
        if layout.sizes:
            if residual is None:
                x = gradient.vector()
                is_ok = is_finite(x)
            else:
                accumulated = gradient.accumulated()
                x, is_ok = accumulated.sum(), accumulated.is_ok()
            if (summands := self.summands(x, layout, state.step)) is not None:
                codes, scales, unit = summands
                summed = integer_sum(codes, is_ok, self.axis_name)
            else:
                (vector, scales), unit = self.scaled(x, layout), 1
                codecs, axis_name = self.codecs(layout, state.step), self.axis_name
                summed = coded_sum(
                    vector, is_ok, *codecs, self.collective, axis_name, self.checksum, self.keeps_residual
                )
            factors = scales * np.float32(1 / (unit * axis_size(self.axis_name)))
            mean = (summed.total(summed.ok).reshape(scales.size, -1) * factors[:, None]).reshape(-1)
            compressed = layout.as_leaves(layout.unflatten(mean))
            # The means are at most the scales, up to rounding. To test them would take a pass over the vector.
            ok = ok & summed.ok & jnp.isfinite(2 * scales).all() & is_finite_narrow(compressed)
            means = layout.join(compressed, means)
            if residual is not None:
                residual = jnp.where(ok, summed.residual()[None], residual)
        metrics = ExchangeMetrics.of(ok, axis_size(self.axis_name) * sum(layout.sizes))
        return Exchanged(zeros_unless(ok, means), residual, metrics), state.memory
