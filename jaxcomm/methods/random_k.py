"""Random-k with shared seeds and error feedback."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from jaxcomm.checks import Sparsity
from jaxcomm.exchange import Exchanged, ExchangeState, Gradient, transformation
from jaxcomm.kernels import noise
from jaxcomm.methods.shared import SharedExchange
from jaxcomm.methods.sparse import drain
from jaxcomm.selectors.strata import select_strata
from jaxcomm.selectors.topk import n_kept


@dataclass(frozen=True)
class RandomK(SharedExchange):
    """Sends k random coordinates of every tensor, the same on all workers, and keeps the rest (error feedback).

    The seed is shared, so no index travels, and what a worker receives does not grow with K. Each step, on each worker,
    in every tensor of N elements:

      1. x = gradient + residual
      2. draw k = N - floor(N * sparsity) coordinates, from (seed, step): one in each of k strata of N // k or
         N // k + 1 coordinates, rotated by a random offset, so that every coordinate is drawn equally often
      3. sum x over the workers there; the residual is the rounding error there, and x elsewhere
      4. return the sum / K

    Every coordinate waits for 1 / (1 - sparsity) steps on average, and then arrives with all that has accumulated: use
    a learning rate that tolerates such bursts, and less sparsity than with top-k.

    Source: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.

    Attributes:
      sparsity: the fraction of coordinates that is not sent, 0 <= sparsity < 1.
      seed: seed of the coordinates, the same on all workers.
    """

    sparsity: Sparsity = 0.99
    _: KW_ONLY
    seed: int = 0

    def capacity(self, n: int) -> int:
        return n_kept(n, self.sparsity)

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        vector = gradient.accumulated()
        if not gradient.layout.sizes:
            return drain(gradient, vector, self.axis_name), state.memory
        slots = select_strata(noise.make_key(self.seed, state.step), gradient.layout)
        return self.send(gradient, vector, slots), state.memory


random_k = transformation(RandomK)
