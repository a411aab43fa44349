"""The order of the transformations in an Optax chain: read from their closures, and judged.

Optax keeps no list of a chain's links. But `optax.chain(...).update` holds its links' functions in its closure, and the
qualified name of such a function ("trace.<locals>.update_fn") begins with the factory that made it, whose arguments are
in the closure in turn. What is found this way is judged; what is not is left alone.
"""

import functools
import inspect
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import optax


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Exchanges, by the names of their factories.
GRADIENT_EXCHANGES = _names("plump_dp quant_dp iwp dct_dp terngrad dgc powersgd sign topk random_k hierarchical")
LOCAL_EXCHANGES = frozenset({"slim_dp", "local_sgd"})
EXCHANGES = GRADIENT_EXCHANGES | LOCAL_EXCHANGES
NO_RESIDUAL = frozenset({"plump_dp", "quant_dp", "terngrad"})
MOMENTUM_INSIDE = frozenset({"dgc", "iwp"})

# Optax's factories, by what they do to updates.
CLIPS = _names("adaptive_grad_clip clip clip_by_block_rms clip_by_global_norm")
RATES = frozenset({"scale", "scale_by_schedule"})
LINEAR = _names("apply_every ema scale_by_optimistic_gradient trace")
NORMALIZING = _names(
    "scale_by_acprop scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan scale_by_ademamix scale_by_adopt "
    "scale_by_amsgrad scale_by_belief scale_by_factored_rms scale_by_galore scale_by_lbfgs scale_by_lion scale_by_muon "
    "scale_by_novograd scale_by_radam scale_by_rms scale_by_rprop scale_by_rss scale_by_simplified_ademamix "
    "scale_by_sm3 scale_by_sophia scale_by_stddev scale_by_yogi"
)
OWN_RATE = _names(
    "dadapt_adamw momo momo_adam prodigy scale_by_backtracking_linesearch scale_by_cocob "
    "scale_by_distance_over_gradients scale_by_dog scale_by_dowg scale_by_madgrad scale_by_zoom_linesearch"
)
WATCHING = frozenset({"monitor", "snapshot"})
STATELESS = _names(
    "add_decayed_weights add_noise centralize identity keep_params_nonnegative normalize normalize_by_update_norm "
    "scale_by_param_block_norm scale_by_param_block_rms scale_by_shape scale_by_sign scale_by_trust_ratio"
)
# Those whose state depends on the updates that they have seen.
STATEFUL = LINEAR | NORMALIZING | OWN_RATE | WATCHING | {"MultiSteps", "apply_if_finite", "schedule_free", "zero_nans"}
# After these the size of an update is no longer that of the gradients in it.
FORGET_SIZE = NORMALIZING | OWN_RATE | {"normalize", "normalize_by_update_norm", "scale_by_sign"}
# Those with momentum, and the variable of their closure that weighs the past. Unless it is seen to be 0, there is some.
MOMENTUM = _names(
    "dadapt_adamw ema momo momo_adam prodigy scale_by_acprop scale_by_adam scale_by_adamax scale_by_adan "
    "scale_by_ademamix scale_by_adopt scale_by_amsgrad scale_by_belief scale_by_lion scale_by_madgrad scale_by_muon "
    "scale_by_novograd scale_by_radam scale_by_simplified_ademamix scale_by_sm3 scale_by_sophia scale_by_yogi trace"
)
PAST = ("b1", "beta", "beta1", "decay", "momentum")

# What holds one other transformation, by the name of the variable that does.
WRAPPERS = {"already_mean": "exchange", "schedule_free": "base_optimizer", "with_extra_args_support": "tx"}
WRAPPERS |= dict.fromkeys(
    _names("apply_if_finite conditionally_mask conditionally_transform flatten masked split_real_and_imaginary"),
    "inner",
)
# Why an exchange cannot be in one of these, and what to do.
NOT_AROUND = {
    "already_mean": "what it passes by would get none of its momentum; take momentum=0, and momentum after it",
    "MultiSteps": "it exchanges in every small step, and keeps the gradients of each worker in a state that is one for "
    "all; accumulate in loss_fn, or put MultiSteps around the optimizer alone",
    "apply_if_finite": "each worker would decide by its own gradient whether to take part, and the others would wait; "
    "leave it out, since an exchange skips non-finite steps on all workers alike, or put it around the optimizer alone",
    "conditionally_mask": "other steps would lose their gradients; put it around the optimizer alone",
    "conditionally_transform": "other steps would apply each worker's own gradient; put it around the optimizer alone",
}
SOME_NUMBER = 0.5  # stands for a hyperparameter that optax.inject_hyperparams takes from a schedule


@dataclass(frozen=True, eq=False)
class Link:
    """One transformation of a chain, with what it is in.

    Attributes:
      name: of the factory, as far as the closure tells.
      args: the variables of the closure, by name.
      known: whether this library or Optax made it, and its name is known here.
      within: the names of the wrappers around it, outermost first.
      part: which part of the parameters it gets: the label in every `optax.partition` (by its set of labels), the
        identity of an `optax.masked`'s mask.
      inner: the exchanges in an exchange that is a wrapper.
    """

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    known: bool = False
    within: tuple[str, ...] = ()
    part: Mapping[Hashable, Hashable] = field(default_factory=dict)
    inner: tuple["Link", ...] = ()

    def __str__(self) -> str:
        labels = "".join(f"[{label!r}]" for key, label in self.part.items() if isinstance(key, frozenset))
        return self.name + labels

    def is_in(self, names: Container[str]) -> bool:
        """Returns whether this is one of some factories."""
        return self.known and self.name in names

    def meets(self, other: "Link") -> bool:
        """Returns whether some parameter gets both. Two different masks are taken for two parts."""
        return all(other.part.get(key, label) == label for key, label in self.part.items())

    @property
    def keeps_residual(self) -> bool:
        """Whether an exchange has error feedback."""
        if self.name == "hierarchical":
            return any(link.keeps_residual for link in self.inner)
        return self.is_in(GRADIENT_EXCHANGES - NO_RESIDUAL)

    @property
    def momentum(self) -> float:
        """The momentum that an exchange applies before it compresses: a variable, or the attribute of one."""
        if self.name == "hierarchical":
            return max((link.momentum for link in self.inner), default=0.0)
        if not self.is_in(MOMENTUM_INSIDE):
            return 0.0
        values = [self.args.get("momentum"), *(getattr(value, "momentum", None) for value in self.args.values())]
        return next((number for number in map(_number, values) if number is not None), 0.0)

    @property
    def has_momentum(self) -> bool:
        """Whether a link of Optax has momentum that is not 0."""
        return self.is_in(MOMENTUM) and not any(_number(self.args.get(name)) == 0 for name in PAST)

    @property
    def is_negative_rate(self) -> bool:
        """Whether this is a learning rate, and not the constant that undoes a loss's scale."""
        return self.is_in({"scale_by_schedule"}) or (
            self.is_in({"scale"}) and (_number(self.args.get("step_size")) or 0) <= 0
        )


def check_chain(tx: optax.GradientTransformation) -> list[str]:
    """Finds the order of the transformations in an Optax chain, and judges it.

    Two kinds of exchange exist. A gradient exchange takes each worker's own gradient and gives the mean; the optimizer
    comes after it. A local exchange (`slim_dp`, `local_sgd`, `plump_dp` with p above 1) comes after a whole local
    optimizer and takes its updates. Refused is what loses gradients, counts them twice, or lets the workers' parameters
    or states part; a warning is for what is merely unusual.

    | found                                                      | verdict                                          |
    | ---------------------------------------------------------- | ------------------------------------------------ |
    | two exchanges of the same parameters                       | refused: averaged twice                          |
    | a state that depends on gradients, before a gradient       | refused: it is each worker's own and kept as one |
    |   exchange: momentum, Adam, zero_nans, snapshot, ...       |                                                  |
    | clipping after an exchange with error feedback, no         | refused: cuts off what has left the residual     |
    |   normalising optimizer (Adam and its kind) in between     |                                                  |
    | momentum after dgc or iwp with momentum > 0                | refused: momentum twice                          |
    | dgc or iwp with momentum > 0 in already_mean               | refused: some parameters would have no momentum  |
    | a local exchange without a learning rate before it         | refused: it would ascend                         |
    | what changes updates after a local exchange                | refused: workers leave the merged model          |
    | an exchange in MultiSteps, apply_if_finite or              | refused: workers would not take the same step,   |
    |   conditionally_transform, conditionally_mask              |   or lose gradients between exchanges            |
    | an exchange in optax.partition, where the parameters of    | refused: they would part                         |
    |   another label have none and are not set to zero          |                                                  |
    | a local exchange in optax.partition or optax.masked        | refused: the other parameters would part         |
    | an exchange in optax.masked, or of all parameters that are | warning: the others stay each worker's own, and  |
    |   not set to zero in optax.partition                       |   JAX refuses that on a mesh, even for zeros     |
    | several exchanges, of different parameters                 | warning: a skip in one is not a skip in all      |
    | learning rate before an exchange with error feedback       | warning: the residual mixes learning rates       |
    | weight decay before an exchange, Adam or its kind after it | warning: L2 that is not decoupled                |
    | weight decay after dgc or iwp with momentum > 0            | warning: it has no momentum, as L2 would         |

    Nothing is said about clipping, weight decay, noise and a constant positive scale before an exchange: they belong to
    the local gradient. Nor about weight decay between an exchange and momentum, `chain(dct_dp(), add_decayed_weights(),
    sgd(momentum=))`: parameters are the same on every worker, so decay that is added to the mean is the mean of decay
    added to every gradient, and momentum takes it as in dense SGD with L2; before the exchange it would wait in the
    residual with the gradient. With dgc and iwp, momentum is over when the mean comes back: decay that is added then is
    that of SGDW, 1 - momentum times as strong. (Paddle's DGC lost 2% of ResNet-50's accuracy on ImageNet that way.)

    Clipping after error feedback is refused rather than warned about, because gradients are lost. A mean comes in
    bursts that hold the residuals of many steps; dense clipping cuts a step's gradient, this one cuts what was owed,
    which has left the residual and never comes back. Behind Adam and its kind, as in `optax.adafactor`, an update no
    longer has the size of the gradients in it, and the clip bounds a step.

    What is not recognised, such as a transformation of your own and what it wraps, is left alone: neither judged nor
    refused. Of `local_sgd`, what it holds is not judged. `init_state` calls this and emits the warnings.

    Args:
      tx: a transformation or a chain.

    Returns:
      The warnings, each with what is unusual, what happens and the remedy; empty for a chain in order.

    Raises:
      ValueError: for what the table says is refused.

    References:
      Lin et al., "Deep Gradient Compression", ICLR 2018, sections 3.1 and 3.2: momentum correction, local clipping.
      https://github.com/PaddlePaddle/Paddle/pull/21278: weight decay goes before the accumulation.
    """
    links = chain_links(tx, (), {})
    order = "optax.chain(" + ", ".join(str(link) for link in links) + ")"
    exchanges = [link for link in links if link.is_in(EXCHANGES)]
    for first, second in combinations(exchanges, 2):
        if first.meets(second):
            raise ValueError(
                f"A chain averages every gradient once over the workers, got {order}: {second.name} would get what "
                f"{first.name} has made the same everywhere, and average it again; keep one of them (local_sgd and "
                "hierarchical take the exchange that they use as an argument)."
            )
    for exchange, wrapper in product(exchanges, NOT_AROUND):
        if wrapper in exchange.within and (wrapper != "already_mean" or exchange.momentum > 0):
            raise ValueError(
                f"An exchange is not inside {wrapper}, got {order} with {exchange.name} in it: {NOT_AROUND[wrapper]}."
            )
    messages = list(_parts(links, exchanges, order))
    for exchange in exchanges:
        at = next(place for place, link in enumerate(links) if link is exchange)
        before = [link for link in links[:at] if link.meets(exchange)]
        after = [link for link in links[at + 1 :] if link.meets(exchange)]
        judge = _local if exchange.is_in(LOCAL_EXCHANGES) else _gradient
        messages += judge(before, exchange, after, order)
    return messages


def _gradient(before: list[Link], exchange: Link, after: list[Link], order: str) -> Iterator[str]:
    """Judges what is around a gradient exchange; yields warnings."""
    name = exchange.name
    for link in before:
        if link.is_in(STATEFUL):
            raise ValueError(
                f"The state of a chain is one for all workers, got {order}: {link.name} before {name} would keep each "
                f"worker's own gradients in it; put it after {name}, or take a method that is made for it: dgc and iwp "
                "correct momentum on every worker, local_sgd and slim_dp come after a whole local optimizer."
            )
        if link.is_negative_rate and exchange.keeps_residual:
            yield (
                f"A learning rate is usually applied after an exchange with error feedback, got {order}: the residual "
                f"of {name} keeps updates of earlier steps, and mixes those of different learning rates; put "
                f"{link.name} after {name}."
            )
    for decay, adaptive in product(before, after):
        if decay.is_in({"add_decayed_weights"}) and adaptive.is_in(FORGET_SIZE) and decay.meets(adaptive):
            yield (
                f"Weight decay is usually decoupled from {adaptive.name}, got {order}: add_decayed_weights before "
                f"{name} enters the gradient as L2, and is normalised with it; put it after {adaptive.name}, as "
                "optax.adamw(weight_decay=) does."
            )
            break
    for at, link in enumerate(after):
        is_gradient = not any(earlier.is_in(FORGET_SIZE) and earlier.meets(link) for earlier in after[:at])
        if link.is_in(CLIPS) and is_gradient and exchange.keeps_residual:
            raise ValueError(
                f"Gradients are clipped before an exchange with error feedback, got {order}: {link.name} after {name} "
                "would cut off gradients that have left the residual, and they never come back; put it before "
                f"{name}, where it clips each worker's own gradient."
            )
        if link.has_momentum and exchange.momentum > 0:
            raise ValueError(
                f"Momentum is applied once, got {order}: {name} has momentum={exchange.momentum} and "
                f"{link.name} would apply it again; use optax.sgd(learning_rate) without momentum after {name}, or "
                f"{name} with momentum=0."
            )
        if link.is_in({"add_decayed_weights"}) and is_gradient and exchange.momentum > 0:
            yield (
                f"Weight decay usually has the momentum that the gradient has, got {order}: add_decayed_weights after "
                f"{name} gets none of its momentum, and decays less than SGD with L2 and momentum; put it before "
                f"{name}."
            )


def _local(before: list[Link], exchange: Link, after: list[Link], order: str) -> Iterator[str]:
    """Judges what is around a local exchange. There is nothing to warn about."""
    name = exchange.name
    if all(link.is_in(STATELESS | LINEAR | NORMALIZING | CLIPS | WATCHING | {"zero_nans"}) for link in before):
        raise ValueError(
            f"{name} exchanges the updates of a whole local optimizer, got {order}, which applies no learning rate "
            "before it: raw gradients would be added to the parameters, and the loss would rise; put the optimizer "
            f"first, optax.chain(optax.sgd(0.1), {name}(...))."
        )
    for link in after:
        if link.known and not link.is_in(EXCHANGES | WATCHING | {"identity"}):
            raise ValueError(
                f"{name} gives the updates that lead to the merged model, got {order}: {link.name} after it would "
                f"change them, and the workers would leave that model; put it before {name}."
            )
    yield from ()


def _parts(links: list[Link], exchanges: list[Link], order: str) -> Iterator[str]:
    """Judges exchanges that get a part of the parameters; yields warnings."""
    for exchange in exchanges:
        if exchange.is_in(LOCAL_EXCHANGES) and exchange.part:
            raise ValueError(
                f"A local method leads all parameters to one model, got {order} with {exchange.name} for some: the "
                "others would part for good; put it after optax.partition or optax.masked."
            )
    is_part = any("masked" in exchange.within for exchange in exchanges)
    for labels in {key for exchange in exchanges for key in exchange.part if isinstance(key, frozenset)}:
        for label in sorted(labels, key=str):
            own = [link for link in links if labels in link.part and link.part[labels] == label]
            if any(link.is_in(EXCHANGES) or not link.known for link in own):
                continue
            is_part = True
            if not any(link.is_in({"set_to_zero"}) for link in own):
                raise ValueError(
                    f"All parameters are exchanged, got {order} with an exchange for some labels of optax.partition "
                    f"and none for {label!r}: each worker would apply its own gradient to those; put the exchange "
                    "before optax.partition."
                )
    names = ", ".join(exchange.name for exchange in exchanges)
    if len(exchanges) > 1:
        yield (
            f"A chain usually has one exchange for all parameters, got {order}: if {exchanges[0].name} skips a step, "
            f"the train step skips it, and loses what the others ({names}) have sent; put one exchange before "
            "optax.partition(...) or optax.masked(...) of the optimizers."
        )
    elif is_part:
        yield (
            f"An exchange usually gets all parameters, got {order} with {names} for some: the updates of the others "
            "stay each worker's own, which JAX refuses on a mesh, even for zeros; put the exchange before "
            "optax.partition or optax.masked, and leave frozen parameters out of the tree."
        )


def chain_links(tx: Any, within: tuple[str, ...], part: Mapping[Hashable, Hashable]) -> list[Link]:
    """Returns the links of a transformation in order; those of the labels of a partition one after the other."""
    update = getattr(tx, "update", None)
    steps = getattr(update, "__self__", None)
    if isinstance(steps, optax.MultiSteps):
        links = chain_links(steps.inner_opt, (*within, "MultiSteps"), part)
        return [*links, Link("MultiSteps", known=True, within=within, part=part)]
    package, name, args = made_by(update)
    if package == "jaxcomm" and name != "already_mean":
        inner = [value for value in args.values() if isinstance(value, optax.GradientTransformation)]
        inner = tuple(link for value in inner for link in chain_links(value, (), {})) if name == "hierarchical" else ()
        return [Link(name, args, name in EXCHANGES, within, part, inner)]
    if package not in ("optax", "jaxcomm"):
        return [Link(name, args, False, within, part)]
    _, _, init_args = made_by(getattr(tx, "init", None))
    if name == "chain" and len(args.get("update_fns", ())) == len(init_args.get("init_fns", ())) > 0:
        pairs = zip(init_args["init_fns"], args["update_fns"], strict=True)
        return [link for pair in pairs for link in chain_links(optax.GradientTransformation(*pair), within, part)]
    if name == "named_chain" and "transforms" in args:
        return [link for _, one in args["transforms"] for link in chain_links(one, within, part)]
    if name == "partition" and "transforms" in args:
        ones: Mapping[Hashable, Any] = args["transforms"]
        within, labels = (*within, name), frozenset(ones)
        return [link for label, one in ones.items() for link in chain_links(one, within, {**part, labels: label})]
    if name == "wrapped_transform":
        return _injected(args, init_args, (*within, "inject_hyperparams"), part)
    if WRAPPERS.get(name) in args:
        inside = {**part, "mask": id(args["mask"])} if "mask" in args else part
        links = chain_links(args[WRAPPERS[name]], (*within, name), inside)
        return [*links, Link(name, args, True, within, part)] if name in STATEFUL else links
    if name == "add_decayed_weights" and _number(args.get("weight_decay")) == 0:
        name = "identity"
    known = STATEFUL | CLIPS | RATES | STATELESS | {"set_to_zero", "scale_by_polyak"}
    return [Link(name, args, name in known, within, part)]


def _injected(
    args: Mapping[str, Any], init_args: Mapping[str, Any], within: tuple[str, ...], part: Mapping[Hashable, Hashable]
) -> list[Link]:
    """Returns the links of what `optax.inject_hyperparams` makes in every step."""
    try:
        scheduled = dict.fromkeys(args["sched_hps"], SOME_NUMBER)
        made = args["inner_factory"](**args["other_hps"], **init_args["numeric_hps"], **scheduled)
    except Exception:  # a factory may refuse any argument, and what cannot be made is not known
        return [Link("inject_hyperparams", args, False, within, part)]
    return chain_links(made, within, part)


def made_by(function: Any) -> tuple[str, str, dict[str, Any]]:
    """Returns the package and the factory that a function comes from, and the variables in its closure."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    if not inspect.isfunction(function):
        return "", getattr(function, "__qualname__", type(function).__name__), {}
    names = function.__qualname__.split(".<locals>.")
    return function.__module__.partition(".")[0], names[max(len(names) - 2, 0)], _closure(function)


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the variables of a function's closure that are set."""
    variables = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # not set yet, or deleted
            continue
    return variables


def _number(value: Any) -> float | None:
    """Returns a value as a number, or None where it is none, or is not known yet."""
    try:
        return float(value)
    except (TypeError, ValueError):  # a tracer's is a TypeError
        return None
