"""The exchanges that code every coordinate in a few bits: quant_dp, terngrad, sign."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.checks import DenseBelow, one_of
from jaxcomm.codecs.quantize import PartCodec
from jaxcomm.collectives import axis_size, dense_mean
from jaxcomm.collectives.coded_sum import COLLECTIVES, coded_sum, integer_sum
from jaxcomm.collectives.dense import dense_words, read_dense
from jaxcomm.exchange import Exchange, Exchanged, ExchangeState, Gradient, Packed, zeros_unless
from jaxcomm.kernels.numerics import is_finite_narrow
from jaxcomm.kernels.vectors import Stored, Vector, computed_end_to_end
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.types import ExchangeMetrics, PyTree


class Summands(NamedTuple):
    """A worker's small integers, and what they stand for.

    Attributes:
      codes: (n,) int8 or int16.
      scales: (m,) float32 of n / m numbers each, the same on all workers.
      unit: the integer that stands for a scale.
      ok: () bool, whether the worker's vector is ok.
    """

    codes: jax.Array
    scales: jax.Array
    unit: int
    ok: jax.Array


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

    def summands(self, vector: jax.Array, layout: Layout, step: jax.Array) -> Summands | None:
        """Returns what `integer_sum` adds up; None if the codes are summed by `coded_sum`."""
        del vector, layout, step
        return None

    def codecs(self, layout: Layout, step: jax.Array, worker: jax.Array | int) -> tuple[PartCodec, PartCodec]:
        """Returns the codecs for a worker's vector, by the worker's number, and for a sum of vectors."""
        raise NotImplementedError

    def scaled(self, vector: Vector, layout: Layout) -> tuple[Vector, jax.Array, jax.Array]:
        """Returns what to code, the scales (m,) of n / m numbers each for the mean, and whether the vector is ok.

        The codec may find it broken as well.
        """
        del layout
        return vector, jnp.ones(1, jnp.float32), jnp.asarray(True)

    def plan(self, tree: PyTree) -> Layout:
        return plan_layout(tree, dense_below=self.dense_below, capacity=lambda n: n)

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        layout = gradient.layout
        means, ok = dense_mean(gradient.dense, self.axis_name)
        residual = gradient.residual
        if layout.sizes:
            x: Vector = Stored(gradient.vector()) if residual is None else gradient.accumulated()
            if (summands := self.summands(x.sum(), layout, state.step)) is not None:
                scales, unit = summands.scales, summands.unit
                summed = integer_sum(summands.codes, summands.ok, self.axis_name)
            else:
                vector, scales, is_ok = self.scaled(x, layout)
                axis_name, unit = self.axis_name, 1
                codecs = self.codecs(layout, state.step, lax.axis_index(axis_name))
                summed = coded_sum(vector, is_ok, *codecs, self.collective, axis_name, self.checksum)
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
