"""The laws that need a mesh: replicated outputs are the same on every device, and bytes are what was predicted."""

import jax
import numpy as np
import pytest

import jaxcomm as jc
from benchmarks.shapes import resnet50
from jaxcomm.accounting.hlo import read_program
from tests.jaxcomm import cases, trees
from tests.jaxcomm.cases import CASES, on_mesh, simulated
from tests.jaxcomm.methods import topk
from tests.jaxcomm.trees import EPS, gradients
from tests.jaxcomm.workers import is_per_worker

every_mesh = cases.over(CASES, [(4, "pair")], [(4, "pair")])


@every_mesh
def test_replicated_outputs(case, K, tree):
    """check_vma=True, under which this compiled, proves it; here are the bits."""
    workers = on_mesh(case, tree, K)
    state = workers.first
    for i, kind in enumerate(["normal", "nan", "ties", "normal"]):
        grads = gradients("normal" if kind == "nan" else kind, i, tree, K)
        if kind == "nan":
            grads["w" if "w" in grads else "e"].reshape(K, -1)[0, 0] = np.nan
        state = workers.step(grads, state).state
        means, _ = workers.last
        outside = jax.tree.map(lambda node: () if is_per_worker(node) else node, state, is_leaf=is_per_worker)
        for array in [*jax.tree.leaves(outside), *means.values()]:
            copies = [np.asarray(shard.data) for shard in array.addressable_shards]
            assert len(copies) == K
            for copy in copies:
                assert copy.shape == array.shape
                assert copy.tobytes() == copies[0].tobytes()


@cases.over(CASES, [(4, "pair")], [])
def test_mesh_and_simulation(case, K, tree):
    """From one state. Residuals agree to the bit, unless scales are sums; means to the rounding of a sum."""
    mesh, simulation = on_mesh(case, tree, K), simulated(case, tree, K)
    state = mesh.first
    for i, kind in enumerate(["normal", "ties", "heavy", "largest", "normal"]):
        grads = gradients(kind, i, tree, K)
        _, sizes = case.inputs(tree, grads, state)
        layout = jax.tree.map(lambda rows, like: np.asarray(rows).reshape(like.shape), state, simulation.first)
        out, expected = mesh.step(grads, state), simulation.step(grads, layout)
        state = out.state
        assert out.metrics == expected.metrics
        if case.residual and not case.has_scales:
            np.testing.assert_array_equal(out.residual, expected.residual)
        residual, expected_residual = (case.owed(tree, K, state) for state in (out.state, expected.state))
        for name in grads:
            error = K * EPS * sizes[name].mean(0)
            if case.has_scales:
                error = 16 * K * EPS * sizes[name].max()
            assert np.all(np.abs(residual[name] - expected_residual[name]) <= error)
            difference = np.abs(out.means[name].astype(np.float64) - expected.means[name])
            assert np.mean(difference > error) <= (0.01 if case.rounds_at_random else 0)


def test_one_worker_sends_nothing():
    case = topk.CASES[0]
    report = jc.wire_report(case.make(), trees.zeros_of("pair"), 1)
    assert report.received == 0
    assert read_program(on_mesh(case, "pair", 1).compiled.as_text()).received == 0


@every_mesh
def test_bytes(case, K, tree):
    report = jc.wire_report(case.make(), trees.shapes_of(tree), K)
    compiled = read_program(on_mesh(case, tree, K).compiled.as_text())
    usual, at_most = case.received_bytes(tree, K)
    assert report.program.received == compiled.received == usual
    assert report.program.received_at_most == compiled.received_at_most == at_most


@cases.over(CASES, [(96, "odd"), (2, "half")], [(96, "odd")])
def test_bytes_without_devices(case, K, tree):
    for workers in (1, K) if K == 2 else (K,):
        report = jc.wire_report(case.make(), trees.shapes_of(tree), workers)
        assert (report.program.received, report.program.received_at_most) == case.received_bytes(tree, workers)


RESNET = {f"{i:03}": jax.ShapeDtypeStruct(shape, np.float32) for i, shape in enumerate(resnet50())}


@pytest.mark.parametrize("K", [4, 16])
@pytest.mark.parametrize(
    ("factory", "options", "bits", "of_sum"),
    [
        (jc.sign, {}, 1, {}),
        (jc.terngrad, {}, 2, {4: 4, 16: 6}),  # of a number from -K to K
        (jc.quant_dp, {"bits": 2}, 2, {}),
        (jc.quant_dp, {"bits": 4}, 4, {}),
        (jc.quant_dp, {"bits": 8}, 8, {}),
    ],
    ids=["sign", "terngrad", "2", "4", "8"],
)
def test_names_of_bits(factory, options, bits, of_sum, K):
    """Within 5% for ResNet-50, scales and small dense tensors included."""
    received = {}  # bits a parameter
    for collective in ("gather", "two_shot", "auto"):
        report = jc.wire_report(factory(**options, collective=collective), RESNET, K)
        received[collective] = 8 * report.received / report.parameters
    assert received["gather"] == pytest.approx((K - 1) * bits, rel=0.05)
    assert received["two_shot"] == pytest.approx((K - 1) / K * (bits + of_sum.get(K, bits)), rel=0.05)
    assert received["auto"] == pytest.approx(min(received["gather"], received["two_shot"]), rel=1e-3)  # or psum
