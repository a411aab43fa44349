"""The cost of collectives: by hand for a given link, and measured on a mesh of simulated devices."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc
from jaxcomm.planner import Link, Links, given_links, measure_links
from jaxcomm.traffic import Program, Traffic
from tests.refusals import refusals, refused

N, K = 1000, 4
PARAMS = {"w": jnp.zeros((20, 50))}


def report(tx, workers=K):
    return jc.wire_report(tx, PARAMS, workers)


def test_one_link_by_hand():
    wire = given_links(1e6, latency=0.01).wire(report(jc.plump_dp()))
    assert wire.latency == pytest.approx(2 * (K - 1) * 0.01)
    assert wire.transfer == pytest.approx(2 * (K - 1) / K * 4 * N * 8 / 1e6)
    assert wire.error == pytest.approx(wire.seconds / 4)
    gathered = given_links(1e6, latency=0.01).wire(report(jc.topk(0.9, collective="gather")))
    assert gathered.latency == pytest.approx((K - 1) * 0.01)
    two_shot = given_links(1e6, latency=0.01).wire(report(jc.plump_dp(value_dtype="bfloat16")))
    assert two_shot.latency == pytest.approx(0.01 + (K - 1) * 0.01)
    single = given_links(1e6, latency=0.01).wire(report(jc.plump_dp(), workers=1))
    assert single.seconds == 0


def test_several_links_by_hand():
    """In a ring, the slowest link counts; in an all-to-all, the worker with the longest messages, one after another."""
    operand, ring = 4000, [2e6, 1e6, 4e6, 4e6]  # bytes; from each worker to the next
    rates = np.full((K, K), 8e6)
    for worker, bits in enumerate(ring):
        rates[worker, (worker + 1) % K] = bits
    rates[2, 0], rates[2, 1] = 5e5, 1e6

    def seconds(rate, op, **options):
        return given_links(rate, latency=0.0).seconds(Program([Traffic(op, operand, K, axes=("data",), **options)]))

    assert seconds(rates.tolist(), "all_gather") == pytest.approx(3 * operand * 8 / 1e6)
    assert seconds(rates.tolist(), "all_reduce") == pytest.approx(2 * 3 / 4 * operand * 8 / 1e6)
    # Worker 2 sends a quarter of its operand to each of the others.
    assert seconds(rates.tolist(), "all_to_all") == pytest.approx(operand / 4 * 8 * (1 / 5e5 + 1 / 1e6 + 1 / 4e6))
    assert seconds(rates.T.tolist(), "all_to_all") == pytest.approx(operand / 4 * 8 * (1 / 5e5 + 1 / 1e6 + 1 / 4e6))
    pairs = ((0, 1), (1, 3), (2, 0), (3, 2))
    assert seconds(rates.tolist(), "permute", pairs=pairs) == pytest.approx(operand * 8 / 5e5)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):  # one host at a tenth slows all of them
        assert seconds([1e5, 1e6, 1e6, 1e6], op) == pytest.approx(seconds(1e5, op))
    with pytest.raises(ValueError, match="must be given for every worker of a collective; got 3 rates for all_reduce"):
        seconds([1e6] * 3, "all_reduce")


def test_a_permutation_of_some():
    """Stages pass activations on: one that receives a whole operand is waited for."""
    for pairs, received in (((0, 1),), 1), (((0, 1), (1, 2), (2, 3)), 1), (((1, 1),), 0):
        program = Program([Traffic("permute", 10**6, K, times=2, pairs=pairs)])
        assert given_links(1e9).seconds(program) == pytest.approx(received * 2 * 8e-3)


@pytest.mark.parametrize(("rate", "latency"), [(1e9, 0.01), (1e12, 0.01), (1e3, 0.0)])
def test_a_link_has_its_own_rate(rate, latency):
    link = given_links(rate, latency).link(Traffic("all_to_all", 8, 2))
    assert (link.bits_per_second, link.latency) == (pytest.approx(rate, rel=1e-9), latency)
    assert link.seconds(1e6) == pytest.approx(latency + 8e6 / rate)


def test_large_messages_that_take_no_longer():
    assert Link(((0.0, 0.5), (1e6, 0.5)), 0.0).bits_per_second == np.inf


def test_periods():
    links = given_links(1e6, latency=0.01)
    steps, tenth = links.wire(report(jc.plump_dp())), links.wire(report(jc.local_sgd(10, exchange=jc.plump_dp())))
    assert tenth.seconds == pytest.approx(steps.seconds / 10)
    assert tenth.error == pytest.approx(steps.error / 10)


def test_lines_between_sizes():
    link = Link(((0.0, 0.001), (1000.0, 0.002), (10000.0, 0.02)), 0.1)
    assert link.seconds(0) == 0.001
    assert link.seconds(500) == pytest.approx(0.0015)
    assert link.seconds(5500) == pytest.approx(0.011)
    assert link.seconds(20000) == pytest.approx(0.001 + 2 * 0.019)
    assert link.bits_per_second == pytest.approx(8 * 10000 / 0.019)
    links = Links({("all_reduce", ("data",)): link})
    (traffic,) = report(jc.plump_dp()).program.always
    assert links.wire(report(jc.plump_dp())).seconds == pytest.approx(link.seconds(float(traffic.received)))
    with pytest.raises(ValueError, match="must be measured to be predicted; got all_gather over data"):
        links.wire(report(jc.topk(0.9, collective="gather")))


def test_loops_and_branches():
    link = Link(((0.0, 0.5), (1.0, 1.5)), 0.0)
    links = Links({("permute", ("data",)): link})
    program = Program([Traffic("permute", 3, 2, times=4, axes=("data",))])
    program.add_conditional([Program(), Program([Traffic("permute", 1000, 2, axes=("data",))])])
    wire = links.wire(jc.accounting.WireReport(2, N, program))
    assert (wire.latency, wire.transfer) == (4 * 0.5, 4 * 3.0)


def test_full_exchanges_take_their_share():
    links = given_links(1e6)
    usual, full = (links.wire(report(tx)).seconds for tx in (jc.dct_dp(0.99), jc.plump_dp()))
    drains = jc.dct_dp(0.99, drain_every=4)
    mean = 0.75 * usual + 0.25 * full
    assert links.wire(report(drains)).seconds == pytest.approx(mean)
    assert links.wire(report(jc.local_sgd(2, exchange=drains))).seconds == pytest.approx(mean / 2)


def test_measured_collectives():
    programs = [report(tx, 2).program for tx in (jc.plump_dp(), jc.quant_dp(8, collective="two_shot"))]
    links = measure_links(jc.make_mesh(data=2), programs)
    assert set(links.table) == {(op, ("data",)) for op in ("all_reduce", "all_to_all", "all_gather")}
    for (op, _), link in links.table.items():
        sizes, seconds = np.array(link.points).T
        assert (np.diff(sizes) > 0).all(), op
        assert sizes[1] == pytest.approx(4096, rel=0.01)
        assert (seconds > 0).all()
        assert seconds[-1] > seconds[0]
    with pytest.raises(ValueError, match="must have the axes of the workers"):
        measure_links(jc.make_mesh(other=2), programs)


def test_measured_types():
    """Gloo sums float16 in software, unlike float32, whose link stands for all types that were not measured."""
    programs = [report(tx, 2).program for tx in (jc.plump_dp(), jc.plump_dp(value_dtype="float16"))]
    links = measure_links(jc.make_mesh(data=2), programs)
    assert set(links.table) == {(kind, ("data",)) for kind in ("all_reduce", "all_reduce of float16")}
    of_float16, of_others = (Link(((0.0, 0.0), (1.0, seconds)), 0.0) for seconds in (5.0, 1.0))
    table = {("all_reduce", ("data",)): of_others, ("all_reduce of float16", ("data",)): of_float16}
    (narrow,) = programs[1].always
    assert links.link(narrow) is links.table["all_reduce of float16", ("data",)]
    assert Links(table).seconds(programs[1]) == 5 * float(narrow.received)
    (of_integers, *_) = report(jc.quant_dp(8, collective="psum"), 2).program.always
    assert Links(table).link(of_integers) is of_others


@refusals(
    *(
        (lambda rate=rate: given_links(rate, 0.0), "rate must be ")
        for rate in (0.0, float("nan"), [1e9, -1e9], [[0.0, 1e9], [0.0, 0.0]], [], [[1e9, 1e9], [1e9]], [[1e9] * 3] * 2)
    ),
    *((lambda value=value: given_links(1e9, value), "latency must be ", f"got {value}") for value in (-1.0, None, 50)),
)
def test_refusals(call, said):
    refused(call, *said)


def test_start_of_a_program(monkeypatch):
    """A collective that sleeps 20 ms, in programs that each take 50 ms more."""

    def sleeping(x, axes):
        del axes
        return jax.pure_callback(lambda x: time.sleep(0.02) or np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    module = sys.modules[measure_links.__module__]
    real = module.time_calls
    monkeypatch.setitem(module._COLLECTIVES, "all_reduce", sleeping)
    monkeypatch.setattr(module, "time_calls", lambda *args: [s + 0.05 for s in real(*args)])
    program = Program(always=(Traffic("all_reduce", 4096, 2, axes=("data",)),))
    latency = measure_links(jc.make_mesh(data=2), [program]).table["all_reduce", ("data",)]
    assert 0.01 < latency.latency < 0.04


def test_a_link_that_answers_slowly(monkeypatch):
    """0.3 s of delay are not 0.3 s of transfer: larger messages are measured as well."""
    module = sys.modules[measure_links.__module__]
    sizes = iter(size for size in module._BYTES for _ in range(2 if size == module._BYTES[0] else 1))
    chained = iter([1, module._CHAINED, *[1] * len(module._BYTES)])
    monkeypatch.setattr(module, "time_calls", lambda *_: [next(chained) * 0.3 + 1e-7 * next(sizes)] * 4)
    program = Program(always=(Traffic("all_reduce", 4096, 2, axes=("data",)),))
    link = measure_links(jc.make_mesh(data=2), [program]).table["all_reduce", ("data",)]
    assert len(link.points) > 2
    assert link.latency == pytest.approx(0.3, rel=0.1)
    assert link.bits_per_second == pytest.approx(8e7, rel=0.2)
