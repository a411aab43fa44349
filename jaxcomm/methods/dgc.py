"""Deep Gradient Compression."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.checks import Sparsity
from jaxcomm.exchange import Exchanged, ExchangeState, Gradient, transformation
from jaxcomm.methods.momentum import MomentumCorrection
from jaxcomm.methods.sparse import SparseExchange, exchange_densely
from jaxcomm.selectors import Selected, draw_start, select_topk
from jaxcomm.selectors.topk import n_kept
from jaxcomm.types import PerWorker


@dataclass(frozen=True)
class Dgc(MomentumCorrection, SparseExchange):
    """Sends the largest coordinates of each worker's accumulated momentum, and keeps the rest.

    Each step, on each worker, in every tensor of N elements:

      1. g is clipped: scaled so that the norm of the whole gradient is at most clip * sqrt(K)
      2. u = momentum * u + g (momentum correction); v = v + u
      3. select the N - floor(N * sparsity) largest |v|, exactly
      4. send them; subtract the rounded values that were sent from v
      5. u = 0 where v was sent (momentum factor masking)
      6. return the mean over the workers of what was sent

    Momentum is applied inside: `jc.chain(jc.dgc(0.999), optax.sgd(0.1))`, without momentum after it. Dense tensors
    get the same momentum. The memory is the momentum u, a row per worker; see `Velocity`.

    Source: Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR
    2018.

    Attributes:
      sparsity: the fraction of coordinates that is not sent, 0 <= sparsity < 1. The paper: 0.999.
    """

    sparsity: Sparsity = 0.999

    @property
    def final_density(self) -> float:
        return 1 - self.sparsity

    def capacity(self, n: int) -> int:
        return n_kept(n, self.sparsity)

    @property
    def pack_remedy(self) -> str | None:
        return "Take topk: the momentum belongs to the local optimizer"

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, PerWorker]:
        layout, step = gradient.layout, state.step
        gradient, vector, velocity = self.correct(gradient, state.memory)

        def sparse(selected: Selected) -> tuple[Exchanged, jax.Array]:
            out, reduced = self.send(gradient, vector, selected, draw_start(0, step))
            return out, self.masked(velocity.flat, reduced.sent.position, reduced.sent.filled)

        def warm_up(selected: Selected) -> tuple[Exchanged, jax.Array]:
            out = exchange_densely(gradient, vector, self.axis_name, selected.words, self.decay)
            return out, self.masked_by(velocity.flat, selected.words)

        if not layout.sizes:
            out, flat = exchange_densely(gradient, vector, self.axis_name), velocity.flat
        elif self.warmup_steps == 0:
            out, flat = sparse(select_topk(vector, layout))
        else:
            is_warm_up, final = step < self.warmup_steps, jnp.asarray(layout.rooms())
            counts = jnp.where(is_warm_up, self.warm_counts(step, layout), final)
            out, flat = lax.cond(is_warm_up, warm_up, sparse, select_topk(vector, layout, counts))
        return out, self.kept(out.ok, velocity, flat, state.memory)


dgc = transformation(Dgc)
