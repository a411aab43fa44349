"""TernGrad: gradients of three values."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.checks import Seed, positive
from jaxcomm.codecs.quantize import Integers, PartCodec, Ternary
from jaxcomm.collectives import axis_size
from jaxcomm.collectives.reduced import Reduced
from jaxcomm.exchange import transformation
from jaxcomm.kernels import noise
from jaxcomm.kernels.numerics import divide
from jaxcomm.kernels.scopes import EXCHANGE
from jaxcomm.kernels.vectors import Stored, Vector
from jaxcomm.layout import BLOCK, Layout
from jaxcomm.methods.coded import CodedExchange
from jaxcomm.selectors.importance import moments, segment_max


@dataclass(frozen=True, kw_only=True)
class TernGrad(CodedExchange):
    """Rounds every coordinate at random to -s, 0 or s: 2 bits a coordinate; unbiased, and without a residual.

    Each step, on each worker, in every tensor:

      1. g is clipped to +- clip * sigma, where sigma is its standard deviation
      2. s = the largest |g| over all workers (shared scaler: 4 bytes a tensor in one all-reduce)
      3. send sign(g) with probability |g| / s, else 0
      4. the sum over the workers is an integer from -K to K; return s / K times this sum

    The sums are exact, so both collectives return the same; in two shots the sums take ceil(log2(2K+1)) bits.
    Received: (K-1)/K * (2 + log2(2K+1)) n bits. Memory: none. `jc.chain(jc.terngrad(), optax.sgd(0.1))`.

    Source: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NeurIPS
    2017.

    Attributes:
      clip: bound in standard deviations; None does not clip. Clipping makes s smaller: less variance, but a bias.
      seed: seed of the rounding.
    """

    clip: Annotated[float | None, positive("The paper uses 2.5 standard deviations", or_none=True)] = 2.5
    seed: Seed = 0

    @property
    def pack_remedy(self) -> str | None:
        return "Take quant_dp(2): the scaler is the largest of all workers"

    def codecs(self, layout: Layout, step: jax.Array, worker: jax.Array | int) -> tuple[PartCodec, PartCodec]:
        first = Ternary(noise.make_key(self.seed, step, worker))
        return first, Integers(axis_size(self.axis_name))

    def summed(self, vector: Vector, layout: Layout, step: jax.Array) -> tuple[Reduced, jax.Array, int]:
        values = vector.sum()
        rows, largest = values.reshape(-1, BLOCK), segment_max(jnp.abs(values), layout)  # (S,)
        is_ok = jnp.isfinite(largest).all()
        if self.clip is not None:
            unit, _, variance = moments(values, layout)
            bound = unit * (np.float32(self.clip) * jnp.sqrt(variance))
            largest = jnp.minimum(largest, bound)
            bound = layout.per_block(bound)[:, None]
            rows = jnp.clip(rows, -bound, bound)
        with jax.named_scope(EXCHANGE):
            scaler = lax.pmax(largest, self.axis_name)  # (S,)
        scales = layout.per_block(scaler)
        ratio = divide(rows, jnp.where(scales > 0, scales, 1.0)[:, None])
        return self.coded(Stored(ratio.reshape(-1)), is_ok, layout, step), scales, 1


terngrad = transformation(TernGrad)
