"""Top-k with error feedback in NumPy: what DCT-DP approximates, and an oracle of the tests.

The sparsification of Stich et al., "Sparsified SGD with Memory" (NeurIPS 2018), for each tensor by
itself, in the form to which Gupta et al. (KDD 2021) compare DCT-DP. For one worker and one tensor
of N elements:

    1:  x = gradient + residual
    2:  chosen = the k = max(1, N - floor(N * sparsity)) coordinates of largest |x|; of equal ones
        those of the lowest flat index (C order); never a zero, so that fewer than k may be chosen
    3:  sent = x on the chosen coordinates, rounded to the payload's type; 0 elsewhere
    4:  residual = x - sent
    5:  send `sent`; all K workers receive the mean of what the K workers sent

Small tensors, the largest numbers and non-finite ones are treated as in `dct_dp`.
"""

import numpy as np

from .common import (
    VALUE_DTYPES,
    StepResult,
    Tensors,
    add_residuals,
    all_finite,
    compressed_names,
    floor_of_dropped,
    mean_over_workers,
    round_values,
    skipped_step,
    sums_may_overflow,
    zero_residuals,
)


class TopKReference:
    """K synchronous workers which exchange their gradients by top-k; K is that of the first step.

    Args:
        sparsity: the fraction of the coordinates which is dropped.
        dense_below: tensors with fewer elements than this are sent dense.
        value_dtype: the type in which the sent values travel, "float32" or "bfloat16".

    Attributes:
        residuals: per worker, what it has not sent, by name; compressed tensors only.
    """

    def __init__(self, sparsity: float, dense_below: int = 512, value_dtype: str = "float32"):
        if value_dtype not in VALUE_DTYPES:
            raise ValueError(f"value_dtype must be one of {list(VALUE_DTYPES)}, not {value_dtype}.")
        self.sparsity = sparsity
        self.dense_below = dense_below
        self.value_dtype = value_dtype
        self.residuals: list[Tensors] = []

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker. `overflow` is always 0."""
        K = len(gradients)
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.residuals = zero_residuals(gradients, compressed)

        # 1: error feedback
        all_x = add_residuals(gradients, self.residuals)

        if not all_finite(gradients) or not all_finite(all_x):
            return skipped_step(gradients)
        all_sent, residuals = [], []
        sent_counts = [0] * K
        for w in range(K):
            sent, residual = {}, {}
            for name, x in all_x[w].items():
                if name not in compressed:
                    sent[name] = x
                    continue
                # 2: the largest; a stable sort keeps equal ones in the order of their index
                flat = x.reshape(-1)  # (N,)
                k = max(1, flat.size - floor_of_dropped(flat.size, self.sparsity))
                descending = np.argsort(-np.abs(flat), kind="stable")  # (N,)
                chosen = [i for i in descending[:k] if flat[i] != 0]
                # 3: the compressed gradient
                flat_sent = np.zeros(flat.size, np.float32)  # (N,)
                flat_sent[chosen] = round_values(flat[chosen], self.value_dtype)
                sent[name] = flat_sent.reshape(x.shape)
                # 4: the error
                residual[name] = np.asarray(x - sent[name])
                sent_counts[w] += len(chosen)
            all_sent.append(sent)
            residuals.append(residual)

        # 5: send
        mean = mean_over_workers(all_sent)
        if sums_may_overflow(all_sent, compressed) or not all_finite([mean]):
            return skipped_step(gradients)
        self.residuals = residuals
        return StepResult(mean=mean, sent=sent_counts, overflow=[0] * K, skipped=False)
