"""The rules of order in an Optax chain: checked by the states of its links, and by what the links do to small arrays.

The state of `optax.chain` is a tuple in the order of its links, and the state of an exchange names its method. Each
link is traced once and tried on arrays of a few numbers, which shows whether it clips, decays, descends or has
momentum. Where only a state is at hand, it is checked alone.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm.accounting.jaxpr import has_primitive, inner_jaxprs
from jaxcomm.checks import check_range
from jaxcomm.exchange import (
    Exchange,
    ExchangeState,
    ExchangeTransformation,
    clips_in,
    exchange_states,
    is_exchange_state,
    methods_in,
    momentum_inside,
)
from jaxcomm.types import AccumulatedState, DelayedState, Params, PyTree

_SMALL, _LARGE = np.float32(2.0**-13), np.float32(2.0**40)
_TRIED = 16
_PASSED = optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState


class Effects(NamedTuple):
    """The effects of a link on updates, each as the paths of the leaves that have it.

    Attributes:
      cuts: clips: small updates pass, large ones are bounded; or they are bounded before they enter its state, as in a
        chain of a clip and Adam.
      forgets_size: the output does not scale with the gradient (Adam and its kind).
      has_momentum: updates continue after the gradient has become zero.
      decays: adds a multiple of the parameter.
      descends: turns gradients into descent steps: has a learning rate.
      changes: is not the identity.
      mixes: an element of the output depends on other elements of the gradient.
      couples: it depends on the gradients of other leaves.
      adds: adds what depends neither on gradients nor on parameters: noise.
      stops: lets nothing pass.
    """

    cuts: frozenset[str]
    forgets_size: frozenset[str]
    has_momentum: frozenset[str]
    decays: frozenset[str]
    descends: frozenset[str]
    changes: frozenset[str]
    mixes: frozenset[str]
    couples: frozenset[str]
    adds: frozenset[str]
    stops: frozenset[str]


def try_link(link: optax.GradientTransformation, params: Params, most: int = _TRIED) -> Effects | None:
    """Tries a link on a tree like the parameters', with 2 elements along each dimension; None if the link fails.

    Of more leaves than `most`, so many are tried for all, to save time.
    """
    structure, ndims = jax.tree.structure(params), tuple(len(jnp.shape(leaf)) for leaf in jax.tree.leaves(params))
    try:
        return _try_link(link, structure, ndims, most)
    except TypeError:  # a link, or a tree, that cannot be hashed
        return _try_link.__wrapped__(link, structure, ndims, most)


@functools.lru_cache(maxsize=64)  # a chain is checked when it is initialised, and again wherever it is split
def _try_link(
    link: optax.GradientTransformation, structure: PyTree, ndims: tuple[int, ...], most: int
) -> Effects | None:
    probed = {round(i) for i in np.linspace(0, len(ndims) - 1, min(len(ndims), most))}
    for places in (probed, set(range(len(ndims)))):  # all, for a link with a mask of the parameters' structure
        try:  # in a thread of its own, which is in no trace and no mesh: small arrays are not a worker's
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(_effects, link, structure, ndims, places, probed).result()
        except Exception:  # it may want other arguments, or another tree: its effects are then unknown
            continue
    return None


def _effects(
    link: optax.GradientTransformation, structure: PyTree, ndims: tuple[int, ...], tensors: set[int], probed: set[int]
) -> Effects | None:
    """Tries a link on the `tensors` leaves, and returns its effects on those in `probed`."""
    pairs = jax.tree_util.tree_leaves_with_path(structure.unflatten(ndims))
    places = sorted(tensors)
    paths = [jax.tree_util.keystr(pairs[place][0]) for place in places]
    shapes = [(2,) * pairs[place][1] for place in places]
    wave = [np.cos(np.arange(np.prod(shape), dtype=np.float32) + i).reshape(shape) for i, shape in enumerate(shapes)]

    def tree(arrays: PyTree) -> PyTree:
        by_place = dict(zip(places, arrays, strict=True))
        return structure.unflatten([by_place.get(place, optax.MaskedNode()) for place in range(len(pairs))])

    params = tree([np.ones(shape, np.float32) for shape in shapes])
    init, state = _traced(link.init, params)
    update, (outs, new_state) = _traced(link.update, params, state, params)
    if jax.tree.structure(new_state) != jax.tree.structure(state):
        return None
    state_paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    count = len(jax.tree.leaves(outs))

    def run(first: Any, second: Any, scale: float = 1.0, weights: float = 1.0) -> tuple[list[np.ndarray], list[Any]]:
        """Returns the second of two updates, and the state after it."""
        params = [np.full(shape, weights, np.float32) for shape in shapes]
        state, out = init(*params), []
        for updates in (first, second):
            results = update(*(scale * _SMALL * x for x in updates), *state, *params)
            out, state = results[:count], results[count:]
        return [np.asarray(leaf, np.float64) for leaf in out], state

    nothing, shifted = [0 * x for x in wave], [x + (np.arange(x.size).reshape(x.shape) == 1) for x in wave]
    (rest_out, rest_state), (rest2, _) = run(nothing, nothing), run(nothing, nothing, weights=2.0)
    (out_once, once_state), (twice, _) = run(wave, wave), run(wave, wave, 2.0)
    (huge, huge_state), (_, huger_state) = (run(wave, wave, float(size * _LARGE)) for size in (1, 2))
    (after, _), (shifted_out, _) = run(wave, nothing), run(shifted, shifted, float(_LARGE))
    half = len(wave) // 2
    larger = [3 * x for x in wave[:half]] + wave[half:]
    half_larger, _ = run(larger, larger, float(_LARGE))
    if not any(out.any() for out in (*out_once, *huge)):  # it may accumulate
        return None

    # What of the state follows the gradients of each leaf: floats that are not the same for all sizes.
    bounded: dict[int, list[bool]] = {i: [] for i in range(len(paths))}
    adapts: set[int] = set()
    # Whether outputs of the other half have changed, or a number of the state follows the gradients of all leaves.
    is_coupled = not all(map(np.array_equal, huge[half:], half_larger[half:]))
    for path, *leaves in zip(state_paths, rest_state, once_state, huge_state, huger_state, strict=True):
        if not jnp.issubdtype(jnp.result_type(leaves[0]), jnp.floating):
            continue
        zero, small, large, larger = (np.asarray(leaf, np.float64) for leaf in leaves)
        if np.allclose(small, large, rtol=1e-3, atol=0):
            continue
        owners = [i for i, leaf in enumerate(paths) if path.endswith(leaf)]
        is_coupled |= not owners
        longest = max((len(paths[i]) for i in owners), default=0)
        owners = [i for i in owners if len(paths[i]) == longest] or list(range(len(paths)))
        follows = np.allclose(large - zero, float(_LARGE) * (small - zero), rtol=1e-3, atol=0)
        for i in owners:
            bounded[i].append(np.allclose(large, larger, rtol=1e-3, atol=0))
            if not follows:
                adapts.add(i)

    def where(holds: Any) -> frozenset[str]:
        return frozenset(path for i, path in enumerate(paths) if places[i] in probed and holds(i))

    def is_linear(i: int, out: list[np.ndarray], factor: float) -> bool:
        if out[i].shape != shapes[i]:  # of gradients of each row, which it reduces
            return True
        return np.allclose(out[i] - rest_out[i], factor * (out_once[i] - rest_out[i]), rtol=1e-3, atol=0)

    def cuts(i: int) -> bool:
        if bounded[i] and all(bounded[i]):
            return True
        # An optimizer that adapts to the size of gradients may be linear in its first steps.
        return i not in adapts and is_linear(i, twice, 2) and not is_linear(i, huge, float(_LARGE))

    def decays(i: int) -> bool:
        return bool(rest_out[i].any()) and np.allclose(rest2[i], 2 * rest_out[i], rtol=1e-3)

    return Effects(
        cuts=where(cuts),
        forgets_size=where(lambda i: not is_linear(i, twice, 2)),
        has_momentum=where(lambda i: not np.allclose(after[i], rest_out[i], rtol=1e-3, atol=0)),
        decays=where(decays),
        descends=where(lambda i: not np.sum((out_once[i] - rest_out[i]) * wave[i]) >= 0),  # or cannot tell: NaN at rest
        changes=where(lambda i: not np.array_equal(out_once[i], np.float64(_SMALL * wave[i])) or rest_out[i].any()),
        mixes=where(lambda i: shifted_out[i].reshape(-1)[0] != huge[i].reshape(-1)[0]),
        couples=where(lambda _: is_coupled),
        adds=where(lambda i: rest_out[i].any() and np.array_equal(rest2[i], rest_out[i])),
        stops=where(lambda i: not any(out[i].any() for out in (rest_out, out_once, huge))),
    )


def _traced(function: Any, *args: Any) -> tuple[Any, Any]:
    """Traces a function once; returns it as a function of its flat arguments, and the shapes of its output.

    What only reports (`jax.debug.callback`, `jax.debug.print`) is left out.

    Raises:
      ValueError: for other calls of the host, which may have side effects.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    silent = closed.replace(jaxpr=_without_reports(closed.jaxpr))
    return jax.extend.core.jaxpr_as_fun(silent), shapes


def _without_reports(jaxpr: Any) -> Any:
    equations = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.startswith("debug_"):
            continue
        if "callback" in name:
            raise ValueError(f"A link must be tried without calling the host; got {name}.")
        if name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            silent = inner.replace(jaxpr=_without_reports(inner.jaxpr))
            eqn = eqn.replace(params=eqn.params | {"jaxpr": silent}, effects=silent.effects)
        elif any(body.effects or has_primitive(body, lambda x: "callback" in x) for body in inner_jaxprs(eqn.params)):
            raise ValueError(f"A link must be tried without calling the host; got {name}.")
        equations.append(eqn)
    return jaxpr.replace(eqns=equations, effects=frozenset(e for eqn in equations for e in eqn.effects))


def check_chain(tx: optax.GradientTransformation, state: PyTree, params: Params) -> list[str]:
    """Checks the order of the transformations around an exchange.

    A gradient exchange takes each worker's gradient and returns the mean; the optimizer comes after it. A local
    exchange (`slim_dp`, `local_sgd`, `plump_dp` with p above 1) comes after a whole local optimizer and takes its
    updates. An order is refused if it loses gradients, counts them twice, or makes replicated state differ. An unusual
    order causes a warning. The rules are in docs/guide.md; those marked (*) need the links. A `jaxcomm.chain` calls
    this in its `init`, so that the rules hold wherever it is used.

    Args:
      tx: a transformation or a chain.
      state: its state, or the shapes of it.
      params: the parameters, or their shapes.

    Returns:
      The warnings; each says what is unusual, its effect, and the remedy.

    Raises:
      ValueError: for an order that is refused, with the remedy.
    """
    state = _without_steps(state)
    states = list(_flat(state))
    at = [place for place, node in enumerate(states) if is_exchange_state(node)]
    if len(at) > 1:
        raise ValueError(
            f"A chain must average every gradient once; got {' and '.join(states[i].method.name for i in at)} in one "
            "chain. Keep one (local_sgd and hierarchical take an exchange as an argument), or give the exchange "
            "where= and others=, if each is for a part of the parameters."
        )
    for node in states:
        if isinstance(node, optax.contrib.SplitRealAndImaginaryState) and next(exchange_states(node), None):
            raise ValueError(
                "Parameters must be real in a step that differentiates by itself; got split_real_and_imaginary around "
                "an exchange, whose gradients JAX gives conjugated. Conjugate them in a step of your own, under "
                "jaxcomm.data_parallel."
            )
        if len(states) > 1 and isinstance(node, AccumulatedState | DelayedState):
            raise ValueError(
                "accumulate= and delay= must be those of the outermost chain; got a jaxcomm.chain with one of them "
                "inside another, whose other links would run in every call. Pass it to the outer chain."
            )
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
    _check_inside(exchange.method, params)
    links, of_links = _with_states(tx, state)
    place = next((i for i, node in enumerate(of_links) if node is exchange), None)
    if place is None and not hasattr(tx, "links"):
        return _check_states(exchange, before, after)
    if place is None:
        raise ValueError(
            f"Chains in a jaxcomm.chain must keep their links too; got {exchange.method.name} in an optax.chain inside "
            "it. Write jaxcomm.chain there as well."
        )
    tried = [None if i == place else try_link(link, params) for i, link in enumerate(links)]
    if exchange.method.period is not None:
        _check_local(exchange, tried[:place], tried[place + 1 :])
        return []
    warned = _check_states(exchange, before, [])
    warned += _judge(exchange, [link for link in tried[:place] if link], [link for link in tried[place:] if link])
    return list(dict.fromkeys(warned))


def _check_inside(method: Exchange, params: Params) -> None:
    """Refuses an optimizer where an exchange takes an exchange, and an outer optimizer that does not descend."""
    for name in ("exchange", "others"):
        tx: Any = getattr(method, name, None)
        links: list[Any] = list(getattr(tx, "links", (tx,)))
        place = next((i for i, link in enumerate(links) if isinstance(link, ExchangeTransformation)), len(links))
        effects = [try_link(link, params) for link in links[place + 1 :]]
        steps = [f"{step}=" for step, usual in (("accumulate", 1), ("delay", 0)) if getattr(tx, step, usual) != usual]
        if steps or any(effect and effect.changes for effect in effects):
            raise ValueError(
                f"{name}= of {method.name} must return the mean gradient; got a chain with "
                f"{' and '.join(steps) or 'links that change it after its exchange'}. Put the optimizer, accumulate= "
                "and delay= into the outermost jaxcomm.chain."
            )
        if place < len(links):
            _check_inside(links[place].method, params)
    outer: Any = getattr(method, "outer", None)
    if outer is not None:
        check_outer(outer, params)


def check_outer(outer: optax.GradientTransformation, params: Params) -> None:
    """Refuses an outer optimizer that goes up: one without a learning rate."""
    effects = try_link(outer, params)
    descends = effects is None or bool(effects.descends)
    remedy = "Pass optax.sgd(0.7, momentum=0.9, nesterov=True), say, or put optax.scale_by_learning_rate behind"
    check_range("outer", "a transformation that adds gradients", "an optimizer that descends", descends, remedy)


def _without_steps(state: PyTree) -> Any:
    """Returns the state of a whole chain without what accumulates or delays around it, or changes hyperparameters."""
    if isinstance(state, AccumulatedState):
        return _without_steps(state.inner_opt_state)
    if isinstance(state, DelayedState):
        return _without_steps(state.inner)
    if isinstance(state, _PASSED) and next(exchange_states(state), None):
        return _without_steps(state.inner_state)
    return state


def _with_states(tx: Any, state: PyTree) -> tuple[list[Any], list[Any]]:
    """Returns the links of a `jaxcomm.chain`, or of an `optax.chain`, whose functions hold them, and their states.

    Chains that have an exchange inside an `optax.chain` are taken apart, too.
    """
    if hasattr(tx, "links"):
        return list(tx.links), list(state)
    inits, updates = (
        inspect.getclosurevars(function).nonlocals.get(name) if inspect.isfunction(function) else None
        for function, name in ((tx.init, "init_fns"), (tx.update, "update_fns"))
    )
    if not (isinstance(inits, tuple) and isinstance(updates, tuple) and len(inits) == len(updates) == len(state)):
        return [tx], [state]
    links, states = [], []
    for init, update, link_state in zip(inits, updates, state, strict=True):
        link, has_exchange = optax.GradientTransformationExtraArgs(init, update), any(exchange_states(link_state))
        parts = _with_states(link, link_state) if has_exchange else ([link], [link_state])
        links += parts[0]
        states += parts[1]
    return links, states


def check_slots(tx: optax.GradientTransformation, slots: PyTree, stages: Sequence[tuple[Params, PyTree]]) -> None:
    """Refuses a link of a pipeline's chain that goes by a tensor's name or rank.

    It would not do to the slots of a stage what it does to its tensors. `stages` has the shapes of every stage's
    tensors, and a like tree of the path of each one's slot.
    """
    places = [
        {jax.tree_util.keystr(path): at for (path, _), at in zip(leaves, jax.tree.leaves(paths), strict=True)}
        for leaves, paths in ((jax.tree_util.tree_leaves_with_path(tensors), paths) for tensors, paths in stages)
    ]
    for number, link in enumerate(getattr(tx, "links", ())):
        if isinstance(link, ExchangeTransformation) or (on_slots := try_link(link, slots, len(slots))) is None:
            continue
        for stage, ((tensors, _), slot_of) in enumerate(zip(stages, places, strict=True)):
            if (on_tensors := try_link(link, tensors, len(slot_of))) is None:
                continue
            for of_tensors, of_slots in zip(*(e._replace(couples=()) for e in (on_tensors, on_slots)), strict=True):
                if differing := [name for name, at in slot_of.items() if (name in of_tensors) != (at in of_slots)]:
                    raise ValueError(
                        "A link of a pipeline's chain must not go by a tensor's name or rank, since stages are stacked "
                        f"without names, and as vectors where their shapes differ; got link {number} of the chain, "
                        f"which would treat {differing[0]!r} of stage {stage} in another way. Leave its mask out, or "
                        "an optimizer of matrices; stages of equal shapes keep their ranks."
                    )


def check_stages(tx: optax.GradientTransformation, exchange: ExchangeState, slots: PyTree) -> list[str]:
    """Returns a warning for each link of a pipeline's chain that looks at the gradients of all tensors at once."""
    links = [(f"link {i} of the chain", link) for i, link in enumerate(getattr(tx, "links", ()))]
    links += [] if (outer := getattr(exchange.method, "outer", None)) is None else [("outer", outer)]
    found = clips_in(exchange)
    for name, link in links:
        tried = None if isinstance(link, ExchangeTransformation) else try_link(link, [slots, slots])
        found += [name] if tried is not None and tried.couples else []
    return [
        f"A pipeline's chain has for every stage the gradients of that stage alone; got {name}, which looks at those "
        "of all tensors, as a clip by their norm does: unlike on one device, every stage is treated by its own. Use a "
        "link that looks at one tensor at a time, such as optax.adaptive_grad_clip."
        for name in found
    ]


def check_descent(tx: optax.GradientTransformation, state: PyTree, params: Params) -> None:
    """Refuses an exchange of gradients alone, or with links that are all known and none of which descends.

    For a step that applies updates. A loop of one's own may apply the mean gradient by itself, so `check_chain` does
    not ask for a learning rate.
    """
    links: Any = getattr(tx, "links", (tx,) if isinstance(tx, ExchangeTransformation) else None)
    links, states = (links, links) if links else _with_states(tx, state)
    methods = [item.method for item in states if isinstance(item, ExchangeTransformation | ExchangeState)]
    if not methods or methods[0].period is not None:
        return
    optimizers = [
        link for link, item in zip(links, states, strict=True) if getattr(item, "method", None) is not methods[0]
    ]
    tried = [try_link(link, params) for link in optimizers]
    if all(link is not None and not link.descends for link in tried):
        name = methods[0].name
        raise ValueError(
            f"A step must get descent steps from its chain; got {name} and no learning rate: gradients would be added "
            f"to the parameters. Write jaxcomm.chain({name}(...), optax.sgd(0.1)). To maximise, negate the loss."
        )


def check_states(tree: PyTree) -> list[str]:
    """Checks the chains whose states are somewhere in a tree, by these states alone, as `check_chain` does.

    A tuple with the state of an exchange counts as that of a chain if all others in it are of Optax's transformations.
    """
    return [message for state in _chains(tree) for message in check_chain(optax.identity(), state, None)]


def check_frozen(tree: PyTree) -> list[str]:
    """Returns a warning for each exchange that freezes leaves, of chains of Optax whose states are in a tree."""

    def freezes(state: ExchangeState) -> bool:
        others = list(exchange_states(state.others))
        return state.method.others is not None and (not others or any(map(freezes, others)))

    names = [state.method.name for chain in _chains(tree) for state in exchange_states(chain) if freezes(state)]
    return [
        f"Frozen parameters must get no updates from the links after {name}; got an optax.chain, in which weight decay "
        "would shrink them. Write jaxcomm.chain, which keeps them as they are."
        for name in names
    ]


def _chains(tree: PyTree) -> list[Any]:
    """Returns the states in a tree that are those of chains with an exchange."""

    def is_chain(node: PyTree) -> bool:
        if type(node) is not tuple or not any(map(is_exchange_state, node)):
            return False
        links = [state for state in _flat(node) if not is_exchange_state(state)]
        return bool(links) and all(_is_optax(state) and not isinstance(state, dict) for state in links)

    return [node for node in jax.tree.leaves(tree, is_leaf=is_chain) if is_chain(node)]


def _check_states(exchange: ExchangeState, before: list[Any], after: list[Any]) -> list[str]:
    """Checks a gradient exchange by the states around it; returns warnings."""
    name, warned = exchange.method.name, []
    if exchange.method.period is not None:
        return []
    for node in before:
        inner = node.inner_state if hasattr(node, "hyperparams") else node
        # Hyperparameters, counters and random keys do not depend on gradients.
        if any(leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(inner)):
            remedy = (
                f"Leave it out: where one worker has NaN, {name} skips the step on all of them; or, if some are "
                "always NaN, keep no state: optax.stateless(lambda g, _: jax.tree.map(jnp.nan_to_num, g))"
                if isinstance(inner, optax.ZeroNansState)
                else f"Put it after {name}, or take a method that is made for it: dgc and iwp correct momentum on "
                "every worker, local_sgd and slim_dp come after a whole local optimizer"
            )
            raise ValueError(
                f"The state of a link before {name} must be replicated; got {type(node).__name__}, which would keep "
                f"each worker's own gradients in it. {remedy}."
            )
        if any(map(_is_key, jax.tree.leaves(inner))):
            warned.append(_shared_noise(name))
    for node in after:
        if momentum_inside(exchange) and any(hasattr(node, field) for field in ("trace", "mu", "ema")):
            _refuse_momentum(exchange)
    return warned


def _is_key(leaf: PyTree) -> bool:
    is_raw = leaf.dtype == jnp.uint32 and leaf.shape[-1:] in ((2,), (4,))
    return is_raw or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shared_noise(name: str) -> str:
    return (
        f"Noise before {name} is the same on all workers, since its key is replicated. Put optax.add_noise after "
        f"{name}, where it is that of one device. optax.contrib.differentially_private_aggregate goes before it with "
        "noise_multiplier=0 (then ignore this warning), and the variance of its noise on one device, that of all rows, "
        "is (noise_multiplier * l2_norm_clip / rows) ** 2."
    )


def _judge(exchange: ExchangeState, before: list[Effects], after: list[Effects]) -> Iterator[str]:
    """Checks a gradient exchange by the effects of the links around it; yields warnings."""
    name, momentum = exchange.method.name, momentum_inside(exchange)
    forgotten: frozenset[str] = frozenset()
    if exchange.method.where is None and (frozen := sorted(frozenset().union(*(link.stops for link in after)))):
        yield (
            f"{name} exchanges the gradients of parameters that get no updates: {', '.join(frozen[:8])}"
            f"{' and others' if frozen[8:] else ''}. Freeze them by {name}(where=..., others=optax.set_to_zero()), "
            "with where= for those that are trained: nothing is sent for the others."
        )
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
    if any((link.cuts or link.forgets_size) and not link.adds for link in before) and not has_error_feedback(exchange):
        yield (
            f"A clip, a norm or a sign before {name} is that of each worker's own gradient, and not of the mean, as on "
            f"one device: put it after {name}, which leaves nothing for a later step."
        )
    if any(link.adds for link in before):
        yield _shared_noise(name)
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


def has_error_feedback(exchange: ExchangeState) -> bool:
    """Returns whether a gradient exchange has error feedback."""
    return any(method.has_error_feedback for method in methods_in(exchange))


def _flat(state: PyTree) -> Iterator[Any]:
    """Yields the states of the links of nested chains, in order.

    A wrapper that passes every update through the chain in it, and keeps nothing of gradients itself, counts as it.
    """
    if type(state) is tuple or isinstance(state, OrderedDict):  # of optax.named_chain
        for part in state.values() if isinstance(state, OrderedDict) else state:
            yield from _flat(part)
    elif isinstance(state, _PASSED) and next(exchange_states(state), None):
        yield from _flat(state.inner_state)
    else:
        yield state


def _is_optax(node: PyTree) -> bool:
    return isinstance(node, dict) or type(node).__module__.partition(".")[0] == "optax"
