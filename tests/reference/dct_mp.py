"""DCT-MP in NumPy, and the two schemes that do not work according to its paper: oracles of the tests.

Algorithm 2 of Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data
Parallelism" (KDD 2021), for one boundary between two parts of a network, B samples and d features a sample:

    Forward pass:
    2:  input: the activations X_act, (B, d)
    3:  M = []
    4:  for i = 1 to B do
    5:      x_1, ..., x_d = Sort(|X_act,i|)
    6:      tau_i = x_floor(d * eta)
    7:      m_i = I(|X_act,i| >= tau_i)
    8:      M = [M; m_i]
    9:  end for
    10: compute the sparse matrix X_act * M
    11: send X_act * M and the mask M across the network
    Backward pass:
    12: input: the gradient X_grad, (B, d), of the loss with respect to what was received
    13: compute the sparse matrix X_grad * M
    14: send X_grad * M across the network

The receiver does not multiply the gradient by M again: what arrives is already X_grad * M, the gradient with respect to
X_act.

Appendix A, "Schemes That Do Not Work":

- Gaussian sketching: forward, A = X_act becomes A S, whose S has random numbers of an appropriately scaled Gaussian
  distribution; the gradient is not compressed on its way back.
- Top-k with error feedback of the gradient X_grad; the activations are not compressed on their way forward.

Where the paper is silent, or this differs:

- Lines 6 and 7 keep more than (1 - eta) * d if numbers are equal, and the paper's floor(d * eta) keeps one more than
  intended. Here exactly k = ceil((1 - eta) * d) are kept of every sample; of equal ones, those of the lowest index.
  Zeros are kept if a sample has fewer than k other numbers.
- A sample with more than one dimension is one row of d numbers, in C order.
- NaN is larger than every number, infinity included, and both arrive as they are, so that the loss shows them.
- Values travel in `value_dtype`, both ways, rounded to nearest even; what is beyond the largest number of the type
  arrives as infinity.
- The sketch S has (d, m) numbers of variance 1 / m, with m = ceil((1 - eta) * d), which makes S S^T the identity in
  expectation; the receiver goes on with A S S^T. Its gradient arrives whole, and is used as that with respect to A.
- The residual of the gradient has the shape of the activations: a row for each position in the batch, which has
  another sample in the next step.
"""

import math

import numpy as np

from .common import VALUE_DTYPES, check_value_dtype, floor_of_dropped


class DctMpReference:
    """One boundary of DCT-MP: `forward`, then `backward` on the mask of that forward pass.

    Args:
        eta: the fraction of a sample's activations which is dropped, at least 0 and less than 1.
        value_dtype: the type in which the values travel, "float32" or "bfloat16".

    Attributes:
        mask: which activations of the last forward pass were sent, bool, in their shape.
    """

    def __init__(self, eta: float, value_dtype: str = "float32"):
        check_value_dtype(value_dtype)
        self.eta = eta
        self.value_dtype = value_dtype
        self.mask = np.zeros((0,), bool)

    def forward(self, activations: np.ndarray) -> np.ndarray:
        """Lines 2 to 11: the activations as they arrive, zero where they were not sent."""
        x = rows(activations)  # (B, d)
        mask = np.zeros(x.shape, bool)  # (B, d)
        for i in range(len(x)):
            for feature in largest_of_row(x[i], n_kept_of_row(x.shape[1], self.eta)):
                mask[i, feature] = True
        self.mask = mask.reshape(np.shape(activations))
        return send_masked(activations, self.mask, self.value_dtype)

    def backward(self, gradient: np.ndarray) -> np.ndarray:
        """Lines 12 to 14: the gradient as it arrives, zero where the activations were not sent."""
        return send_masked(gradient, self.mask, self.value_dtype)


class GaussianSketchReference:
    """One boundary whose activations are sent as a sketch, and whose gradient is sent whole.

    Args:
        eta: the fraction by which a sample gets shorter, at least 0 and less than 1.
    """

    def __init__(self, eta: float):
        self.eta = eta

    def width(self, d: int) -> int:
        """m, the numbers that are sent for a sample of d features."""
        return n_kept_of_row(d, self.eta)

    def sketch(self, activations: np.ndarray, S: np.ndarray) -> np.ndarray:
        """What is sent: A S, (B, m), for a given S, (d, m), with numbers of variance 1 / m."""
        return rows(activations) @ np.asarray(S, np.float32)

    def forward(self, activations: np.ndarray, S: np.ndarray) -> np.ndarray:
        """The activations with which the receiver goes on: A S S^T, in their shape."""
        received = self.sketch(activations, S) @ np.asarray(S, np.float32).T  # (B, d)
        return received.reshape(np.shape(activations))

    def backward(self, gradient: np.ndarray) -> np.ndarray:
        """The gradient as it arrives: whole."""
        return np.asarray(gradient, np.float32)


class TopKGradientReference:
    """One boundary whose activations are sent whole, and whose gradient is sparsified with error feedback.

    Args:
        eta: the fraction of a sample's gradient which is dropped, at least 0 and less than 1.
        value_dtype: the type in which the gradient's values travel, "float32" or "bfloat16".

    Attributes:
        residual: the part of the gradients that has not been sent, in their shape; None before the first one.
    """

    def __init__(self, eta: float, value_dtype: str = "float32"):
        check_value_dtype(value_dtype)
        self.eta = eta
        self.value_dtype = value_dtype
        self.residual: np.ndarray | None = None

    def forward(self, activations: np.ndarray) -> np.ndarray:
        """The activations as they arrive: whole."""
        return np.asarray(activations, np.float32)

    def backward(self, gradient: np.ndarray) -> np.ndarray:
        """The gradient as it arrives: the k largest of each sample's gradient plus residual, the rest zero."""
        if self.residual is None:
            self.residual = np.zeros(np.shape(gradient), np.float32)
        x = np.asarray(gradient, np.float32) + self.residual
        mask = np.zeros(rows(x).shape, bool)  # (B, d)
        for i, row in enumerate(rows(x)):
            for feature in largest_of_row(row, n_kept_of_row(row.size, self.eta)):
                mask[i, feature] = True
        sent = send_masked(x, mask.reshape(x.shape), self.value_dtype)
        self.residual = np.asarray(x - sent, np.float32)
        return sent


def rows(samples: np.ndarray) -> np.ndarray:
    """The samples as float32, one row of d numbers each, (B, d)."""
    samples = np.asarray(samples, np.float32)
    return samples.reshape(samples.shape[0], -1)


def n_kept_of_row(d: int, eta: float) -> int:
    """ceil((1 - eta) * d), where (1 - eta) * d may come out of rounding just above an integer."""
    return d - floor_of_dropped(d, eta)


def largest_of_row(row: np.ndarray, k: int) -> list[int]:
    """The features, ascending, of the k largest |row|: of equal ones the first; NaN is larger than infinity."""
    magnitudes = [abs(float(number)) for number in row]
    left = list(range(len(magnitudes)))
    chosen = []
    for _ in range(k):
        best = left[0]
        for feature in left[1:]:  # ascending, so that an equal one does not take the place of an earlier one
            if is_larger(magnitudes[feature], magnitudes[best]):
                best = feature
        left.remove(best)
        chosen.append(best)
    return sorted(chosen)


def is_larger(a: float, b: float) -> bool:
    """a > b, where NaN is larger than every number."""
    if math.isnan(a):
        return not math.isnan(b)
    return a > b


def send_masked(x: np.ndarray, mask: np.ndarray, value_dtype: str) -> np.ndarray:
    """x as it arrives where the mask is set, 0 elsewhere; infinity and NaN arrive as they are."""
    rounded = np.asarray(x, np.float32).astype(VALUE_DTYPES[value_dtype]).astype(np.float32)
    arrived = np.zeros(rounded.shape, np.float32)
    for at in np.ndindex(rounded.shape):
        if mask[at]:
            arrived[at] = rounded[at]
    return arrived
