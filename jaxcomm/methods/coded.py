"""The exchanges that code every coordinate in a few bits: quant_dp, terngrad, sign."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

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
    """One code of every coordinate per worker and step.

    Attributes:
      dense_below: tensors with fewer elements are sent dense, as float32.
      collective: "gather" (each worker receives the K-1 other codes, and sums are not rounded), "two_shot" (2 (K-1)/K
        codes whatever K is: the owner of a part codes the sum again), or "auto" for fewer bytes. `quant_dp` has "psum"
        as well.
    """

    dense_below: int = 512
    collective: str = "auto"

    keeps_residual: ClassVar[bool] = False
    collectives: ClassVar[tuple[str, ...]] = COLLECTIVES  # that `collective` may name

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("dense_below", self.dense_below, 0, "0 compresses every tensor")
        check_collective(self.collective, self.collectives)

    @property
    def instead_of_checksum(self) -> str | None:
        return None

    def summands(self, vector: jax.Array, layout: Layout, step: jax.Array) -> tuple[jax.Array, Any] | None:
        """Returns integers (n,) for `integer_sum`, and the factor that makes a mean of their sum, a number or (n,).

        None where codes are summed in another way.
        """
        del vector, layout, step
        return None

    def codecs(self, layout: Layout, step: jax.Array) -> tuple[PartCodec, PartCodec]:
        """Returns the codes of a worker's vector and of a sum of vectors."""
        raise NotImplementedError

    def scaled(self, vector: jax.Array, layout: Layout) -> tuple[jax.Array, Any]:
        """Returns the vector (n,) to code, and the factor that makes a mean of the sum: a number or (n,)."""
        del layout
        return vector, 1 / axis_size(self.axis_name)

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
                codes, factor = summands
                summed = integer_sum(codes, is_ok, self.axis_name)
            else:
                vector, factor = self.scaled(x, layout)
                codecs, axis_name = self.codecs(layout, state.step), self.axis_name
                summed = coded_sum(vector, is_ok, *codecs, self.collective, axis_name, self.checksum)
            mean = summed.total(summed.ok) * factor
            compressed = layout.as_leaves(layout.unflatten(mean))
            ok = ok & summed.ok & jnp.isfinite(mean).all() & is_finite_narrow(compressed)
            means = layout.join(compressed, means)
            if residual is not None:
                residual = jnp.where(ok, summed.residual()[None], residual)
        metrics = ExchangeMetrics.of(ok, axis_size(self.axis_name) * sum(layout.sizes))
        return Exchanged(zeros_unless(ok, means), residual, metrics), state.memory
