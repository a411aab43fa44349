"""The laws that need a mesh: replicated outputs are the same on every device, and bytes are what was predicted."""

import math
from fractions import Fraction

import jax
import numpy as np
import pytest

import jaxcomm as jc
from jaxcomm.hlo import read_program
from tests.jaxcomm import cases
from tests.jaxcomm.cases import CASES, gradients, on_mesh, simulated

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_mesh = cases.over(CASES, [(2, "pair"), (4, "pair"), (8, "odd")], [(4, "pair")])
HEADER_WORDS = 4  # finite, largest value, sent, overflow


@every_mesh
def test_replicated_outputs_are_the_same_on_every_device(case, K, tree):
    """check_vma=True, under which this compiled, proves it; here are the bits."""
    workers = on_mesh(case, tree, K)
    state = workers.first
    for i, kind in enumerate(["normal", "nan", "ties", "normal"]):
        grads = gradients("normal" if kind == "nan" else kind, i, tree, K)
        if kind == "nan":
            grads["w" if "w" in grads else "e"].reshape(K, -1)[0, 0] = np.nan
        state = workers.step(grads, state).state
        means, _ = workers.last
        outside = jax.tree.map(
            lambda node: () if cases.is_per_worker(node) else node, state, is_leaf=cases.is_per_worker
        )
        for array in [*jax.tree.leaves(outside), *means.values()]:
            copies = [np.asarray(shard.data) for shard in array.addressable_shards]
            assert len(copies) == K
            for copy in copies:
                assert copy.shape == array.shape
                assert copy.tobytes() == copies[0].tobytes()


@cases.over(CASES, [(4, "pair"), (8, "odd")], [])
def test_a_mesh_and_a_simulation_agree(case, K, tree):
    """Residuals to the bit; means to the rounding of a sum, whose order is XLA's."""
    mesh, simulation = on_mesh(case, tree, K), simulated(case, tree, K)
    state, other, residual = mesh.first, simulation.first, None
    for i, kind in enumerate(["normal", "ties", "heavy", "largest", "normal"]):
        grads = gradients(kind, i, tree, K)
        sizes = cases.sizes(case, tree, grads, residual)
        out, expected = mesh.step(grads, state), simulation.step(grads, other)
        residual = out.residual
        state, other = out.state, expected.state
        assert out.metrics == expected.metrics
        if case.is_sparse:
            np.testing.assert_array_equal(out.residual, expected.residual)
        for name in grads:
            difference = np.abs(out.means[name].astype(np.float64) - expected.means[name])
            assert np.all(difference <= K * cases.EPS * sizes[name].mean(0))


def test_the_exchange_of_a_mesh_is_free_of_collectives_where_there_is_one_worker():
    report = jc.wire_report(CASES[1].make(), cases.zeros_of("pair"), 1)
    assert report.received == 0
    assert read_program(on_mesh(CASES[1], "pair", 1).compiled.as_text()).received == 0


@every_mesh
def test_predicted_bytes_are_compiled_bytes_and_those_of_the_formula(case, K, tree):
    report = jc.wire_report(case.make(), cases.shapes_of(tree), K)
    compiled = read_program(on_mesh(case, tree, K).compiled.as_text())
    usual, at_most = received_bytes(case, tree, K)
    assert report.program.received == compiled.received == usual
    assert report.program.received_at_most == compiled.received_at_most == at_most


@pytest.mark.parametrize("tree", ["odd", "half"])
@every_case
def test_bytes_of_96_workers_are_predicted_without_devices(case, tree):
    report = jc.wire_report(case.make(), cases.shapes_of(tree), 96)
    assert (report.program.received, report.program.received_at_most) == received_bytes(case, tree, 96)


def received_bytes(case, tree, K):
    """(in a usual step, at most): the documented bytes that a worker receives, by hand."""
    sizes = {name: s.size for name, s in cases.shapes_of(tree).items()}
    total = sum(sizes.values())
    everything = Fraction(2 * (K - 1), K) * 4 * total
    if not case.is_sparse:
        return everything, everything
    names = cases.compressed(case, tree)
    dense = Fraction(2 * (K - 1), K) * 4 * (total - sum(sizes[name] for name in names))
    n = sum(math.ceil(sizes[name] / 1024) * 1024 for name in names)
    slots = sum(capacity(case, sizes[name]) for name in names)
    bits = {"float32": 32, "bfloat16": 16}[case.options["value_dtype"]]
    words = HEADER_WORDS + math.ceil(slots * bits / 32) + index_words(case.options["index_codec"], n, slots)
    usual = dense + (K - 1) * 4 * words
    return usual, max(usual, everything) if case.drain_every else usual


def capacity(case, n):
    """Slots of a tensor of n elements; the options are decimal numbers, and so is the arithmetic."""
    sparsity = Fraction(str(case.options["sparsity"]))
    if case.factory is jc.topk:
        return max(1, n - math.floor(n * sparsity))
    return max(1, min(n, math.ceil(Fraction(str(case.options.get("slack", 1.05))) * (1 - sparsity) * n)))


def index_words(codec, n, slots):
    """Words of the indices of `slots` of n coordinates."""
    if codec == "plain":
        return slots
    if codec == "bitmap":
        return n // 32
    if codec == "elias_fano":  # the upper parts as a bitmap, the lower l bits as planes, the best l
        return min(math.ceil((((n - 1) >> low) + slots) / 32) + low * math.ceil(slots / 32) for low in range(31))
    if codec == "rice":
        return rice(n, slots)
    assert codec == "auto"
    return min(index_words(each, n, slots) for each in ("plain", "bitmap", "elias_fano", "rice"))


def rice(n, slots):
    """At 1.09 times the entropy if evenly spread positions then have four standard deviations of room, else for all."""
    p = slots / n
    entropy = -math.log2(p) - (1 - p) / p * math.log2(1 - p)

    def quotient(low):  # the expected gap >> low, of gaps 1, 2, ... with probabilities p (1 - p)^(gap - 1)
        return sum((1 - p) ** (j * 2**low - 1) for j in range(1, 4000) if j * 2**low < 80 / p)

    low = min(range(15), key=lambda low: low + quotient(low))
    upper = max(slots, math.floor((1.09 * entropy - low) * slots))
    most = slots + ((n - 1) >> low)
    tight = math.ceil(min(upper, most) / 32)
    survival = (1 - p) ** 2**low
    need = slots * (1 + quotient(low)) + 4 * math.sqrt(slots * survival) / (1 - survival)
    return (tight if need <= 32 * tight else math.ceil(most / 32)) + low * math.ceil(slots / 32)
