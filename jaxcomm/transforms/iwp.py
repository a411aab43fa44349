"""Importance weighted pruning on ring all-reduce."""

import math
from collections.abc import Callable
from fractions import Fraction
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import noise
from jaxcomm.bits import Slots
from jaxcomm.collectives import axis_size, check_per_worker
from jaxcomm.collectives.masks import MASK_CODECS, MaskUnion
from jaxcomm.layout import Layout
from jaxcomm.selectors import compact, draw_turn, order_statistic
from jaxcomm.selectors.importance import importance, select_important, spread
from jaxcomm.selectors.threshold import select_threshold
from jaxcomm.transforms.checks import check_count, check_range
from jaxcomm.transforms.momentum import Corrected, Correction, correct, keep_old_unless, zero_velocity
from jaxcomm.transforms.shared import plan_shared
from jaxcomm.transforms.sparse import Exchanged, drain, exchange_densely
from jaxcomm.types import ExchangeMetrics, PerWorker

Schedule = float | Callable[[jax.Array], Any]
_PUBLISHERS = 2**31 - 2  # no worker's number, which is what other keys have in its place


class IwpState(NamedTuple):
    """State of `iwp`.

    Attributes:
      step: () int32, the exchanges so far, skipped ones included.
      due: () bool, whether a new mask is owed (at the start, and after a skipped renewal).
      mask: (n/32,) uint32, the shared mask, bit-packed.
      velocity: the momentum u, a row per worker; see `momentum.Velocity`.
      residual: (K, n) float32, the accumulated momentum v that was not sent yet; a row per worker.
      metrics: counts of the last exchange.
    """

    step: jax.Array
    due: jax.Array
    mask: jax.Array
    velocity: PerWorker
    residual: PerWorker
    metrics: ExchangeMetrics


def iwp(
    alpha: Schedule = 0.01,
    *,
    beta: Schedule = 0.0,
    C: float = 1.0,
    floor: float = 1e-4,
    density: float = 0.02,
    publishers: int = 1,
    random_selection: bool = True,
    eps: float = 1e-6,
    momentum: float = 0.9,
    factor_masking: bool = True,
    clip: float | None = None,
    warmup_steps: int = 0,
    life_span: int = 1,
    dense_below: int = 512,
    value_dtype: Any = "bfloat16",
    collective: str = "auto",
    mask_codec: str = "auto",
    seed: int = 0,
    axis_name: str = "data",
) -> optax.GradientTransformation:
    """Sends the gradients that would change their weights most, at coordinates that all workers share.

    A few workers publish which coordinates are important to them; all workers send those, summed on their way (a ring
    all-reduce of a compact buffer), so that nothing gets denser as workers are added. Each step, on each worker, in
    every tensor of N elements with the weights w:

      3. g is clipped; u = momentum * u + g; v = v + u (see `dgc`)
      5. thr = alpha; layer-wise (beta > 0), with q = var(I) / mean(I) of the tensor: alpha + beta q if q > C, else
         alpha - beta q; at least `floor`
      6. draw the tensor's publishers, from (seed, step)
      7. a publisher's mask = I > thr, with the importance I = |v| / K / (|w| + eps): the paper accumulates gradients
         that are already divided by the number of workers, so that thresholds mean what they mean there; with random
         selection a coordinate below the threshold enters with the probability I / thr, so that none waits for ever
      9. the tensor's mask = the union of its publishers' masks
      10. send v there; v keeps the rest, and u = 0 where v was sent (momentum factor masking)
      13. return the sum / K

    The compact buffer has ceil(density * N) slots a tensor. If the mask has more coordinates, as many of them are sent
    from a random start offset on, which wraps around, so that none starves; the others stay in v on every worker, and
    are counted in `metrics.overflow`. In the first `warmup_steps` steps a fraction that falls
    exponentially to `density` is sent at least, densely. The momentum lives here: the optimizer after it is plain SGD.

    If some worker's u or v has a number that is not finite, or its u one of 2^100 or larger, the exchange is skipped on
    all workers, as for `topk`: zeros come back, u, v and the mask stay, `metrics.skipped` is 1.

    Args:
      alpha: the fixed threshold, or the first term of the layer-wise one: a number above 0, or a schedule of the step.
        The paper tries 0.005, 0.01, 0.05 and 0.1, on 96 workers.
      beta: the factor of var/mean, a number or a schedule; 0 for the fixed threshold.
      C: var/mean above which the threshold rises with it.
      floor: the least threshold, above 0.
      density: slots of the compact buffer over coordinates, above 0 and at most 1.
      publishers: r, workers whose masks of a tensor are united, of the K.
      random_selection: whether coordinates below the threshold may enter.
      eps: what is added to |w|, above 0. Weights that are much smaller count as eps.
      momentum: m, 0 <= m < 1.
      factor_masking: whether u is emptied where v was sent.
      clip: the norm of the mean gradient that clipping aims at, as for `dgc`; None for no clipping.
      warmup_steps: steps of the warm-up.
      life_span: steps for which a mask is used.
      dense_below: tensors with fewer elements are sent dense, as float32.
      value_dtype: "bfloat16" (16 bits a value) or "float32".
      collective: how the values are summed: "psum" (float32 alone), "two_shot", "ring", or "auto" for psum of float32
        and two_shot of bfloat16.
      mask_codec: how masks travel: "bitmap" (one bit a coordinate), "coded" (positions, at most `density` of them a
        publisher; more is overflow), or "auto" for fewer bytes.
      seed: of the publishers and of the random selection, the same on all workers.
      axis_name: the axis of workers, of a mesh or of a `jax.vmap`.

    Returns:
      A transformation from each worker's own gradients (different on every worker) to a mean of momentum (the same),
      for `optax.chain(iwp(0.01), optax.sgd(0.1))`, without momentum there. Its `update` needs the parameters. Each
      worker receives 2 (K-1)/K values for each slot, and a mask every `life_span` steps; see `wire_report`, whose usual
      step has no new mask where life_span > 1. The state costs 8 bytes a parameter of memory.

    Raises:
      ValueError: for arguments out of range; at trace time for an empty tree, leaves that are not real floats, 2^31
        elements or more, more publishers than workers, no parameters, gradients that were already reduced, and outside
        the axis of workers.

    References:
      Cheng and Xu, "Bandwidth Reduction using Importance Weighted Pruning on Ring AllReduce", 2019, Algorithm 1.
    """
    _check_schedule("alpha", alpha, above_zero=True)
    _check_schedule("beta", beta, above_zero=False)
    for name, value in (("floor", floor), ("eps", eps)):
        holds = isinstance(value, Real) and 0 < value < math.inf
        check_range(name, value, "a positive number", holds, "the default is small enough for most")
    check_range("C", C, "a number of at least 0", isinstance(C, Real) and C >= 0, "0 always raises the threshold")
    holds = isinstance(density, Real) and 0 < density <= 1
    check_range("density", density, "above 0 and at most 1", holds, "0.02 leaves room for 2% of the coordinates")
    density = float(density)
    check_count("publishers", publishers, 1, "1 is the least, all workers the most")
    check_count("life_span", life_span, 1, "1 renews the mask in every step")
    check_count("dense_below", dense_below, 0, "0 compresses every tensor")
    if mask_codec not in (*MASK_CODECS, "auto"):
        raise ValueError(f"Masks travel as one of {', '.join(MASK_CODECS)}, got mask_codec={mask_codec!r}: pass one.")
    rule = Correction(momentum, factor_masking, clip, warmup_steps, density)
    rule.check()

    def plan(tree: Any) -> Any:
        return plan_shared(
            tree,
            capacity=lambda n: min(n, max(1, math.ceil(Fraction(repr(density)) * n))),
            dense_below=dense_below,
            value_dtype=value_dtype,
            collective=collective,
            axis_name=axis_name,
        )

    def thresholds(values: jax.Array, step: jax.Array, layout: Layout) -> jax.Array:
        a, b = (jnp.asarray(s(step) if callable(s) else s, jnp.float32) for s in (alpha, beta))
        level = jnp.full(len(layout.sizes), a)
        if callable(beta) or beta > 0:
            q = spread(values, layout)
            level = jnp.where(q > C, a + b * q, a - b * q)
        return jnp.maximum(level, floor)

    def own_mask(own: Corrected, weights: jax.Array, step: jax.Array, layout: Layout) -> jax.Array:
        values = importance(own.vector.sum() / axis_size(axis_name), weights, eps)
        threshold = thresholds(values, step, layout)
        uniform = None
        if random_selection:
            key = noise.make_key(seed, step, lax.axis_index(axis_name))
            uniform = noise.uniform(key, layout.n)
        mask = select_important(values, threshold, layout, uniform)
        if warmup_steps == 0:
            return mask

        def at_least() -> jax.Array:
            ranks = jnp.asarray(layout.sizes, jnp.int32) - rule.warm_counts(step, layout) + 1
            tau = order_statistic(values, layout, ranks)
            lowered = layout.per_block(tau <= threshold)[:, None]
            most = select_threshold(values, tau, layout).reshape(lowered.shape[0], -1)
            return jnp.where(lowered, most, mask.reshape(most.shape)).reshape(-1)

        return lax.cond(step < warmup_steps, at_least, lambda: mask)

    def publish(own: Corrected, weights: jax.Array, step: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
        workers = axis_size(axis_name)
        if publishers > workers:
            raise ValueError(
                f"Publishers are workers, got publishers={publishers} of {workers}: pass at most {workers}."
            )
        chosen = draw_publishers(seed, step, workers, publishers, len(layout.sizes))
        is_own = chosen == lax.axis_index(axis_name)  # (S, r)
        mask, row = own_mask(own, weights, step, layout), jnp.where(is_own.any(1), jnp.argmax(is_own, axis=1), -1)

        def unite(codec: str) -> tuple[jax.Array, jax.Array]:
            return MaskUnion(layout, codec, publishers, axis_name)(mask, row, draw_turn(seed, step))

        if warmup_steps == 0:
            return unite(mask_codec)
        # The masks of the warm-up are denser than what positions have room for.
        return lax.cond(step < warmup_steps, lambda: unite("bitmap"), lambda: unite(mask_codec))

    def init(params: Any) -> Any:
        layout = plan(params).layout
        return IwpState(
            step=jnp.zeros((), jnp.int32),
            due=jnp.asarray(True),
            mask=jnp.zeros(layout.n_words, jnp.uint32),
            velocity=zero_velocity(layout),
            residual=PerWorker(jnp.zeros((1, layout.n), jnp.float32)),
            metrics=ExchangeMetrics.zeros(),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "Importance compares a gradient with its weight, got no parameters: call tx.update(gradients, state, "
                "params)."
            )
        exchange = plan(updates)
        check_per_worker(updates, axis_name)
        layout, step = exchange.layout, state.step
        leaves, treedef = jax.tree.flatten(updates)
        weights = layout.flatten(layout.split(jax.tree.leaves(params))[0])
        own = correct(rule, layout, leaves, state.velocity, state.residual, axis_name)

        renew = state.due | (step % life_span == 0) | (step < warmup_steps + bool(warmup_steps))
        mask, cut = state.mask, jnp.zeros((), jnp.float32)
        if not layout.sizes:
            out, flat = drain(layout, own.leaves, own.vector, axis_name), own.velocity.flat
        else:
            if life_span == 1:
                mask, cut = publish(own, weights, step, layout)
            else:
                mask, cut = lax.cond(
                    renew,
                    lambda: publish(own, weights, step, layout),
                    lambda: (state.mask, jnp.zeros((), jnp.float32)),
                )

            def compactly() -> tuple[Exchanged, jax.Array]:
                selection = compact(mask, layout, draw_turn(seed, step))
                out = exchange(own.leaves, own.vector, selection.slots, selection.overflow)
                counted = out.metrics.overflow + jnp.where(out.ok, cut, 0.0)
                out = out._replace(metrics=out.metrics._replace(overflow=counted))
                return out, rule.mask_velocity(own.velocity.flat, Slots(*selection.slots))

            def densely() -> tuple[Exchanged, jax.Array]:
                out = exchange_densely(layout, own.leaves, own.vector, mask, axis_name)
                return out, rule.mask_velocity_by(own.velocity.flat, mask)

            out, flat = lax.cond(step < warmup_steps, densely, compactly) if warmup_steps else compactly()
        new_state = IwpState(
            step=step + 1,
            due=renew & ~out.ok,
            mask=jnp.where(out.ok, mask, state.mask),
            velocity=keep_old_unless(out.ok, own.velocity._replace(flat=flat), state.velocity),
            residual=PerWorker(out.residual),
            metrics=out.metrics,
        )
        return treedef.unflatten(out.means), new_state

    return optax.GradientTransformation(init, update)


def draw_publishers(seed: int, step: jax.Array, workers: int, publishers: int, tensors: int) -> jax.Array:
    """Draws r different workers of K for every tensor of a step, the same on all of them: (S, r) int32.

    Of K numbers for each tensor, from the key (seed, step, 2^31 - 2), the publishers have the r largest.
    """
    numbers = noise.uniform(noise.make_key(seed, step, _PUBLISHERS), tensors * workers)
    return lax.top_k(numbers.reshape(tensors, workers), publishers)[1]


def _check_schedule(name: str, value: Any, *, above_zero: bool) -> None:
    if callable(value):
        return
    holds = isinstance(value, Real) and (float(value) > 0 if above_zero else float(value) >= 0) and value < math.inf
    rule = f"a number {'above' if above_zero else 'of at least'} 0, or a schedule of the step"
    check_range(name, value, rule, holds, "see the docstring for the paper's")
