"""The table of methods, and how tests iterate over it. Every method in it is tested for every law.

A method has a file of its own in `tests/jaxcomm/methods`, named as in `jaxcomm/methods`. What the laws have to know
about it, its oracle and its bytes are in a subclass of `Case`; its rows of the table are the module's `CASES`.
"""

import functools
from typing import Any

import pytest

from tests.jaxcomm.methods import dct_dp, demo, dgc, iwp, plump_dp, pulse, quant_dp, random_k, sign, terngrad, topk
from tests.jaxcomm.methods.case import Case
from tests.jaxcomm.workers import OnMesh, Simulated

METHODS = (plump_dp, topk, dct_dp, dgc, demo, pulse, random_k, iwp, sign, quant_dp, terngrad)

# The first row of a method is tested with every number of workers, variants with fewer, as compiling is expensive.
CASES: list[Case] = [case for method in METHODS for case in method.CASES]
FIRST: list[Case] = [method.CASES[0] for method in METHODS]

# Every number of workers with the shapes that it is tested on, the last only for a method whose usual setting it is, as
# it takes longest and each family has such a method; then the same for variants.
LARGEST = (8, "odd")
SETTINGS = [(1, "single"), (2, "odd"), (3, "half"), (4, "pair"), LARGEST]
FEW = [(2, "odd")]

# If a test does not have a case's `usual` setting, plain `pytest` runs the first of these that it has; the other
# settings, and the variants, are in the slow tier.
USUAL = [(4, "pair"), LARGEST, (3, "half")]


def over(rows: list[Case], settings: list[tuple[int, str]], of_variants: list[tuple[int, str]]) -> Any:
    """Parametrizes a test over cases, numbers of workers K and trees of shapes; all but one per method are slow."""

    def marks(case: Case, setting: tuple[int, str]) -> Any:
        usual = next((each for each in [case.usual, *USUAL] if each in settings), settings[0])
        return pytest.mark.slow if case.is_variant or setting != usual else ()

    return pytest.mark.parametrize(
        ("case", "K", "tree"),
        [
            pytest.param(case, K, tree, id=f"{case}-{K}-{tree}", marks=marks(case, (K, tree)))
            for case in rows
            for K, tree in (of_variants if case.is_variant else settings)
            if (K, tree) != LARGEST or case.usual == LARGEST
        ],
    )


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
