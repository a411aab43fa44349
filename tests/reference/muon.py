"""Muon and Adam in NumPy, the local optimizer of MuLoCo: an oracle of the tests.

Therien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo" (2025), is DiLoCo (`local_sgd`) with Muon as
InnerOpt. Muon (Jordan et al., 2024), of a matrix W of n rows and m columns, with heavy-ball momentum B, 0 at the start:

    1:  B = mu * B + gradient
    2:  X = B / |B|, the Frobenius norm
    3:  five times: A = X X^T; X = a X + (b A + c A A) X, with a, b, c = 3.4445, -4.775, 2.0315
    4:  W = W - learning rate * sqrt(max(1, m / n)) * X

A matrix with more rows than columns is transposed for lines 2 and 3. Other tensors use Adam (Kingma and Ba, 2015), with
the same learning rate.
"""

import math

import numpy as np

from .common import Tensors

A, B, C = 3.4445, -4.775, 2.0315


class MuonReference:
    """One worker's optimizer.

    Args:
        learning_rate: of Muon and of Adam.
        mu: Muon's momentum.
        b1: Adam's.
        b2: of Adam's second moment.
    """

    def __init__(self, learning_rate: float, mu: float, b1: float, b2: float):
        self.learning_rate, self.mu, self.b1, self.b2 = learning_rate, mu, b1, b2
        self.steps = 0
        self.first: dict[str, np.ndarray] = {}  # B, or Adam's first moment
        self.second: dict[str, np.ndarray] = {}

    def update(self, gradient: Tensors) -> Tensors:
        """What to add to the parameters."""
        self.steps += 1
        return {
            name: np.float32(-self.learning_rate * self._direction(name, np.float64(g))) for name, g in gradient.items()
        }

    def _direction(self, name: str, g: np.ndarray) -> np.ndarray:
        before = self.first.get(name, np.zeros_like(g))
        if g.ndim == 2:
            self.first[name] = self.mu * before + g
            n, m = g.shape
            return math.sqrt(max(1, m / n)) * orthogonalized(self.first[name])
        self.first[name] = self.b1 * before + (1 - self.b1) * g
        self.second[name] = self.b2 * self.second.get(name, np.zeros_like(g)) + (1 - self.b2) * g * g
        mean = self.first[name] / (1 - self.b1**self.steps)
        return mean / (np.sqrt(self.second[name] / (1 - self.b2**self.steps)) + 1e-8)


def orthogonalized(matrix: np.ndarray) -> np.ndarray:
    """Lines 2 and 3: approximately the matrix with its singular values set to 1."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.T).T
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        a = x @ x.T
        x = A * x + (B * a + C * a @ a) @ x
    return x
