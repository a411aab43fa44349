"""IWP, importance weighted pruning, in NumPy: an oracle of the tests.

Algorithm 1 of Cheng and Xu, "Bandwidth Reduction using Importance Weighted Pruning on Ring
AllReduce". Step t of one worker, for one tensor of N elements with the parameters w (the paper's
omega); v is its nabla omega of line 3, which is all that was not sent yet, and lines 4 to 12 are
repeated for each tensor by itself:

     3:  v = v + gradient / K; with momentum: u = m * u + gradient / K, v = v + u     (Equation 3)
     5:  choose the threshold thr
     6:  choose the publishers r_1, ..., r_n among the workers, at random
     7:  a publisher's mask = I > thr, with the importance I = |v / w| of its own v
     8:  all-gather the publishers' masks
     9:  mask = OR of the masks, the same on every worker
    10:  sent = v * mask
    11:  v = v * not mask
    12:  which is accumulated locally
    13:  ring all-reduce of `sent` over the K workers: its sum
    14:  SGD with what was received

Line 5 by Equation 4, with the variance and the mean of I over the N coordinates, q = var / mean:

    thr = alpha + beta * q  if q > C,  else  alpha - beta * q

alpha alone is the paper's fixed threshold. Line 7 with the random selection of section III.C: a
coordinate that is not above the threshold enters with probability I / thr, which is I > thr * u with
u uniform in [0, 1).

Lines 3 and 14 follow DGC, on which the paper builds: local clipping, momentum correction, factor
masking, tensors that go dense and the warm-up are described in `momentum`.

Where the paper is silent, or contradicts itself, or this differs:

- Line 3 divides by N B, the nodes and the samples of each; a gradient here is the mean over the samples
  already. u and v are kept undivided, K times the paper's. So I = |v| / K / (|w| + eps), and line 13
  returns the sum over K, which is the paper's sum. Dividing by K commutes with all other lines.
- Equation 4 gives both of its cases the condition q > C; the text subtracts where q is smaller, and
  here where it is not larger. q = 0 if the mean is 0. A threshold is at least `floor`, the fixed one
  too. The variance is that of the population, q is computed in float64 and rounded to float32.
- eps keeps I finite where w is zero. An I which float32 cannot hold counts as float32's largest number.
- Line 7 never selects a zero of v.
- Line 6 stands below line 4, so that every tensor has publishers of its own, all different. Line 10 masks with the
  mask of line 9 on every worker, whatever its own v is.
- The mask has a life-span: lines 5 to 9 are done at the steps that `life_span` divides, counted from
  0, and the mask is kept at the others. A renewal which was due at a skipped step is due at the next
  step which is not skipped; later ones stay at the multiples.
- A payload has a fixed capacity, ceil(density * N), at most N and at least 1. If the mask of line 9
  has more coordinates, M of them, as many as fit are sent: in C order, from number floor(turn * M) on,
  wrapping around, with a random turn in [0, 1) for each step. The rest, the overflow, stay in v on
  every worker, and count at every step at which the mask is used.
- If the publishers send their masks as coded indices ("coded") and not as bitmaps ("bitmap"), such a
  payload has the same capacity: a publisher drops what is beyond it from its mask, and that is an
  overflow of this worker, at the step of the renewal only.
- Line 13: the ways to sum, and what is rounded, are those of `shared_sum`. What was rounded off goes
  back into v; u becomes zero there nevertheless. Without factor masking, u stays everywhere.
- Warm-up: the mask is renewed at every step, and at the first step after it. thr is lowered to tau,
  the k-th largest I of the publisher's tensor, k = floor(f * N) with the kept fraction f, at least
  the capacity and at most N. Where that lowers it, or tau = thr, I >= tau selects, without random
  selection. There is no capacity; the values travel in float32.
- If any worker's gradient or v, or what they would receive, holds a non-finite number, or a new u one
  of 2^100 or more in a compressed tensor, all workers skip the step: the mean is zero; u, v and the mask
  stay.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from .common import (
    StepResult,
    Tensors,
    Turn,
    all_finite,
    can_be_added,
    check_option,
    compressed_names,
    in_turn,
    mean_of_sums,
    skipped_step,
    zero_residuals,
)
from .momentum import add_dense_momentum, clip_locally, correct_momentum, kept_fraction, mask_factors, warmup_slots
from .shared_sum import check_collective, exchange_slots

MASK_CODECS = ("bitmap", "coded")


@dataclass(kw_only=True, eq=False)
class IwpReference:
    """K synchronous workers which exchange their gradients by IWP; K is that of the first step.

    Args:
        alpha: the threshold, or its first term; a number, or a function of the step.
        turn: a function of the step: a number in [0, 1), at which coordinate an overfull mask starts.
        publishers: a function of the step: the publishers by name of the compressed tensor, different ones, as
            numbers from 0 to K - 1.
        density: the capacity of a payload, as a fraction of a tensor's coordinates.
        beta: the factor of var / mean, a number or a function of the step; 0 for the fixed threshold.
        C: the var / mean up to which the threshold is lowered and not raised.
        floor: the least threshold, above 0.
        momentum: the paper's m.
        factor_masking: whether u becomes zero where v was sent.
        random_selection: whether coordinates below the threshold may enter.
        uniform: a function of the step and the worker: by name of the tensor, numbers in [0, 1) of its
            shape. Needed for the random selection only, and called at renewals, for all workers.
        eps: what is added to |w|, above 0.
        clip: the norm at which gradients are clipped, before the factor K^(-1/2); None for never.
        warmup_steps: the number of steps which send more.
        life_span: the number of steps for which a mask is used.
        dense_below: tensors with fewer elements than this are sent dense.
        value_dtype: the type in which the sent values travel, "float32" or "bfloat16".
        collective: how they are added up, "psum" (float32 only), "two_shot" or "ring".
        mask_codec: how a publisher's mask travels, "bitmap" or "coded".

    Attributes:
        velocities: per worker, u by name; compressed tensors only.
        residuals: per worker, v by name: what it has not sent; compressed tensors only.
        momentum_dense: u by name of the tensors which go dense, the same on every worker.
        mask: by name, the union of line 9, the same on every worker; none before the first step.
        renewal_due: whether the next step which is not skipped has to renew the mask.
        k: the number of steps so far, skipped ones included.
    """

    alpha: float | Callable[[int], float]
    publishers: Callable[[int], dict[str, list[int]]]
    turn: Turn
    density: float
    beta: float | Callable[[int], float] = 0.0
    C: float = 1.0
    floor: float = 1e-6
    momentum: float = 0.9
    factor_masking: bool = True
    random_selection: bool = False
    uniform: Callable[[int, int], Tensors] | None = None
    eps: float = 1e-8
    clip: float | None = None
    warmup_steps: int = 0
    life_span: int = 1
    dense_below: int = 512
    value_dtype: str = "float32"
    collective: str = "psum"
    mask_codec: str = "bitmap"
    k: int = field(default=0, init=False)
    renewal_due: bool = field(default=False, init=False)
    velocities: list[Tensors] = field(default_factory=list, init=False)
    residuals: list[Tensors] = field(default_factory=list, init=False)
    momentum_dense: Tensors = field(default_factory=dict, init=False)
    mask: dict[str, np.ndarray] = field(default_factory=dict, init=False)

    def __post_init__(self):
        check_collective(self.collective, self.value_dtype)
        check_option("mask_codec", self.mask_codec, MASK_CODECS)
        if self.random_selection and self.uniform is None:
            raise ValueError("random_selection is True, but there are no random numbers: pass uniform.")

    def step(self, gradients: list[Tensors], params: Tensors) -> StepResult:
        """Exchange the workers' gradients, one dict for each worker; the parameters are everyone's."""
        K = len(gradients)
        compressed = compressed_names(gradients[0], self.dense_below)
        if not self.residuals:
            self.velocities = zero_residuals(gradients, compressed)
            self.residuals = zero_residuals(gradients, compressed)
            dense = [name for name in gradients[0] if name not in compressed]
            self.momentum_dense = zero_residuals(gradients[:1], dense)[0]
            self.mask = {name: np.zeros(np.shape(gradients[0][name]), bool) for name in compressed}
        k = self.k
        self.k += 1
        warm_up = k < self.warmup_steps
        # at the multiples of the life-span, in the warm-up and right after it, or if it is still owed
        if k % self.life_span == 0 or k <= self.warmup_steps:
            self.renewal_due = True
        if not all_finite(gradients):
            return skipped_step(gradients)

        # 3: clipping, momentum correction, accumulation
        clipped = clip_locally(gradients, self.clip)
        velocities, all_v = correct_momentum(clipped, self.velocities, self.residuals, self.momentum)
        if not can_be_added(velocities, compressed) or not all_finite(all_v):
            return skipped_step(gradients)

        # 5 to 9: a new mask, or the old one
        mask, overflow = self.mask, [0] * K
        if self.renewal_due:
            mask, overflow = self._renewed_mask(all_v, params, compressed, k)

        # 10 to 13: each worker's v at the coordinates of the mask
        if warm_up:
            coordinates = {name: np.flatnonzero(mask[name]) for name in compressed}
            capacities = {name: mask[name].size for name in compressed}
            sums, residuals = exchange_slots(all_v, coordinates, capacities, "psum", "float32")
        else:
            capacities = {name: self._capacity(mask[name].size) for name in compressed}
            coordinates = {
                name: in_turn(np.flatnonzero(mask[name]), capacities[name], self.turn(k)) for name in compressed
            }
            held_back = sum(int(mask[name].sum()) - len(coordinates[name]) for name in compressed)
            overflow = [lost + held_back for lost in overflow]
            sums, residuals = exchange_slots(all_v, coordinates, capacities, self.collective, self.value_dtype)
        if self.factor_masking:
            velocities = mask_factors(velocities, [coordinates] * K)
        mean = mean_of_sums(all_v, sums)
        momentum_dense = add_dense_momentum(mean, self.momentum_dense, self.momentum)
        received = {**mean, **momentum_dense}
        if not all_finite([received]):
            return skipped_step(gradients)
        self.velocities, self.residuals, self.momentum_dense = velocities, residuals, momentum_dense
        self.mask, self.renewal_due = mask, False
        sent = sum(len(coordinates[name]) for name in compressed)
        return StepResult(mean=received, sent=[sent] * K, overflow=overflow, skipped=False)

    def _renewed_mask(
        self, all_v: list[Tensors], params: Tensors, compressed: list[str], k: int
    ) -> tuple[dict[str, np.ndarray], list[int]]:
        """Lines 5 to 9: (the mask, what each worker dropped from its own mask)."""
        warm_up = k < self.warmup_steps
        mask = {}
        cut = [0] * len(all_v)
        K = len(all_v)
        publishers = self.publishers(k)
        draws = {r: self.uniform(k, r) for r in range(K)} if self.random_selection else None
        for name in compressed:
            mask[name] = np.zeros(all_v[0][name].shape, bool)
            capacity = self._capacity(mask[name].size)
            # 6: the publishers
            for r in publishers[name]:
                # 5, 7: a publisher's mask
                u = np.asarray(draws[r][name], np.float32) if draws else None
                published = self._publisher_mask(name, all_v[r][name], params[name], K, k, u)
                if self.mask_codec == "coded" and not warm_up:
                    coded = np.zeros(published.size, bool)  # (N,)
                    coded[in_turn(np.flatnonzero(published), capacity, self.turn(k))] = True
                    cut[r] += int(published.sum() - coded.sum())
                    published = coded.reshape(published.shape)
                # 8, 9: of which all workers take the union
                mask[name] |= published
        return mask, cut

    def _publisher_mask(
        self, name: str, v: np.ndarray, w: np.ndarray, K: int, k: int, u: np.ndarray | None
    ) -> np.ndarray:
        """Line 7: what a publisher would send of one tensor; u are the draws of the random selection, or None."""
        importance = self._importance(v, w, K)
        threshold = self._threshold(importance, k)
        if k < self.warmup_steps:
            tau = self._warmup_threshold(importance, k)
            if tau <= threshold:
                return (importance >= tau) & (v != 0)
        if u is not None:
            threshold = threshold * u
        return (importance > threshold) & (v != 0)

    def _importance(self, v: np.ndarray, w: np.ndarray, K: int) -> np.ndarray:
        """The I of line 7."""
        with np.errstate(over="ignore"):  # the next line is about that
            importance = np.abs(v) / np.float32(K) / (np.abs(np.asarray(w, np.float32)) + np.float32(self.eps))
        return np.minimum(importance, np.finfo(np.float32).max)

    def _threshold(self, importance: np.ndarray, k: int) -> np.float32:
        """Line 5, Equation 4."""
        alpha = np.float32(self.alpha(k) if callable(self.alpha) else self.alpha)
        beta = np.float32(self.beta(k) if callable(self.beta) else self.beta)
        mean = np.mean(importance, dtype=np.float64)
        variance = np.var(importance, dtype=np.float64)
        q = np.float32(variance / mean if mean > 0 else 0)
        threshold = alpha + beta * q if q > np.float32(self.C) else alpha - beta * q
        return max(threshold, np.float32(self.floor))

    def _warmup_threshold(self, importance: np.ndarray, k: int) -> np.float32:
        """The importance that as many coordinates reach as a step of the warm-up sends."""
        n = importance.size
        slots = warmup_slots(kept_fraction(self.density, k, self.warmup_steps), n, self._capacity(n))
        ascending = np.sort(importance.reshape(-1))  # (N,)
        return ascending[n - slots]

    def _capacity(self, n: int) -> int:
        """The slots in a payload, for a tensor of n elements: with the density as the decimal number in the source."""
        return min(n, max(1, math.ceil(Fraction(repr(float(self.density))) * n)))
