"""Random-k with shared seeds and error feedback."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import noise
from jaxcomm.collectives import check_per_worker
from jaxcomm.selectors.strata import select_strata
from jaxcomm.selectors.topk import kept
from jaxcomm.transforms.checks import check_count, check_sparsity
from jaxcomm.transforms.shared import SharedExchange, plan_shared
from jaxcomm.transforms.sparse import drain, lay_out, own_row
from jaxcomm.types import ExchangeMetrics, PerWorker


class RandomKState(NamedTuple):
    """State of `random_k`.

    Attributes:
      step: () int32, the exchanges so far, skipped ones included.
      residual: (K, n) float32, gradients that were not sent yet; a row per worker.
      metrics: counts of the last exchange.
    """

    step: jax.Array
    residual: PerWorker
    metrics: ExchangeMetrics


def random_k(
    sparsity: float = 0.99,
    *,
    dense_below: int = 512,
    value_dtype: Any = "bfloat16",
    collective: str = "auto",
    seed: int = 0,
    axis_name: str = "data",
) -> optax.GradientTransformation:
    """Sends k random coordinates of every tensor, the same on all workers, and keeps the rest (error feedback).

    The seed is shared, so no index travels, and the values are summed on their way: what a worker receives does not
    grow with K. Each step, on each worker, in every tensor of N elements:

      1. x = gradient + residual
      2. draw k = N - floor(N * sparsity) coordinates, from (seed, step): one in each of k strata of N // k coordinates
         or one more, which are rotated by an offset, so that every coordinate is drawn equally often
      3. sum x over the workers there; the residual is x elsewhere, and what rounding left there
      4. return the sum / K

    If some worker's gradient has a number that is not finite, or 2^100 or larger, the exchange is skipped on all
    workers, as for `topk`: zeros come back, the residual stays, `metrics.skipped` is 1.

    Every coordinate waits for 1 / (1 - sparsity) steps on average, and then arrives with all that has gathered: use a
    learning rate that stands such bursts, and less sparsity than with top-k.

    Args:
      sparsity: the fraction of coordinates that is not sent, 0 <= sparsity < 1.
      dense_below: tensors with fewer elements are sent dense, as float32.
      value_dtype: "bfloat16" (16 bits a value) or "float32".
      collective: how the values are summed: "psum" (float32 alone), "two_shot", "ring", or "auto" for psum of float32
        and two_shot of bfloat16.
      seed: of the coordinates, the same on all workers.
      axis_name: the axis of workers, of a mesh or of a `jax.vmap`.

    Returns:
      A transformation from each worker's own gradients (different on every worker) to a mean (the same). It belongs
      before the optimizer: `optax.chain(random_k(0.9), optax.sgd(0.1))`. Each worker receives 2 (K-1)/K values for
      every coordinate drawn. The residual costs 4 bytes a parameter of memory.

    Raises:
      ValueError: for arguments out of range; at trace time for an empty tree, leaves that are not real floats, 2^31
        elements or more, gradients that were already reduced, and outside the axis of workers.

    References:
      Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """
    sparsity = check_sparsity(sparsity)
    check_count("dense_below", dense_below, 0, "0 compresses every tensor")

    def plan(tree: Any) -> SharedExchange:
        return plan_shared(
            tree,
            capacity=lambda n: kept(n, sparsity),
            dense_below=dense_below,
            value_dtype=value_dtype,
            collective=collective,
            axis_name=axis_name,
        )

    def init(params: Any) -> Any:
        residual = jnp.zeros((1, plan(params).layout.n), jnp.float32)
        return RandomKState(jnp.zeros((), jnp.int32), PerWorker(residual), ExchangeMetrics.zeros())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        exchange = plan(updates)
        check_per_worker(updates, axis_name)
        layout = exchange.layout
        leaves, treedef = jax.tree.flatten(updates)
        vector = lay_out(layout, leaves, own_row(state.residual, layout.n, axis_name))
        if layout.sizes:
            slots = select_strata(noise.make_key(seed, state.step), layout)
            out = exchange(leaves, vector, slots)
        else:
            out = drain(layout, leaves, vector, axis_name)
        return treedef.unflatten(out.means), RandomKState(state.step + 1, PerWorker(out.residual), out.metrics)

    return optax.GradientTransformation(init, update)
