"""DeMo in NumPy and SciPy: an oracle of the tests.

Peng et al., "DeMo: Decoupled Momentum Optimization" (ICLR 2026), Algorithm 1, with the discrete cosine transform of its
experiments. For one worker and one tensor, with a momentum m, which starts at 0:

    1:  m = decay * m + gradient
    2:  q = in every chunk, the k largest coefficients of the discrete cosine transform II of m; 0 elsewhere
    3:  m = m - the inverse transform of q
    4:  send q; all K workers receive Q, the inverse transform of the mean of what the K workers sent
    5:  parameters = parameters - learning rate * sign(Q)

Where the paper is silent, or this differs:

- Its chunks are s x s x ..., where s divides every dimension. Here a tensor is a matrix whose columns are its last
  dimension (a vector has as many columns as its largest divisor up to s), and a chunk is a x b, the largest divisors of
  rows and columns up to s. Chunks are numbered row by row, and so are the coefficients of a chunk.
- Line 2 sends, of every s * s consecutive coefficients of a tensor (of its last N, which may be fewer), ceil(k N /
  (s * s)): of equal ones those of the lowest index, never a zero. If s divides rows and columns, these are the k of a
  chunk.
- The values are rounded to the payload's type before line 3, so that m keeps the rounding error.
- The mean of a coefficient counts zeros of the workers that do not send it.
- A tensor with fewer than `dense_below` elements has all of its momentum sent in every step.
- The transform is linear, so that m is held as its coefficients: lines 1 and 3 are of these.
- If a number of a gradient, of m or of what is received is not finite, or a coefficient of a gradient is 2^100 or more,
  all workers skip the step: the mean is zero, and m stays.
"""

import math

import numpy as np
import scipy.fft

from .common import (
    StepResult,
    Tensors,
    all_finite,
    can_be_added,
    compressed_names,
    largest,
    mean_over_workers,
    round_values,
    skipped_step,
)


class DemoReference:
    """K synchronous workers which exchange their gradients by DeMo; K is that of the first step.

    Args:
        k: coefficients of a chunk which are sent.
        chunk: s * s.
        decay: of the momentum.
        dense_below: tensors with fewer elements than this are sent dense.
        value_dtype: the type in which the sent values travel, "float32" or "bfloat16".

    Attributes:
        residuals: per worker, the coefficients of decay * m by name, what line 1 adds to: (N,); of compressed tensors.
    """

    def __init__(self, k: int, chunk: int, decay: float, dense_below: int = 512, value_dtype: str = "float32"):
        self.k, self.chunk, self.decay = k, chunk, decay
        self.dense_below, self.value_dtype = dense_below, value_dtype
        self.residuals: list[Tensors] = []

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker; the mean is Q of line 4."""
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.residuals = [{name: np.zeros(own[name].size, np.float32) for name in compressed} for own in gradients]
        all_c = [
            {name: cosines(own[name], self.chunk) if name in compressed else own[name] for name in own}
            for own in gradients
        ]
        all_q, left, counts = [], [], []
        for c, kept in zip(all_c, self.residuals, strict=True):
            q, rest, count = dict(c), {}, 0
            for name in compressed:
                with np.errstate(all="ignore"):  # below it is looked for inf, nan
                    m, q[name] = kept[name] + c[name], np.zeros_like(c[name])
                    for start in range(0, m.size, self.chunk):
                        piece = m[start : start + self.chunk]
                        chosen = self._choose(name, piece, math.ceil(self.k * piece.size / self.chunk))
                        q[name][start + chosen] = round_values(piece[chosen], self.value_dtype)
                        count += len(chosen)
                    rest[name] = np.float32(self.decay) * (m - q[name])
            all_q.append(q)
            left.append(rest)
            counts.append(count)
        mean = mean_over_workers(all_q)
        with np.errstate(all="ignore"):
            mean |= {n: from_cosines(mean[n], np.shape(gradients[0][n]), self.chunk) for n in compressed}
        if not can_be_added(all_c, compressed) or not all_finite([*left, mean]):
            return skipped_step(gradients)
        self.residuals = left
        return StepResult(mean=mean, sent=counts, overflow=[0] * len(counts), skipped=False)

    def _choose(self, name: str, coefficients: np.ndarray, k: int) -> np.ndarray:
        """Line 2, of one chunk of a tensor of that name."""
        return largest(coefficients, k)


def divisor(size: int, chunk: int) -> int:
    """The largest divisor of a size up to the side of a chunk."""
    return next(d for d in range(math.isqrt(chunk), 0, -1) if size % d == 0)


def as_chunks(tensor: np.ndarray, chunk: int) -> np.ndarray:
    """A tensor as a matrix of chunks of a x b: (rows / a, a, columns / b, b)."""
    columns = tensor.shape[-1] if tensor.ndim > 1 else divisor(tensor.size, chunk)
    rows = tensor.size // columns
    a, b = divisor(rows, chunk), divisor(columns, chunk)
    return tensor.reshape(rows // a, a, columns // b, b)


def cosines(tensor: np.ndarray, chunk: int) -> np.ndarray:
    """The coefficients of a tensor, chunk after chunk: (N,) float32."""
    with np.errstate(all="ignore"):
        of_chunks = scipy.fft.dctn(np.float64(as_chunks(tensor, chunk)), axes=(1, 3), norm="ortho")
        return of_chunks.transpose(0, 2, 1, 3).reshape(-1).astype(np.float32)


def from_cosines(coefficients: np.ndarray, shape: tuple[int, ...], chunk: int) -> np.ndarray:
    """The tensor of these coefficients, in their order: float64."""
    p, a, q, b = as_chunks(np.zeros(shape), chunk).shape
    of_chunks = np.float64(coefficients).reshape(p, q, a, b).transpose(0, 2, 1, 3)
    return scipy.fft.idctn(of_chunks, axes=(1, 3), norm="ortho").reshape(shape)
