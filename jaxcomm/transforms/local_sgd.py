"""Local steps, and an outer optimizer on what they changed: DiLoCo, and with a compressor SparseLoCo."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm.collectives import check_per_worker
from jaxcomm.collectives.axis import other_axes, to_varying
from jaxcomm.layout import plan_layout
from jaxcomm.transforms.checks import check_count
from jaxcomm.types import Every, ExchangeMetrics, PerWorker, communication_period, exchange_metrics


class LocalSgdState(NamedTuple):
    """State of `local_sgd`.

    Attributes:
      metrics: counts of the last step's exchange; zeros in a step without one.
      every: steps from one exchange to the next.
      step: () int32, the steps so far.
      anchor: the global model, float32, in the tree of the parameters; the same on every worker.
      exchange: the state of the exchange, its rows per worker included.
      outer: the state of the outer optimizer, the same on every worker.
    """

    metrics: ExchangeMetrics
    every: Every
    step: jax.Array
    anchor: Any
    exchange: Any
    outer: Any

    def global_model(self, like: Any) -> Any:
        """Returns the global model in the types of the parameters `like`."""
        return jax.tree.map(lambda anchor, leaf: anchor.astype(leaf.dtype), self.anchor, like)


def local_sgd(
    steps: int = 20,
    *,
    exchange: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    axis_name: str = "data",
) -> optax.GradientTransformation:
    """Trains each worker on its own for a few steps, and then moves all by an outer optimizer.

    It comes after a whole local optimizer, and takes its updates. On each worker:

      1. for H steps, change the own parameters by the local optimizer alone
      2. then g = anchor - own parameters (the "outer gradient"), where the anchor is what all began with
      3. average g over the workers by `exchange`: dense, or any compressor of this library
      4. anchor = anchor + outer(mean g); all go on from the anchor

    Parameters differ between workers: `make_train_step` keeps a row per worker of them and of the local optimizer's
    state, and `global_params(state)` gives the anchor, which is the model to evaluate.

    A local update that is not finite is not applied on its worker. If the exchange is skipped, the anchor and the outer
    optimizer stay, this step's local updates are not applied, and training goes on to the next exchange.

    Args:
      steps: H, local steps from one exchange to the next. DiLoCo: 500; SparseLoCo: 15 to 250.
      exchange: averages the outer gradients: `plump_dp()` (DiLoCo), or any compressor. `topk(0.99)` gives SparseLoCo:
        its residual carries what was not sent over to the next exchange.
      outer: an optimizer for the outer gradients; SGD with learning rate 0.7 and Nesterov momentum 0.9 if not given.
      axis_name: the axis of workers, of a mesh or of a `jax.vmap`, the same as that of `exchange`.

    Returns:
      A transformation from each worker's local updates to the updates that keep it on its way, or lead it to the new
      anchor (both different on every worker): `optax.chain(optax.adamw(3e-4), local_sgd(100, exchange=plump_dp()))`.
      Its `update` needs the parameters. On the wire: the exchange, once in H steps. The state costs 4 bytes a
      parameter, beside those of the exchange and of the outer optimizer.

    Raises:
      ValueError: for arguments out of range, an exchange that is none or is local itself; at trace time for what the
        exchange refuses, and without parameters.

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; Sarfi et al.,
      "Communication Efficient LLM Pre-training with SparseLoCo", 2025.
    """
    check_count("steps", steps, 1, "1 exchanges in every step")
    if outer is None:
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)

    def init(params: Any) -> Any:
        plan_layout(params, dense_below=0, capacity=lambda n: n)  # for its errors
        anchor = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        inner = exchange.init(anchor)
        if exchange_metrics(inner) is None or communication_period(inner) is not None:
            raise ValueError(
                "Outer gradients are averaged by an exchange of gradients, got a transformation that is none (or is "
                "local itself): pass exchange=jaxcomm.plump_dp(), jaxcomm.topk(0.99) or another compressor."
            )
        return LocalSgdState(
            metrics=ExchangeMetrics.zeros(),
            every=Every(steps),
            step=jnp.zeros((), jnp.int32),
            anchor=anchor,
            exchange=inner,
            outer=outer.init(anchor),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "A local method compares the workers' parameters with the anchor, got none: call tx.update(updates, "
                "state, params)."
            )
        check_per_worker(updates, axis_name)
        like = jax.tree.leaves(updates)[0]

        def stay() -> tuple[Any, Any]:
            ok = is_finite_tree(updates)
            own = jax.tree.map(lambda u: jnp.where(ok, u, jnp.zeros_like(u)), updates)
            return own, vary_rows(state._replace(metrics=ExchangeMetrics.zeros()), axis_name, like)

        def communicate() -> tuple[Any, Any]:
            gradient = jax.tree.map(lambda a, p, u: a - (_wide(p) + _wide(u)), state.anchor, params, updates)
            mean, inner = exchange.update(gradient, state.exchange, state.anchor)
            metrics = exchange_metrics(inner)
            assert metrics is not None, "init refuses transformations without an exchange"
            change, new_outer = outer.update(mean, state.outer, state.anchor)
            ok = metrics.skipped == 0
            moved = jax.tree.map(lambda a, c: a + jnp.where(ok, c, 0.0), state.anchor, change)
            to_anchor = jax.tree.map(
                lambda a, p: to_varying(jnp.where(ok, a - _wide(p), 0.0).astype(p.dtype), axis_name), moved, params
            )
            kept = jax.tree.map(lambda n, o: jnp.where(ok, n, o), new_outer, state.outer)
            return to_anchor, vary_rows(
                state._replace(metrics=metrics, anchor=moved, exchange=inner, outer=kept), axis_name, like
            )

        if steps == 1:
            own, new_state = communicate()
        else:
            # The usual branch is the one that communicates: bytes are given for an exchange, and how often it comes.
            own, new_state = lax.cond((state.step + 1) % steps != 0, stay, communicate)
        return own, new_state._replace(step=state.step + 1)

    return optax.GradientTransformation(init, update)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32)


def is_finite_tree(tree: Any) -> jax.Array:
    """Returns whether every number of a tree is finite: () bool."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def vary_rows(state: Any, axis_name: str, like: jax.Array) -> Any:
    """Marks what may differ in a state, as branches of a conditional must agree about it.

    Rows differ on every worker, and everything along the other axes on which `like`, an update, does.
    """
    others = other_axes(like, axis_name)

    def vary(node: Any) -> Any:
        return to_varying(node, (axis_name, *others) if isinstance(node, PerWorker) else others)

    return jax.tree.map(vary, state, is_leaf=lambda node: isinstance(node, PerWorker))
