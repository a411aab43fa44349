"""DCT-DP: dynamic communication thresholding for data parallelism."""

import math
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.checks import Seed, Sparsity, count, number
from jaxcomm.exchange import Exchanged, ExchangeState, Gradient, keep_unless, own_row, transformation
from jaxcomm.kernels.platforms import by_platform
from jaxcomm.layout import Layout
from jaxcomm.methods.sparse import SparseExchange, exchange_densely
from jaxcomm.selectors import Selected, draw_start, select_threshold, select_with_ties
from jaxcomm.selectors.topk import dropped
from jaxcomm.types import Params, PerWorker


class Thresholds(NamedTuple):
    """Memory of `dct_dp`.

    Attributes:
      due: () bool, whether the next step must refresh: at the start, after a skipped refresh, after a step that
        selected far more than fits, and after resuming on a different number of workers.
      threshold: (K, S) float32, one per segment; a row per worker.
    """

    due: jax.Array
    threshold: PerWorker


@dataclass(frozen=True)
class DctDp(SparseExchange):
    """Sends the coordinates that reach a threshold, and keeps the rest for later steps (error feedback).

    The threshold is computed exactly every `life_span` steps and reused in between, so that a step costs little more
    than reading the gradient. Each step, on each worker, in every tensor of N elements (numbered as in Algorithm 1):

      2. x = gradient + residual
      3. if a refresh is due: tau = the floor(N * sparsity)-th smallest |x|
      9. mask = |x| >= tau
      10. send x where the mask is set
      11. the residual is x minus the rounded values that were sent
      12. return the mean over the workers of what was sent

    Thresholds are refreshed in steps divisible by `life_span`, as in the paper, and also, unless `early` is False:

      - in steps 1, 2, 4, 8, ... below `life_span`, since gradients change fastest at the start;
      - in the step after one in which some worker selected more than twice as many coordinates of some tensor as fit,
        unless that step was itself a refresh. This replaces a tau that was found among zeros and selects every nonzero.

    On CPUs a refresh selects in the pass over the gradient that finds its thresholds, and costs about as much as a step
    of `topk`: a quarter more. Elsewhere it takes a pass for each. If most tensors have fewer than a few thousand
    elements, it takes 32. There are about log2(life_span) early refreshes.

    Payloads have a fixed capacity: what a refresh selects, N - floor(N * sparsity) + 1 coordinates, times `slack`.
    If more coordinates reach tau, only a window that fits is sent. It begins at a random start offset and wraps around,
    so that none is starved. The others stay in the residual and are counted in `metrics.overflow`. A lasting overflow
    means that the gradient has grown since the last refresh and `life_span` is too long.

    `jc.chain(jc.dct_dp(0.99), optax.adamw(3e-4))`.

    Source: Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism",
    KDD 2021, https://doi.org/10.1145/3447548.3467080, Algorithm 1.

    Attributes:
      sparsity: eta, the fraction of coordinates that is not sent, 0 <= sparsity < 1.
      life_span: L, steps between refreshes of the thresholds. The paper trains with 1000, for days. With 10, refreshes
        add some 3% to the time of exchanges.
      early: whether thresholds are refreshed earlier than after `life_span` steps where that is needed. False is
        Algorithm 1 as printed, but for the capacity: one refresh in L steps, whatever a threshold selects.
      slack: payload capacity divided by what a refresh selects, at least 1. More makes overflow rarer and payloads
        larger.
      drain_every: N, to send everything densely in each step with probability 1/N, at once on all workers. That empties
        the residual (and accepts numbers of 2^100 or more). The paper drains once in about a million steps. None never
        drains.
      seed: seed of the drained steps and of the start offsets.
    """

    sparsity: Sparsity = 0.99
    _: KW_ONLY
    life_span: Annotated[int, count(1, "1 refreshes the thresholds in every step")] = 1000
    early: bool = True
    slack: Annotated[float, number("at least 1", lambda x: 1 <= x < math.inf, "1.05 leaves 5% of room")] = 1.05
    drain_every: Annotated[int | None, count(1, "None never drains", or_none=True)] = None
    seed: Seed = 0

    always_fits: ClassVar[bool] = False

    def capacity(self, n: int) -> int:
        return min(n, math.ceil(Fraction(repr(float(self.slack))) * self.n_selected(n)))

    def n_selected(self, n: int) -> int:
        """Returns how many of n coordinates a refresh selects: the floor(n * sparsity)-th smallest |x| and above."""
        return n - dropped(n, self.sparsity) + 1

    @property
    def pack_remedy(self) -> str | None:
        return "Take topk: thresholds of other rounds are no help where each round selects anew"

    def first_memory(self, params: Params, layout: Layout) -> Thresholds:
        threshold = self.per_worker(jnp.zeros((1, len(layout.sizes)), jnp.float32))
        return Thresholds(jnp.asarray(True), threshold)

    @property
    def full_every(self) -> int | None:
        return None if self.drain_every == 1 else self.drain_every

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Thresholds]:
        layout, vector, step, old = gradient.layout, gradient.accumulated(), state.step, state.memory
        if not layout.sizes:
            return exchange_densely(gradient, vector, self.axis_name), old
        refresh = old.due | (step % self.life_span == 0)
        if self.early:
            refresh |= (step < self.life_span) & (step & (step - 1) == 0)  # 0, 1, 2, 4, 8, ...
        k = jnp.asarray(layout.counts(self.n_selected))
        before = own_row(old.threshold, len(layout.sizes))[0]  # (S,)

        def at_once() -> tuple[Selected, jax.Array]:
            return lax.cond(
                refresh,
                lambda: select_with_ties(vector, layout, k),
                lambda: (select_threshold(vector, before, layout), before),
            )

        def afterwards() -> tuple[Selected, jax.Array]:
            threshold = lax.cond(refresh, lambda: select_with_ties(vector, layout, k)[1], lambda: before)
            return select_threshold(vector, threshold, layout), threshold

        # On a TPU, a mask that is made in a conditional takes one gradient of memory more.
        selected, threshold = by_platform(cpu=at_once, default=afterwards)

        def sparse() -> tuple[Exchanged, jax.Array]:
            out, reduced = self.send(gradient, vector, selected, draw_start(self.seed, step))
            return out, reduced.overfull

        def dense() -> tuple[Exchanged, jax.Array]:
            out = exchange_densely(gradient, vector, self.axis_name)
            return out, out.ok & jnp.asarray(False)  # marked as varying, like `overfull` in `sparse`

        if self.drain_every in (None, 1):
            out, overfull = dense() if self.drain_every else sparse()
        else:
            chance = jax.random.uniform(jax.random.fold_in(jax.random.key(self.seed), step), dtype=jnp.float32)
            out, overfull = lax.cond(chance < 1 / self.drain_every, dense, sparse)
        due = jnp.where(out.ok, overfull & ~refresh & self.early, refresh)
        rows = keep_unless(out.ok, threshold, before)[None]
        return out, Thresholds(due, self.per_worker(rows))


dct_dp = transformation(DctDp)
