"""DCT-DP: dynamic communication thresholding for data parallelism."""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm.collectives import check_per_worker
from jaxcomm.selectors import draw_turn, order_statistic, select_threshold
from jaxcomm.selectors.topk import dropped
from jaxcomm.transforms.checks import check_count, check_range, check_sparsity
from jaxcomm.transforms.sparse import SparseExchange, drain, lay_out, own_row, plan_exchange
from jaxcomm.types import ExchangeMetrics, PerWorker


class DctDpState(NamedTuple):
    """State of `dct_dp`.

    Attributes:
      step: () int32, the exchanges so far, skipped ones included.
      due: () bool, whether a refresh of the thresholds is owed (at the start, after a skipped refresh, after a step in
        which far more was selected than fits, and after a resume on another number of workers).
      residual: (K, n) float32, gradients that were not sent yet; a row per worker.
      threshold: (K, S) float32, one per compressed tensor; a row per worker.
      metrics: counts of the last exchange.
    """

    step: jax.Array
    due: jax.Array
    residual: PerWorker
    threshold: PerWorker
    metrics: ExchangeMetrics


def dct_dp(
    sparsity: float = 0.99,
    *,
    life_span: int = 1000,
    slack: float = 1.05,
    drain_every: int | None = None,
    dense_below: int = 512,
    value_dtype: Any = "bfloat16",
    index_codec: str = "auto",
    collective: str = "auto",
    seed: int = 0,
    axis_name: str = "data",
) -> optax.GradientTransformation:
    """Sends the coordinates that reach a threshold, and keeps the rest for later steps (error feedback).

    The threshold is exact once every `life_span` steps and used unchanged in between, so that a step costs little more
    than reading the gradient. Each step, on each worker, in every tensor of N elements (numbers of Algorithm 1):

      2. x = gradient + residual
      3. if the thresholds are to be refreshed: tau = the floor(N * sparsity)-th smallest |x|
      9. mask = |x| >= tau
      10. send x where the mask is set
      11. the residual is x less what was sent, rounding of the values included
      12. return the mean over the workers of what was sent

    Thresholds are refreshed in the steps that `life_span` divides (the paper), and besides:

      - in the steps 1, 2, 4, 8, ... below `life_span`, since gradients change fastest at the start;
      - in the step after one in which some worker selected more than twice as many coordinates of some tensor as fit,
        unless that step was a refresh: so does a tau that was found among zeros, which would select everything.

    A refresh costs 31 passes over the gradient that only read; the early ones are log2(life_span) in all.

    Payloads have a fixed capacity: what a refresh selects, N - floor(N * sparsity) + 1 coordinates, times `slack`.
    Where more coordinates reach tau, as many as fit are sent, from a random start offset on, which wraps around, so
    that none starves; the others stay in the residual and are counted in `metrics.overflow`: watch it, a lasting
    overflow means that the gradient has grown since the last refresh and `life_span` is too long.

    If some worker's gradient has a number that is not finite, or 2^100 or larger, the exchange is skipped on all
    workers, as for `topk`: zeros come back, the residual and the thresholds stay, `metrics.skipped` is 1. (A drain
    sends large finite numbers: it leaves no residual.)

    Args:
      sparsity: eta, the fraction of coordinates that is not sent, 0 <= sparsity < 1.
      life_span: L, steps between refreshes of the thresholds. The paper trains with 1000; runs of a few hundred steps
        want 10 to 100.
      slack: capacity of a payload over what a refresh selects, at least 1. More makes overflow rarer and payloads
        larger.
      drain_every: N, to send everything densely in a random one of N steps, the same on all workers, which empties the
        residual; the paper drains once in about a million. None never does.
      dense_below: tensors with fewer elements are sent dense, as float32.
      value_dtype: "bfloat16" (16 bits a value) or "float32".
      index_codec: "plain", "bitmap", "elias_fano", "rice", or "auto" for the smallest at this density.
      collective: "gather" (every worker gets every payload: (K-1) of them), "balanced" (owners of regions sum, send the
        largest sums on, and keep the rest: about 2 payloads whatever K is), "ring" (partial sums pass from neighbour to
        neighbour, and get denser with every hop: to show what that costs), or "auto" for gather while that receives at
        most a quarter of the dense bytes, beyond that for gather or balanced.
      seed: of the steps to drain, and of the turns.
      axis_name: the axis of workers, of a mesh or of a `jax.vmap`.

    Returns:
      A transformation from each worker's own gradients (different on every worker) to a mean (the same). It belongs
      before the optimizer: `optax.chain(dct_dp(0.99), optax.adamw(3e-4))`. Each worker receives (K-1) payloads; see
      `wire_report` for their bytes. The residual costs 4 bytes a parameter of memory.

    Raises:
      ValueError: for arguments out of range; at trace time for an empty tree, leaves that are not real floats, 2^31
        elements or more, gradients that were already reduced, and outside the axis of workers.

    References:
      Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism", KDD
      2021, https://doi.org/10.1145/3447548.3467080, Algorithm 1.
    """
    sparsity = check_sparsity(sparsity)
    check_count("life_span", life_span, 1, "1 refreshes the thresholds in every step")
    check_range("slack", slack, "at least 1", 1 <= slack < math.inf, "1.05 leaves 5% of room for overflow")
    slack = float(slack)
    check_count("dense_below", dense_below, 0, "0 compresses every tensor")
    if drain_every is not None:
        check_count("drain_every", drain_every, 1, "None never drains")

    def capacity(n: int) -> int:
        selected = n - dropped(n, sparsity) + 1
        return min(n, math.ceil(Fraction(repr(slack)) * selected))

    def plan(tree: Any) -> SparseExchange:
        return plan_exchange(
            tree,
            capacity=capacity,
            dense_below=dense_below,
            value_dtype=value_dtype,
            index_codec=index_codec,
            collective=collective,
            always_fits=False,
            axis_name=axis_name,
        )

    def init(params: Any) -> Any:
        layout = plan(params).layout
        return DctDpState(
            step=jnp.zeros((), jnp.int32),
            due=jnp.asarray(True),
            residual=PerWorker(jnp.zeros((1, layout.n), jnp.float32)),
            threshold=PerWorker(jnp.zeros((1, len(layout.sizes)), jnp.float32)),
            metrics=ExchangeMetrics.zeros(),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        exchange = plan(updates)
        check_per_worker(updates, axis_name)
        layout = exchange.layout
        leaves, treedef = jax.tree.flatten(updates)
        vector = lay_out(exchange.layout, leaves, own_row(state.residual, layout.n, axis_name))

        old_threshold = own_row(state.threshold, len(layout.sizes), axis_name)[0]  # (S,)
        is_early = (state.step < life_span) & (state.step & (state.step - 1) == 0)  # 0, 1, 2, 4, 8, ...
        refresh = state.due | is_early | (state.step % life_span == 0)
        threshold = old_threshold
        if layout.sizes:
            ranks = [dropped(size, sparsity) for size in layout.sizes]
            threshold = lax.cond(
                refresh,
                lambda: order_statistic(vector.sum(), layout, ranks),
                lambda: old_threshold,
            )

        turn = draw_turn(seed, state.step)
        if drain_every is None:
            out = exchange(leaves, vector, lambda: select_threshold(vector.sum(), threshold, layout), turn)
        else:
            chance = jax.random.uniform(jax.random.fold_in(jax.random.key(seed), state.step))
            out = lax.cond(
                chance < 1 / drain_every,
                lambda: drain(layout, leaves, vector, axis_name),
                lambda: exchange(leaves, vector, lambda: select_threshold(vector.sum(), threshold, layout), turn),
            )
        new_state = DctDpState(
            step=state.step + 1,
            due=jnp.where(out.ok, out.overfull & ~refresh, refresh),
            residual=PerWorker(out.residual),
            threshold=PerWorker(jnp.where(out.ok, threshold, old_threshold)[None]),
            metrics=out.metrics,
        )
        return treedef.unflatten(out.means), new_state

    return optax.GradientTransformation(init, update)
