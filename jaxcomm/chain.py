"""An Optax chain that keeps its links, and gives those after its exchange the loss and gradient of all workers.

The rules for the order of its links are in `order`.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm.checks import check_count, check_range, check_transformation
from jaxcomm.collectives import dense_mean
from jaxcomm.collectives.axis import AxisName, in_axes_of_workers, is_tracked, to_varying, varies, zeros_of
from jaxcomm.exchange import (
    ARGUMENTS,
    DELAYED,
    SCOPE,
    clips_in,
    get_exchange,
    is_exchange_state,
    is_placeholder,
    lets_bypass,
    momentum_inside,
    without_frozen,
)
from jaxcomm.kernels.numerics import wide_type
from jaxcomm.order import check_chain, try_link
from jaxcomm.state import keep_states_unless, trained, update_with_more, vary_rows
from jaxcomm.types import AccumulatedState, DelayedState, ExchangeMetrics, Params, PerWorker, PyTree

_NOT_OF_PARAMS: Any = 0  # a leaf in the place of state that has another shape than the parameters
FROZEN = "jaxcomm.frozen"  # the `jax.named_scope` of what keeps frozen leaves as they are, whatever decays behind


class Chain(optax.GradientTransformationExtraArgs):
    """An Optax transformation that keeps its links, as `chain` returns it.

    Attributes:
      links: its transformations, in order.
      accumulate: calls of `update` from one exchange to the next.
      delay: steps from a gradient to its exchange.
    """

    links: tuple[optax.GradientTransformation, ...]
    accumulate: int
    delay: int


def chain(*links: optax.GradientTransformation, accumulate: int = 1, delay: int = 0) -> Chain:
    """Equals `optax.chain`, but keeps its links: a chain is split at its exchange by them, and its order checked.

    `init` checks the order of the links, wherever the chain is used. Leaves that the exchange freezes get no updates.

    A link after an exchange of gradients may take more than gradients (a line search, `reduce_on_plateau`). It gets
    arguments of all workers: `value` and `value_fn` are means over the workers, and `grad` is the mean gradient.

    With `accumulate=G` this is `optax.MultiSteps` around the chain: one exchange in G calls. Every worker keeps the
    mean of its own gradients since the last exchange, 4 bytes a parameter, and hands it to the chain in every G-th
    call. In the other calls nothing is sent and the updates are zero. The state has the fields of
    `optax.MultiStepsState` but `skip_state`. If an exchange is skipped, the other links' states stay as they were, and
    its G gradients are not applied.

    With `delay=1` the chain takes the gradients of the previous step. The state holds them, one row per worker, 4 bytes
    a parameter more. What is sent then does not depend on this step, so it travels while the loss and its gradient are
    computed: a step takes as long as the slower of the two. Nothing is lost: a checkpoint includes these rows. The
    first step exchanges zeros. A gradient that is not finite causes a skip one step later.

    Args:
      *links: transformations in order; chains made by this function are flattened.
      accumulate: G, calls of `update` from one exchange to the next.
      delay: steps from a gradient to its exchange, 0 or 1.

    Warns:
      UserWarning: in `init`, for an unusual order, with the remedy.

    Raises:
      ValueError: if `accumulate` is below 1, or `delay` is not 0 or 1; if both are used; if either is used with a local
        method, which has steps of its own, or where gradients bypass the exchange; in `init`, for an order that is
        refused (see the guide); and in a step, for a delay with a link that takes the loss.
    """
    check_count("accumulate", accumulate, 1, "1 exchanges in every step")
    is_simple = accumulate == 1 or delay == 0
    check_range("delay", delay, "0 or 1, and 0 with accumulate=", delay in (0, 1) and is_simple, "0 exchanges at once")
    flat: list[optax.GradientTransformation] = []
    for link in links:
        check_transformation("A link of a chain", link)
        flat += link.links if isinstance(link, Chain) and (link.accumulate, link.delay) == (1, 0) else [link]
    composed = _chained(flat)
    if accumulate > 1:
        composed = _accumulated(composed, accumulate)
    composed = _delayed(composed) if delay else composed
    warned: set[str] = set()

    def init(params: Params) -> PyTree:
        state = composed.init(params)
        for message in check_chain(transformation, state, trained(params)):
            if message not in warned:
                warned.add(message)
                warn(message)
        return state

    transformation = Chain(init, composed.update)
    transformation.links, transformation.accumulate, transformation.delay = tuple(flat), accumulate, delay
    return transformation


def warn(message: str) -> None:
    """Warns at the line of the user, who may call `init` through a step or another library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


_BETWEEN = ("jaxcomm", "jax", "optax", "flax", "equinox", "functools", "contextlib")


def _chained(links: Sequence[optax.GradientTransformation]) -> optax.GradientTransformationExtraArgs:
    """Returns `optax.chain`, but gives the links after the exchange the arguments of all workers."""

    def init(params: Params) -> PyTree:
        return tuple(link.init(params) for link in links)

    def update(updates: PyTree, state: PyTree, params: Params = None, **extra_args: Any) -> tuple[Any, Any]:
        if len(state) != len(links):
            raise ValueError(
                f"A chain's state must have one for each link; got {len(state)} for {len(links)}. Initialise it with "
                "this chain."
            )
        new = []
        for link, old in zip(links, state, strict=True):
            updates, link_state = update_with_more(link, updates, old, params, extra_args)
            new.append(link_state)
            if extra_args and is_exchange_state(link_state) and link_state.method.period is None:
                extra_args = average_extra_args(extra_args, updates, link_state.method.axes)
        for link_state in filter(is_exchange_state, new):
            with jax.named_scope(FROZEN):
                updates = without_frozen(updates, link_state)
        return updates, tuple(new)

    return optax.GradientTransformationExtraArgs(init, update)


def average_extra_args(extra_args: dict[str, Any], mean_gradient: PyTree, axes: tuple[str, ...]) -> dict[str, Any]:
    """Turns one worker's arguments of a line search into those of all workers."""

    def mean(tree: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        with jax.named_scope(SCOPE), jax.named_scope(ARGUMENTS):
            return treedef.unflatten(dense_mean(to_varying([jnp.asarray(leaf) for leaf in leaves], axes), axes)[0])

    def mean_of(function: Callable[..., Any]) -> Callable[..., Any]:
        def value_fn(params: Params, *args: Any, **kwargs: Any) -> Any:
            value = jax.custom_vjp(lambda at: mean(function(at, *args, **kwargs)))

            def forward(at: Any) -> Any:
                # Tracked or not, the gradient of a mean is the mean of the gradients, and replicated.
                return mean(jax.value_and_grad(lambda at: function(at, *args, **kwargs))(to_varying(at, axes)))

            value.defvjp(forward, lambda gradient, scale: (jax.tree.map(lambda leaf: scale * leaf, gradient),))
            return value(params)

        return value_fn

    if "grad" in extra_args:
        extra_args = extra_args | {"grad": mean_gradient}
    if (value := extra_args.get("value")) is not None:
        is_known = all(is_tracked(name) and not varies(jnp.asarray(value), name) for name in axes)
        extra_args = extra_args | {"value": value if is_known else mean(value)}
    if value_fn := extra_args.get("value_fn"):
        extra_args = extra_args | {"value_fn": mean_of(value_fn)}
    return extra_args


def _accumulated(composed: optax.GradientTransformationExtraArgs, count: int) -> optax.GradientTransformationExtraArgs:
    def init(params: Params) -> AccumulatedState:
        inner = composed.init(params)
        if is_placeholder(params):
            return AccumulatedState(_NOT_OF_PARAMS, _NOT_OF_PARAMS, inner, _NOT_OF_PARAMS, count)
        exchange = get_exchange(inner)
        rule = f"1 for {exchange.method.name}, which exchanges once in several steps by itself"
        check_range("accumulate", count, rule, exchange.method.period is None, "Pass it more steps")
        rule = f"1 where gradients bypass {exchange.method.name}, and are applied in their own step"
        check_range("accumulate", count, rule, not lets_bypass(exchange), "Pass accumulate= to make_train_step")
        zeros = jax.tree.map(lambda leaf: jnp.zeros((1, *jnp.shape(leaf)), wide_type(jnp.result_type(leaf))), params)
        step = jnp.zeros((), jnp.int32)
        rows = PerWorker(zeros, exchange.method.axes)
        return AccumulatedState(step, jnp.zeros((), jnp.int32), inner, rows, count)

    def update(
        updates: PyTree, state: AccumulatedState, params: Params = None, **extra_args: Any
    ) -> tuple[Any, AccumulatedState]:
        axes = state.acc_grads.axes
        inner = vary_rows(state.inner_opt_state, ())

        def add(row: jax.Array, update: jax.Array) -> jax.Array:
            return row[0] + (update.astype(row.dtype) - row[0]) / (state.mini_step + 1).astype(row.dtype)

        total = jax.tree.map(add, state.acc_grads.rows, to_varying(updates, axes))

        def exchange(total: Any, inner: Any) -> Any:
            gradient = jax.tree.map(lambda mean, update: mean.astype(update.dtype), total, updates)
            out, new = composed.update(gradient, inner, params, **extra_args)
            return out, keep_states_unless(get_exchange(new).metrics.skipped == 0, new, inner)

        def wait(total: Any, inner: Any) -> Any:
            def quiet(node: PyTree) -> Any:
                return node.replace(metrics=ExchangeMetrics.zeros()) if is_exchange_state(node) else node

            return jax.tree.map(zeros_of, kinds), jax.tree.map(quiet, inner, is_leaf=is_exchange_state)

        kinds, _ = jax.eval_shape(exchange, total, inner)
        is_due = state.mini_step == count - 1
        out, inner = lax.cond(~is_due, wait, exchange, total, inner)  # reports count the false branch as the usual one
        rows = jax.tree.map(lambda mean: jnp.where(is_due, 0, mean)[None], total)
        gradient_step = state.gradient_step + is_due.astype(jnp.int32)
        new = AccumulatedState((state.mini_step + 1) % count, gradient_step, inner, PerWorker(rows, axes), count)
        return out, new

    typed: tuple[Any, Any] = init, update
    return optax.GradientTransformationExtraArgs(*typed)


def _delayed(composed: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    def init(params: Params) -> DelayedState:
        inner = composed.init(params)
        if is_placeholder(params):
            return DelayedState(inner, _NOT_OF_PARAMS)
        exchange = get_exchange(inner)
        name = exchange.method.name
        rule = f"0 for {name}, whose workers train on their own"
        check_range("delay", 1, rule, exchange.method.period is None, "Leave it out")
        rule = f"0 where gradients bypass {name}, and are applied in their own step"
        check_range("delay", 1, rule, not lets_bypass(exchange), "Leave delay out, or where=")
        zeros = jax.tree.map(lambda leaf: jnp.zeros((1, *jnp.shape(leaf)), jnp.result_type(leaf)), params)
        return DelayedState(inner, PerWorker(zeros, exchange.method.axes))

    def update(
        updates: PyTree, state: DelayedState, params: Params = None, **extra_args: Any
    ) -> tuple[Any, DelayedState]:
        del extra_args  # it is of this step, the gradients of the previous one
        axes = state.gradients.axes
        before = to_varying(jax.tree.map(lambda row: row[0], state.gradients.rows), axes)
        try:
            out, inner = composed.update(before, state.inner, params)
        except TypeError as error:
            if "keyword-only argument" not in str(error):
                raise
            raise ValueError(
                f"delay must be 0 with a link that takes the loss, or the gradient, of its step; got 1: {error}. Leave "
                "delay out, or that link."
            ) from error
        inner = keep_states_unless(get_exchange(inner).metrics.skipped == 0, inner, state.inner)
        with jax.named_scope(DELAYED):
            updates = to_varying(updates, axes)
            rows = jax.tree.map(lambda update, row: update[None].astype(row.dtype), updates, state.gradients.rows)
        return out, DelayedState(inner, PerWorker(rows, axes))

    typed: tuple[Any, Any] = init, update
    return optax.GradientTransformationExtraArgs(*typed)


class SplitChain(NamedTuple):
    """A chain that is split at its exchange.

    Attributes:
      before: the links before the exchange; with a local method, a worker's optimizer.
      exchange: the links before the exchange and the exchange itself; with a local method, the exchange alone.
      after: the links after the exchange.
      is_local: whether the exchange is a local method, whose workers have their own parameters.
      reverts_on_skip: that of the exchange's method.
      momentum: the momentum that the exchange applies before it compresses.
      whole_tensors: the parts of `exchange` that look at whole tensors, named for messages; empty if none does.
    """

    before: optax.GradientTransformation
    exchange: optax.GradientTransformation
    after: optax.GradientTransformation
    is_local: bool
    reverts_on_skip: bool
    momentum: float
    whole_tensors: str


def split_chain(
    tx: optax.GradientTransformation, params: Params, sizes: tuple[int, ...], axis_name: AxisName
) -> SplitChain:
    """Splits one exchange of gradients, or a `jaxcomm.chain` with one among its links, at the exchange.

    Raises:
      ValueError: for a chain that does not keep its links, has no exchange, accumulates, or has a delay; for an
        exchange whose `where` leaves parameters out (PartitionSpecs say which gradients are already reduced); and as
        `check_chain`.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params)
    state = jax.eval_shape(in_axes_of_workers(tx.init, sizes, axis_name), shapes)
    exchange, links = get_exchange(state), getattr(tx, "links", (tx,))
    rule, is_one = "1 in a chain that is split at its exchange", not isinstance(state, AccumulatedState)
    check_range("accumulate", getattr(tx, "accumulate", None), rule, is_one, "Pass accumulate= to make_train_step")
    rule = "0 in a chain that is split at its exchange, of a step with shards or stages"
    check_range("delay", 1, rule, not isinstance(state, DelayedState), "Leave it out")
    check_chain(tx, state, params)
    states = state if len(links) > 1 or isinstance(tx, Chain) else (state,)
    place = next((i for i, node in enumerate(states) if is_exchange_state(node)), None)
    if place is None:
        raise ValueError(
            "A chain that is split at its exchange must keep its links; got an optax.chain, which does not. Write "
            "jaxcomm.chain(jaxcomm.dct_dp(0.99), optax.adamw(3e-4)), which is the same otherwise."
        )
    if lets_bypass(exchange):
        raise ValueError(
            "With PartitionSpecs, which say which gradients are already reduced, an exchange must have others= where "
            "it has where=; got where= alone. Leave where= out."
        )
    is_local = exchange.method.period is not None
    outer = getattr(exchange.method, "outer", None)
    on_shards = [] if is_local else [(f"link {i}", link) for i, link in enumerate(links[:place])]
    on_shards += [] if outer is None else [("outer", outer)]
    whole_tensors = [name for name, link in on_shards if (tried := try_link(link, params)) and tried.mixes]
    whole_tensors += clips_in(exchange)
    parts = (links[:place], links[place if is_local else 0 : place + 1], links[place + 1 :])
    before, exchanging, after = (_chained(part) if part else optax.identity() for part in parts)

    def update(updates: PyTree, state: PyTree, params: Params = None, **extra_args: Any) -> tuple[Any, Any]:
        updates, state = optax.with_extra_args_support(after).update(updates, state, params, **extra_args)
        return without_frozen(updates, exchange), state

    return SplitChain(
        before,
        exchanging,
        optax.GradientTransformationExtraArgs(after.init, update),
        is_local=is_local,
        reverts_on_skip=exchange.method.reverts_on_skip,
        momentum=momentum_inside(exchange),
        whole_tensors=" and ".join(whole_tensors),
    )
