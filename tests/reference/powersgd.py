"""PowerSGD, low-rank exchange with error feedback, in NumPy: an oracle of the tests.

Algorithms 1 and 2 of Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
for Distributed Optimization" (NeurIPS 2019). Algorithm 1, for one matrix M_w (n x m) of worker w, with
the Q (m x r) which all workers keep from the step before:

     1:  shape: vectors go dense; every other tensor is reshaped to a matrix
     3:  P_w = M_w Q
     4:  P = mean of P_w over the workers
     5:  P = Orthogonalize(P), its columns
     6:  Q_w = M_w^T P
     7:  Q = mean of Q_w over the workers
    11:  result = P Q^T

Algorithm 2 puts it into SGD with error feedback. Of its lines these are done here; the momentum and
the step of the parameters (12 and 13) are the optimizer's:

     4:  residual = 0
     7:  M_w = gradient + residual
     8, 10, 11:  Algorithm 1
     9:  residual = M_w - result

Where the paper is silent, or leaves a choice:

- Line 1: m is the tensor's last dimension, n the product of the others. A tensor goes dense in float32,
  without a residual, if it has fewer than two dimensions, fewer than `dense_below` elements, or if
  r * (n + m) numbers would not be fewer than n * m.
- r = min(rank, n, m). The first Q of a tensor is `initial_q(name, m, r)`; the paper draws it from a
  standard normal distribution.
- Line 5 is the modified Gram-Schmidt process, once, from the first column to the last. A column is
  divided by its norm + 1e-8, so that a zero column stays zero, and so does its column of Q from then on.
  If the M_w have a smaller rank than r, the later columns are rounding noise and need not be orthogonal.
- Line 9 takes the result of all workers, P Q^T with the mean Q, not the worker's own P Q_w^T. So the mean
  of the residuals is what the result misses of the mean of the M_w.
- If any worker's gradient or M_w, or the result, holds a non-finite number, all workers skip the step:
  the mean is zero, residuals and every Q stay.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .common import (
    StepResult,
    Tensors,
    add_residuals,
    all_finite,
    compressed_names,
    mean_over_workers,
    skipped_step,
    zero_residuals,
)


@dataclass(kw_only=True, eq=False)
class PowerSgdReference:
    """K synchronous workers which exchange their gradients by PowerSGD; K is that of the first step.

    Args:
        rank: the number of columns of P and Q, where the matrix has as many rows and columns.
        dense_below: tensors with fewer elements than this are sent dense.
        initial_q: initial_q(name, m, r) is the first Q, (m, r), of the tensor of that name.

    Attributes:
        residuals: per worker, what it has not sent, by name; compressed tensors only.
        Q: the Q of the last step which was not skipped, by name; compressed tensors only. The same on every worker.
    """

    rank: int
    initial_q: Callable[[str, int, int], np.ndarray]
    dense_below: int = 512
    residuals: list[Tensors] = field(default_factory=list, init=False)
    Q: Tensors = field(default_factory=dict, init=False)

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker.

        `sent` counts the numbers of P and Q, r * (n + m) for each compressed tensor; `overflow` is always 0.
        """
        K = len(gradients)
        compressed = self._compressed(gradients[0])
        if not self.residuals:
            self.residuals = zero_residuals(gradients, compressed)
            for name in compressed:
                _, m, r = self._sizes(gradients[0][name])
                self.Q[name] = np.asarray(self.initial_q(name, m, r), np.float32)  # (m, r)

        # Algorithm 2, 7: error feedback
        all_x = add_residuals(gradients, self.residuals)

        if not all_finite(gradients) or not all_finite(all_x):
            return skipped_step(gradients)
        with np.errstate(over="ignore", invalid="ignore"):  # the result is looked at below
            result, Q = self._low_rank(all_x, compressed)
        dense = [{name: x[name] for name in x if name not in compressed} for x in all_x]
        mean = {**result, **mean_over_workers(dense)}
        mean = {name: mean[name] for name in gradients[0]}  # in the order in which they came
        if not all_finite([mean]):
            return skipped_step(gradients)

        # Algorithm 2, 9: the error
        self.residuals = [{name: np.asarray(x[name] - mean[name]) for name in compressed} for x in all_x]
        self.Q = Q
        sent = 0
        for name in compressed:
            n, m, r = self._sizes(gradients[0][name])
            sent += r * (n + m)
        return StepResult(mean=mean, sent=[sent] * K, overflow=[0] * K, skipped=False)

    def _low_rank(self, all_x: list[Tensors], compressed: list[str]) -> tuple[Tensors, Tensors]:
        """Algorithm 1: (the results, in the tensors' shapes; every new Q)."""
        # 1: matrices
        all_M = [{name: x[name].reshape(-1, x[name].shape[-1]) for name in compressed} for x in all_x]  # each (n, m)
        # 3 and 4
        P = mean_over_workers([{name: M[name] @ self.Q[name] for name in compressed} for M in all_M])  # each (n, r)
        # 5
        P = {name: orthogonalize(P[name]) for name in compressed}
        # 6 and 7
        Q = mean_over_workers([{name: M[name].T @ P[name] for name in compressed} for M in all_M])  # each (m, r)
        # 11
        return {name: (P[name] @ Q[name].T).reshape(all_x[0][name].shape) for name in compressed}, Q

    def _compressed(self, gradient: Tensors) -> list[str]:
        """The tensors which are compressed: matrices, large enough, and cheaper as P and Q."""
        names = []
        for name in compressed_names(gradient, self.dense_below):
            if np.ndim(gradient[name]) >= 2:
                n, m, r = self._sizes(gradient[name])
                if r * (n + m) < n * m:
                    names.append(name)
        return names

    def _sizes(self, tensor: np.ndarray) -> tuple[int, int, int]:
        """(n, m, r) of a tensor of two dimensions or more."""
        shape = np.shape(tensor)
        m = shape[-1]
        n = int(np.prod(shape[:-1]))
        return n, m, min(self.rank, n, m)


def orthogonalize(P: np.ndarray) -> np.ndarray:
    """Modified Gram-Schmidt: orthonormal columns of the same span, (n, r); a zero column stays zero."""
    P = np.array(P, np.float32)  # a copy
    r = P.shape[1]
    for i in range(r):
        P[:, i] /= np.sqrt(np.sum(P[:, i] * P[:, i])) + np.float32(1e-8)
        for j in range(i + 1, r):
            P[:, j] -= np.sum(P[:, i] * P[:, j]) * P[:, i]
    return P
