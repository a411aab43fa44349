"""Sharded weights and their gradients in a few bits, in NumPy: an oracle of the tests.

Differences of weights as in SDP4Bit (arXiv 2410.15526), gradients with an error memory as in LoCo (arXiv 2407.04480),
after summaries of both. A number x of a bucket of 128, of which a is the largest magnitude, with L = 2^(b-1) - 1:

    Q(x) = sign(x) * floor(L |x| / a + 1/2) * a / L, and 0 where a = 0

    1:  d_i = s_i - h_i for the rows i of every worker; h_i = h_i + Q(d_i)
    2:  x_k = gradient of worker k + e_k
    3:  worker j gets the sum over k of Q(x_k) on its rows; e_k = x_k - Q(x_k)

A worker's rows of a tensor are one sequence, in buckets of 128 of which the last may be short.
"""

import numpy as np

BUCKET = 128


def quantized(rows: np.ndarray, bits: int) -> np.ndarray:
    """Q of one worker's rows, in float64."""
    levels, flat = 2 ** (bits - 1) - 1, np.asarray(rows, np.float64).reshape(-1)
    made = np.zeros_like(flat)
    for start in range(0, flat.size, BUCKET):
        x = flat[start : start + BUCKET]
        a = np.abs(x).max()
        if a > 0:
            made[start : start + BUCKET] = np.sign(x) * np.floor(levels * np.abs(x) / a + 0.5) * a / levels
    return made.reshape(np.shape(rows))


def gather(shards: np.ndarray, held: np.ndarray, bits: int) -> np.ndarray:
    """Line 1, for shards (K, m, ...) and the held copies of the same shape: the new h."""
    return held + np.stack([quantized(s - h, bits) for s, h in zip(shards.astype(np.float64), held, strict=True)])


def scatter(gradients: np.ndarray, residuals: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Lines 2 and 3, for arrays (K, K, m, ...): each worker's numbers for the rows of every worker.

    Returns:
        The sums (K, m, ...), and the new e.
    """
    x = gradients.astype(np.float64) + residuals
    sent = np.stack([[quantized(rows, bits) for rows in own] for own in x])
    return sent.sum(0), x - sent
