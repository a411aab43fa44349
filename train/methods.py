"""Makes the chain of transformations that trains with a method."""

import dataclasses

import optax

import jaxcomm as jc
from configs.experiment import BoundaryFields, Experiment
from configs.methods import Demo, Method, PlumpDp, PowerSgd, SlimDp
from jaxcomm.exchange import Where
from jaxcomm.methods.momentum import MomentumCorrection
from train.schedules import make_schedule


def run_name(
    method: Method,
    boundary: BoundaryFields | None = None,
    dense_layers: str = "exchange",
    embeddings: str = "exchange",
) -> str:
    """Returns the name of a run's folder and curve.

    It has the method, the options of a dense one (its type, its period), how dense layers and tables are trained if not
    like the rest, and the boundary. So a pipeline with a boundary has another folder than its baseline, which sends
    whole activations.
    """
    name = method.name
    if isinstance(method, PlumpDp):  # the baseline is one as well
        for field in dataclasses.fields(method):
            if (value := getattr(method, field.name)) != field.default:
                name += f"-{value}" if isinstance(value, str) else f"-{field.name}{'' if value is True else value}"
    name += "".join(f"-{way}" for way in (dense_layers, embeddings) if way != "exchange")
    if boundary is None or boundary == BoundaryFields():
        return name
    name += f"-rank-{boundary.rank}" if boundary.rank else ""
    name += f"-masked-{boundary.sparsity:g}" if boundary.sparsity or not boundary.rank else ""
    return name if boundary.value_dtype is None else f"{name}-{boundary.value_dtype}"


def make_exchange(
    method: Method,
    *,
    momentum: float,
    where: Where | None = None,
    others: optax.GradientTransformation | None = None,
    axis_name: str = "data",
) -> optax.GradientTransformation:
    """Makes a method's transformation from its options and the arguments below.

    Args:
      method: the options.
      momentum: for the methods that have it inside, `dgc` and `iwp`.
      where: chooses the parameters that are exchanged; the gradients of the others are already reduced, or go to
        `others`.
      others: a second exchange, for the rest.
      axis_name: the axis of workers to exchange over.

    Raises:
      ValueError: for a field out of range.
    """
    arguments = {"where": where, "others": others, "axis_name": axis_name}
    if isinstance(method, MomentumCorrection):
        arguments["momentum"] = momentum
    return dataclasses.replace(method, **arguments).transform()


def make_chain(experiment: Experiment, method: Method, where: Where | None = None) -> optax.GradientTransformation:
    """Makes the whole optimizer around the exchange: SGD with momentum, Adam or Muon, weight decay, a schedule.

    - Gradients are exchanged first: L2, exchange, momentum, decoupled decay, learning rate.
    - `dgc` and `iwp` have heavy-ball momentum inside: L2, exchange, decoupled decay, learning rate.
    - `demo` has its momentum inside as well: L2, exchange, sign, decoupled decay, learning rate.
    - Local methods come last: L2, momentum, decoupled decay, learning rate, exchange.
    - With slices, gradients are averaged densely inside each, and exchanged between them.

    The decay is either L2 or decoupled, by `experiment.decay`. Parameters are replicated, so adding L2 to each worker's
    gradient is the same as adding it to the mean; this also holds for gradients that are already reduced.

    Args:
      experiment: the fields; `experiment.method` is ignored.
      method: how the workers exchange.
      where: chooses the parameters that are exchanged; the gradients of the others are already reduced.

    Raises:
      ValueError: for a field out of range, or a method that does not go with the other fields.
    """
    has_momentum, is_local = isinstance(method, MomentumCorrection | Demo), method.period is not None
    layout = {f"--{name.replace('_', '-')}": value for name, value in experiment.layout.items()}
    for option in ("--delay", "--slices"):
        if is_local and option in layout:
            raise ValueError(
                f"With {option} workers must exchange gradients; got {run_name(method)}, whose workers train on their "
                f"own and exchange models, with {option} {layout[option]}. Leave {option} out, or take a method before "
                "the optimizer."
            )
    if experiment.slices > 1 and isinstance(method, PowerSgd):
        raise ValueError(
            f"--slices must be 1 with {run_name(method)}, which compresses matrices: between slices go shares of "
            f"tensors, which are vectors, and it would send them all dense; got {experiment.slices}. Leave --slices "
            "out, or take another method."
        )
    for option in ("--dense-layers", "--embeddings"):
        if option in layout and (has_momentum or is_local):
            raise ValueError(
                f"{option} must be exchange with {run_name(method)}, "
                f"{'whose momentum' if has_momentum else 'whose averaging of models'} gradients that bypass the "
                f"exchange would miss; got {layout[option]}. Take another method."
            )
    if experiment.optimizer != "sgd" and has_momentum:
        raise ValueError(
            f"--optimizer must be sgd with {run_name(method)}, which has momentum inside; got {experiment.optimizer}. "
            "Take another method, or sgd."
        )
    across = "slice" if experiment.slices > 1 else "data"
    inner, second_exchange = (where if experiment.slices == 1 else None), None
    if experiment.compress:
        inner, second_exchange = experiment.compress, jc.plump_dp(axis_name=across)
        if isinstance(method, MomentumCorrection):  # dense, with the same momentum
            second_exchange = jc.dgc(momentum=experiment.momentum, dense_below=2**31 - 1, axis_name=across)
    exchange = make_exchange(
        method, momentum=experiment.momentum, where=inner, others=second_exchange, axis_name=across
    )
    if experiment.slices > 1:
        exchange = jc.hierarchical(exchange, where=where, inside="data", across="slice")
    l2, momentum, tail = _optimizer(experiment)
    if is_local:
        return jc.chain(*l2, *momentum, *tail, exchange)
    if has_momentum:
        signs = [optax.scale_by_sign(), optax.scale(method.sign_size)] if isinstance(method, Demo) else []
        return jc.chain(*l2, exchange, *signs, *tail, delay=experiment.delay)
    return jc.chain(*l2, exchange, *momentum, *tail, delay=experiment.delay)


def make_optimizer(experiment: Experiment) -> optax.GradientTransformation:
    """Makes the optimizer without an exchange."""
    l2, momentum, tail = _optimizer(experiment)
    return optax.chain(*l2, *momentum, *tail)


Links = list[optax.GradientTransformation]


def _optimizer(experiment: Experiment) -> tuple[Links, Links, Links]:
    """Returns L2 and momentum, if there are any, and what comes after: decoupled decay, if any, and learning rate."""
    l2, momentum, decay = [], [], []
    if experiment.weight_decay and experiment.decay == "l2":
        l2 = [optax.add_decayed_weights(experiment.weight_decay)]
    elif experiment.weight_decay:
        decay = [optax.add_decayed_weights(experiment.weight_decay)]
    if experiment.optimizer == "adam":
        momentum = [optax.scale_by_adam(b1=experiment.momentum, b2=0.98, eps=1e-8)]
    elif experiment.optimizer == "muon":
        options = {"beta": experiment.momentum, "adam_b1": experiment.momentum, "nesterov": experiment.nesterov}
        momentum = [optax.contrib.muon(-1.0, adam_b2=0.98, consistent_rms=0.2, **options)]  # the rate comes after decay
    elif experiment.momentum:  # without momentum, a trace would only be a copy of the parameters: gigabytes in a DLRM
        momentum = [optax.trace(decay=experiment.momentum, nesterov=experiment.nesterov)]
    return l2, momentum, [*decay, optax.scale_by_learning_rate(make_schedule(experiment))]


def is_rare(method: Method, step: int) -> bool:
    """Returns whether a step, counted from 1, is known to cost the most: a new core, or a dense start or warm-up."""
    if isinstance(method, SlimDp):
        return step % (method.p * method.q) == 0
    return step <= (method.warmup_steps if isinstance(method, MomentumCorrection) else method.start)
