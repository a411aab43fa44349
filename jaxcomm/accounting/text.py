"""The text of a compiled program: its computations, their instructions, and the sizes of arrays."""

import re
from collections.abc import Container, Iterator

from jaxcomm.traffic import count_bytes

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.+?) (?P<op>[a-z][a-z0-9\-]*)\((?P<rest>.*)$")
_NAME = re.compile(r"[\w.\-]+")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=\{?%?([\w.\-]+)")
BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_FALSE = re.compile(r"\bfalse_computation=%?([\w.\-]+)")
_TRUE = re.compile(r"\btrue_computation=%?([\w.\-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def read_computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of every computation by its name, and the name of the one that runs first.

    Raises:
      ValueError: for a text without one.
    """
    computations: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = header.group(2)
            computations[current] = []
            entry = current if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            computations[current].append(line)
    if not entry:
        raise ValueError(
            "The text of a compiled program must have an ENTRY computation; got none. Pass compiled.as_text()."
        )
    return computations, entry


def operands_of(tail: str, names: Container[str]) -> list[str]:
    """Returns the instructions among `names` that an instruction reads; ignores names in its metadata."""
    return [name for name in _NAME.findall(re.split(r", (?:metadata|backend_config)=", tail)[0]) if name in names]


def branches_of(tail: str) -> list[str]:
    """Returns the branches of a conditional, the false branch first."""
    listed = _BRANCHES.search(tail)
    return _NAME.findall(listed.group(1)) if listed else _FALSE.findall(tail) + _TRUE.findall(tail)


def array_bytes(shape: str) -> Iterator[int]:
    """Yields the bytes of an array, or of each array of a tuple.

    Raises:
      ValueError: for an unknown type.
    """
    for dtype, dims in _ARRAY.findall(shape):
        if dtype == "token":
            continue
        yield count_bytes(tuple(int(d) for d in dims.split(",") if d), _itemsize(dtype))


def types_of(shape: str) -> str:
    """Returns the types of an array, or of the arrays of a tuple, each once: "f32+s8"."""
    return "+".join(dict.fromkeys(dtype for dtype, _ in _ARRAY.findall(shape) if dtype != "token"))


def _itemsize(dtype: str) -> int:
    if dtype == "pred":
        return 1
    bits = re.search(r"\d+", dtype)
    if bits is None:
        raise ValueError(f"A type in a compiled program must be of known bytes; got {dtype!r}.")
    return max(int(bits.group()) // 8, 1)


def dimensions_of(shape: str) -> list[int]:
    """Returns the dimensions of an array, or of the first array of a tuple."""
    return [int(size) for size in _ARRAY.findall(shape)[0][1].split(",") if size]
