"""The rooms of `jaxcomm` are on floors: a room imports only rooms of lower floors, so that there is no circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = [
    {"kernels", "checks", "serialization", "traffic", "types"},
    {"layout"},
    {"selectors"},
    {"codecs"},
    {"collectives"},
    {"exchange", "layers", "patches"},
    {"state"},
    {"accounting", "methods"},
    {"order"},
    {"chain"},
    {"steps"},
    {"foreign", "planner", "rounds"},
    {"placement"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LIBRARY = Path(__file__).parents[2] / "jaxcomm"
MODULES = [path for path in sorted(LIBRARY.rglob("*.py")) if path != LIBRARY / "__init__.py"]


def imports(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports, wherever in it: `jaxcomm.bits` for `from jaxcomm import bits`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "jaxcomm":
            yield from (f"jaxcomm.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(LIBRARY).with_suffix("")) for path in MODULES])
def test_imports_go_down(path):
    room = path.relative_to(LIBRARY).with_suffix("").parts[0]
    rooms = {module.split(".")[1] for module in imports(path) if module.startswith("jaxcomm.")} - {room}
    assert {name for name in rooms if FLOOR[name] >= FLOOR[room]} == set()


def test_imports_of_the_wheel():
    packages = {module.split(".")[0] for path in MODULES for module in imports(path)}
    assert packages.isdisjoint({"flax", "train", "models", "configs", "benchmarks", "tests"})
    of_scipy = {path.parent.name for path in MODULES if any(module.startswith("scipy") for module in imports(path))}
    assert of_scipy == {"placement"}
