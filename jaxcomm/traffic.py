"""What collectives cost: one operation, and everything a program does in a step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

TILE_BYTES = 4096  # bytes of a tile of a TPU's arrays
SPLIT_FROM = 8  # tiles per worker from which an all-reduce is padded to whole tiles: at most an eighth more bytes


@dataclass(frozen=True)
class Traffic:
    """One collective operation of a step.

    Attributes:
      op: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
      operand_bytes: bytes that each worker puts in.
      workers: workers in each group.
      times: executions in a step.
      axes: names of the mesh axes that it goes over; empty if they are not known (compiled text).
      pairs: (source, target) of a permutation: positions on the axis, or, in compiled text, places in the mesh.
      dtype: the type, for an all-reduce of numbers that are not 4 bytes, since some types are slow to sum. Else empty,
        except in compiled text: there it is what is sent, as XLA names it ("u32", "f32+s8").
    """

    op: str
    operand_bytes: int
    workers: int
    times: int = 1
    axes: tuple[str, ...] = field(default=(), compare=False)
    pairs: tuple[tuple[int, int], ...] | None = field(default=None, compare=False)
    dtype: str = field(default="", compare=False)

    @property
    def kind(self) -> str:
        """What its time depends on in addition to its bytes: the operation, and the type."""
        return f"{self.op} of {self.dtype}" if self.dtype else self.op

    @property
    def received(self) -> Fraction:
        """Bytes that each worker receives in a step, by the ring algorithm of the operation.

        all_reduce 2 (K-1)/K, all_gather K-1, reduce_scatter and all_to_all (K-1)/K times the operand. For a
        permutation, the average over the workers: one operand per pair of different workers, divided by K.
        """
        k = self.workers
        receivers = k if self.pairs is None else sum(source != target for source, target in self.pairs)
        factor = {
            "all_reduce": Fraction(2 * (k - 1), k),
            "all_gather": Fraction(k - 1),
            "reduce_scatter": Fraction(k - 1, k),
            "all_to_all": Fraction(k - 1, k),
            "permute": Fraction(receivers, k) if k > 1 else Fraction(0),
        }[self.op]
        return factor * self.operand_bytes * self.times

    @property
    def longest(self) -> float:
        """Bytes that the worker which receives most receives in one execution: of a permutation, the whole operand."""
        if self.pairs is None:
            return float(self.received) / self.times
        return float(self.operand_bytes) if any(source != target for source, target in self.pairs) else 0.0

    def in_tiles(self, is_between_slices: bool) -> "Traffic":
        """Returns the most that XLA may make of it on TPUs, where each message is whole tiles of 4 kB.

        Between slices, XLA splits an all-reduce among the devices of a slice, tile by tile. It may sum a small one
        twice: inside each slice, and then between the slices. The parts of a reduce-scatter are padded by up to 4 tiles
        and a 64th, and a permutation then shifts the sums by their padding, which is as much again.
        """
        if self.op == "reduce_scatter":
            tiles = -(-self.operand_bytes // (self.workers * TILE_BYTES))
            return replace(self, operand_bytes=(tiles + 2 * (4 + tiles // 64)) * self.workers * TILE_BYTES)
        messages = self.workers if self.op == "all_to_all" else 1
        summed = 1.0
        if self.op == "all_reduce" and is_between_slices:
            messages = self.workers
            summed = 1.0 if self.operand_bytes >= SPLIT_FROM * messages * TILE_BYTES else 1.5
        tile = messages * TILE_BYTES
        return replace(self, operand_bytes=int(summed * -(-self.operand_bytes // tile) * tile))


@dataclass
class Program:
    """The collectives of a program: those of every step, and those of each branch of its conditionals.

    Attributes:
      always: run in every step.
      conditionals: for every conditional, its branches, of which one runs. The usual branch is first (that of a false
        predicate, as in `lax.cond(rare, ...)`).
    """

    always: list[Traffic] = field(default_factory=list)
    conditionals: list[list["Program"]] = field(default_factory=list)

    def in_tiles(self, is_between_slices: bool) -> "Program":
        """Returns the most that XLA may make of it on TPUs; see `Traffic.in_tiles`."""
        rounded = [traffic.in_tiles(is_between_slices) for traffic in self.always]
        branches = [[branch.in_tiles(is_between_slices) for branch in conditional] for conditional in self.conditionals]
        return Program(rounded, branches)

    def add(self, program: "Program", times: int = 1) -> None:
        """Adds another program's collectives, run `times` times a step."""
        self.always += [replace(traffic, times=traffic.times * times) for traffic in program.always]
        for branches in program.conditionals:
            scaled = [Program() for _ in branches]
            for target, branch in zip(scaled, branches, strict=True):
                target.add(branch, times)
            self.conditionals.append(scaled)

    def add_conditional(self, branches: list["Program"]) -> None:
        """Adds a conditional, unless none of its branches communicates."""
        if any(branch.communicates for branch in branches):
            self.conditionals.append(branches)

    def over(self, *axes: str) -> "Program":
        """Returns the part of the program that goes over any of the given mesh axes.

        Raises:
          ValueError: if some collective's axes are not known.
        """
        if any(not traffic.axes and traffic.workers > 1 for _, traffic in self.operations()):
            raise ValueError(
                "Collectives must be of a traced program, or of compiled text with a mesh, for their axes to be known; "
                f"got neither for {axes}. Ask wire_report or step_report."
            )
        part = Program([traffic for traffic in self.always if set(axes) & set(traffic.axes)])
        for branches in self.conditionals:
            part.add_conditional([branch.over(*axes) for branch in branches])
        return part

    def in_turn(self, turn: int, turns: int) -> "Program":
        """Returns the collectives of a step in which a given fragment of the parameters is exchanged; see `local_sgd`.

        Args:
          turn: the fragment, from 0.
          turns: how many there are. A conditional with a branch for each, and one to stay, is replaced by the branch of
            `turn`. With one turn there is nothing to choose.
        """
        program = Program(list(self.always))
        for branches in self.conditionals:
            if turns > 1 and len(branches) == turns + 1:
                program.add(branches[turn])
            else:
                program.conditionals.append(branches)
        return program

    def links(self) -> dict[tuple[int, int], int]:
        """Returns the bytes of a usual step that permutations move from one position to another, by (from, to)."""
        bytes_of_pair: dict[tuple[int, int], int] = {}
        for traffic in self.usual:
            for pair in traffic.pairs or ():
                bytes_of_pair[pair] = bytes_of_pair.get(pair, 0) + traffic.operand_bytes * traffic.times
        return bytes_of_pair

    @property
    def communicates(self) -> bool:
        """Whether there is any collective."""
        return bool(self.always or self.conditionals)

    @property
    def usual(self) -> list[Traffic]:
        """The collectives of a usual step: of every conditional, the first branch."""
        return [*self.always, *(traffic for branches in self.conditionals for traffic in branches[0].usual)]

    @property
    def received_always(self) -> Fraction:
        """Bytes that each worker receives in every step, outside of all conditionals."""
        return sum((t.received for t in self.always), Fraction(0))

    @property
    def received(self) -> Fraction:
        """Bytes that each worker receives in a usual step: of every conditional, the first branch."""
        return sum((traffic.received for traffic in self.usual), Fraction(0))

    @property
    def most_expensive(self) -> list[Traffic]:
        """The collectives of the most expensive step: of every conditional, the branch that receives most."""
        worst = (max(branches, key=lambda branch: branch.received_at_most) for branches in self.conditionals)
        return [*self.always, *(traffic for branch in worst for traffic in branch.most_expensive)]

    @property
    def received_at_most(self) -> Fraction:
        """Bytes that each worker receives in the most expensive step."""
        return sum((traffic.received for traffic in self.most_expensive), Fraction(0))

    def operations(self) -> Iterator[tuple[str, Traffic]]:
        """Yields ("always" or "branch", operation) for every collective."""
        for traffic in self.always:
            yield "always", traffic
        for branches in self.conditionals:
            for branch in branches:
                for _, traffic in branch.operations():
                    yield "branch", traffic


def count_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the bytes of an array."""
    return math.prod(shape) * itemsize
