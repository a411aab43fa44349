"""Top-k with error feedback."""

from dataclasses import dataclass

from jaxcomm.checks import Sparsity
from jaxcomm.exchange import transformation
from jaxcomm.methods.sparse import SparseExchange
from jaxcomm.selectors.topk import n_kept


@dataclass(frozen=True)
class TopK(SparseExchange):
    """Sends the k largest coordinates of every tensor, and keeps the rest for later steps (error feedback).

    Each step, on each worker:

      1. x = gradient + residual
      2. select, in every tensor of N elements, the N - floor(N * sparsity) largest |x|, exactly
      3. send them; the residual is x minus the rounded values that were sent
      4. return the mean over the workers of what was sent

    Selection takes one pass over the gradient, or 32 if most tensors have fewer than a few thousand elements.
    `jc.chain(jc.topk(0.99), optax.sgd(0.1))`.

    Source: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.

    Attributes:
      sparsity: the fraction of coordinates that is not sent, 0 <= sparsity < 1.
    """

    sparsity: Sparsity = 0.99

    def capacity(self, n: int) -> int:
        return n_kept(n, self.sparsity)


topk = transformation(TopK)
