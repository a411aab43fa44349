"""Deep Gradient Compression."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm.bits import Slots
from jaxcomm.collectives import check_per_worker
from jaxcomm.selectors import draw_turn, select_topk
from jaxcomm.selectors.topk import kept
from jaxcomm.transforms.checks import check_count, check_sparsity
from jaxcomm.transforms.momentum import Correction, correct, keep_old_unless, zero_velocity
from jaxcomm.transforms.sparse import Exchanged, SparseExchange, drain, exchange_densely, plan_exchange
from jaxcomm.types import ExchangeMetrics, PerWorker


class DgcState(NamedTuple):
    """State of `dgc`.

    Attributes:
      step: () int32, the exchanges so far, skipped ones included.
      velocity: the momentum u, a row per worker; see `momentum.Velocity`.
      residual: (K, n) float32, the accumulated momentum v that was not sent yet; a row per worker.
      metrics: counts of the last exchange.
    """

    step: jax.Array
    velocity: PerWorker
    residual: PerWorker
    metrics: ExchangeMetrics


def dgc(
    sparsity: float = 0.999,
    *,
    momentum: float = 0.9,
    factor_masking: bool = True,
    clip: float | None = None,
    warmup_steps: int = 0,
    dense_below: int = 512,
    value_dtype: Any = "bfloat16",
    index_codec: str = "auto",
    collective: str = "auto",
    axis_name: str = "data",
) -> optax.GradientTransformation:
    """Sends the largest coordinates of each worker's accumulated momentum, and keeps the rest.

    The momentum lives here, before the exchange: the optimizer after it is plain SGD. Each step, on each worker, in
    every tensor of N elements:

      1. g is clipped: scaled so that the norm of the whole gradient is at most clip * sqrt(K)
      2. u = momentum * u + g (momentum correction); v = v + u
      3. select the N - floor(N * sparsity) largest |v|, exactly
      4. send them; v keeps what was not sent, rounding of the values included
      5. u = 0 where v was sent (momentum factor masking)
      6. return the mean over the workers of what was sent

    In the first `warmup_steps` steps the fraction that is sent falls exponentially to 1 - sparsity; so many coordinates
    travel as one dense all-reduce of float32. Tensors below `dense_below` elements travel dense, with the
    same momentum.

    If some worker's u or v has a number that is not finite, or its u one of 2^100 or larger, the exchange is skipped on
    all workers, as for `topk`: zeros come back, u and v stay, `metrics.skipped` is 1.

    Args:
      sparsity: the fraction of coordinates that is not sent, 0 <= sparsity < 1. The paper: 0.999.
      momentum: m, 0 <= m < 1.
      factor_masking: whether u is emptied where v was sent.
      clip: the norm of the mean gradient that clipping aims at: each worker clips its own to sqrt(K) times it (the
        paper: K^-1/2 of it, for gradients that are already divided by K). None for no clipping.
      warmup_steps: steps of the warm-up. The paper: four epochs.
      dense_below: tensors with fewer elements are sent dense, as float32.
      value_dtype: "bfloat16" (16 bits a value) or "float32".
      index_codec: "plain", "bitmap", "elias_fano", "rice", or "auto" for the smallest at this density.
      collective: "gather", "balanced", "ring" (the paper's method on a ring all-reduce), or "auto", as for `topk`.
      axis_name: the axis of workers, of a mesh or of a `jax.vmap`.

    Returns:
      A transformation from each worker's own gradients (different on every worker) to a mean of momentum (the same),
      for `optax.chain(dgc(0.999), optax.sgd(0.1))`, without momentum there. See `wire_report` for its bytes. The state
      costs 8 bytes a parameter of memory.

    Raises:
      ValueError: for arguments out of range; at trace time for an empty tree, leaves that are not real floats, 2^31
        elements or more, gradients that were already reduced, and outside the axis of workers.

    References:
      Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR 2018.
    """
    sparsity = check_sparsity(sparsity)
    check_count("dense_below", dense_below, 0, "0 compresses every tensor")
    rule = Correction(momentum, factor_masking, clip, warmup_steps, density=1 - sparsity)
    rule.check()

    def plan(tree: Any) -> SparseExchange:
        return plan_exchange(
            tree,
            capacity=lambda n: kept(n, sparsity),
            dense_below=dense_below,
            value_dtype=value_dtype,
            index_codec=index_codec,
            collective=collective,
            always_fits=True,
            axis_name=axis_name,
        )

    def init(params: Any) -> Any:
        layout = plan(params).layout
        return DgcState(
            step=jnp.zeros((), jnp.int32),
            velocity=zero_velocity(layout),
            residual=PerWorker(jnp.zeros((1, layout.n), jnp.float32)),
            metrics=ExchangeMetrics.zeros(),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        exchange = plan(updates)
        check_per_worker(updates, axis_name)
        layout, step = exchange.layout, state.step
        leaves, treedef = jax.tree.flatten(updates)
        own = correct(rule, layout, leaves, state.velocity, state.residual, axis_name)
        x = own.vector.sum()

        def sparse(mask: jax.Array) -> tuple[Exchanged, jax.Array]:
            out, sent = exchange.exchange(own.leaves, own.vector, mask, draw_turn(0, step))
            return out, rule.mask_velocity(own.velocity.flat, Slots(sent.position, sent.filled))

        def warm_up(mask: jax.Array) -> tuple[Exchanged, jax.Array]:
            out = exchange_densely(layout, own.leaves, own.vector, mask, axis_name)
            return out, rule.mask_velocity_by(own.velocity.flat, mask)

        if not layout.sizes:
            out, flat = drain(layout, own.leaves, own.vector, axis_name), own.velocity.flat
        elif warmup_steps == 0:
            out, flat = sparse(select_topk(x, layout))
        else:
            is_warm_up, final = step < warmup_steps, jnp.asarray(layout.capacities, jnp.int32)
            mask = select_topk(x, layout, jnp.where(is_warm_up, rule.warm_counts(step, layout), final))
            out, flat = lax.cond(is_warm_up, warm_up, sparse, mask)
        velocity = keep_old_unless(out.ok, own.velocity._replace(flat=flat), state.velocity)
        return treedef.unflatten(out.means), DgcState(step + 1, velocity, PerWorker(out.residual), out.metrics)

    return optax.GradientTransformation(init, update)
