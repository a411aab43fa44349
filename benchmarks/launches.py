"""What a program that XLA compiled for a GPU launches, from what XLA dumps beside it.

XLA runs such a program as a tree of thunks: kernels, copies and collectives, each of which the host launches; CUDA
graphs (command buffers), whose contents it launches at once; and loops and conditionals. The host waits for a number
from the device before each turn of a loop of unknown length, and before a conditional, unless these are in a graph.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from jaxcomm.accounting.text import INSTRUCTION, TRIPS

DUMP = {"xla_dump_emitter_re": "ptx"}  # options of the compiler, beside xla_dump_to: PTX as well

_THUNK = re.compile(r"^(?P<indent> *)(?P<id>\d+): (?P<kind>k\w+) *(?:\[[^\]]*\])? *(?P<name>[\w.]*)")
_SECTION = re.compile(r"^(?P<indent> *)(?P<name>\w+):$")
_NAME = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
_KERNEL = re.compile(r"\.entry (\w+)\((.*?)^\}", re.DOTALL | re.MULTILINE)
_ATOMIC = re.compile(r"\b(?:atom|red)\.[\w.]*global\.(?P<kind>\w+)")
_GRAPH, _LOOP, _CONDITIONAL = "kCommandBuffer", "kWhile", "kConditional"
_NOT_LAUNCHED = {_LOOP, "kSequential", "kAsyncStart", "kWaitForStreams"}


@dataclass
class _Thunk:
    """A thunk of the dump. `parts` are the thunks of a graph, or those of a loop or a conditional by section.

    Of a conditional, XLA 0.12 calls the branch "true_branch" that runs if the predicate is false.
    """

    id: int
    kind: str
    name: str
    indent: int
    parts: dict[str, list["_Thunk"]] = field(default_factory=dict)


@dataclass
class Launches:
    """What a usual step launches: of a conditional, the branch with the fewest, and of an unknown loop one turn.

    Attributes:
      total: kernels, copies and collectives.
      in_graphs: those of them that are in CUDA graphs.
      graphs: CUDA graphs.
      host_waits: loops of unknown length and conditionals outside of graphs: the host waits for a number.
      atomics: launches of kernels that add to memory by atomic operations.
      swap_loops: launches of kernels that do so by a loop of compare-and-swap.
    """

    total: int = 0
    in_graphs: int = 0
    graphs: int = 0
    host_waits: int = 0
    atomics: int = 0
    swap_loops: int = 0

    def __add__(self, other: "Launches") -> "Launches":
        return Launches(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


def read_launches(text: str, sequence: str, names: str, ptx: str) -> Launches:
    """Counts the launches of a usual step.

    Args:
      text: of the compiled program: it has the lengths of loops.
      sequence: the thunks, as XLA dumps them.
      names: the instructions that thunks come from, as XLA dumps them ("thunk_metadata").
      ptx: the kernels' code.

    Raises:
      ValueError: for a sequence without thunks.
    """
    trips = {}
    for line in text.splitlines():
        match, length = INSTRUCTION.match(line), TRIPS.search(line)
        if match and length and match["op"] == "while":
            trips[match["name"]] = int(length[1])
    instructions = {int(number): name for name, number in _NAME.findall(names)}
    atomics = {name: {match["kind"] for match in _ATOMIC.finditer(body)} for name, body in _KERNEL.findall(ptx)}
    lengths = {number: trips[name] for number, name in instructions.items() if name in trips}
    return _count(_parse(sequence), lengths, atomics, 1, False)


def _count(
    thunks: Sequence[_Thunk],
    lengths: Mapping[int, int],
    atomics: Mapping[str, set[str]],
    times: int,
    in_graph: bool,
) -> Launches:
    """Counts what thunks launch that run `times` times in a step, from the lengths of loops and kernels' atomics."""
    launches = Launches()
    for thunk in thunks:
        trips, parts = lengths.get(thunk.id, 1), dict(thunk.parts)
        is_unknown = thunk.kind == _LOOP and thunk.id not in lengths
        if thunk.kind == _LOOP and not is_unknown:
            parts.pop("condition")  # XLA counts the turns on the host
        counts = [
            _count(part, lengths, atomics, times * trips, in_graph or thunk.kind == _GRAPH) for part in parts.values()
        ]
        if thunk.kind == _CONDITIONAL:
            counts = [min(counts, key=lambda count: count.total)]
        launches = sum(counts, launches)
        if thunk.kind == _GRAPH:
            launches.graphs += times
        elif is_unknown or thunk.kind == _CONDITIONAL:
            launches.host_waits += 0 if in_graph else times
        elif thunk.kind not in _NOT_LAUNCHED and not thunk.kind.endswith("Done"):
            kinds = atomics.get(thunk.name, set())
            inside, adds, swaps = (times * is_so for is_so in (in_graph, bool(kinds), "cas" in kinds))
            launches += Launches(times, inside, 0, 0, adds, swaps)
    return launches


def read_dump(folder: Path, text: str) -> Launches:
    """Counts the launches of the one program whose dump is in a folder; see `read_launches`.

    Raises:
      ValueError: without such a dump.
    """
    found = sorted(folder.glob("*.thunk_metadata.txt"), key=lambda path: path.stat().st_size)
    if not found:
        raise ValueError(f"XLA must dump the thunks of a GPU program; got none in {folder}. Pass xla_dump_to.")
    stem = found[-1].name.removesuffix(".thunk_metadata.txt")
    # Passes over thunks make the graphs; XLA dumps what comes of them only if it differs.
    sequences = [folder / f"{stem}.thunk_sequence{part}.txt" for part in ("_after_thunk_passes", "")]
    sequence = next(path for path in sequences if path.exists())
    ptx = "\n".join(path.read_text() for path in sorted(folder.glob("*.ptx")))
    return read_launches(text, sequence.read_text(), found[-1].read_text(), ptx)


def _parse(sequence: str) -> list[_Thunk]:
    """Reads the tree from its indentation."""
    top: list[_Thunk] = []
    ancestors: list[_Thunk] = []  # of the next line, each with its current section last in `parts`
    for line in sequence.replace("No thunks.", "\n").splitlines():
        section, match = _SECTION.match(line), _THUNK.match(line)
        if section:
            # A loop's condition follows the loop's line at once, and XLA does not indent it.
            while section["name"] != "condition" and (
                ancestors[-1].indent > len(section["indent"]) or ancestors[-1].kind not in (_LOOP, _CONDITIONAL)
            ):
                ancestors.pop()
            ancestors[-1].parts[section["name"]] = []
        elif match:
            indent = len(match["indent"])
            while ancestors and ancestors[-1].indent >= indent:
                ancestors.pop()
            thunk = _Thunk(int(match["id"]), match["kind"], match["name"], indent)
            parts = ancestors[-1].parts if ancestors else {"": top}
            parts.setdefault(next(reversed(parts), ""), []).append(thunk)  # to the section that the dump is in
            ancestors.append(thunk)
    if not top:
        raise ValueError(f"A sequence of thunks must have at least one; got {sequence[:200]!r}.")
    return top
