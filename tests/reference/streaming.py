"""Streaming DiLoCo in NumPy: an oracle of the tests.

After Algorithm 2 of Douillard et al., "Streaming DiLoCo with overlapping communication" (2025). M workers, fragments
p = 1 .. P of the parameters theta, H steps from one exchange of a fragment to the next, at t mod H = t_p; tau steps
from an exchange to its use; alpha, the weight of a worker's own parameters:

    for step t = 1, 2, ...
        for worker m = 1 to M
            theta_m = InnerOpt(theta_m, gradient): here theta_m + update_m, the update comes from outside
            if t mod H = t_p for a fragment p:
                send delta_m,p = theta_p - theta_m,p
            if (t - tau) mod H = t_p for a fragment p:
                receive delta_p, the mean over the workers of what was sent tau steps ago
                theta_p = OuterOpt(theta_p, delta_p): SGD with Nesterov's momentum, a state for each fragment
                theta_m,p = alpha * theta_m,p + (1 - alpha) * theta_p

Here t_p = p * H / P mod H. Where the paper is silent:

- A worker whose update is not finite, or has a number of 2^90 or more, does not apply it, and all skip an exchange of
  this step. It receives what is due all the same: its next delta would otherwise undo what the others have learned.
- After a skipped exchange nothing is received: theta_p, its outer optimizer and theta_m,p stay.
"""

from collections.abc import Callable

import numpy as np

from .common import Tensors


class StreamingReference:
    """K synchronous workers which exchange one fragment of their models after another.

    Args:
        params: the initial parameters, the same on every worker.
        K: the number of workers.
        fragments: the names of each fragment's tensors, in the order of their turns.
        H: the local steps from one exchange of a fragment to the next.
        tau: the steps from an exchange to its use.
        alpha: the weight of a worker's own parameters.
        lr: the outer learning rate.
        momentum: of the outer SGD.
        exchange: makes the exchange that takes the mean, for each fragment.

    Attributes:
        params: per worker, its local model.
        global_model: theta; in the tau steps after an exchange it does not have it yet.
    """

    def __init__(
        self,
        params: Tensors,
        K: int,
        *,
        fragments: list[list[str]],
        H: int,
        tau: int,
        alpha: float,
        lr: float,
        momentum: float,
        exchange: Callable[[], object],
    ):
        self.fragments, self.H, self.tau = fragments, H, tau
        self.alpha, self.lr, self.mu = np.float32(alpha), np.float32(lr), np.float32(momentum)
        self.exchanges = [exchange() for _ in fragments]
        self.on_its_way: dict[int, Tensors] = {}  # the step in which it is received: the mean
        self.global_model = {name: np.array(w, np.float32) for name, w in params.items()}
        self.params = [dict(self.global_model) for _ in range(K)]
        self.outer_momentum = {name: np.zeros_like(w) for name, w in self.global_model.items()}
        self.t = 0

    def step(self, updates: list[Tensors]) -> bool:
        """Take a local step on every worker, send and receive what is due; returns whether an exchange was skipped."""
        self.t += 1
        is_bad = [not all(np.all(np.abs(tensor) < 2.0**90) for tensor in update.values()) for update in updates]
        for w, update, bad in zip(self.params, updates, is_bad, strict=True):
            if not bad:
                w.update({name: np.asarray(w[name] + update[name], np.float32) for name in w})
        skipped = False
        for p in range(len(self.fragments)):
            if self.t % self.H == self._place(p):
                skipped = self._send(p, any(is_bad))
        for p in range(len(self.fragments)):
            if (self.t - self.tau) % self.H == self._place(p) and self.t in self.on_its_way:
                self._receive(p, self.on_its_way.pop(self.t))
        return skipped

    def _place(self, p: int) -> int:
        return (p + 1) * self.H // len(self.fragments) % self.H

    def _send(self, p: int, bad: bool) -> bool:
        names, theta = self.fragments[p], self.global_model
        deltas = [{name: np.asarray(theta[name] - w[name]) for name in names} for w in self.params]
        if bad:
            return True
        result = self.exchanges[p].step(deltas)
        if not result.skipped:
            self.on_its_way[self.t + self.tau] = result.mean
        return result.skipped

    def _receive(self, p: int, delta: Tensors) -> None:
        for name in self.fragments[p]:
            mom = np.asarray(self.mu * self.outer_momentum[name] + delta[name], np.float32)
            self.outer_momentum[name] = mom
            theta = np.asarray(self.global_model[name] - self.lr * (delta[name] + self.mu * mom), np.float32)
            self.global_model[name] = theta
            for w in self.params:
                w[name] = np.asarray(self.alpha * w[name] + (1 - self.alpha) * theta, np.float32)
