"""Importance weighted pruning on ring all-reduce."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.checks import Rule, Seed, check_range, count, number, one_of, positive
from jaxcomm.collectives import axis_size
from jaxcomm.collectives.axis import other_axes, to_varying
from jaxcomm.collectives.masks import MASK_CODECS, MaskUnion
from jaxcomm.collectives.sparse import Accumulated
from jaxcomm.exchange import Exchanged, ExchangeState, Gradient, keep_unless, transformation
from jaxcomm.kernels import noise
from jaxcomm.kernels.vectors import Stored
from jaxcomm.layout import Layout
from jaxcomm.methods.momentum import MomentumCorrection
from jaxcomm.methods.shared import SharedExchange
from jaxcomm.methods.sparse import exchange_densely
from jaxcomm.selectors import compact, draw_start, select_with_ties
from jaxcomm.selectors.importance import importance, select_important, spread
from jaxcomm.types import Params, PerWorker

Schedule = float | Callable[[jax.Array], Any]
_PUBLISHERS = 2**31 - 2  # takes the place of a worker index in a key, and is none


def _schedule(least: str, holds: Callable[[Any], bool]) -> Rule:
    fixed = number(f"a number {least} 0, or a schedule of the step", holds, "See the docstring for the paper's")
    return replace(fixed, holds=lambda value: callable(value) or fixed.holds(value))


class SharedMask(NamedTuple):
    """Memory of `iwp`.

    Attributes:
      due: () bool, whether a new mask is owed (at the start, and after a skipped renewal).
      mask: (n/32,) uint32, the shared mask, bit-packed.
      velocity: the momentum u, a row per worker; see `Velocity`.
    """

    due: jax.Array
    mask: jax.Array
    velocity: PerWorker


@dataclass(frozen=True)
class Iwp(MomentumCorrection, SharedExchange):
    """Sends the gradients that would change their weights most, at coordinates that all workers share.

    A few workers publish the coordinates that are important to them. All workers send values at these coordinates, in
    one all-reduce of a compact buffer, which does not get denser as workers are added. Each step, on each worker, in
    every tensor of N elements with the weights w (numbered as in Algorithm 1):

      3. g is clipped; u = momentum * u + g; v = v + u (see `dgc`)
      5. thr = alpha; layer-wise (beta > 0), with q = var(I) / mean(I) of the tensor: alpha + beta q if q > C, else
         alpha - beta q; at least `floor`
      6. draw the tensor's publishers, from (seed, step)
      7. a publisher's mask = I > thr, with the importance I = |v| / (K (|w| + eps)). Dividing by K gives thresholds the
         paper's meaning, since the paper's gradients are already divided by K. With random selection, a coordinate
         below the threshold enters with probability I / thr, so that none waits forever
      9. the tensor's mask = the union of its publishers' masks
      10. send v there; v keeps the rest, and u = 0 where v was sent (momentum factor masking)
      13. return the sum / K

    The compact buffer has ceil(density * N) slots a tensor. If the mask has more coordinates, only a window that fits
    is sent. It begins at a random start offset and wraps around, so that none is starved. The others stay in v on every
    worker, and are counted in `metrics.overflow`. The warm-up sends at least a fraction that falls to `density`.

    Momentum is applied inside: `jc.chain(jc.iwp(0.01), optax.sgd(0.1))`, without momentum after it. `update` needs
    the parameters. With life_span > 1, `wire_report`'s usual step is one without a new mask.

    Received: 2 (K-1)/K values a slot, and a mask every `life_span` steps.

    Source: Cheng and Xu, "Bandwidth Reduction using Importance Weighted Pruning on Ring AllReduce", 2019, Algorithm 1.

    Attributes:
      alpha: the fixed threshold, or the first term of the layer-wise one: a number above 0, or a schedule of the step.
        The paper tries 0.005, 0.01, 0.05 and 0.1, on 96 workers.
      beta: the factor of var/mean, a number or a schedule; 0 for the fixed threshold.
      C: var/mean above which the threshold rises with it.
      floor: the least threshold, above 0.
      density: slots of the compact buffer as a fraction of the coordinates, above 0 and at most 1.
      publishers: r, workers out of K that publish a mask of each tensor.
      random_selection: whether coordinates below the threshold may enter.
      eps: added to |w|, above 0. Weights that are much smaller count as eps.
      life_span: steps for which a mask is used.
      mask_codec: how masks travel: "bitmap" (one bit a coordinate), "coded" (positions, at most a fraction `density`
        per publisher; more is overflow), or "auto" for fewer bytes.
      seed: seed of the publishers and of the random selection, the same on all workers.
    """

    alpha: Annotated[Schedule, _schedule("above", lambda x: 0 < x < math.inf)] = 0.01
    _: KW_ONLY
    beta: Annotated[Schedule, _schedule("of at least", lambda x: 0 <= x < math.inf)] = 0.0
    C: Annotated[float, number("a number of at least 0", lambda x: x >= 0, "0 always raises the threshold")] = 1.0
    floor: Annotated[float, positive("The default is small enough for most")] = 1e-4
    density: Annotated[
        float, number("above 0 and at most 1", lambda x: 0 < x <= 1, "0.02 leaves room for 2% of the coordinates")
    ] = 0.02
    publishers: Annotated[int, count(1, "1 is the least, all workers the most")] = 1
    random_selection: bool = True
    eps: Annotated[float, positive("The default is small enough for most")] = 1e-6
    life_span: Annotated[int, count(1, "1 refreshes the mask in every step")] = 1
    mask_codec: Annotated[str, one_of((*MASK_CODECS, "auto"), "'auto' takes fewer bytes")] = "auto"
    seed: Seed = 0

    @property
    def full_every(self) -> int | None:
        return self.life_span if self.life_span > 1 and not self.warmup_steps else None

    @property
    def final_density(self) -> float:
        return float(self.density)

    def capacity(self, n: int) -> int:
        return min(n, max(1, math.ceil(Fraction(repr(float(self.density))) * n)))

    def first_memory(self, params: Params, layout: Layout) -> SharedMask:
        velocity = super().first_memory(params, layout)
        return SharedMask(jnp.asarray(True), jnp.zeros(layout.n_words, jnp.uint32), velocity)

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, SharedMask]:
        if gradient.params is None:
            raise ValueError(
                "params must be given to iwp, which compares gradients with weights; got none. Call "
                "tx.update(gradients, state, params)."
            )
        layout, step, old = gradient.layout, state.step, state.memory
        weights = layout.flatten(layout.split(gradient.params)[0])
        gradient, vector, velocity = self.correct(gradient, old.velocity)
        renew = old.due | (step % self.life_span == 0) | (step < self.warmup_steps + bool(self.warmup_steps))
        publish = partial(self.publish, vector, weights, step, layout)
        saved = old.mask, jnp.zeros((), jnp.float32), to_varying(jnp.asarray(True), self.axis_name)
        masks = saved = to_varying(saved, other_axes(old.mask, self.axis_name))
        if layout.sizes:
            masks = publish() if self.life_span == 1 else lax.cond(renew, publish, lambda: saved)
        mask, cut, is_intact = masks
        if self.checksum:  # a worker whose masks were damaged makes all workers skip
            vector = vector._replace(gradient=jnp.where(is_intact, vector.gradient, jnp.nan))

        def compactly() -> tuple[Exchanged, jax.Array]:
            selection = compact(mask, layout, draw_start(self.seed, step))
            out = self.send(gradient, vector, selection.slots, selection.overflow)
            overflow = out.metrics.overflow + jnp.where(out.ok, cut, 0.0)
            out = out._replace(metrics=out.metrics._replace(overflow=overflow))
            return out, self.masked(velocity.flat, *selection.slots)

        def densely() -> tuple[Exchanged, jax.Array]:
            out = exchange_densely(gradient, vector, self.axis_name, mask)
            return out, self.masked_by(velocity.flat, mask)

        if not layout.sizes:
            out, flat = exchange_densely(gradient, vector, self.axis_name), velocity.flat
        elif self.warmup_steps:
            out, flat = lax.cond(step < self.warmup_steps, densely, compactly)
        else:
            out, flat = compactly()
        new = self.kept(out.ok, velocity, flat, old.velocity)
        return out, SharedMask(renew & ~out.ok, keep_unless(out.ok, mask, old.mask), new)

    def publish(
        self, vector: Accumulated, weights: jax.Array, step: jax.Array, layout: Layout
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the union of the publishers' masks.

        Returns:
          The union (n/32,) uint32; how many coordinates the mask codec cut off, () float32; and whether this worker
          received the masks as they were sent, () bool.
        """
        workers = axis_size(self.axis_name)
        rule = f"at most the number of workers, {workers}"
        check_range("publishers", self.publishers, rule, self.publishers <= workers, "Pass fewer")
        publishers = draw_publishers(self.seed, step, workers, self.publishers, len(layout.sizes))
        is_own = publishers == lax.axis_index(self.axis_name)  # (S, r)
        mask = self.local_mask(vector, weights, step, layout)
        row = jnp.where(is_own.any(1), jnp.argmax(is_own, axis=1), -1)

        def unite(codec: str) -> tuple[jax.Array, jax.Array, jax.Array]:
            union = MaskUnion(layout, codec, self.publishers, self.axis_name, self.checksum)
            united, cut, is_intact = union(mask, row, draw_start(self.seed, step))
            # As the masks do, counts differ between the shards of a model, where not one coordinate is cut off too.
            return to_varying((united, cut, to_varying(is_intact, self.axis_name)), other_axes(mask, self.axis_name))

        if self.warmup_steps == 0:
            return unite(self.mask_codec)
        # Warm-up masks are denser than coded positions have room for.
        return lax.cond(step < self.warmup_steps, lambda: unite("bitmap"), lambda: unite(self.mask_codec))

    def local_mask(self, vector: Accumulated, weights: jax.Array, step: jax.Array, layout: Layout) -> jax.Array:
        """Returns the mask (n/32,) that this worker would publish."""
        values = importance(vector.sum() / axis_size(self.axis_name), weights, self.eps)
        threshold = self.thresholds(values, step, layout)
        uniform = None
        if self.random_selection:
            uniform = noise.uniform(noise.make_key(self.seed, step, lax.axis_index(self.axis_name)), layout.n)
        mask = select_important(values, threshold, layout, uniform)
        if self.warmup_steps == 0:
            return mask

        def at_least() -> jax.Array:
            selected, tau = select_with_ties(Stored(values), layout, self.warm_counts(step, layout))
            lowered = layout.per_block(tau <= threshold)[:, None]
            top_words = selected.words.reshape(lowered.shape[0], -1)
            return jnp.where(lowered, top_words, mask.reshape(top_words.shape)).reshape(-1)

        return lax.cond(step < self.warmup_steps, at_least, lambda: mask)

    def thresholds(self, values: jax.Array, step: jax.Array, layout: Layout) -> jax.Array:
        """Returns the threshold of every segment, (S,), from the importance (n,)."""
        a, b = (jnp.asarray(s(step) if callable(s) else s, jnp.float32) for s in (self.alpha, self.beta))
        level = jnp.full(len(layout.sizes), a)
        if callable(self.beta) or self.beta > 0:
            q = spread(values, layout)
            level = jnp.where(q > self.C, a + b * q, a - b * q)
        return jnp.maximum(level, self.floor)


iwp = transformation(Iwp)


def draw_publishers(seed: int, step: jax.Array, workers: int, publishers: int, tensors: int) -> jax.Array:
    """Draws r of the K workers for every tensor in a step, the same on all workers: (S, r) int32.

    Each tensor has K random numbers, from the key (seed, step, 2^31 - 2); its publishers have the r largest.
    """
    numbers = noise.uniform(noise.make_key(seed, step, _PUBLISHERS), tensors * workers)
    return lax.top_k(numbers.reshape(tensors, workers), publishers)[1]
