"""The table of methods, and how tests iterate over it. Every method in it is tested for every law.

A method has a file of its own in `tests/jaxcomm/methods`, named as in `jaxcomm/methods`. What the laws have to know
about it, its oracle and its bytes are in a subclass of `Case`; its rows of the table are the module's `CASES`.
"""

import functools
from importlib import import_module
from typing import Any

import pytest

from jaxcomm import methods
from tests.jaxcomm.methods.case import Case
from tests.jaxcomm.workers import OnMesh, Simulated

# Methods with another promise have the laws in files of their own. Every other method is in the table.
OTHER_PROMISES = {"ef21", "hierarchical", "local_sgd", "powersgd", "slim_dp", "sparse_loco"}
METHODS = [import_module(f"tests.jaxcomm.methods.{name}") for name in methods.__all__ if name not in OTHER_PROMISES]

# The rows of the table. Compiling is expensive: a row is tested with two workers and with a number of its own, variants
# with two, and plain `pytest` runs one setting of a row. Every family has rows with 1, 3, 4 or 8 workers.
CASES: list[Case] = [case for method in METHODS for case in method.CASES]
FIRST: list[Case] = [method.CASES[0] for method in METHODS]

LARGEST = (8, "odd")
SETTINGS = [(1, "single"), (2, "odd"), (3, "half"), (4, "pair"), LARGEST]
FEW = [(2, "odd")]

# If a test does not have a row's own setting, the row is tested with the first of these that it has.
INSTEAD = [(4, "pair"), LARGEST, (3, "half")]


def over(rows: list[Case], settings: list[tuple[int, str]], of_variants: list[tuple[int, str]]) -> Any:
    """Parametrizes a test over cases, numbers of workers K and trees of shapes; all but one per row are slow."""
    params = []
    for case in rows:
        choice = next((setting for setting in [case.setting, *INSTEAD] if setting in settings), settings[0])
        tested = of_variants if case.is_variant else [item for item in settings if item == choice or item[0] == 2]
        usual = None if case.is_variant else choice if choice[0] > 1 else tested[-1]
        params += [
            pytest.param(case, K, tree, id=f"{case}-{K}-{tree}", marks=() if (K, tree) == usual else pytest.mark.slow)
            for K, tree in tested
        ]
    return pytest.mark.parametrize(("case", "K", "tree"), params)


def first_rows(rows: list[Case]) -> list[Any]:
    """Parameters of a test over only cases; variants are slow."""
    return [pytest.param(case, id=str(case), marks=pytest.mark.slow if case.is_variant else ()) for case in rows]


@functools.cache
def simulated(case: Case, tree: str, K: int) -> Simulated:
    """The simulation of a case of the table; compiled once for all tests."""
    return Simulated(case.make(), tree, K)


@functools.cache
def on_mesh(case: Case, tree: str, K: int) -> OnMesh:
    """The exchange of a case of the table on a mesh; compiled once for all tests."""
    return OnMesh(case.make(), tree, K)
