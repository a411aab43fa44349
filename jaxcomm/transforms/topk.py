"""Top-k with error feedback."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm.collectives import check_per_worker
from jaxcomm.selectors import draw_turn, select_topk
from jaxcomm.selectors.topk import kept
from jaxcomm.transforms.checks import check_count, check_sparsity
from jaxcomm.transforms.sparse import SparseExchange, lay_out, own_row, plan_exchange
from jaxcomm.types import ExchangeMetrics, PerWorker


class TopKState(NamedTuple):
    """State of `topk`.

    Attributes:
      step: () int32, the exchanges so far, skipped ones included.
      residual: (K, n) float32, gradients that were not sent yet; a row per worker.
      metrics: counts of the last exchange.
    """

    step: jax.Array
    residual: PerWorker
    metrics: ExchangeMetrics


def topk(
    sparsity: float = 0.99,
    *,
    dense_below: int = 512,
    value_dtype: Any = "bfloat16",
    index_codec: str = "auto",
    collective: str = "auto",
    axis_name: str = "data",
) -> optax.GradientTransformation:
    """Sends the k largest coordinates of every tensor, and keeps the rest for later steps (error feedback).

    Each step, on each worker:

      1. x = gradient + residual
      2. select, in every tensor of N elements, the N - floor(N * sparsity) largest |x|, exactly
      3. send them; the residual is x less what was sent, rounding of the values included
      4. return the mean over the workers of what was sent

    If some worker's gradient has a number that is not finite, or 2^100 or larger, the exchange is skipped on all
    workers: zeros come back, the residual stays, `metrics.skipped` is 1. (In a residual, so large a number would make
    the sums of every later step infinite.)

    Compared with `dct_dp`, the selection is exact in every step, for about 31 passes over the gradient that only read.

    Args:
      sparsity: the fraction of coordinates that is not sent, 0 <= sparsity < 1.
      dense_below: tensors with fewer elements are sent dense, as float32.
      value_dtype: "bfloat16" (16 bits a value) or "float32".
      index_codec: "plain", "bitmap", "elias_fano", "rice", or "auto" for the smallest at this density.
      collective: "gather" (every worker gets every payload: (K-1) of them), "balanced" (owners of regions sum, send the
        largest sums on, and keep the rest: about 2 payloads whatever K is), "ring" (partial sums pass from neighbour to
        neighbour, and get denser with every hop: to show what that costs), or "auto" for gather while that receives at
        most a quarter of the dense bytes, beyond that for gather or balanced.
      axis_name: the axis of workers, of a mesh or of a `jax.vmap`.

    Returns:
      A transformation from each worker's own gradients (different on every worker) to a mean (the same). It belongs
      before the optimizer: `optax.chain(topk(0.99), optax.sgd(0.1))`. See `wire_report` for its
      bytes. The residual costs 4 bytes a parameter of memory.

    Raises:
      ValueError: for arguments out of range; at trace time for an empty tree, leaves that are not real floats, 2^31
        elements or more, gradients that were already reduced, and outside the axis of workers.

    References:
      Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """
    sparsity = check_sparsity(sparsity)
    check_count("dense_below", dense_below, 0, "0 compresses every tensor")

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
        residual = jnp.zeros((1, plan(params).layout.n), jnp.float32)
        return TopKState(jnp.zeros((), jnp.int32), PerWorker(residual), ExchangeMetrics.zeros())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        exchange = plan(updates)
        check_per_worker(updates, axis_name)
        leaves, treedef = jax.tree.flatten(updates)
        vector = lay_out(exchange.layout, leaves, own_row(state.residual, exchange.layout.n, axis_name))
        turn = draw_turn(0, state.step)
        out = exchange(leaves, vector, lambda: select_topk(vector.sum(), exchange.layout), turn)
        return treedef.unflatten(out.means), TopKState(state.step + 1, PerWorker(out.residual), out.metrics)

    return optax.GradientTransformation(init, update)
