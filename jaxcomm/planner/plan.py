"""Which exchange for which tensor, and which block on which stage: a plan, its file, and what executes it."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import methods
from jaxcomm.accounting.report import wire_report
from jaxcomm.assignment.problem import Block, Device, Option, Problem, Tensor
from jaxcomm.assignment.solve import Assignment, solve
from jaxcomm.collectives.axis import AxisName
from jaxcomm.exchange import Exchange, leaf_name
from jaxcomm.planner.advice import Advice, candidates
from jaxcomm.planner.costs import method_of
from jaxcomm.planner.dense_layers import WAYS, LayerCost

FORMAT = 1
_PROBES = ((512, 512), (2048, 2048))  # by which it shows whether bytes are in proportion to elements
_NOISE = (256, 64)  # of the gradient that errors are measured on


@dataclass(frozen=True)
class ModelBlock:
    """A part of a model that is not cut, for `make_plan`.

    Attributes:
      name: for messages.
      leaves: the paths of its parameters, as `where=` sees them.
      seconds: forward, backward and optimizer for one worker's batch, on a device of speed 1.
      memory: bytes of activations, and of what else is not parameters, gradients and the exchange's state.
      boundary_bytes: that cross in a step, both ways together, for each worker, if the model is cut after it.
    """

    name: str
    leaves: tuple[str, ...]
    seconds: float
    memory: int = 0
    boundary_bytes: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What to exchange how, and where to cut.

    Attributes:
      workers: K.
      cuts: the blocks that begin a stage, but the first; empty for one stage.
      tensors: of every parameter, by its path: its shape, and the name of its exchange; "late" or "split" for one of a
        dense layer that multiplies late or is sharded over the workers, whose gradient is not exchanged.
      exchanges: by name, the method and its options.
      micro_batches: M, of a pipeline.
      compute: predicted seconds of computing in a step, the pipeline's fill included.
      boundaries: predicted seconds of what crosses between stages.
      exchange_seconds: predicted seconds of the exchange, coding and wire.
      optimal: whether no plan is better, by the model of costs.
    """

    workers: int
    cuts: tuple[int, ...]
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    exchanges: Mapping[str, Mapping[str, Any]]
    micro_batches: int
    compute: float
    boundaries: float
    exchange_seconds: float
    optimal: bool = True

    @property
    def step(self) -> float:
        """Predicted seconds of a step."""
        return self.compute + self.boundaries + self.exchange_seconds

    @property
    def used(self) -> dict[str, list[str]]:
        """The paths of the tensors of every exchange that is used, the exchange of the most parameters last."""
        groups: dict[str, list[str]] = {}
        for path, (_, name) in self.tensors.items():
            groups.setdefault(name, []).append(path)

        def size(name: str) -> int:
            return sum(math.prod(self.tensors[path][0]) for path in groups[name])

        return {name: groups[name] for name in sorted(groups, key=size)}

    def computed(self, way: str) -> set[str]:
        """Returns the paths of the dense layers that multiply "late", or are "split" over the workers."""
        return {path.rpartition("/")[0] for path, (_, name) in self.tensors.items() if name == way}

    @property
    def dense_layers(self) -> str:
        """How dense layers are computed: "late" (those of `computed`), "split" (all of them), else "exchange"."""
        return next((way for way in WAYS if self.computed(way)), "exchange")

    def transformation(self, axis_name: AxisName = "data") -> optax.GradientTransformation:
        """Makes the exchange of the plan: one transformation, in whose step all tensors go or none.

        Gradients of layers that multiply late bypass it. Those of shards do where `make_train_step` has their `specs=`.
        """
        late, tx = self.dense_layers == "late", None
        exchanged = {name: paths for name, paths in self.used.items() if name not in WAYS}
        for name, paths in reversed(exchanged.items()):
            spec = self.exchanges[name]
            chosen: dict[str, Any] = {}
            if tx is not None or late:
                chosen["where"] = f"^(?:{'|'.join(re.escape(path) for path in paths)})$"
            if tx is not None:
                chosen["others"] = tx
            tx = getattr(methods, spec["method"])(**spec["options"], **chosen, axis_name=axis_name)
        if tx is None:
            tx = methods.plump_dp(where=(lambda *_: False) if late else None, axis_name=axis_name)
        return tx

    def check(self, params: Any, workers: int) -> None:
        """Refuses parameters that the plan was not made for.

        Raises:
          ValueError: for other paths, shapes or workers, and names the first.
        """
        remedy = "Make a plan for this model."
        if workers != self.workers:
            raise ValueError(f"A plan must be for {self.workers} workers; got {workers}. Make a plan for those.")
        given = {leaf_name(path): jnp.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        for path in given.keys() ^ self.tensors.keys():
            which = "without" if path in self.tensors else "with"
            raise ValueError(
                f"A plan must be for the parameters that are trained; got a model {which} {path!r}. {remedy}"
            )
        for path, shape in given.items():
            if shape != self.tensors[path][0]:
                raise ValueError(
                    f"A plan must be for the shapes that are trained; got {shape} at {path!r}, planned as "
                    f"{self.tensors[path][0]}. {remedy}"
                )

    def write(self, path: Path) -> None:
        """Writes the plan as JSON."""
        path.write_text(json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=2) + "\n")

    def __str__(self) -> str:
        cuts = f", {len(self.cuts) + 1} stages cut before the blocks {list(self.cuts)}" if self.cuts else ""
        lines = [
            f"plan for {self.workers} workers{cuts}: {1e3 * self.step:,.1f} ms a step ({1e3 * self.compute:,.1f} "
            f"computing, {1e3 * self.boundaries:,.1f} boundaries, {1e3 * self.exchange_seconds:,.1f} exchange)"
        ]
        for name, paths in self.used.items():
            count = sum(math.prod(self.tensors[path][0]) for path in paths)
            lines.append(f"  {name}: {len(paths)} tensors, {count:,} parameters")
        return "\n".join(lines)


def read_plan(path: Path) -> Plan:
    """Reads a plan's file.

    Raises:
      ValueError: for a file that is none, or of another format.
    """
    try:
        record = json.loads(path.read_text())
        if record.pop("format") != FORMAT:
            raise KeyError("format")
        record["tensors"] = {name: (tuple(shape), way) for name, (shape, way) in record["tensors"].items()}
        record["cuts"] = tuple(record["cuts"])
        plan = Plan(**record)
        plan.transformation()
        return plan
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"A plan must be a file that `Plan.write` made, of format {FORMAT}; got {path}: {error!r}. Make it again."
        ) from None


def make_plan(
    advice: Advice,
    params: Any,
    *,
    methods: Mapping[str, optax.GradientTransformation] | None = None,
    error_budget: float | None = None,
    gradient: Any = None,
    blocks: Sequence[ModelBlock] | None = None,
    devices: Sequence[Device] = (Device(),),
    link_seconds_per_byte: Sequence[float] = (),
    link_seconds: Sequence[float] = (),
    micro_batches: int = 1,
    parameter_copies: int = 3,
    time_limit: float = 10.0,
) -> Plan:
    """Finds the exchange of every tensor, and the stage of every block, with the shortest predicted step.

    Stages share one exchange, since their parameters are stacked, tensor on tensor. In one stage, dense layers that the
    advice was asked about may multiply late, or all be split over the workers.

    What a tensor adds to a step is its part of a method's predicted coding, by its elements, and of its wire, by its
    bytes; a method that is used at all costs its latency once. `jaxcomm.assignment.solve.solve` minimises the step.

    Args:
      advice: of `advise` or `estimate`, for the plan's number of workers.
      params: the parameters, or their shapes.
      methods: what may be used, by the names of the advice; by default those of `candidates`. Local methods are left
        out: they merge whole models. Each must be made of numbers and names, so that a file can hold it.
      error_budget: the largest part of the gradient's squared norm that one step may miss; what a residual keeps counts
        as missed. None for no limit.
      gradient: one worker's, on which that is measured; on normal noise if not given, of which a matrix of low rank
        catches much less.
      blocks: of the model in order; None for one that is not cut.
      devices: one for every stage: its speed and its memory.
      link_seconds_per_byte: of the link between every stage and the next.
      link_seconds: latency of a message on each of these links.
      micro_batches: M.
      parameter_copies: of 4 bytes a parameter that a device keeps beside the exchange: parameters, gradient, momentum.
      time_limit: seconds to search for.

    Raises:
      ValueError: for blocks that do not have every parameter once, a memory or a budget that nothing fits, and a method
        that a file cannot hold.
    """
    usual = candidates() if methods is None else {**candidates(), **methods}
    known = {row.method: row for row in advice.predictions}
    found_methods = {name: method_of(tx, params) for name, tx in usual.items() if name in known}
    usable = {name: method for name, method in found_methods.items() if method.period is None}
    specs = {name: _spec(name, method, params) for name, method in usable.items()}
    leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    sizes = {path: math.prod(jnp.shape(leaf)) for path, leaf in leaves.items()}
    blocks = [ModelBlock("model", tuple(leaves), advice.compute)] if blocks is None else blocks
    _check_blocks(blocks, leaves)
    total = sum(sizes.values())
    options: dict[str, list[Option]] = {path: [] for path in leaves}
    for name, method in usable.items():
        row = known[name]
        shares = _byte_shares(method, {path: jnp.shape(leaf) for path, leaf in leaves.items()}, advice.workers)
        if error_budget is None:
            errors = dict.fromkeys(leaves, 0.0)
        elif gradient is None:
            errors = {path: _noise_error(method) * size / total for path, size in sizes.items()}
        else:
            errors = _errors(method, gradient)
        for path, size in sizes.items():
            part = size / total
            seconds = row.coding * part + (row.wire - row.latency) * shares[path]
            memory = 4 * parameter_copies * size + math.ceil(row.memory * part)
            options[path].append(Option(name, seconds, errors[path], memory))

    def problem(layers: Sequence[LayerCost]) -> Problem:
        tensors, group_of = _tensors(options, layers, parameter_copies)
        return Problem(
            blocks=tuple(
                Block(
                    block.name,
                    block.seconds,
                    block.memory,
                    block.boundary_bytes,
                    tuple(tensors[name] for name in dict.fromkeys(group_of[path] for path in block.leaves)),
                )
                for block in blocks
            ),
            devices=tuple(devices),
            link_seconds_per_byte=tuple(link_seconds_per_byte),
            link_seconds=tuple(link_seconds),
            starts={name: known[name].latency for name in usable},
            micro_batches=micro_batches,
            error_budget=error_budget,
        )

    in_way = {way: [layer for layer in advice.layers if layer.way == way] for way in WAYS}
    if len(devices) > 1:  # whose parameters are stacked, tensor on tensor: they share one exchange
        problems = [_with_one(problem([]), name) for name in usable]
    else:
        problems = [problem([]), *(problem(layers) for layers in in_way.values() if layers)]
    found = _fastest(problems, time_limit)
    used = next((layers for way, layers in in_way.items() if way in found.options.values()), [])
    _, group_of = _tensors(options, used, parameter_copies)
    chosen = {path: found.options[group_of[path]] for path in leaves}
    stages = np.asarray(found.stages)
    return Plan(
        workers=advice.workers,
        cuts=tuple(int(at) + 1 for at in np.flatnonzero(np.diff(stages))),
        tensors={path: (tuple(jnp.shape(leaf)), chosen[path]) for path, leaf in leaves.items()},
        exchanges={name: specs[name] for name in sorted(set(chosen.values()) - set(WAYS))},
        micro_batches=micro_batches,
        compute=found.parts.compute,
        boundaries=found.parts.boundaries,
        exchange_seconds=found.parts.exchange,
        optimal=found.optimal,
    )


def _tensors(
    options: Mapping[str, Sequence[Option]], layers: Sequence[LayerCost], parameter_copies: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns what is assigned, by its name, and the name that each leaf is part of.

    Leaves of a layer that can multiply late go together. A layer that can be split has no other option: all are split,
    or none.
    """
    group_of = {path: path for path in options} | {path: layer.path for layer in layers for path in layer.tensors}
    tensors = {path: Tensor(path, tuple(options[path])) for path, name in group_of.items() if path == name}
    for layer in layers:
        together = [
            Option(
                same[0].name,
                sum(option.seconds for option in same),
                sum(option.error for option in same),
                sum(option.memory for option in same),
            )
            for same in zip(*(options[path] for path in layer.tensors), strict=True)
        ]
        memory = min(option.memory for option in together) - parameter_copies * layer.memory
        own = Option(layer.way, layer.wire + layer.computing, 0.0, memory)
        tensors[layer.path] = Tensor(layer.path, (own,) if layer.way == "split" else (*together, own))
    return tensors, group_of


def _with_one(problem: Problem, name: str) -> Problem:
    """Returns a problem in which all tensors have one option."""

    def only(tensor: Tensor) -> Tensor:
        return Tensor(tensor.name, tuple(option for option in tensor.options if option.name == name))

    blocks = (
        dataclasses.replace(block, tensors=tuple(only(each) for each in block.tensors)) for block in problem.blocks
    )
    return dataclasses.replace(problem, blocks=tuple(blocks))


def _fastest(problems: Sequence[Problem], time_limit: float) -> Assignment:
    """Returns the best assignment of some problems, in equal parts of the time."""
    best, refused = None, None
    for problem in problems:
        try:
            found = solve(problem, time_limit=time_limit / len(problems))
        except ValueError as error:
            refused = error
            continue
        if best is None or found.seconds < best.seconds:
            best = found
    if best is None:
        raise refused or ValueError("methods must be at least one exchange of gradients; got none. Pass plump_dp().")
    return best


def place(
    devices: int,
    params: Any,
    advice_of: Callable[[int], Advice],
    blocks_of: Callable[[int], Sequence[ModelBlock]],
    *,
    seconds_per_byte: float,
    latency: float = 0.0,
    micro_batches: int = 4,
    memory: int | None = None,
    time_limit: float = 10.0,
    **options: Any,
) -> Plan:
    """Finds how many workers of how many stages equal devices should make, and the plan for them.

    Args:
      devices: that there are, all alike.
      params: the parameters, or their shapes.
      advice_of: K -> the advice for K workers.
      blocks_of: K -> the blocks, with the seconds and bytes of one of K workers' batches.
      seconds_per_byte: of a link between two stages.
      latency: of a message on it.
      micro_batches: M, where there is more than one stage.
      memory: bytes of a device; None for no limit.
      time_limit: seconds to search for in all.
      **options: of `make_plan`.

    Raises:
      ValueError: if nothing fits; the message is that of the last number of stages.
    """
    counts = [count for count in range(1, devices + 1) if devices % count == 0]
    best, refused = None, None
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
            continue
        if best is None or plan.step < best.step:
            best = plan
    if best is None:
        raise refused or ValueError(f"devices must be at least 1; got {devices}. Say how many there are.")
    return best


def _check_blocks(blocks: Sequence[ModelBlock], leaves: Mapping[str, Any]) -> None:
    listed = [path for block in blocks for path in block.leaves]
    if sorted(listed) != sorted(leaves):
        wrong = sorted(set(listed) ^ set(leaves)) or sorted(path for path in listed if listed.count(path) > 1)
        raise ValueError(f"Blocks must have every parameter once; got {wrong[:3]} not so. Look at their leaves.")


def _spec(name: str, method: Exchange, params: Any) -> dict[str, Any]:
    """Returns a method's name and its options, for a file.

    Raises:
      ValueError: for a method that would not come back from it.
    """
    fields = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    options = {key: value for key, value in fields.items() if key not in ("where", "others", "axis_name")}
    spec = {"method": method.name, "options": options}
    try:
        make = getattr(methods, method.name)
        again = make(**json.loads(json.dumps(options)), axis_name=method.axis_name)
        comes_back = method_of(again, params) == method
    except (AttributeError, TypeError):
        comes_back = False
    if not comes_back:
        raise ValueError(
            f"A plan's methods must be those of jaxcomm, without where= and others=, so that its file can hold them; "
            f"got {name!r}, which is {method}. Leave it out: the plan chooses the tensors of each method itself."
        )
    return spec


def _byte_shares(method: Exchange, shapes: Mapping[str, tuple[int, ...]], workers: int) -> dict[str, float]:
    """Returns the part of a method's bytes that each tensor takes."""
    few, many = (_received(method, shape, workers) / math.prod(shape) for shape in _PROBES)
    is_even = many == 0 or abs(few / many - 1) < 0.25
    found = {
        shape: float(math.prod(shape)) if is_even else _received(method, shape, workers)
        for shape in set(shapes.values())
    }
    total = sum(found[shape] for shape in shapes.values()) or 1.0
    return {path: found[shape] / total for path, shape in shapes.items()}


@functools.lru_cache(maxsize=1024)
def _received(method: Exchange, shape: tuple[int, ...], workers: int) -> float:
    """Returns the bytes that a worker receives for one tensor."""
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    return wire_report(method.transform(), like, workers, axis_name=method.axis_name).received


def _errors(method: Exchange, gradient: Any) -> dict[str, float]:
    """Returns what one worker's first exchange misses of each tensor, as a part of the whole squared norm."""
    tx = method.transform()

    def missed(gradient: Any) -> Any:
        out, _ = tx.update(gradient, tx.init(gradient), gradient)
        return jax.tree.map(lambda a, b: jnp.sum(jnp.square(a.astype(jnp.float32) - b)), out, gradient)

    update = jax.jit(jax.vmap(missed, axis_name=method.axis_name, axis_size=1))
    found = update(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], gradient))
    norm = sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(gradient))
    return {leaf_name(path): float(part[0]) / norm for path, part in jax.tree_util.tree_leaves_with_path(found)}


@functools.lru_cache(maxsize=128)
def _noise_error(method: Exchange) -> float:
    """Returns what one worker's first exchange misses of normal noise, as a part of its squared norm."""
    noise = {"noise": np.random.default_rng(0).standard_normal(_NOISE).astype(np.float32)}
    return _errors(method, noise)["noise"]
