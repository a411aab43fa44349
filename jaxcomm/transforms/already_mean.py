"""An exchange that leaves alone what is the workers' mean before it comes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm.collectives.axis import AxisName, axis_names, axis_size, is_tracked, to_varying, varies
from jaxcomm.transforms.checks import count
from jaxcomm.transforms.local_sgd import is_finite_tree
from jaxcomm.types import AlreadyMean, ExchangeMetrics, already_mean_paths, communication_period, exchange_metrics


class AlreadyMeanState(NamedTuple):
    """State of `already_mean`.

    Attributes:
      passed: the parameters whose gradients are passed by.
      exchange: the state of the exchange of the others, its metrics included; metrics alone where there are no others.
    """

    passed: AlreadyMean
    exchange: Any


def already_mean(
    exchange: optax.GradientTransformation, where: Callable[[Any], Any] | Any, *, axis_name: AxisName = "data"
) -> optax.GradientTransformation:
    """Exchanges some gradients, and passes by those that come as the workers' mean.

    For layers that make the mean gradient themselves, such as `late_multiply`. `make_train_step` and `simulate` leave
    the parameters of these gradients as they are, the same on every worker, and make the others each worker's own; in
    your own `jax.shard_map` do so yourself. They also prove, when they are traced, that the loss uses the marked
    parameters in no other way: JAX would insert a dense all-reduce for that, of a sum.

    If a marked gradient is not finite, which all workers see alike, the exchange is skipped, and if the exchange skips,
    so are the marked gradients: zeros come back for all.

    Args:
      exchange: any exchange of gradients: `plump_dp()` or a compressor. It never sees the marked gradients: momentum
        inside it (`dgc`, `iwp`) is not applied to them, and is refused by `check_chain`.
      where: the marked parameters: a tree of bools of the parameters' structure, or a function that makes one of them,
        such as `plan.where` (see `plan_late_multiply`).
      axis_name: the axis of workers, or the axes along which they lie, as of `exchange`.

    Returns:
      A transformation from gradients, each worker's own or where marked the same on all, to means (the same). It takes
      the place of `exchange` in the chain. On the wire: `exchange`, of the others alone.

    Raises:
      ValueError: if `where` does not fit the parameters, or `exchange` is none, or is a local method; at trace time for
        a marked gradient that differs between workers, and for what `exchange` refuses.
    """

    def init(params: Any) -> Any:
        marks = where(params) if callable(where) else where
        if jax.tree.structure(marks) != jax.tree.structure(params) or not all(
            isinstance(mark, bool) for mark in jax.tree.leaves(marks)
        ):
            raise ValueError(
                "where has a bool for every parameter, True for those whose gradient is the mean already, got "
                f"{marks}: give it the structure of the parameters, {jax.tree.structure(params)}."
            )
        paths = [jax.tree_util.keystr(path) for path, mark in jax.tree_util.tree_leaves_with_path(marks) if mark]
        others = _without(params, paths)
        if not jax.tree.leaves(others):
            return AlreadyMeanState(AlreadyMean(tuple(paths)), ExchangeMetrics.zeros())
        inner = exchange.init(others)
        if exchange_metrics(inner) is None or communication_period(inner) is not None:
            raise ValueError(
                "Gradients that are not marked are averaged by an exchange of gradients, got a transformation that is "
                "none (or is local: its workers have parameters of their own, whose gradients have no mean in common): "
                "pass jaxcomm.plump_dp() or a compressor such as jaxcomm.dct_dp(0.99)."
            )
        return AlreadyMeanState(AlreadyMean(tuple(paths)), inner)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        axis_size(axis_name)  # its error comes before any work
        paths = state.passed.paths
        passed = {path: leaf for path, leaf in _by_path(updates).items() if path in paths}
        _check_same(passed, axis_name)
        others = _without(updates, paths)
        ok = is_finite_tree(passed) if passed else jnp.asarray(True)
        if jax.tree.leaves(others):
            own = None if params is None else _without(params, paths)
            means, inner = exchange.update(_not_finite_unless(ok, others), state.exchange, own)
            counts = exchange_metrics(inner)
            assert counts is not None, "init refuses transformations without an exchange"
            ok = counts.skipped == 0
        else:
            means, inner = others, count(ok, sent=0)
        returned = {path: jnp.where(ok, leaf, jnp.zeros_like(leaf)) for path, leaf in passed.items()} | _by_path(means)
        merged = jax.tree_util.tree_map_with_path(lambda path, _: returned[jax.tree_util.keystr(path)], updates)
        return merged, AlreadyMeanState(state.passed, inner)

    return optax.GradientTransformation(init, update)


def vary_others(tree: Any, state: Any, axis_name: AxisName) -> Any:
    """Makes parameters each worker's own, but for those whose gradients `already_mean` passes by. Free: no bytes.

    Args:
      tree: the parameters, or another tree of their structure.
      state: the optimizer's state.
      axis_name: the axis of workers, or the axes along which they lie.
    """
    paths = already_mean_paths(state)

    def vary(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf if jax.tree_util.keystr(path) in paths else to_varying(leaf, axis_name)

    return jax.tree_util.tree_map_with_path(vary, tree)


def _by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _without(tree: Any, paths: Any) -> Any:
    """Returns the tree with nodes of no leaves in the place of the leaves at some paths."""

    def choose(path: Any, leaf: Any) -> Any:
        return optax.MaskedNode() if jax.tree_util.keystr(path) in paths else leaf

    return jax.tree_util.tree_map_with_path(choose, tree)


def _check_same(passed: dict[str, jax.Array], axis_name: AxisName) -> None:
    for path, leaf in passed.items():
        for name in axis_names(axis_name):
            if is_tracked(name) and varies(leaf, name):
                raise ValueError(
                    f"A gradient that is already the mean is the same on all workers, got one at {path!r} that differs "
                    f"along {name!r}: differentiate with respect to a parameter that is the same on all workers, and "
                    "that late_multiply alone uses (jaxcomm.make_train_step sees to it); put what mixes it with the "
                    "workers' own gradients, such as clip_by_global_norm, behind the exchange."
                )


def _not_finite_unless(ok: jax.Array, gradients: Any) -> Any:
    """Puts NaN into the smallest gradient unless `ok` holds, so that an exchange skips the step in its own way."""
    leaves, treedef = jax.tree.flatten(gradients)
    smallest = min(range(len(leaves)), key=lambda index: (leaves[index].size == 0, leaves[index].size))
    leaves[smallest] = jnp.where(ok, leaves[smallest], jnp.nan)
    return treedef.unflatten(leaves)
