"""Stochastic quantization of gradients in NumPy: the oracle of the tests.

Algorithm 1, parallel SGD, of Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD: Communication-Efficient SGD via
Gradient Quantization and Encoding" (NeurIPS 2017), with the quantization Q_s of its section 3.1 in the buckets of its
section 4. For worker i in each step:

    2:  g_i = the gradient
    3:  M_i = Encode(g_i): the scale, the signs and the levels, which make up Q_s(g_i), of each bucket
    4:  broadcast M_i to all peers
    5:  for each peer l do
    6:      receive M_l
    7:      g_l = Decode(M_l), which is Q_s(g_l)
    8:  end
    9:  apply (g_1 + ... + g_K) / K, which is the mean here

Equation 4 of the paper, for a bucket v with s levels above zero:

    Q_s(v_i) = |v| * sign(v_i) * xi_i(v, s)
    xi_i(v, s) = l / s with probability 1 - p, and (l + 1) / s with probability p
    l <= s * |v_i| / |v| <= l + 1;  p = s * |v_i| / |v| - l

|v| is the L2 norm, which gives the paper's theorems, or the largest |v_i|, which its experiments have (section 4). Q_s
is unbiased, and there is no error feedback: what is lost to quantization is lost.

Where the paper is silent, or this differs:

- There are s = 2 ** (bits - 1) - 1 levels, so that a sign and a level fit into `bits` bits.
- xi is drawn as floor(s * |v_i| / |v| + u) / s, at most 1, with u uniform in [0, 1). In float32:
  y = |v_i| * (s / |v|);  q = min(floor(y + u), s);  Q_s(v_i) = sign(v_i) * q * (|v| * float32(1 / s)).
- A bucket has `bucket` consecutive coordinates of one tensor; the last one of a tensor may be shorter. If |v| is 0, or
  so small that s / |v| is infinite in float32 (less than s * 3e-39), the bucket is sent as zeros.
- The collective "two_shot" replaces lines 4 to 9 by a reduce-scatter and an all-gather: the owner of a bucket receives
  the K workers' Q_s(g_l) of it, adds them up, and sends Q_s of the sum, drawn anew, to all. The mean is that over K.
- With the collective "psum", |v| is the largest of the K workers', and there are floor(s / K) levels in the place of s,
  so that the sum of the workers' codes sign(v_i) * q fits in as many bits. The mean is (sum of the codes) * (|v| *
  float32(1 / (levels * K))) in float32; the sum is exact.
- A tensor with fewer than `dense_below` elements goes dense in float32.
- If any worker's gradient, or a sum, before or after it is quantized, holds a non-finite number, all workers skip the
  step: the mean is zero. An L2 norm which float32 does not hold makes the sum non-finite. The steps are counted from 0,
  skipped ones too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .common import (
    BLOCK,
    StepResult,
    Tensors,
    all_finite,
    as_float32,
    check_option,
    compressed_names,
    mean_of_sums,
    mean_over_workers,
    skipped_step,
    sum_over_workers,
    whole_step,
)


@dataclass(kw_only=True, eq=False)
class QuantDpReference:
    """K synchronous workers which exchange quantized gradients.

    Args:
        bits: for a sign and a level, at least 2.
        bucket: how many coordinates share a scale; it divides 1024.
        norm: the scale of a bucket, its largest absolute value, "max", or its L2 norm, "l2".
        uniform: (step, worker, phase) -> random numbers in [0, 1), float32, in the shapes of the gradient, by name. The
            workers' quantization is phase 0; that of the sum is phase 1, and its worker is None.
        dense_below: tensors with fewer elements than this are sent dense.
        collective: "gather", where all receive all workers' payloads, "two_shot", or "psum".
    """

    bits: int
    uniform: Callable[[int, int | None, int], Tensors]
    bucket: int = 512
    norm: str = "max"
    dense_below: int = 512
    collective: str = "gather"
    k: int = field(default=0, init=False)

    def __post_init__(self):
        check_option("norm", self.norm, ("max", "l2"))
        check_option("collective", self.collective, ("gather", "two_shot", "psum"))
        if self.bits < 2:
            raise ValueError(f"bits must be at least 2, one for the sign and one for the level, not {self.bits}.")
        if BLOCK % self.bucket != 0:
            raise ValueError(f"bucket must divide {BLOCK}, which {self.bucket} does not.")
        self.levels = 2 ** (self.bits - 1) - 1

    def step(self, gradients: list[Tensors]) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker. `sent` counts all coordinates, `overflow` none."""
        K = len(gradients)
        compressed = compressed_names(gradients[0], self.dense_below)
        step = self.k
        self.k += 1

        # 2: the gradients
        gradients = as_float32(gradients)
        if not all_finite(gradients):
            return skipped_step(gradients)

        if self.collective == "psum":
            all_u = [self.uniform(step, w, 0) for w in range(K)]
            means = mean_over_workers([{n: g for n, g in own.items() if n not in compressed} for own in gradients])
            for name in compressed:
                means[name] = self._summed([own[name] for own in gradients], [u[name] for u in all_u])
            return whole_step({name: means[name] for name in gradients[0]}, gradients, compressed)

        # 3 to 8: what each worker sends, as it arrives
        all_sent = []
        for w in range(K):
            u = self.uniform(step, w, 0)
            all_sent.append({name: self._quantize(gradients[w][name], u[name]) for name in compressed})

        # 9: the sum, and its mean
        sums = {name: sum_over_workers([sent[name] for sent in all_sent]) for name in compressed}
        if self.collective == "two_shot":
            if not all_finite([sums]):
                return skipped_step(gradients)
            u = self.uniform(step, None, 1)
            sums = {name: self._quantize(sums[name], u[name]) for name in compressed}
        return whole_step(mean_of_sums(gradients, sums), gradients, compressed)

    def _summed(self, all_x: list[np.ndarray], all_u: list[np.ndarray]) -> np.ndarray:
        """The mean of all workers' tensors, of integer codes with one scale a bucket for all."""
        K, shape = len(all_x), all_x[0].shape
        flat_x, flat_u = [x.reshape(-1) for x in all_x], [np.asarray(u, np.float32).reshape(-1) for u in all_u]
        levels, mean = self.levels // K, np.zeros(flat_x[0].size, np.float32)
        for start in range(0, mean.size, self.bucket):
            place = slice(start, start + self.bucket)
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                scale = max(self._scale(x[place]) for x in flat_x)
                per_level = np.float32(levels) / scale
                if not np.isfinite(per_level):
                    continue
                total = np.zeros(flat_x[0][place].size, np.int64)
                for x, u in zip(flat_x, flat_u, strict=True):
                    q = np.minimum(np.floor(np.abs(x[place]) * per_level + u[place]), levels)
                    total += (np.sign(x[place]) * q).astype(np.int64)
                mean[place] = total.astype(np.float32) * (scale * np.float32(1 / (levels * K)))
        return mean.reshape(shape)

    def _scale(self, v: np.ndarray) -> np.float32:
        return np.abs(v).max() if self.norm == "max" else np.sqrt(np.sum(v * v, dtype=np.float32))

    def _quantize(self, x: np.ndarray, u: np.ndarray) -> np.ndarray:
        """Q_s of each bucket of a tensor, with one random number per coordinate."""
        flat_x, flat_u = x.reshape(-1), np.asarray(u, np.float32).reshape(-1)  # (N,), (N,)
        quantized = np.zeros(flat_x.size, np.float32)  # (N,)
        s = np.float32(self.levels)
        for start in range(0, flat_x.size, self.bucket):
            v = flat_x[start : start + self.bucket]
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                scale = self._scale(v)
                per_level = s / scale
                if not np.isfinite(per_level):  # as for a scale of 0
                    continue
                q = np.minimum(np.floor(np.abs(v) * per_level + flat_u[start : start + self.bucket]), s)
                # an infinite scale gives NaN here
                quantized[start : start + self.bucket] = np.sign(v) * q * (scale * np.float32(1 / self.levels))
        return quantized.reshape(x.shape)
