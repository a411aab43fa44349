from fractions import Fraction

import pytest

from jaxcomm.traffic import Program, Traffic


@pytest.mark.parametrize(
    ("op", "workers", "received"),
    [
        ("all_reduce", 1, 0),
        ("all_reduce", 4, 150),
        ("all_gather", 4, 300),
        ("all_gather", 1, 0),
        ("reduce_scatter", 4, 75),
        ("all_to_all", 4, 75),
        ("all_to_all", 3, Fraction(200, 3)),
        ("permute", 4, 100),
        ("permute", 1, 0),
    ],
)
def test_bytes_of_collectives(op, workers, received):
    assert Traffic(op, 100, workers).received == received
    assert Traffic(op, 100, workers, times=5).received == 5 * received


def test_conditionals():
    gather, reduce = Program([Traffic("all_gather", 10, 4)]), Program([Traffic("all_reduce", 1000, 4)])
    program = Program([Traffic("all_reduce", 4, 4)])
    program.add_conditional([gather, reduce])
    assert program.received == 6 + 30
    assert program.received_at_most == 6 + 1500
    assert [(when, traffic.op) for when, traffic in program.operations()] == [
        ("always", "all_reduce"),
        ("branch", "all_gather"),
        ("branch", "all_reduce"),
    ]


def test_a_conditional_in_a_loop():
    inner, outer = Program(), Program()
    inner.add_conditional([Program(), Program([Traffic("all_gather", 10, 2)])])
    outer.add(inner, 3)
    assert (outer.received, outer.received_at_most) == (0, 30)
    assert inner.received_at_most == 10


def test_an_empty_conditional():
    program = Program()
    program.add_conditional([Program(), Program()])
    assert not program.communicates
    program.add_conditional([Program(), Program([Traffic("permute", 1, 2)])])
    assert program.communicates


RING = ((0, 1), (1, 2), (2, 3), (3, 0))


@pytest.mark.parametrize(
    ("pairs", "workers", "received"),
    [
        (RING, 4, 100),
        (((0, 1),), 2, 50),
        (((0, 1),), 4, 25),
        (((1, 0), (2, 3)), 4, 50),
        (((0, 0), (1, 2)), 4, 25),  # a device that sends to itself receives nothing over the network
        (((0, 0),), 1, 0),
        ((), 4, 0),
        (None, 4, 100),
    ],
)
def test_permutations(pairs, workers, received):
    assert Traffic("permute", 100, workers, pairs=pairs).received == received
    assert Traffic("permute", 100, workers, pairs=pairs, times=3).received == 3 * received


def test_pairs_are_not_compared():
    """Neither do axes: compiled text numbers places in the mesh, the trace positions on an axis."""
    assert Traffic("permute", 8, 4, pairs=((0, 1),)) == Traffic("permute", 8, 4)


def test_links_add_up():
    program = Program([Traffic("permute", 8, 4, pairs=((0, 1), (2, 3))), Traffic("all_gather", 100, 4)])
    loop = Program([Traffic("permute", 5, 4, times=2, pairs=((0, 1),)), Traffic("permute", 7, 4, pairs=((1, 0),))])
    program.add(loop, times=3)
    assert program.links() == {(0, 1): 8 + 30, (2, 3): 8, (1, 0): 21}
    assert Program().links() == {}


def test_links_of_the_usual_branch():
    usual, rare = Program([Traffic("permute", 8, 2, pairs=((0, 1),))]), Program([Traffic("permute", 9, 2, pairs=RING)])
    inner, outer = Program(), Program([Traffic("permute", 1, 2, pairs=((0, 1),))])
    inner.add_conditional([usual, rare])
    outer.add(inner, times=5)
    assert outer.links() == {(0, 1): 1 + 40}
