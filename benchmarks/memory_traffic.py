"""What a compiled program reads and writes in memory, from its text.

XLA's own figure (`cost_analysis()`) has, for each of 161 loops that read a slice of a vector, the whole vector.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence

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
)

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_READ_IN_PART = {"slice", "dynamic-slice", "gather"}
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_IN_PLACE = {"dynamic-update-slice", "scatter"}


def read_memory_traffic(text: str, scope: str = "") -> int:
    """Returns the bytes that a usual step reads from memory and writes to it.

    Every array that is not inside of a fused loop counts when it is written, and whenever it is read. Slices and
    gathers count what they take, and updates in place what they change. A conditional counts its cheapest branch, which
    leaves out the rare steps; a loop of unknown length, one turn.

    Args:
      text: of a program that XLA compiled for CPUs or GPUs (`compiled.as_text()`).
      scope: a named scope: what is named and not in it does not count. A fused loop has one of its operations' names.
    """
    computations, entry = read_computations(text)
    matches = {
        name: [match for match in map(INSTRUCTION.match, lines) if match] for name, lines in computations.items()
    }
    return _of_computation(entry, matches, scope)


_Matches = Mapping[str, Sequence[re.Match[str]]]


def _of_computation(name: str, matches: _Matches, scope: str = "") -> int:
    shapes = {match["name"]: match["shape"] for match in matches[name]}
    return sum(
        _of_instruction(match, shapes, matches)
        for match in matches[name]
        if not (names := _OP_NAME.findall(match["rest"])) or scope in names[0]
    )


def _of_instruction(match: re.Match[str], shapes: Mapping[str, str], matches: _Matches) -> int:
    op, tail = match["op"], match["rest"]
    if op in _FREE:
        return 0
    if op == "while":
        trips = TRIPS.search(tail)
        return _of_computation(BODY.findall(tail)[0], matches) * (int(trips[1]) if trips else 1)
    if op == "conditional":
        return min(_of_computation(name, matches) for name in branches_of(tail))
    if op == "call":
        return _of_computation(CALLED.findall(tail)[0], matches)
    if op == "fusion":
        return _of_fusion(matches[CALLED.findall(tail)[0]])
    operands = [_bytes(shapes[name]) for name in operands_of(tail, shapes)]
    if op.endswith("-start"):  # of an asynchronous copy or collective: it reads, and its end writes
        return sum(operands)
    return _bytes_moved(op, _bytes(match["shape"]), [] if op.endswith("-done") else operands)


def _bytes_moved(op: str, result: int, operands: Sequence[int]) -> int:
    if op in _READ_IN_PART:
        return 2 * result + sum(operands[1:])
    if op in _IN_PLACE:
        return sum(operands[1:]) + _bytes_changed(op, operands)
    return result + sum(operands)


def _of_fusion(instructions: Sequence[re.Match[str]]) -> int:
    """Returns the bytes of a loop: what it reads of its parameters, and what it writes."""
    shapes = {match["name"]: match["shape"] for match in instructions}
    operands = {match["name"]: operands_of(match["rest"], shapes) for match in instructions}
    ops = {match["name"]: match["op"] for match in instructions}
    (root,) = [match["name"] for match in instructions if match.string.lstrip().startswith("ROOT")]

    @functools.cache
    def read(name: str) -> float:
        """Returns the share of an array that the loop reads or computes: that which it needs of what depends on it."""
        shares = [1.0] if name == root else []
        for user, names in operands.items():
            if name not in names:
                continue
            if ops[user] in _READ_IN_PART and names[0] == name:
                shares.append(read(user) * _size(shapes[user]) / _size(shapes[name]))
            elif ops[user] in _IN_PLACE and names[0] == name:
                shares.append(0.0)
            else:
                shares.append(read(user))
        return min(1.0, sum(shares))

    def bytes_written(name: str) -> int:
        if ops[name] == "bitcast":
            return bytes_written(operands[name][0])
        if ops[name] == "tuple":
            return sum(map(bytes_written, operands[name]))
        if ops[name] in _IN_PLACE:
            return _bytes_changed(ops[name], [_bytes(shapes[operand]) for operand in operands[name]])
        return _bytes(shapes[name])

    return bytes_written(root) + sum(
        round(read(name) * _bytes(shapes[name])) for name, op in ops.items() if op == "parameter"
    )


def _bytes_changed(op: str, operands: Sequence[int]) -> int:
    """Returns the bytes of an update in place, besides reading the operands that are not changed."""
    return operands[1] if op == "dynamic-update-slice" else 2 * operands[2]  # a scatter adds to what is there


def _size(shape: str) -> int:
    return math.prod(dimensions_of(shape))


def _bytes(shape: str) -> int:
    return sum(array_bytes(shape))
