"""Local SGD with an outer optimizer, after DiLoCo, in NumPy: an oracle of the tests.

Algorithm 1 of Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
(2023). theta is the anchor here, theta_k is w_k, k a worker of K:

     1:  for outer step t = 1, 2, ...
     2:      for worker k = 1 to K
     3:          w_k = anchor
     4:          for inner step h = 1 to H
     8:              w_k = InnerOpt(w_k, gradient): here w_k + update_k, the update comes from outside
    12:      g = mean over the workers of g_k = anchor - w_k, the pseudo-gradient
    14:      anchor = OuterOpt(anchor, g): SGD with momentum mu,
                 mom = mu * mom + g
                 d = g + mu * mom if the momentum is Nesterov's, mom if not
                 anchor = anchor - lr * d

Where the paper is silent:

- The mean of line 12 is any exchange of the tests' oracles. A sparse one keeps residuals of the
  pseudo-gradients, as in SparseLoCo (Sarfi et al., 2025).
- mom = 0 before the first outer step. Every worker holds the same anchor and mom.
- If the exchange skips its step, the anchor and mom stay, and the updates of this call are undone on all
  workers. Those of earlier calls are not lost: the next exchange, H calls later, takes them along.
- In a call without an exchange a worker ignores an update which would leave a non-finite number in w_k.
"""

from typing import Protocol

import numpy as np

from .common import StepResult, Tensors, all_finite


class Exchange(Protocol):
    """Gives all workers the mean of their pseudo-gradients, like `PlumpDpReference`."""

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker."""


class LocalSgdReference:
    """K synchronous workers which exchange the changes of their models every H steps.

    Args:
        params: the initial parameters, the same on every worker.
        K: the number of workers.
        H: the local steps between two exchanges.
        lr: the outer learning rate. The paper's is 0.7.
        momentum: mu of the outer SGD. The paper's is 0.9.
        nesterov: whether the outer momentum is Nesterov's, as the paper's is.
        exchange: takes the mean of the pseudo-gradients.

    Attributes:
        params: per worker, its local model.
        global_model: the anchor, the model after the last exchange.
        outer_momentum: mom, by name.
        result: what the last exchange gave, None before the first.
    """

    def __init__(
        self, params: Tensors, K: int, *, H: int, lr: float, momentum: float, nesterov: bool, exchange: Exchange
    ):
        self.H = H
        self.lr = np.float32(lr)
        self.mu = np.float32(momentum)
        self.nesterov = nesterov
        self.exchange = exchange
        self.calls = 0
        self.global_model = {name: np.array(w, np.float32) for name, w in params.items()}
        self.params = [dict(self.global_model) for _ in range(K)]
        self.outer_momentum = {name: np.zeros_like(w) for name, w in self.global_model.items()}
        self.result: StepResult | None = None

    def step(self, updates: list[Tensors]) -> bool:
        """Add the workers' local updates, one dict for each worker, and exchange if it is time.

        Returns:
            Whether there was an exchange and it was skipped.
        """
        # 8: the inner optimizer
        local = []
        for w, update in zip(self.params, updates, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):  # looked at below, or by the exchange
                local.append({name: np.asarray(w[name] + np.asarray(update[name], np.float32)) for name in w})

        self.calls += 1
        if self.calls % self.H != 0:
            for k in range(len(local)):
                if all_finite([local[k]]):
                    self.params[k] = local[k]
            return False
        return self._outer_step(local)

    def _outer_step(self, local: list[Tensors]) -> bool:
        """Lines 12 and 14, then line 3 of the next outer step; whether the exchange was skipped."""
        # 12: the mean of the pseudo-gradients
        anchor = self.global_model
        pseudo_gradients = []
        for w in local:
            with np.errstate(over="ignore", invalid="ignore"):  # the exchange looks for inf, nan
                pseudo_gradients.append({name: np.asarray(anchor[name] - w[name]) for name in anchor})
        self.result = self.exchange.step(pseudo_gradients)
        if self.result.skipped:
            return True

        # 14: the outer optimizer
        new_anchor, new_momentum = {}, {}
        for name in anchor:
            g = self.result.mean[name]
            mom = np.asarray(self.mu * self.outer_momentum[name] + g, np.float32)
            d = g + self.mu * mom if self.nesterov else mom
            new_momentum[name] = mom
            new_anchor[name] = np.asarray(anchor[name] - self.lr * d, np.float32)
        self.global_model = new_anchor
        self.outer_momentum = new_momentum

        # 3: every worker starts from the anchor
        self.params = [dict(new_anchor) for _ in local]
        return False
