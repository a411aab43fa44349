"""The compressor of SparseLoCo in NumPy: an oracle of the tests.

Algorithm 1 of Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (2025). For worker r, after H
local steps, with the pseudo-gradient d = theta - theta_r, beta the decay, and e the residual, which starts at 0:

    1:  e = beta * e + d
    2:  sent = Q(top-k of each chunk of e)
    3:  e = e - sent
    4:  all workers receive the mean of what they sent; theta = theta - alpha * mean

Where the paper is silent, or this differs:

- A chunk has `chunk` consecutive elements (C order) of one tensor; a tensor's last may be shorter. Of a chunk of N
  elements k = N - floor(N * sparsity) are sent, at least one, the largest |e|; of equal ones those of the lowest index;
  never a zero.
- Q splits the magnitudes that a chunk sends at their mean: those below it, and those at or above it. With 4 bits, both
  parts are split at their own means, and the four parts once more. A value becomes the mean of its part with its own
  sign: the largest mean is rounded to bfloat16, the others to multiples of 1/255 of it. If a chunk sends fewer than k,
  since it has zeros, its lowest two parts are merged.
- A tensor with fewer than `dense_below` elements goes dense in float32.
- Non-finite numbers, and those of 2^100 or more, are not tried here.
"""

import numpy as np

from .common import StepResult, Tensors, compressed_names, largest, mean_over_workers, n_kept, round_values


class ChunkedTopKReference:
    """K synchronous workers, each with the largest elements of every chunk in a few bits; K is that of the first step.

    Args:
        sparsity: the fraction of a chunk which is dropped.
        chunk: elements of a chunk.
        bits: of a value, 2 or 4, including its sign.
        decay: beta.
        dense_below: tensors with fewer elements than this are sent dense.

    Attributes:
        residuals: per worker, e by name, times beta: what the next step adds to.
    """

    def __init__(self, sparsity: float, chunk: int, bits: int, decay: float, dense_below: int = 512):
        self.sparsity, self.chunk, self.bits, self.decay = sparsity, chunk, bits, np.float32(decay)
        self.dense_below = dense_below
        self.residuals: list[Tensors] = []

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker."""
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.residuals = [{name: np.zeros_like(own[name]) for name in compressed} for own in gradients]
        all_sent, counts = [], []
        for own, kept in zip(gradients, self.residuals, strict=True):
            sent, count = {name: own[name] for name in own if name not in compressed}, 0
            for name in compressed:
                e = (own[name] + kept[name]).reshape(-1)
                part = np.zeros_like(e)
                for start in range(0, e.size, self.chunk):
                    piece = e[start : start + self.chunk]
                    chosen = largest(piece, n_kept(piece.size, self.sparsity))
                    part[start + chosen] = quantized(piece[chosen], self.bits, n_kept(piece.size, self.sparsity))
                    count += len(chosen)
                kept[name] = (self.decay * (e - part)).reshape(own[name].shape)
                sent[name] = part.reshape(own[name].shape)
            all_sent.append({name: sent[name] for name in own})
            counts.append(count)
        return StepResult(mean=mean_over_workers(all_sent), sent=counts, overflow=[0] * len(counts), skipped=False)


def quantized(values: np.ndarray, bits: int, k: int) -> np.ndarray:
    """Q of what one chunk sends, k values or fewer."""
    if not values.size:
        return values
    magnitude = np.abs(values)

    def parts(chosen: np.ndarray, depth: int) -> list[np.ndarray]:
        """The parts, from the lowest."""
        if depth == 0:
            return [chosen]
        mean = magnitude[chosen].mean(dtype=np.float32) if chosen.any() else np.float32(0)
        is_large = magnitude >= mean
        return parts(chosen & ~is_large, depth - 1) + parts(chosen & is_large, depth - 1)

    found = parts(np.ones(values.shape, bool), bits - 1)
    if values.size < k:
        found = [found[0] | found[1], *found[2:]]
    largest_mean = round_values(magnitude[found[-1]].mean(dtype=np.float32), "bfloat16")
    out = np.zeros_like(values)
    for chosen in found:
        if chosen.any():
            part = np.round(255 * (magnitude[chosen].mean(dtype=np.float32) / largest_mean)) / 255
            mean = largest_mean if chosen is found[-1] else largest_mean * np.float32(min(part, 1))
            out[chosen] = np.sign(values[chosen]) * mean
    return out
