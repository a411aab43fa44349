"""Plump-DP: the dense exchange."""

from typing import Any, NamedTuple

import jax
import optax

from jaxcomm.collectives import check_per_worker, dense_mean
from jaxcomm.layout import plan_layout
from jaxcomm.transforms.checks import check_count, count, zero_unless
from jaxcomm.transforms.local_sgd import local_sgd
from jaxcomm.types import ExchangeMetrics


class PlumpDpState(NamedTuple):
    """State of `plump_dp`.

    Attributes:
      metrics: counts of the last exchange.
    """

    metrics: ExchangeMetrics


def plump_dp(*, p: int = 1, axis_name: str = "data") -> optax.GradientTransformation:
    """Averages the workers' gradients densely: the baseline, and what every compressor equals when it keeps everything.

    One all-reduce of float32; each worker receives 2 (K-1)/K * 4 bytes a parameter. If the mean is not finite, it is
    replaced by zeros and the step counts as skipped.

    With p > 1 it averages models instead of gradients: each worker takes p local steps, and then all go on from the
    mean of their parameters. It then comes after a whole local optimizer, and is `local_sgd` with an outer optimizer
    that takes the mean as it is.

    Args:
      p: local steps from one communication to the next.
      axis_name: the axis of workers, of a mesh or of a `jax.vmap`.

    Returns:
      A transformation from each worker's own gradients (different on every worker) to their mean (the same), before the
      optimizer; for p > 1 from each worker's local updates to those that lead to the mean model, after it.

    Raises:
      ValueError: at trace time for an empty tree, leaves that are not real floats, 2^31 elements or more, gradients
        that were already reduced, and outside the axis of workers.

    References:
      Sun et al., "Slim-DP: A Light Communication Data Parallelism for DNN", AAAI 2018,
      names it.
    """
    check_count("p", p, 1, "1 averages gradients in every step")
    if p > 1:
        return local_sgd(p, exchange=plump_dp(axis_name=axis_name), outer=optax.sgd(1.0), axis_name=axis_name)

    def init(params: Any) -> Any:
        plan_layout(params, dense_below=0, capacity=lambda n: n)
        return PlumpDpState(ExchangeMetrics.zeros())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        plan_layout(updates, dense_below=0, capacity=lambda n: n)
        check_per_worker(updates, axis_name)
        leaves, treedef = jax.tree.flatten(updates)
        means, ok = dense_mean(leaves, axis_name)
        return treedef.unflatten(zero_unless(ok, means)), PlumpDpState(count(ok, sent=0))

    return optax.GradientTransformation(init, update)
