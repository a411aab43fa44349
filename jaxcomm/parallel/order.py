"""The rules of order in an Optax chain: checked by the states of its links, and by what the links do to small arrays.

The state of `optax.chain` is a tuple in the order of its links, and the state of an exchange names its method. A plain
chain is checked by its states alone. A `jaxcomm.chain` also keeps its links: each is tried on arrays of a few numbers,
which shows whether it clips, decays, descends or has momentum.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm.exchange import Exchange, ExchangeState, exchange_states, is_exchange_state
from jaxcomm.types import AccumulatedState, DelayedState

_SMALL, _LARGE = np.float32(2.0**-13), np.float32(2.0**40)
_TRIED = 16


class Effects(NamedTuple):
    """The effects of a link on updates, each as the paths of the leaves that have it.

    Attributes:
      cuts: clips: small updates pass, large ones are bounded.
      forgets_size: the output does not scale with the gradient (Adam and its kind).
      has_momentum: updates continue after the gradient has become zero.
      decays: adds a multiple of the parameter.
      descends: turns gradients into descent steps: has a learning rate.
      changes: is not the identity.
      mixes: an element of the output depends on other elements of the gradient.
    """

    cuts: frozenset[str]
    forgets_size: frozenset[str]
    has_momentum: frozenset[str]
    decays: frozenset[str]
    descends: frozenset[str]
    changes: frozenset[str]
    mixes: frozenset[str]


def try_link(link: optax.GradientTransformation, params: Any) -> Effects | None:
    """Tries a link on a tree like the parameters', with 2 elements along each dimension; None if the link fails.

    Of more than 16 leaves, 16 are tried for all, to save time.
    """
    structure, ndims = jax.tree.structure(params), tuple(len(jnp.shape(leaf)) for leaf in jax.tree.leaves(params))
    try:
        return _try_link(link, structure, ndims)
    except TypeError:  # a link, or a tree, that cannot be hashed
        return _try_link.__wrapped__(link, structure, ndims)


@functools.lru_cache(maxsize=64)  # a chain is checked when it is initialised, and again wherever it is split
def _try_link(link: optax.GradientTransformation, structure: Any, ndims: tuple[int, ...]) -> Effects | None:
    some = {round(i) for i in np.linspace(0, len(ndims) - 1, min(len(ndims), _TRIED))}
    for chosen in (some, set(range(len(ndims)))):  # all, for a link with a mask of the parameters' structure
        try:
            with jax.ensure_compile_time_eval():
                return _effects(link, structure, ndims, chosen, some)
        except Exception:  # it may want other arguments, or another tree: its effects are then unknown
            continue
    return None


def _effects(
    link: optax.GradientTransformation, structure: Any, ndims: tuple[int, ...], chosen: set[int], some: set[int]
) -> Effects | None:
    """Tries a link on the `chosen` leaves, and returns its effects on those in `some`."""
    pairs = jax.tree_util.tree_leaves_with_path(structure.unflatten(ndims))
    places = sorted(chosen)
    paths = [jax.tree_util.keystr(pairs[place][0]) for place in places]
    shapes = [(2,) * pairs[place][1] for place in places]
    wave = [np.cos(np.arange(np.prod(shape), dtype=np.float32) + i).reshape(shape) for i, shape in enumerate(shapes)]

    def tree(arrays: Any) -> Any:
        by_place = dict(zip(places, map(jnp.asarray, arrays), strict=True))
        return structure.unflatten([by_place.get(place, optax.MaskedNode()) for place in range(len(pairs))])

    def run(first: Any, then: Any, scale: float = 1.0, weights: float = 1.0) -> list[np.ndarray]:
        """Returns the second of two updates."""
        own = tree([np.full(shape, weights, np.float32) for shape in shapes])
        state = link.init(own)
        out: Any = None
        for updates in (first, then):
            out, state = link.update(tree([scale * _SMALL * x for x in updates]), state, own)
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(out)]

    nothing, other = [0 * x for x in wave], [x + (np.arange(x.size).reshape(x.shape) == 1) for x in wave]
    rest, rest2 = run(nothing, nothing), run(nothing, nothing, weights=2.0)
    once, twice, huge = run(wave, wave), run(wave, wave, 2.0), run(wave, wave, float(_LARGE))
    after, another = run(wave, nothing), run(other, other, float(_LARGE))
    if not any(out.any() for out in (*once, *huge)):  # it may accumulate
        return None

    def where(holds: Any) -> frozenset[str]:
        return frozenset(path for i, path in enumerate(paths) if places[i] in some and holds(i))

    def is_linear(i: int, out: list[np.ndarray], factor: float) -> bool:
        return np.allclose(out[i] - rest[i], factor * (once[i] - rest[i]), rtol=1e-3, atol=0)

    return Effects(
        cuts=where(lambda i: is_linear(i, twice, 2) and not is_linear(i, huge, float(_LARGE))),
        forgets_size=where(lambda i: not is_linear(i, twice, 2)),
        has_momentum=where(lambda i: not np.allclose(after[i], rest[i], rtol=1e-3, atol=0)),
        decays=where(lambda i: rest[i].any() and np.allclose(rest2[i], 2 * rest[i], rtol=1e-3)),
        descends=where(lambda i: np.sum((once[i] - rest[i]) * wave[i]) < 0),
        changes=where(lambda i: not np.array_equal(once[i], np.float64(_SMALL * wave[i])) or rest[i].any()),
        mixes=where(lambda i: another[i].reshape(-1)[0] != huge[i].reshape(-1)[0]),
    )


def check_chain(tx: optax.GradientTransformation, state: Any, params: Any) -> list[str]:
    """Checks the order of the transformations around an exchange.

    A gradient exchange takes each worker's gradient and returns the mean; the optimizer comes after it. A local
    exchange (`slim_dp`, `local_sgd`, `plump_dp` with p above 1) comes after a whole local optimizer and takes its
    updates. An order is refused if it loses gradients, counts them twice, or makes replicated state differ. An unusual
    order causes a warning. The rules are in docs/guide.md; those marked (*) are checked for a `jaxcomm.chain` alone.

    Args:
      tx: a transformation or a chain.
      state: its state, or the shapes of it.
      params: the parameters, or their shapes.

    Returns:
      The warnings; each says what is unusual, its effect, and the remedy.

    Raises:
      ValueError: for an order that is refused, with the remedy.
    """
    if isinstance(state, AccumulatedState):
        state = state.inner_opt_state
    if isinstance(state, DelayedState):
        state = state.inner
    states = list(_flat(state))
    at = [place for place, node in enumerate(states) if is_exchange_state(node)]
    if len(at) > 1:
        raise ValueError(
            f"A chain must average every gradient once; got {' and '.join(states[i].method.name for i in at)} in one "
            "chain. Keep one (local_sgd and hierarchical take an exchange as an argument), or give the exchange "
            "where= and others=, if each is for a part of the parameters."
        )
    for node in states:
        if not is_exchange_state(node) and next(exchange_states(node), None) and _is_optax(node):
            raise ValueError(
                f"An exchange must be a link of the chain itself; got {next(exchange_states(node)).method.name} inside "
                f"a transformation with the state {type(node).__name__}: workers would not all take part in every step "
                "with every parameter. Put the exchange before it; choose parameters by the exchange's where=, and "
                "accumulate gradients by jaxcomm.chain(..., accumulate=G) in the place of optax.MultiSteps, or by "
                "accumulate= of make_train_step."
            )
    if not at:
        return []
    exchange, before, after = states[at[0]], states[: at[0]], states[at[0] + 1 :]
    links = getattr(tx, "links", None)
    if links is None:
        _check_states(exchange, before, after)
        return []
    place = next((i for i, node in enumerate(state) if node is exchange), None)
    if place is None:
        raise ValueError(
            f"Chains in a jaxcomm.chain must keep their links too; got {exchange.method.name} in an optax.chain inside "
            "it. Write jaxcomm.chain there as well."
        )
    tried = [None if i == place else try_link(link, params) for i, link in enumerate(links)]
    if exchange.method.period is not None:
        _check_local(exchange, tried[:place], tried[place + 1 :])
        return []
    _check_states(exchange, before, [])
    return list(_judge(exchange, [link for link in tried[:place] if link], [link for link in tried[place:] if link]))


def _check_states(exchange: ExchangeState, before: list[Any], after: list[Any]) -> None:
    """Checks a gradient exchange by the states around it."""
    name = exchange.method.name
    if exchange.method.period is not None:
        return
    for node in before:
        inner = node.inner_state if hasattr(node, "hyperparams") else node
        # Hyperparameters, counters and random keys do not depend on gradients.
        if any(leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(inner)):
            raise ValueError(
                f"The state of a link before {name} must be replicated; got {type(node).__name__}, which would keep "
                f"each worker's own gradients in it. Put it after {name}, or take a method that is made for it: dgc "
                "and iwp correct momentum on every worker, local_sgd and slim_dp come after a whole local optimizer."
            )
    for node in after:
        if momentum_inside(exchange) and any(hasattr(node, field) for field in ("trace", "mu", "ema")):
            _refuse_momentum(exchange)


def _judge(exchange: ExchangeState, before: list[Effects], after: list[Effects]) -> Iterator[str]:
    """Checks a gradient exchange by the effects of the links around it; yields warnings."""
    name, momentum = exchange.method.name, momentum_inside(exchange)
    forgotten: frozenset[str] = frozenset()
    for link in after:
        if link.cuts - forgotten and has_error_feedback(exchange):
            raise ValueError(
                f"Gradients must be clipped before an exchange with error feedback; got a clip after {name}: it would "
                f"cut off gradients that have left the residual, and they never come back. Put it before {name}, where "
                "it clips each worker's gradient."
            )
        if momentum and link.has_momentum:
            _refuse_momentum(exchange)
        if momentum and link.decays - forgotten and not link.forgets_size:
            yield (
                f"Weight decay after {name} has none of its momentum of {momentum:g}, and decays less than L2 under "
                f"momentum: put optax.add_decayed_weights before {name}."
            )
        forgotten = forgotten | link.forgets_size
    if any(link.descends for link in before) and has_error_feedback(exchange):
        yield (
            f"A learning rate before {name} enters the residual, which then mixes the rates of several steps: put it "
            f"after {name}."
        )
    if any(link.decays & forgotten for link in before):
        yield (
            f"Weight decay before {name} is L2, which the optimizer after it normalises with the gradient: put it "
            "after the optimizer, as optax.adamw(weight_decay=) does."
        )


def _check_local(exchange: ExchangeState, before: list[Effects | None], after: list[Effects | None]) -> None:
    """Checks a local exchange by the effects of the links around it."""
    name = exchange.method.name
    if all(link is not None and not link.descends for link in before):
        raise ValueError(
            f"{name} must come after a whole local optimizer; got no learning rate before it: gradients would be added "
            f"to the parameters. Write jaxcomm.chain(optax.sgd(0.1), {name}(...))."
        )
    if any(link is not None and link.changes for link in after):
        raise ValueError(
            f"{name} must be the last link that changes updates; got one after it: workers would leave the merged "
            f"model. Put it before {name}."
        )


def _refuse_momentum(exchange: ExchangeState) -> None:
    name = exchange.method.name
    raise ValueError(
        f"Momentum must be applied once; got an optimizer with momentum after {name}(momentum="
        f"{momentum_inside(exchange):g}). Use optax.sgd(learning_rate), without momentum=, or {name}(momentum=0)."
    )


def methods_in(exchange: ExchangeState) -> list[Exchange]:
    """Returns the method of a gradient exchange, and those of the exchanges that it holds."""
    return [exchange.method, *(held.method for held in exchange_states((exchange.memory, exchange.others)))]


def momentum_inside(exchange: ExchangeState) -> float:
    """Returns the momentum that a gradient exchange applies before it compresses."""
    return max(method.momentum_inside for method in methods_in(exchange))


def has_error_feedback(exchange: ExchangeState) -> bool:
    """Returns whether a gradient exchange has error feedback."""
    return any(method.has_error_feedback for method in methods_in(exchange))


def _flat(state: Any) -> Iterator[Any]:
    """Yields the states of the links of nested chains, in order."""
    if type(state) is tuple:
        for part in state:
            yield from _flat(part)
    else:
        yield state


def _is_optax(node: Any) -> bool:
    return isinstance(node, dict) or type(node).__module__.partition(".")[0] == "optax"
