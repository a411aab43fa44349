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
def test_bytes_received_for_100_bytes_put_in(op, workers, received):
    assert Traffic(op, 100, workers).received == received
    assert Traffic(op, 100, workers, times=5).received == 5 * received


def test_a_conditional_counts_its_cheaper_branch_usually_and_its_dearer_one_at_most():
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


def test_a_conditional_in_a_loop_counts_every_time():
    inner, outer = Program(), Program()
    inner.add_conditional([Program(), Program([Traffic("all_gather", 10, 2)])])
    outer.add(inner, 3)
    assert (outer.received, outer.received_at_most) == (0, 30)
    assert inner.received_at_most == 10


def test_a_conditional_without_collectives_is_none():
    program = Program()
    program.add_conditional([Program(), Program()])
    assert not program.communicates
    program.add_conditional([Program(), Program([Traffic("permute", 1, 2)])])
    assert program.communicates
