"""PULSELoCo's exchange: sends only what changes a parameter as the forward pass reads it."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

import jax
import numpy as np
from jax import lax

from jaxcomm.checks import Seed, Sparsity, positive
from jaxcomm.collectives.sparse import Accumulated
from jaxcomm.exchange import Gradient, transformation
from jaxcomm.kernels import bits
from jaxcomm.kernels.scopes import SELECT
from jaxcomm.methods.sparse import SparseExchange
from jaxcomm.selectors import Selected, draw_start
from jaxcomm.selectors.topk import n_kept


@dataclass(frozen=True)
class Pulse(SparseExchange):
    """Sends what changes a parameter after its cast to bfloat16, and keeps the rest for later (error feedback).

    In each exchange, on each worker, in every tensor of N elements w:

      1. x = gradient + residual
      2. select all coordinates where bfloat16(w - learning_rate * x) != bfloat16(w)
      3. send x there; the residual is x minus the rounded values that were sent
      4. return the mean over the workers of what was sent

    How many are selected is not known in advance, but payloads have a fixed capacity, N - floor(N * sparsity)
    coordinates. If more are selected, only a window that fits is sent. It begins at a random start offset and wraps
    around, so that none is starved. The others stay in the residual and are counted in `metrics.overflow`. `update`
    needs the parameters.

    PULSELoCo is this exchange inside `local_sgd`, where w is the anchor and the gradient is what the local steps
    changed, both in float32:

        exchange = jc.pulse(0.95, value_dtype="float32")
        jc.chain(optax.adamw(1e-6), jc.local_sgd(8, exchange=exchange, outer=optax.sgd(1.0)))

    Source: "PULSE", 2026, https://arxiv.org/abs/2602.03839, after its abstract, whose values are float32, 4 bytes each.
    Here they are bfloat16 by default, 2 bytes each, as in every sparse method: what is rounded off stays in the
    residual. The capacity is this library's own.

    Attributes:
      sparsity: the fraction of coordinates that a payload has no room for, 0 <= sparsity < 1.
      learning_rate: learning rate of the SGD that comes after the exchange.
      seed: seed of the start offsets.
    """

    sparsity: Sparsity = 0.95
    _: KW_ONLY
    learning_rate: Annotated[float, positive("1 for local_sgd with sgd(1.0)")] = 1.0
    seed: Seed = 0

    always_fits: ClassVar[bool] = False

    def capacity(self, n: int) -> int:
        return n_kept(n, self.sparsity)

    def choose(self, gradient: Gradient, vector: Accumulated, step: jax.Array) -> tuple[Selected, jax.Array]:
        if gradient.params is None:
            raise ValueError("params must be given to pulse; got none. Call tx.update(gradients, state, params).")
        weights = gradient.layout.flatten(gradient.layout.split(gradient.params)[0])
        mask = select_visible(vector.sum() * np.float32(-self.learning_rate), weights)
        return Selected(mask, vector.is_ok()), draw_start(self.seed, step)


pulse = transformation(Pulse)


@jax.named_scope(SELECT)
def select_visible(change: jax.Array, weights: jax.Array) -> jax.Array:
    """Marks bfloat16(w + change) != bfloat16(w), but never a change of 0.

    Args:
      change: (n,) float32, what would be added to the weights.
      weights: (n,) float32.

    Returns:
      (n/32,) uint32, the bit-packed mask.
    """

    def rounded(x: jax.Array) -> jax.Array:  # not a cast there and back, which XLA may take for the identity
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    return bits.pack((rounded(weights + change) != rounded(weights)) & (change != 0))
