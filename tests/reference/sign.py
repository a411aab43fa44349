"""Blockwise scaled signs with error feedback in NumPy: the oracle of the tests.

Algorithm 1, dist-EF-SGD, of Zheng, Huang and Kwok, "Communication-Efficient Distributed Blockwise Momentum SGD with
Error-Feedback" (NeurIPS 2019), with their blockwise compressor. For each block it is the scaled sign of algorithm 1 of
Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (ICML
2019):

    C(v) = (|v_1| + ... + |v_d|) / d * sign(v), for a block v of d coordinates

The papers' errors e are `residual` here. Their step sizes stay with the optimizer: in lines 5 and 10 the ratio of the
last step size to this one is 1. M, the number of workers, is K.

     2:  residual_i = 0 on each worker, and 0 on the server, before the first step
     3:  for each step
     4:      on worker i
     5:          x_i = gradient_i + residual_i
     6:          push sent_i = C(x_i) to the server
     7:          apply what is pulled from the server, which is the mean here
     8:          residual_i = x_i - sent_i
     9:      on the server
    10:          x = (sent_1 + ... + sent_K) / K + residual
    11:          push C(x) to each worker
    12:          residual = x - C(x)
    13:  end for

With the collective "gather" there is no server: every worker receives what every worker sent, and the mean is theirs,
without lines 10 to 12. With "two_shot" each worker is the server for a part of the blocks.

Where the papers are silent, or this differs:

- A block has 1024 consecutive coordinates of one tensor; the last one of a tensor may be shorter.
- sign(0) = 1: a zero is sent as the positive scale. Only a block of zeros is sent as zeros.
- "two_shot": all blocks of the compressed tensors, in the sorted order of their names, are cut into K parts of
  ceil(B / K) of the B blocks, the last ones shorter or empty; worker j is the server for part j. It compresses the sum
  sent_1 + ... + sent_K, rather than the mean: all receive C(sum) / K. The error, sum - C(sum), it adds to its own
  residual of line 8, and so to its next gradient, rather than keeping a second one.
- A tensor with fewer than `dense_below` elements goes dense in float32 and has no residual.
- If any worker's gradient or x, a sum, or a new residual holds a non-finite number, or a gradient a number of 2^100 or
  more in a compressed tensor, all workers skip the step: the mean is zero, residuals stay.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from .common import (
    BLOCK,
    StepResult,
    Tensors,
    add_residuals,
    all_finite,
    can_be_added,
    check_option,
    compressed_names,
    mean_of_sums,
    skipped_step,
    sum_over_workers,
    whole_step,
    zero_residuals,
)


@dataclass(kw_only=True, eq=False)
class SignReference:
    """K synchronous workers which exchange scaled signs; K is that of the first step.

    Args:
        dense_below: tensors with fewer elements than this are sent dense.
        collective: "gather", where all receive all workers' payloads, or "two_shot".

    Attributes:
        residuals: per worker, what it has not sent, by name; compressed tensors only.
    """

    dense_below: int = 512
    collective: str = "gather"
    residuals: list[Tensors] = field(default_factory=list, init=False)

    def __post_init__(self):
        check_option("collective", self.collective, ("gather", "two_shot"))

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker. `sent` counts all coordinates, `overflow` none."""
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.residuals = zero_residuals(gradients, compressed)

        # 5: error feedback
        all_x = add_residuals(gradients, self.residuals)
        if not can_be_added(gradients, compressed) or not all_finite(all_x):
            return skipped_step(gradients)

        # 6, 8: scaled signs, and the residuals
        all_sent = [self._compress({name: x[name] for name in compressed}) for x in all_x]
        sums = {name: sum_over_workers([sent[name] for sent in all_sent]) for name in compressed}
        if not all_finite([sums]):
            return skipped_step(gradients)
        residuals = []
        for x, sent in zip(all_x, all_sent, strict=True):
            residuals.append({name: np.asarray(x[name] - sent[name]) for name in compressed})

        # 10 to 12: scaled signs of the sum, and the owners' errors
        if self.collective == "two_shot":
            sums, residuals = serve(sums, self._compress(sums), residuals)

        # 7: the mean
        result = whole_step(mean_of_sums(all_x, sums), all_x, compressed)
        if not all_finite(residuals):
            return skipped_step(gradients)
        if not result.skipped:
            self.residuals = residuals
        return result

    def _compress(self, tensors: Tensors) -> Tensors:
        """C of each block of each tensor."""
        return {name: scaled_signs(x) for name, x in tensors.items()}


def scaled_signs(x: np.ndarray) -> np.ndarray:
    """C of each block of a tensor."""
    flat = x.reshape(-1)  # (N,)
    compressed = np.zeros(flat.size, np.float32)  # (N,)
    for start in range(0, flat.size, BLOCK):
        v = flat[start : start + BLOCK]
        with np.errstate(over="ignore"):  # the caller looks for inf
            scale = np.mean(np.abs(v), dtype=np.float32)
        compressed[start : start + BLOCK] = np.where(v >= 0, scale, -scale)
    return compressed.reshape(x.shape)


def serve(sums: Tensors, compressed: Tensors, residuals: list[Tensors]) -> tuple[Tensors, list[Tensors]]:
    """Lines 10 to 12, given C of the sums: (C of the sums, the residuals with each owner's errors added)."""
    K = len(residuals)
    per_worker = math.ceil(sum(math.ceil(total.size / BLOCK) for total in sums.values()) / K)
    flat_residuals = [{name: np.array(r).reshape(-1) for name, r in residual.items()} for residual in residuals]
    block = 0
    for name in sorted(sums):
        error = (sums[name] - compressed[name]).reshape(-1)  # (N,)
        for start in range(0, error.size, BLOCK):
            owner = block // per_worker
            with np.errstate(over="ignore"):  # the caller looks for inf
                flat_residuals[owner][name][start : start + BLOCK] += error[start : start + BLOCK]
            block += 1
    return compressed, [{name: r.reshape(sums[name].shape) for name, r in own.items()} for own in flat_residuals]
