"""Finds a plan: the exchange of every tensor and the stage of every block, by an integer program."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import methods
from jaxcomm.accounting.report import trained_shapes, wire_report
from jaxcomm.checks import check_range
from jaxcomm.exchange import Exchange, leaf_name
from jaxcomm.placement.plan import Plan
from jaxcomm.placement.problem import Block, Device, Option, Problem, Tensor
from jaxcomm.placement.solve import Assignment, NotInTimeError, solve
from jaxcomm.planner.advice import Advice, candidates
from jaxcomm.planner.costs import method_of
from jaxcomm.planner.dense_layers import WAYS, LayerCost
from jaxcomm.types import Params

Shapes = Mapping[str, tuple[int, ...]]  # of the parameters, by path

_PROBES = ((512, 512), (2048, 2048))  # shapes that show whether a method's bytes are proportional to elements
_NOISE = (256, 64)  # the shape of the noise that errors are measured on
_PARAMETER_COPIES = 3  # of 4 bytes a parameter, that a device keeps in addition to the exchange's state


@dataclass(frozen=True)
class ModelBlock:
    """A part of a model that stays in one stage, for `make_plan`.

    Attributes:
      name: its name in messages.
      leaves: the paths of its parameters, as `where=` gets them.
      seconds: forward, backward and optimizer for one worker's batch, on a device of speed 1.
      memory: bytes of activations and anything else but parameters, gradients and the exchange's state.
      boundary_bytes: bytes that cross in a step if the model is cut after this block, for each worker, both directions
        together. For a boundary that learns, the bytes of every rank that is possible: {rank: bytes}.
    """

    name: str
    leaves: tuple[str, ...]
    seconds: float
    memory: int = 0
    boundary_bytes: float | Mapping[int, float] = 0.0

    def crossing(self, rank: int | None) -> float:
        """Returns the bytes of a cut after this block, with boundaries of this rank; None: there are no cuts."""
        size = self.boundary_bytes
        return (0.0 if rank is None else size[rank]) if isinstance(size, Mapping) else size


def make_plan(
    advice: Advice,
    params: Params,
    *,
    methods: Mapping[str, optax.GradientTransformation] | None = None,
    error_budget: float | None = None,
    gradient: Any = None,
    blocks: Sequence[ModelBlock] | None = None,
    devices: Sequence[Device] = (Device(),),
    link_seconds_per_byte: Sequence[float] = (),
    link_seconds: Sequence[float] = (),
    micro_batches: int = 1,
    time_limit: float = 10.0,
) -> Plan:
    """Finds the exchange of every tensor, and the stage of every block, with the shortest predicted step.

    With several stages, all share one exchange, since their parameters are stacked, tensor on tensor. With one stage,
    the dense layers of the advice may multiply late, or all be split over the workers.

    A tensor adds its share of a method's predicted coding, by elements, and of its wire, by bytes; a method that is
    used at all adds its latency once. `jaxcomm.placement.solve.solve` minimises the step.

    Of the ranks of boundaries that learn, all cuts get the largest with which a step waits for its boundaries no longer
    than it computes, or else the smallest: fewer numbers cost accuracy, of which the plan knows nothing.

    Args:
      advice: the advice of `advise` or `estimate`, for the plan's number of workers.
      params: the parameters, or their shapes.
      methods: further methods that may be used, by their names in the advice, in addition to those of `candidates`.
        Local methods are left out: they merge whole models. Each must be made from numbers and names, so that a file
        can hold it.
      error_budget: the largest part of the gradient's squared norm that one step may miss; the residual counts as
        missed. None for no limit.
      gradient: one worker's gradient, to measure the error on; by default normal noise, of which a low-rank method
        catches much less.
      blocks: the blocks of the model, in order; None for a single block, with the advice's computing and memory.
      devices: the device of every stage: its speed and its memory. Of every parameter, a device keeps 12 bytes (the
        parameter, its gradient and momentum) in addition to the exchange's state.
      link_seconds_per_byte: for the link between every stage and the next.
      link_seconds: latency of a message on each of these links; over Gloo a round trip.
      micro_batches: M.
      time_limit: seconds to search for.

    Raises:
      ValueError: for blocks that do not have every parameter once, blocks of different ranks, a memory or a budget that
        nothing fits, and a method that a file cannot hold.
    """
    shapes = {leaf_name(path): jnp.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    _check_advice(advice, methods, sum(leaf.size for leaf in jax.tree.leaves(trained_shapes(params))))
    blocks = [_whole_model(advice, params, tuple(shapes))] if blocks is None else blocks
    _check_blocks(blocks, shapes)
    usable = _gradient_exchanges(advice, candidates() | dict(methods or {}), params)
    specs = {name: _spec(name, method, params) for name, method in usable.items()}
    errors = {name: _errors(method, shapes, error_budget, gradient) for name, method in usable.items()}
    options = _options(advice, usable, shapes, errors)
    groupings = _groupings(options, advice.layers, len(devices))
    ranks = _ranks(blocks) if len(devices) > 1 else [None]

    def fastest(rank: int | None) -> tuple[int | None, int, Assignment]:
        problems = [
            Problem(
                blocks=tuple(grouping.block(block, rank) for block in blocks),
                devices=tuple(devices),
                link_seconds_per_byte=tuple(link_seconds_per_byte),
                link_seconds=tuple(link_seconds),
                starts={name: advice[name].latency for name in usable},
                micro_batches=micro_batches,
                error_budget=error_budget,
            )
            for grouping in groupings
        ]
        return rank, *_solve_fastest(problems, time_limit / len(ranks))

    *larger, smallest = ranks
    waits_little = (
        solution for solution in map(fastest, larger) if solution[2].parts.boundaries <= solution[2].parts.compute
    )
    rank, at, assignment = next(waits_little, None) or fastest(smallest)
    option_of = {path: assignment.options[groupings[at].group_of[path]] for path in shapes}
    return Plan(
        workers=advice.workers,
        cuts=tuple(int(at) + 1 for at in np.flatnonzero(np.diff(assignment.stages))),
        tensors={path: (shape, option_of[path]) for path, shape in shapes.items()},
        exchanges={name: specs[name] for name in sorted(set(option_of.values()) - set(WAYS))},
        micro_batches=micro_batches,
        rank=rank,
        compute=assignment.parts.compute,
        boundaries=assignment.parts.boundaries,
        exchange_seconds=assignment.parts.exchange,
        optimal=assignment.optimal,
    )


def _check_advice(advice: Advice, methods: Mapping[str, Any] | None, parameters: int) -> None:
    """Refuses an advice of another model, or of methods of its own that are not given here."""
    if parameters != advice.parameters:
        raise ValueError(
            f"The advice must be that of params; got one for {advice.parameters:,} parameters, and params with "
            f"{parameters:,}. Ask for advice on these."
        )
    known = {*candidates(), *WAYS}
    unknown = [row.method for row in advice.predictions if row.every == 1 and row.method not in known]
    if methods is None and unknown:
        raise ValueError(
            f"methods must have those that the advice was asked for; got none, and advice on {', '.join(unknown)}. "
            "Pass the same methods, or methods={} to plan without them."
        )


def _whole_model(advice: Advice, params: Params, leaves: tuple[str, ...]) -> ModelBlock:
    """Makes one block of a model; its memory is the advice's without the parameters, or 0 if it is not known."""
    param_bytes = sum(leaf.size * jnp.result_type(leaf).itemsize for leaf in jax.tree.leaves(params))
    return ModelBlock("model", leaves, advice.compute, memory=max(0, advice.memory - param_bytes))


def _check_blocks(blocks: Sequence[ModelBlock], leaves: Iterable[str]) -> None:
    listed = [path for block in blocks for path in block.leaves]
    if sorted(listed) != sorted(leaves):
        wrong = sorted(set(listed) ^ set(leaves)) or sorted(path for path in listed if listed.count(path) > 1)
        raise ValueError(
            f"Blocks must have every parameter once; got {wrong[:3]}, which they miss, repeat or make up. Compare "
            "their leaves with the paths of the parameters."
        )


def _ranks(blocks: Sequence[ModelBlock]) -> Sequence[int | None]:
    """Returns the ranks of boundaries that learn, the largest first; only None if there are none."""
    of_blocks = [set(block.boundary_bytes) for block in blocks if isinstance(block.boundary_bytes, Mapping)]
    if not of_blocks:
        return [None]
    if not of_blocks[0] or any(ranks != of_blocks[0] for ranks in of_blocks):
        raise ValueError(
            f"The blocks with ranks must have the same ones, as all cuts get one; got {of_blocks}. Leave out "
            "those that some do not have."
        )
    return sorted(of_blocks[0], reverse=True)


def _gradient_exchanges(
    advice: Advice, named_methods: Mapping[str, optax.GradientTransformation], params: Params
) -> dict[str, Exchange]:
    """Returns the exchanges of gradients that the advice knows, by name."""
    names = {row.method for row in advice.predictions}
    by_name = {name: method_of(tx, params) for name, tx in named_methods.items() if name in names}
    return {name: method for name, method in by_name.items() if method.period is None}


def _options(
    advice: Advice, usable: Mapping[str, Exchange], shapes: Shapes, errors: Mapping[str, Mapping[str, float]]
) -> dict[str, list[Option]]:
    """Returns the options to exchange every tensor, by path; each costs the tensor's share of the method's total."""
    sizes = {path: math.prod(shape) for path, shape in shapes.items()}
    total = sum(sizes.values())
    options: dict[str, list[Option]] = {path: [] for path in shapes}
    for name, method in usable.items():
        row, of_bytes = advice[name], _byte_shares(method, shapes)
        for path, size in sizes.items():
            part = size / total
            seconds = row.coding * part + (row.wire - row.latency) * of_bytes[path]
            memory = 4 * _PARAMETER_COPIES * size + math.ceil(row.memory * part)
            options[path].append(Option(name, seconds, errors[name][path], memory))
    return options


@dataclass(frozen=True)
class _Grouping:
    """A grouping of parameters that are assigned together.

    Attributes:
      tensors: the groups, each a `Tensor` of the problem, by name.
      group_of: the name of each parameter's group, by the parameter's path.
      spared: seconds that a model in one block saves by updating only shards.
    """

    tensors: Mapping[str, Tensor]
    group_of: Mapping[str, str]
    spared: float = 0.0

    def block(self, block: ModelBlock, rank: int | None) -> Block:
        """Returns a block of the problem, with the block's groups as its tensors and boundaries of a rank."""
        names = dict.fromkeys(self.group_of[path] for path in block.leaves)
        tensors = tuple(self.tensors[name] for name in names)
        seconds = max(0.0, block.seconds - self.spared)
        return Block(block.name, seconds, block.memory, block.crossing(rank), tensors)


def _groupings(options: Mapping[str, Sequence[Option]], layers: Sequence[LayerCost], stages: int) -> list[_Grouping]:
    """Returns the possible groupings: each is a problem, and the fastest of their solutions is the plan."""
    if stages > 1:  # their parameters are stacked, tensor on tensor: they share one exchange
        (several, *_) = options.values()
        single = [{path: (choices[at],) for path, choices in options.items()} for at in range(len(several))]
        return [_make_grouping(grouping, ()) for grouping in single]
    in_way = [[layer for layer in layers if layer.way == way] for way in WAYS]
    return [_make_grouping(options, layer_group) for layer_group in ([], *filter(None, in_way))]


def _make_grouping(options: Mapping[str, Sequence[Option]], layers: Sequence[LayerCost]) -> _Grouping:
    """Groups parameters for layers that are all computed in one way, late or split.

    The parameters of a layer form a group. A layer that can multiply late may also be exchanged; one that can be split
    has no other option: all are split, or none.
    """
    group_of = {path: path for path in options} | {path: layer.path for layer in layers for path in layer.tensors}
    tensors = {path: Tensor(path, tuple(options[path])) for path, name in group_of.items() if path == name}
    for layer in layers:
        layer_options = [
            Option(
                column[0].name,
                sum(option.seconds for option in column),
                sum(option.error for option in column),
                sum(option.memory for option in column),
            )
            for column in zip(*(options[path] for path in layer.tensors), strict=True)
        ]
        memory = min(option.memory for option in layer_options) - _PARAMETER_COPIES * layer.memory
        layer_option = Option(layer.way, layer.wire + max(0.0, layer.computing), 0.0, memory)
        tensors[layer.path] = Tensor(
            layer.path, (layer_option,) if layer.way == "split" else (*layer_options, layer_option)
        )
    return _Grouping(tensors, group_of, spared=-sum(min(0.0, layer.computing) for layer in layers))


def _solve_fastest(problems: Sequence[Problem], time_limit: float) -> tuple[int, Assignment]:
    """Returns the index of the problem with the shortest step, and its assignment; the time is divided equally.

    The assignment is optimal if no problem can have a shorter step.

    Raises:
      ValueError: if no problem has a solution; the message is that of the last.
    """
    assignments: dict[int, Assignment] = {}
    refused: ValueError | None = None
    is_proven = True
    for at, problem in enumerate(problems):
        try:
            assignments[at] = solve(problem, time_limit=time_limit / len(problems))
        except ValueError as error:
            refused = error
            is_proven &= not isinstance(error, NotInTimeError)
    if not assignments:
        raise refused or ValueError("A plan must have an exchange to choose; got none. Give it methods.")
    at = min(assignments, key=lambda at: assignments[at].seconds)
    best = assignments[at]
    is_proven &= all(assignment.optimal or assignment.at_least >= best.at_least for assignment in assignments.values())
    return at, replace(best, optimal=best.optimal and is_proven)


def place(
    devices: int,
    params: Params,
    advice_of: Callable[[int], Advice],
    blocks_of: Callable[[int], Sequence[ModelBlock]],
    *,
    seconds_per_byte: float,
    latency: float,
    micro_batches: int = 4,
    memory: int | None = None,
    time_limit: float = 10.0,
    **options: Any,
) -> Plan:
    """Finds how to divide equal devices into workers and stages, and the plan for them.

    Args:
      devices: the number of devices.
      params: the parameters, or their shapes.
      advice_of: K -> the advice for K workers.
      blocks_of: K -> the blocks, with the seconds and bytes of one worker's batch if there are K workers.
      seconds_per_byte: of a link between two stages.
      latency: seconds of a message on such a link, as in `make_plan`.
      micro_batches: M, if there is more than one stage.
      memory: bytes of a device; None for no limit.
      time_limit: seconds to search for in total.
      **options: further arguments of `make_plan`.

    Raises:
      ValueError: if nothing fits; the message is that of the last number of stages.
    """
    counts = [count for count in range(1, devices + 1) if devices % count == 0]
    best, refused, is_proven = None, None, True
    for count in counts:
        workers = devices // count
        blocks = blocks_of(workers)
        if count > len(blocks):
            break
        try:
            plan = make_plan(
                advice_of(workers),
                params,
                blocks=blocks,
                devices=[Device(memory=memory)] * count,
                link_seconds_per_byte=[seconds_per_byte] * (count - 1),
                link_seconds=[latency] * (count - 1),
                micro_batches=micro_batches if count > 1 else 1,
                time_limit=time_limit / len(counts),
                **options,
            )
        except ValueError as error:
            refused = error
            is_proven &= not isinstance(error, NotInTimeError)
            continue
        is_proven &= plan.optimal
        if best is None or plan.step < best.step:
            best = plan
    if best is None:
        raise refused or ValueError(f"devices must be at least 1; got {devices}. Say how many there are.")
    return replace(best, optimal=is_proven)


def _spec(name: str, method: Exchange, params: Params) -> dict[str, Any]:
    """Returns a method's name and options, for a file.

    Raises:
      ValueError: for a method that cannot be restored from them.
    """
    fields = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    options = {key: value for key, value in fields.items() if key not in ("where", "others", "axis_name")}
    spec = {"method": method.name, "options": options}
    try:
        make = getattr(methods, method.name)
        rebuilt = make(**json.loads(json.dumps(options)), axis_name=method.axis_name)
        comes_back = method_of(rebuilt, params) == method
    except (AttributeError, TypeError):
        comes_back = False
    if not comes_back:
        raise ValueError(
            f"A plan's methods must be those of jaxcomm, without where= and others=, so that its file can hold them; "
            f"got {name!r}, which is {method}. Leave it out: the plan chooses the tensors of each method itself."
        )
    return spec


def _byte_shares(method: Exchange, shapes: Shapes) -> dict[str, float]:
    """Returns each tensor's share of a method's bytes, computed for two workers: it hardly depends on K."""
    small, large = (_bytes_received(method, shape) / math.prod(shape) for shape in _PROBES)
    is_even = large == 0 or abs(small / large - 1) < 0.25
    bytes_of = {
        shape: float(math.prod(shape)) if is_even else _bytes_received(method, shape) for shape in set(shapes.values())
    }
    total = sum(bytes_of[shape] for shape in shapes.values()) or 1.0
    return {path: bytes_of[shape] / total for path, shape in shapes.items()}


@functools.lru_cache(maxsize=1024)
def _bytes_received(method: Exchange, shape: tuple[int, ...]) -> float:
    """Returns the bytes that each of two workers receives for one tensor."""
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    return wire_report(method.transform(), like, 2, axis_name=method.axis_name).received


def _errors(method: Exchange, shapes: Shapes, error_budget: float | None, gradient: Any) -> dict[str, float]:
    """Returns each tensor's error in one step, relative to the whole squared norm; 0 if there is no budget."""
    if error_budget is None:
        return dict.fromkeys(shapes, 0.0)
    if gradient is not None:
        return _error_shares(method, gradient)
    total = sum(math.prod(shape) for shape in shapes.values())
    return {path: _missed_of_noise(method) * math.prod(shape) / total for path, shape in shapes.items()}


def _error_shares(method: Exchange, gradient: Any) -> dict[str, float]:
    """Returns each tensor's error in one worker's first exchange, relative to the whole squared norm."""
    tx = method.transform()

    def missed(gradient: Any) -> Any:
        out, _ = tx.update(gradient, tx.init(gradient), gradient)
        return jax.tree.map(lambda a, b: jnp.sum(jnp.square(a.astype(jnp.float32) - b)), out, gradient)

    update = jax.jit(jax.vmap(missed, axis_name=method.axis_name, axis_size=1))
    shares = update(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], gradient))
    norm = sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(gradient))
    remedy = "Take one of a usual step, or leave it out, for errors of normal noise"
    rule = "finite, and not zero everywhere"
    check_range("gradient", f"squares whose sum is {norm:g}", rule, 0 < norm < math.inf, remedy)
    return {leaf_name(path): float(part[0]) / norm for path, part in jax.tree_util.tree_leaves_with_path(shares)}


@functools.lru_cache(maxsize=128)
def _missed_of_noise(method: Exchange) -> float:
    """Returns the error of one worker's first exchange of normal noise, relative to its squared norm."""
    noise = {"noise": np.random.default_rng(0).standard_normal(_NOISE).astype(np.float32)}
    return _error_shares(method, noise)["noise"]
