"""Collectives in the text of a compiled program.

This is the second, independent count: the collectives that XLA runs, after it has widened types, merged operations or
inserted its own.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from jaxcomm.accounting.text import (
    BODY,
    CALLED,
    INSTRUCTION,
    TRIPS,
    array_bytes,
    branches_of,
    dimensions_of,
    operands_of,
    read_computations,
    types_of,
)
from jaxcomm.traffic import Program, Traffic

_OPS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
# Collectives that cannot be counted: an error, not a silent zero.
_UNCOUNTED = ("ragged-all-to-all", "collective-broadcast", "send", "recv")
# Between TPU slices a collective is a pair of transfers, one each way, between a device and its host.
_BETWEEN_SLICES = {
    "ALL_REDUCE": "all_reduce",
    "ALL_GATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALL_TO_ALL": "all_to_all",
    "ONE_TO_ONE": "permute",
}
# In programs for TPUs: a fusion that is a reduce-scatter, written as an all-reduce of which one part is used.
_REDUCE_SCATTER = "all-reduce-scatter"

_DIGITS = re.compile(r"\d+")
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:ension)?s"?[=:]([{\[][^}\]]*)')
_KERNEL = re.compile(r"dim_labels=\w+_(\w+)->")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_STATE = re.compile(r" while\(%?([\w.\-]+)\)")
_LIMIT = re.compile(r"ROOT .* compare\(%?([\w.\-]+), %?([\w.\-]+)\), direction=LT")
_ELEMENT = re.compile(r" get-tuple-element\(.*\), index=(\d+)")
_VALUES = re.compile(r" tuple\((.*?)\)")
_CONSTANT = re.compile(r" (constant|copy)\(%?([\w.\-]+)\)")
_CHAIN = re.compile(r'\bchannel_id=(\d+),.*frontend_attributes=\{[^}]*chain_id="(\d+)"')
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([^}]*)\}')
_TARGETS = re.compile(r"_xla_megascale_target=\{(.*?)\}\}")


def read_program(text: str, mesh: Mesh | None = None) -> Program:
    """Reads the collectives of a compiled program from its HLO text (`compiled.as_text()`).

    Args:
      text: the text of the program.
      mesh: the mesh that it was compiled for: with it, the axes of the collectives are known.

    Raises:
      ValueError: for a collective that cannot be counted: of an unknown kind, over unknown groups, or in a loop of
        unknown length.
    """
    computations = _Computations(text, mesh)
    return computations.collectives(computations.entry)


class _Computations:
    """A program's computations, each read once."""

    def __init__(self, text: str, mesh: Mesh | None = None):
        lines, self.entry = read_computations(text)
        self.instructions = {name: [*filter(None, map(INSTRUCTION.match, own))] for name, own in lines.items()}
        self._devices, self._mesh = _devices(text), mesh
        self._done: dict[str, Program] = {}
        self._chains: set[tuple[str, ...]] = set()
        self._work: dict[str, dict[str, float]] = {}

    def collectives(self, name: str) -> Program:
        """Returns the collectives of a computation."""
        if name not in self._done:
            self._done[name] = Program()  # filled below; no computation calls itself
            for match in self.instructions.get(name, ()):
                self.add(self._done[name], match)
            if name.startswith(_REDUCE_SCATTER):
                collectives = self._done[name].always
                collectives[:] = [replace(traffic, op="reduce_scatter") for traffic in collectives]
        return self._done[name]

    def add(self, program: Program, match: re.Match[str]) -> None:
        """Adds the collectives of an instruction."""
        op, tail, line = match["op"], match["rest"], match.string
        kind = op.removesuffix("-start")
        if op.endswith(("-done", "-update")):
            return
        transfer = _TRANSFER.search(tail) if kind in ("send", "recv") else None
        if transfer and transfer[1] in _BETWEEN_SLICES:
            if kind == "recv":
                op = _BETWEEN_SLICES[transfer[1]]
                program.always.append(_between_slices(op, match["shape"], tail, self._mesh))
            return
        if kind in _UNCOUNTED:
            raise ValueError(
                f"The bytes of a collective must be countable: one of {', '.join(_OPS)}; got {op!r}: "
                f"{line.strip()[:200]}"
            )
        if kind in _OPS:
            # On TPUs a collective that overlaps with other work appears in several fusions (its start, its end, and
            # the work between them), with one chain: count it once.
            if chain := _CHAIN.search(tail):
                if chain.groups() in self._chains:
                    return
                self._chains.add(chain.groups())
            size, axes, groups = _groups(tail, self._devices, line)
            shape = match["shape"]
            # (operands, results, contexts...); before JAX 0.11.1 the results of an all-reduce alone, maybe several.
            if op != kind and (kind != "all-reduce" or shape.startswith("((")):
                shape = _elements(shape)[1]
            traffic = _traffic(_OPS[kind], shape, size)
            if kind == "collective-permute":
                traffic = replace(traffic, pairs=_pairs(tail))
            axes = (axes or _differing(groups, self._mesh)) if self._mesh else ()
            program.always.append(replace(traffic, axes=axes))
        elif op == "while":
            body = self.collectives(_match_one(BODY, tail, line))
            if body.communicates:
                if (trips := self.trips(line)) is None:
                    raise ValueError(_uncountable(line))
                program.add(body, trips)
        elif op == "conditional":
            program.add_conditional([self.collectives(name) for name in branches_of(tail)])
        else:
            for name in CALLED.findall(tail):
                program.add(self.collectives(name))

    def trips(self, loop: str) -> int | None:
        """Returns the trip count of a loop that counts by one, as those of JAX do; None if the text does not tell.

        XLA states it, except for TPUs. There it follows from the counter's first value and its limit.
        """
        if match := TRIPS.search(loop):
            return int(match[1])
        condition, state = _CONDITION.search(loop), _STATE.search(loop)
        called = self.instructions.get(condition[1], ()) if condition else ()
        limited = _LIMIT.search("\n".join(match.string for match in called))
        if not limited or not state:
            return None
        counter = _ELEMENT.search(self._lines.get(limited[1], ""))
        values = _VALUES.search(self._lines.get(state[1], ""))
        if not counter or not values:
            return None
        first = self._constant(re.findall(r"%([\w.\-]+)", values[1])[int(counter[1])])
        limit = self._constant(limited[2])
        return None if first is None or limit is None else limit - first

    def _constant(self, name: str) -> int | None:
        """Returns the value of a scalar constant, or of a copy of one; None for anything else."""
        constant = _CONSTANT.search(self._lines.get(name, ""))
        if constant and constant[1] == "copy":
            return self._constant(constant[2])
        return int(constant[2]) if constant else None

    @functools.cached_property
    def _lines(self) -> dict[str, str]:
        """The instructions by name; names are unique in a program."""
        return {match["name"]: match.string for matches in self.instructions.values() for match in matches}

    def work(self, name: str) -> dict[str, float]:
        """Returns the number of multiplications of every instruction of a computation."""
        if name not in self._work:
            instructions = self.instructions.get(name, ())
            shapes = {match["name"]: match["shape"] for match in instructions}
            self._work[name] = {match["name"]: self._products(match, shapes) for match in instructions}
        return self._work[name]

    def _products(self, match: re.Match[str], shapes: Mapping[str, str]) -> float:
        """Returns the number of multiplications of an instruction, including the computations that it calls.

        A loop of unknown length counts once.
        """

        def products_of(name: str) -> float:
            return sum(self.work(name).values())

        op, tail = match["op"], match["rest"]
        operands = operands_of(tail, shapes)
        contracted = _CONTRACTED.search(tail)
        if contracted and operands:  # a matrix product, or a library's
            left_shape = dimensions_of(shapes[operands[0]])
            return float(
                math.prod(dimensions_of(match["shape"]))
                * math.prod(left_shape[int(axis)] for axis in _DIGITS.findall(contracted[1]))
            )
        kernel = _KERNEL.search(tail)
        if op == "convolution" and kernel:
            sizes = dimensions_of(shapes[operands[1]])
            return float(math.prod(dimensions_of(match["shape"])) * math.prod(sizes) / sizes[kernel[1].index("o")])
        if op == "while":
            return products_of(_match_one(BODY, tail, match.string)) * (self.trips(match.string) or 1)
        if op == "conditional":
            return max((products_of(name) for name in branches_of(tail)), default=0.0)
        return sum(products_of(name) for name in CALLED.findall(tail))


def read_overlap(text: str) -> float | None:
    """Returns the share of a program's products that neither feed its collectives nor wait for them.

    These can be computed while a collective is on its way. Products are the multiplications of matrix products and
    convolutions. Convolutions in a library (cuDNN) are left out: the text does not give their size. With several
    collectives, the share is the mean, weighted by their bytes in a usual step.

    Args:
      text: the text of the compiled program.

    Returns:
      The share, from 0 to 1; None for a program without products, or without collectives.
    """
    computations = _Computations(text)
    work, instructions = computations.work(computations.entry), computations.instructions[computations.entry]
    feeds = {match["name"]: operands_of(match["rest"], work) for match in instructions}
    sending = [match for match in instructions if match["op"] == "send"]
    sends = {name: match["name"] for match in sending for name in _RENDEZVOUS.findall(match["rest"])}
    for match in instructions:
        if match["op"] == "recv":  # a receive from other slices depends on the send to them
            feeds[match["name"]] += [sends[name] for name in _RENDEZVOUS.findall(match["rest"]) if name in sends]
    waits: dict[str, list[str]] = {name: [] for name in work}
    for name, operands in feeds.items():
        for operand in operands:
            waits[operand].append(name)
    total, free, total_bytes = sum(work.values()), 0.0, 0.0
    for match in instructions:
        message = Program()
        computations.add(message, match)
        if message.received and total:
            bound = _reachable(match["name"], feeds) | _reachable(match["name"], waits)
            free += float(message.received) * (1 - sum(work[bound_name] for bound_name in bound) / total)
            total_bytes += float(message.received)
    return free / total_bytes if total_bytes else None


def _reachable(name: str, edges: Mapping[str, Sequence[str]]) -> set[str]:
    """Returns an instruction, and all that are reached from it."""
    names, todo = {name}, [name]
    while todo:
        new = set(edges[todo.pop()]) - names
        names |= new
        todo += new
    return names


def _devices(text: str) -> int:
    header = text.partition("\n")[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(int(count) for count in counts)


def _match_one(pattern: re.Pattern[str], tail: str, line: str) -> str:
    match = pattern.search(tail)
    if not match:
        raise ValueError(_uncountable(line))
    return match.group(1)


def _uncountable(line: str) -> str:
    return (
        f"A loop with collectives must have a known body and length; got: {line.strip()[:200]}. Use lax.scan with a "
        "static length."
    )


def _traffic(kind: str, shape: str, workers: int) -> Traffic:
    """Makes the record of one collective from the shape of its result."""
    result = sum(array_bytes(shape))
    size = {"all_gather": result // workers, "reduce_scatter": result * workers}.get(kind, result)
    return Traffic(kind, size, workers, dtype=types_of(shape))


def _between_slices(kind: str, shape: str, tail: str, mesh: Mesh | None) -> Traffic:
    """Makes the record of a collective between TPU slices from the shape that a device receives.

    The text gives its devices by their ids: as ranges of slices, whose devices all do the same; as groups; or as pairs.
    """
    slices, targets = _SLICES.search(tail), _TARGETS.search(tail)
    listed = targets[1] if targets else ""
    pairs = [(int(a), int(b)) for a, b in re.findall(r"(\d+)->(\d+)", listed)]
    if slices:
        ranges = [[int(end) for end in part.split(":")] for part in slices[1].split(",")]
        workers, members = sum(span[-1] - span[0] + 1 for span in ranges), None
    else:
        members = [int(device) for device in _DIGITS.findall(listed.partition("}")[0])]
        workers = len(members)
    ids = [device.id for device in mesh.devices.flat] if mesh else sorted({end for pair in pairs for end in pair})
    traffic = _traffic(kind, _elements(shape)[0], len(ids) if pairs else workers)
    if pairs:
        traffic = replace(traffic, pairs=tuple((ids.index(a), ids.index(b)) for a, b in pairs))
    if mesh is None:
        return traffic
    if members is None:  # a device of each slice
        of_slices = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
        members = [ids[of_slices.index(slice_id)] for slice_id in sorted(set(of_slices))]
    groups = list(traffic.pairs) if traffic.pairs else [tuple(ids.index(device) for device in members)]
    return replace(traffic, axes=_differing(groups, mesh))


def _elements(shape: str) -> list[str]:
    """Splits the shape of a tuple at its top-level commas: "((a, b), c)" is ["(a, b)", "c"]."""
    elements, depth, start = [], 0, 1
    for index, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            elements.append(shape[start:index].strip())
            start = index + 1
        if depth == 0:
            break
    return elements


def _pairs(tail: str) -> tuple[tuple[int, int], ...]:
    """Returns the (source, target) pairs of a permutation."""
    listed = re.search(r"source_target_pairs=\{(.*?)\}\}", tail)
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)", listed.group(1))) if listed else ()


def _groups(tail: str, devices: int, line: str) -> tuple[int, tuple[str, ...], list[tuple[int, ...]]]:
    """Returns the size of a collective's groups, and either their axes or the devices of one, from any XLA notation.

    A program numbers its devices in the order of the mesh, the last axis fastest.
    """
    if pairs := _pairs(tail):
        return devices, (), [pair for pair in pairs if pair[0] != pair[1]]
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", tail):
        group = tuple(int(device) for device in listed[1].split(","))
        return len(group), (), [group]
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", tail):
        shape, order = ([int(n) for n in part.split(",")] if part else None for part in iota.group(3, 4))
        numbers = np.arange(math.prod(shape or ())).reshape(shape).transpose(order)
        return int(iota[2]), (), [tuple(int(n) for n in numbers.reshape(int(iota[1]), -1)[0])]
    # In jax 0.10 the order of the devices may come in between: mesh[...], device_ids=([2,2]T(1,0)) {...}.
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\))?\s*\{([^}]*)\}", tail):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        axes = tuple(re.findall(r"'([^']+)'", mesh[2]))
        if axes and all(axis in sizes for axis in axes) and ":" not in mesh[2]:
            return math.prod(sizes[axis] for axis in axes), axes, []
    if "replica_groups={}" in tail:
        return devices, (), [tuple(range(devices))]
    raise ValueError(f"The groups of a collective must be in a known notation; got: {line.strip()[:300]}")


def _differing(groups: Sequence[tuple[int, ...]], mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group, given by their positions in the mesh, differ."""
    places = [np.array(np.unravel_index(group, mesh.devices.shape)) for group in groups]  # (axes, devices)
    return tuple(
        name for i, name in enumerate(mesh.axis_names) if any((place[i] != place[i][0]).any() for place in places)
    )
