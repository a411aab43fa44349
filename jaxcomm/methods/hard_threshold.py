"""Hard-threshold sparsification with error feedback."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

import jax.numpy as jnp

from jaxcomm.checks import Sparsity, positive
from jaxcomm.collectives.sparse import Accumulated
from jaxcomm.exchange import transformation
from jaxcomm.layout import Layout
from jaxcomm.methods.sparse import SparseExchange
from jaxcomm.selectors import Selected, select_threshold
from jaxcomm.selectors.topk import kept


@dataclass(frozen=True)
class HardThreshold(SparseExchange):
    """Sends the coordinates of at least a fixed magnitude, and keeps the rest for later steps (error feedback).

    Each step, on each worker:

      1. x = gradient + residual
      2. send x where |x| >= threshold; if more are selected than there are slots, a window of them that fits
      3. the residual is x minus the rounded values that were sent
      4. return the mean over the workers of what was sent

    Source: Sahu et al., "Rethinking Gradient Sparsification as Total Error Minimization", NeurIPS 2021.

    Attributes:
      sparsity: the fraction of coordinates that a payload has no room for, 0 <= sparsity < 1.
      threshold: the least magnitude that is sent.
    """

    sparsity: Sparsity = 0.99
    _: KW_ONLY
    threshold: Annotated[float, positive("It has the unit of the gradient")] = 1e-3

    always_fits: ClassVar[bool] = False

    def capacity(self, n: int) -> int:
        return kept(n, self.sparsity)

    def select(self, vector: Accumulated, layout: Layout) -> Selected:
        return select_threshold(vector, jnp.full(len(layout.sizes), self.threshold, jnp.float32), layout)


hard_threshold = transformation(HardThreshold)
