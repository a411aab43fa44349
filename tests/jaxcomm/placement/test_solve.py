import dataclasses
import itertools
import math
import random

import pytest

from benchmarks.shapes import resnet50
from jaxcomm.placement import solve as assign
from jaxcomm.placement.problem import Block, Device, Option, Problem, Tensor
from jaxcomm.placement.solve import solve
from tests.refusals import refusals, refused

NAMES = ("dense", "topk", "late", "sign")


def dyadic(draw, most):
    """Returns a multiple of 1/64, so that sums are exact and limits are met exactly too."""
    return draw.randint(0, 64 * most) / 64


def random_problem(seed, S):
    draw = random.Random(f"{seed} {S}")
    B = draw.randint(S, (8, 6, 5)[S - 1])
    blocks, left = [], 5
    for b in range(B):
        tensors = []
        for t in range(min(left, draw.randint(0, 2))):
            names = draw.sample(NAMES, draw.randint(1, 4))
            options = [Option(n, dyadic(draw, 3), dyadic(draw, 2), draw.randint(0, 6)) for n in names]
            if tensors and draw.random() < 0.4:  # alike
                options = tensors[-1].options
            tensors.append(Tensor(f"{b}/{t}", tuple(options)))
        left -= len(tensors)
        blocks.append(Block(f"{b}", dyadic(draw, 4), draw.randint(0, 9), draw.randint(0, 50), tuple(tensors)))
    devices = [Device(draw.choice((0.5, 1.0, 1.7)), draw.choice((None, draw.randint(10, 60)))) for _ in range(S)]
    return Problem(
        tuple(blocks),
        tuple(devices),
        tuple(draw.uniform(0, 0.05) for _ in range(S - 1)),
        tuple(draw.uniform(0, 0.1) for _ in range(S - 1)),
        {name: dyadic(draw, 2) for name in draw.sample(NAMES, draw.randint(0, 4))},
        draw.randint(1, 4),
        draw.choice((None, dyadic(draw, 6))),
    )


def cost(problem, stages, options):
    """Returns the seconds of a step, or None if a limit is broken; computed without the library."""
    S, M = len(problem.devices), problem.micro_batches
    compute, exchange, memory, pairs, error = [0] * S, [0] * S, [0] * S, [set() for _ in range(S)], 0
    for stage, block in zip(stages, problem.blocks, strict=True):
        compute[stage] += block.seconds / problem.devices[stage].speed
        memory[stage] += block.memory
        for tensor in block.tensors:
            option = next(option for option in tensor.options if option.name == options[tensor.name])
            exchange[stage] += option.seconds
            memory[stage] += option.memory
            error += option.error
            pairs[stage].add(option.name)
    for s in range(S):
        exchange[s] += sum(problem.starts.get(name, 0) for name in pairs[s])
        if problem.devices[s].memory is not None and memory[s] > problem.devices[s].memory:
            return None
    if problem.error_budget is not None and error > problem.error_budget:
        return None
    arrived = [0.0] * M  # of the micro-batches, at the next stage; one message forward, one backward
    for b in range(len(stages) - 1):
        if stages[b + 1] > stages[b]:
            s, free = stages[b], 0.0
            size = problem.blocks[b].boundary_bytes / M
            for m in range(M):
                free = max(arrived[m], free) + 2 * problem.link_seconds[s] + size * problem.link_seconds_per_byte[s]
                arrived[m] = free
    crossing = arrived[-1]
    return (M + S - 1) / M * max(compute) + crossing + max(exchange)


def brute_force(problem):
    """Returns the seconds of the shortest of all assignments, or None."""
    B, S = len(problem.blocks), len(problem.devices)
    tensors = [tensor for block in problem.blocks for tensor in block.tensors]
    best = None
    for stages in itertools.product(range(S), repeat=B):
        if list(stages) != sorted(stages) or set(stages) != set(range(S)):
            continue
        for choice in itertools.product(*[tensor.options for tensor in tensors]):
            options = {tensor.name: option.name for tensor, option in zip(tensors, choice, strict=True)}
            seconds = cost(problem, stages, options)
            if seconds is not None and (best is None or seconds < best):
                best = seconds
    return best


@pytest.mark.parametrize("gap", [0, 1e-3])
@pytest.mark.parametrize("S", [1, 2, 3])
def test_brute_force(S, gap, monkeypatch):
    monkeypatch.setattr(assign, "_AT_ONCE", 2)  # so that few placements are many
    solved = 0
    for seed in range(150):
        problem = random_problem(seed, S)
        best = brute_force(problem)
        if best is None:
            with pytest.raises(ValueError, match=r"must fit into the memory|must stay within the budget"):
                solve(problem)
            continue
        solution = solve(problem, gap=gap)
        assert list(solution.stages) == sorted(solution.stages)
        assert set(solution.stages) == set(range(S))
        assert cost(problem, solution.stages, solution.options) == pytest.approx(solution.seconds, rel=1e-9)
        assert best * (1 - 1e-9) <= solution.seconds <= best * (1 + 1e-6 + 2 * gap)
        assert solution.optimal
        assert 0 <= solution.gap <= gap + 1e-6
        solved += 1
    assert solved > 50


def test_knapsack():
    # Bytes to save 4, 3, 2 by errors of 3, 2, 2; a budget of 4 allows the last two, which save more than the first.
    def tensor(name, saved, error):
        return Tensor(name, (Option("dense", 5.0), Option("topk", 5.0 - saved, error)))

    block = Block("all", 1.0, tensors=(tensor("a", 4.0, 3.0), tensor("b", 3.0, 2.0), tensor("c", 2.0, 2.0)))
    solution = solve(Problem((block,), error_budget=4.0), gap=0)
    assert solution.options == {"a": "dense", "b": "topk", "c": "topk"}
    assert (solution.parts.compute, solution.parts.boundaries, solution.parts.exchange) == (1.0, 0.0, 10.0)
    assert solve(Problem((block,), starts={"topk": 100.0})).options == dict.fromkeys("abc", "dense")


def large(S):
    """Returns ResNet-50's 161 tensors in 18 blocks, with 8 options whose costs are drawn around their shares."""
    draw = random.Random(0)
    sizes = iter(math.prod(shape) for shape in resnet50())
    counts = [3, *[9 + 3 * (b == 0) for blocks in (3, 4, 6, 3) for b in range(blocks)], 2]
    ways = {"dense": (1, 0), "quant8": (0.3, 0.001), "quant4": (0.18, 0.01), "topk.9": (0.25, 0.3)}
    ways |= {"topk.99": (0.05, 0.7), "topk.999": (0.01, 0.9), "sign": (0.05, 0.6), "powersgd": (0.03, 0.5)}
    blocks = []
    for b, count in enumerate(counts):
        tensors = []
        for t in range(count):
            n = next(sizes)
            options = [
                Option(name, n * part * draw.uniform(0.9, 1.1) / 3e7 + 1e-5, n * error * draw.uniform(0.9, 1.1) / 2.6e7)
                for name, (part, error) in ways.items()
            ]
            tensors.append(Tensor(f"{b}/{t}", tuple(options)))
        crossing = draw.uniform(8e6, 32e6)
        blocks.append(Block(f"{b}", draw.uniform(0.02, 0.04), 10**8, crossing, tuple(tensors)))
    return Problem(
        tuple(blocks),
        (Device(memory=32 * 10**8 // S),) * S,
        (1e-9,) * (S - 1),
        (1e-4,) * (S - 1),
        {name: draw.uniform(0.001, 0.003) for name in ways},
        8,
        0.3,
    )


@pytest.mark.parametrize("S", [1, 8])
def test_a_large_problem(S):
    solution = solve(large(S), time_limit=60, gap=0.01)
    assert solution.optimal
    assert set(solution.stages) == set(range(S))
    assert cost(large(S), solution.stages, solution.options) == pytest.approx(solution.seconds)


def test_gap(monkeypatch):
    monkeypatch.setattr(assign, "_KEPT", 1)
    missed = 0
    for seed in range(60):
        problem = random_problem(seed, 3)
        problem = dataclasses.replace(problem, devices=tuple(Device(device.speed) for device in problem.devices))
        best = brute_force(problem)
        if best is None:  # by the budget
            continue
        solution = solve(problem, gap=0)
        assert solution.seconds * (1 - solution.gap) <= best * (1 + 1e-9)
        if solution.seconds > best * (1 + 1e-6):
            assert not solution.optimal
            missed += 1
    assert missed


TENSOR = Tensor("t", (Option("dense", 1.0, 0.0, 4), Option("topk", 0.5, 0.25, 8)))
BLOCK = Block("b", 1.0, 10, 8, (TENSOR,))


@refusals(
    (lambda: Problem(()), "blocks", "got 1 stages for 0"),
    (lambda: Problem((BLOCK,), (Device(),) * 2, (0,), (0,)), "blocks", "got 2 stages for 1"),
    (lambda: Problem((BLOCK,), ()), "stage", "got 0 stages"),
    (lambda: Problem((BLOCK, BLOCK)), "names of tensors", "got 't' twice"),
    (lambda: Problem((BLOCK,), link_seconds=(1.0,)), "link_seconds", "got 1 for 1"),
    (lambda: Problem((BLOCK,), link_seconds_per_byte=(1.0,)), "link_seconds_per_byte", "got 1"),
    (
        lambda: Problem((Block("a", 1.0),) * 2, (Device(),) * 2, (-1.0,), (0.0,)),
        "link_seconds_per_byte",
        "got -1.0",
    ),
    (lambda: Problem((BLOCK,), starts={"dense": -1.0}), "start of option 'dense'", "got -1.0"),
    (lambda: Problem((BLOCK,), micro_batches=0), "micro_batches", "got 0"),
    (lambda: Problem((BLOCK,), error_budget=math.nan), "error_budget", "got nan"),
    (lambda: Tensor("t", ()), "tensor 't'", "option"),
    (lambda: Tensor("t", (Option("a", 1), Option("a", 2))), "tensor 't'", "'a', 'a'"),
    (lambda: Option("a", -1.0), "seconds of option 'a'", "got -1.0"),
    (lambda: Option("a", 1.0, math.nan), "error of option 'a'", "got nan"),
    (lambda: Option("a", 1.0, 0.0, -1), "memory of option 'a'", "got -1"),
    (lambda: Block("b", math.inf), "seconds of block 'b'", "got inf"),
    (lambda: Block("b", 1.0, math.nan), "memory of block 'b'", "got nan"),  # type: ignore
    (lambda: Block("b", 1.0, 1, -8), "boundary_bytes of block 'b'", "got -8"),
    (lambda: Device(0.0), "speed of a device", "got 0.0"),
    (lambda: Device(1.0, -1), "memory of a device", "got -1"),
    (lambda: solve(Problem((BLOCK,)), time_limit=0), "time_limit", "got 0"),
    (lambda: solve(Problem((BLOCK,)), time_limit=None), "time_limit", "got None"),  # type: ignore
    (lambda: solve(Problem((BLOCK,)), gap=-1), "gap", "got -1"),
    (lambda: solve(Problem((BLOCK,)), gap="1"), "gap", "got '1'"),  # type: ignore
    (lambda: solve(large(2), time_limit=1e-9), "time limit", "1e-09 seconds"),
)
def test_bad_values(call, said):
    refused(call, *said)


def test_too_little_memory():
    blocks = [Block(f"{b}", 1.0, memory) for b, memory in enumerate((5, 5, 7, 3))]
    problem = Problem(tuple(blocks), (Device(memory=20), Device(memory=9)), (0.0,), (0.0,))
    # Either three blocks in stage 0, which is 17, or two, and 10 in stage 1.
    assert solve(problem).stages == (0, 0, 0, 1)
    problem = dataclasses.replace(problem, devices=(Device(memory=16), Device(memory=8)))
    refused(lambda: solve(problem), "got 16 bytes for stage 0", "needs 17", "1 bytes more")


def test_too_small_a_budget():
    blocks = [Block(b, 1.0, tensors=(Tensor(b, (Option("topk", 1.0, 0.25), Option("sign", 0.5, 0.5))),)) for b in "ab"]
    assert solve(Problem(tuple(blocks), error_budget=0.5)).options == {"a": "topk", "b": "topk"}
    refused(lambda: solve(Problem(tuple(blocks), error_budget=0.4)), "got error_budget=0.4", "is 0.5")


def test_memory_and_budget_exclude():
    options = (Option("topk", 1.0, 0.25, 9), Option("sign", 0.5, 0.5, 1))
    blocks = [Block(b, 1.0, 1, tensors=(Tensor(b, options),)) for b in "abc"]
    problem = Problem(tuple(blocks), (Device(memory=10), Device(memory=12)), (0.0,), (0.0,), error_budget=1.0)
    # A stage of one block takes topk; of two, both options once: 0.25 + 0.75 of errors, and 12 bytes.
    assert cost(problem, (0, 1, 1), {"a": "topk", "b": "topk", "c": "sign"}) is not None
    assert solve(problem).stages == (0, 1, 1)
    problem = dataclasses.replace(problem, error_budget=0.9)
    refused(lambda: solve(problem), "got error_budget=0.9", "memory", "is 1.")
