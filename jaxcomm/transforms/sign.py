"""Signs with error feedback: one bit a coordinate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm.codecs.quantize import BlockSigns
from jaxcomm.collectives import check_per_worker
from jaxcomm.collectives.coded_sum import check_collective, coded_sum
from jaxcomm.transforms.checks import check_count
from jaxcomm.transforms.dense_code import finish, plan_whole
from jaxcomm.transforms.sparse import lay_out, own_row
from jaxcomm.types import ExchangeMetrics, PerWorker


class SignState(NamedTuple):
    """State of `sign`.

    Attributes:
      residual: (K, n) float32, gradients that were not sent yet; a row per worker.
      metrics: counts of the last exchange.
    """

    residual: PerWorker
    metrics: ExchangeMetrics


def sign(*, dense_below: int = 512, collective: str = "auto", axis_name: str = "data") -> optax.GradientTransformation:
    """Sends the sign of every coordinate and the mean magnitude of every block, and keeps the rest (error feedback).

    Each step, on each worker, in every block of 1024 consecutive coordinates of a tensor (its last may be shorter):

      1. x = gradient + residual
      2. scale = mean |x| of the block
      3. send scale * sign(x) (zeros as positive): 1 bit a coordinate, 32 a block
      4. the residual is x less what was sent
      5. return the mean over the workers of what was sent

    In two shots, the owner of a part codes the sum in the same way, and keeps its error in its own residual. If some
    worker's gradient has a number that is not finite, or 2^100 or larger, the exchange is skipped on all workers, as
    for `topk`: zeros come back, the residual stays, `metrics.skipped` is 1.

    Args:
      dense_below: tensors with fewer elements are sent dense, as float32.
      collective: "gather" (each worker receives (K-1) bits a coordinate), "two_shot" (2 (K-1)/K bits, whatever K is),
        or "auto" for fewer bytes.
      axis_name: the axis of workers, of a mesh or of a `jax.vmap`.

    Returns:
      A transformation from each worker's own gradients (different on every worker) to a mean (the same), before the
      optimizer: `optax.chain(sign(), optax.sgd(0.1))`. The residual costs 4 bytes a parameter of memory.

    Raises:
      ValueError: for arguments out of range; at trace time for an empty tree, leaves that are not real floats, 2^31
        elements or more, gradients that were already reduced, and outside the axis of workers.

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019; Zheng et
      al., "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", NeurIPS 2019 (blocks,
      and both directions).
    """
    check_count("dense_below", dense_below, 0, "0 compresses every tensor")
    check_collective(collective)

    def init(params: Any) -> Any:
        layout = plan_whole(params, dense_below)
        return SignState(PerWorker(jnp.zeros((1, layout.n), jnp.float32)), ExchangeMetrics.zeros())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        layout = plan_whole(updates, dense_below)
        check_per_worker(updates, axis_name)
        leaves, treedef = jax.tree.flatten(updates)
        old = own_row(state.residual, layout.n, axis_name)
        if not layout.sizes:
            means, _, metrics = finish(layout, leaves, None, axis_name)
            return treedef.unflatten(means), SignState(PerWorker(old), metrics)
        vector, codec = lay_out(layout, leaves, old), BlockSigns(layout)
        summed = coded_sum(vector.sum(), vector.is_sound(), codec, codec, collective, axis_name)
        means, ok, metrics = finish(layout, leaves, summed, axis_name)
        residual = jnp.where(ok, summed.lost()[None], old)
        return treedef.unflatten(means), SignState(PerWorker(residual), metrics)

    return optax.GradientTransformation(init, update)
