"""EF21 in NumPy (Richtarik, Sokolov and Fatkhullin, NeurIPS 2021, Algorithm 2), with top-k for each tensor by itself.

Every worker i has an estimate g_i of its gradient, and the server g = (1/K) sum g_i, all zero at the start:

    1:  every worker: c_i = C(gradient_i - g_i), C keeping the k = N - floor(N * sparsity) largest magnitudes
    2:  every worker: g_i = g_i + c_i, and sends c_i
    3:  server:       g = g + (1/K) sum c_i
    4:  the model takes its step along g

In the paper, the model's line x = x - rate * g comes first: here g is what the exchange returns.
"""

import numpy as np

from .common import Tensors, largest, n_kept


class Ef21Reference:
    """K workers that exchange their gradients; `dense_below` tensors are averaged as they are."""

    def __init__(self, sparsity: float, dense_below: int = 512):
        self.sparsity, self.dense_below = sparsity, dense_below
        self.estimates: list[Tensors] = []
        self.mean: Tensors = {}

    def step(self, gradients: list[Tensors]) -> Tensors:
        names = [name for name, leaf in gradients[0].items() if leaf.size >= self.dense_below]
        if not self.estimates:
            self.estimates = [{name: np.zeros(own[name].shape) for name in names} for own in gradients]
            self.mean = {name: np.zeros(gradients[0][name].shape) for name in names}
        out = {name: np.mean([own[name] for own in gradients], axis=0) for name in gradients[0]}
        for name in names:
            for own, estimate in zip(gradients, self.estimates, strict=True):
                difference = (own[name] - estimate[name]).reshape(-1)
                chosen = largest(difference, n_kept(difference.size, self.sparsity))
                correction = np.zeros_like(difference)
                correction[chosen] = difference[chosen]
                estimate[name] = estimate[name] + correction.reshape(own[name].shape)
                self.mean[name] = self.mean[name] + correction.reshape(own[name].shape) / len(gradients)
            out[name] = self.mean[name]
        return out
