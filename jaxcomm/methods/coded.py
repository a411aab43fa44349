"""The exchanges that code every coordinate in a few bits: quant_dp, terngrad, sign."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.checks import DenseBelow, one_of
from jaxcomm.codecs.quantize import PartCodec
from jaxcomm.collectives import axis_size, dense_mean
from jaxcomm.collectives.coded_sum import COLLECTIVES, coded_sum
from jaxcomm.collectives.dense import dense_words, read_dense
from jaxcomm.collectives.reduced import Reduced
from jaxcomm.exchange import Exchange, Exchanged, ExchangeState, Gradient, Packed, zeros_unless
from jaxcomm.kernels.numerics import is_finite_narrow
from jaxcomm.kernels.vectors import Stored, Vector, computed_end_to_end
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.types import ExchangeMetrics, PyTree


@dataclass(frozen=True, kw_only=True)
class CodedExchange(Exchange):
    """Base of the methods that send every coordinate, coded in a few bits.

    Attributes:
      dense_below: tensors with fewer elements are sent dense, as float32.
      collective: "gather" (each worker receives the K-1 other workers' codes, and sums are not coded again), "two_shot"
        (the owner of each part codes its sum again; each worker receives 2 (K-1)/K codes), or "auto" for fewer bytes.
        `quant_dp` also has "psum".
    """

    dense_below: DenseBelow = 512
    collective: Annotated[str, one_of((*COLLECTIVES, "auto"), "Or pass 'auto'")] = "auto"

    keeps_residual: ClassVar[bool] = False

    @property
    def checksum_remedy(self) -> str | None:
        return None

    def codecs(self, layout: Layout, step: jax.Array, worker: jax.Array | int) -> tuple[PartCodec, PartCodec]:
        """Returns the codecs for a worker's vector, by the worker's number, and for a sum of vectors."""
        raise NotImplementedError

    def summed(self, vector: Vector, layout: Layout, step: jax.Array) -> tuple[Reduced, jax.Array, int]:
        """Returns the sum over the workers, its scales (m,) of n / m numbers each, and what stands for one scale in it.

        The scales are the same on all workers.
        """
        return self.coded(vector, jnp.asarray(True), layout, step), jnp.ones(1, jnp.float32), 1

    def coded(self, vector: Vector, ok: jax.Array, layout: Layout, step: jax.Array) -> Reduced:
        """Returns `coded_sum` of each worker's vector, in the method's codecs."""
        codecs = self.codecs(layout, step, lax.axis_index(self.axis_name))
        return coded_sum(vector, ok, *codecs, self.collective, self.axis_name, self.checksum)

    def plan(self, tree: PyTree) -> Layout:
        return plan_layout(tree, dense_below=self.dense_below, capacity=lambda n: n)

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        layout = gradient.layout
        means, ok = dense_mean(gradient.dense, self.axis_name)
        residual = gradient.residual
        if layout.sizes:
            x: Vector = Stored(gradient.vector()) if residual is None else gradient.accumulated()
            summed, scales, unit = self.summed(x, layout, state.step)
            max_sum = unit * axis_size(self.axis_name)  # that a sum can be, in integers
            factors = scales * np.float32(1 / max_sum)
            mean = (summed.total(summed.ok).reshape(scales.size, -1) * factors[:, None]).reshape(-1)
            compressed = layout.as_leaves(layout.unflatten(mean))
            ok = ok & summed.ok & jnp.isfinite(max_sum * factors).all() & is_finite_narrow(compressed)
            means = layout.join(compressed, means)
            if residual is not None:
                residual = jnp.where(ok, summed.residual()[None], residual)
        metrics = ExchangeMetrics.of(ok, axis_size(self.axis_name) * layout.n_elements())
        return Exchanged(zeros_unless(ok, means), residual, metrics), state.memory

    @property
    def pack_remedy(self) -> str | None:
        return None if self.collective in ("auto", "gather") else "Leave collective= out: codes are gathered"

    def pack(self, gradient: Gradient, step: jax.Array, worker: jax.Array | int) -> Packed:
        layout, residual = gradient.layout, gradient.residual
        words, ok = dense_words(gradient.dense)
        if not layout.sizes:
            return Packed(words, residual, ok)
        vector: Vector = Stored(gradient.vector()) if residual is None else gradient.accumulated()
        codec = self.codecs(layout, step, worker)[0]
        codes, sound = codec.codes(vector, 0)
        code = codec.words(codes)
        if residual is not None:
            residual = jnp.where(ok & sound, (vector.sum() - codec.decode(code, layout.n, 0))[None], residual)
        return Packed(computed_end_to_end([code, words]), residual, ok & sound)

    def unpack(self, words: jax.Array, layout: Layout, step: jax.Array) -> list[jax.Array]:
        compressed = []
        if layout.sizes:
            vector = self.codecs(layout, step, 0)[0].decode(words[: words.size - layout.n_dense], layout.n, 0)
            compressed = layout.as_leaves(layout.unflatten(vector))
        return layout.join(compressed, read_dense(words[words.size - layout.n_dense :], layout))
