"""The platform of a program, told by its mesh or by JAX_PLATFORMS, else left to JAX; what only CPUs are told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.kernels import platforms
from jaxcomm.kernels.platforms import by_platform, in_memory, traced_platform
from tests.jaxcomm.cases import FIRST, simulated
from tests.jaxcomm.trees import gradients, shapes_of
from tests.jaxcomm.workers import Simulated

ONE = np.ones(4, np.float32)


def ways(traced):
    def way(name, factor):
        def function(x):
            traced.append(name)
            return factor * x

        return function

    return {"default": way("default", 1), "tpu": way("tpu", 2)}


@pytest.mark.parametrize(("platform", "expected"), [("tpu", ["tpu"]), ("cpu", ["default"]), ("gpu", ["default"])])
def test_platform_of_a_mesh(platform, expected):
    mesh = AbstractMesh((2,), ("data",), abstract_device=AbstractDevice("some", None, platform))
    traced = []
    with jax.sharding.use_abstract_mesh(mesh):
        assert traced_platform() == platform
        jax.make_jaxpr(lambda x: by_platform(x, **ways(traced)))(ONE)
    assert traced == expected


@pytest.mark.parametrize(
    ("setting", "expected"), [("cpu", {"default"}), ("cpu,tpu", {"default", "tpu"}), (None, {"default", "tpu"})]
)
def test_platform_without_a_mesh(monkeypatch, setting, expected):
    monkeypatch.setattr(platforms, "_setting", lambda: setting)
    traced = []
    run = jax.jit(lambda x: by_platform(x, **ways(traced)))
    np.testing.assert_array_equal(run(ONE), ONE)
    assert set(traced) == expected


def test_a_report_has_one_platform(monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *_, **__: pytest.fail("the platform is not known"))
    monkeypatch.setattr(platforms, "_setting", lambda: None)
    assert jc.wire_report(jc.topk(0.9), {"w": jax.ShapeDtypeStruct((3000,), np.float32)}, workers=3).received > 0


@pytest.mark.parametrize("case", FIRST, ids=str)
@pytest.mark.parametrize(("kind", "platform"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_methods_lower_for_gpus_and_tpus(case, kind, platform):
    """JAX translates its program without such a device; XLA does not compile it."""
    mesh = AbstractMesh((4,), ("data",), (AxisType.Auto,), abstract_device=AbstractDevice("some", None, kind))
    tx, params = case.make(), shapes_of("pair")
    gradients = {name: jax.ShapeDtypeStruct((4, *like.shape), like.dtype) for name, like in params.items()}
    specs = jc.state_specs(jax.eval_shape(tx.init, params))
    state = jax.eval_shape(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs), params)

    def exchange(gradients, state, params):
        return tx.update({name: rows[0] for name, rows in gradients.items()}, state, params)

    step = jax.shard_map(exchange, mesh=mesh, in_specs=(P("data"), specs, P()), out_specs=(P(), specs))
    lowered = jax.jit(step).trace(gradients, state, params).lower(lowering_platforms=(platform,))
    assert "stablehlo.all_" in lowered.as_text()


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_platforms_agree(case, monkeypatch):
    """To rounding: four steps of the programs for GPUs, on a CPU."""

    def results(workers):
        state = workers.first
        for seed in range(4):
            outcome = workers.step(gradients("normal", seed, "pair", 4), state)
            state = outcome.state
        return jax.tree.leaves((outcome.means, outcome.residual))

    on_cpu = results(simulated(case, "pair", 4))
    monkeypatch.setattr(platforms, "_setting", lambda: "gpu")
    for cpu, gpu in zip(on_cpu, results(Simulated(case.make(), "pair", 4)), strict=True):
        np.testing.assert_allclose(cpu, gpu, rtol=1e-5, atol=1e-5)  # sums are made in another order


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_in_memory_is_a_loop(first):
    x = np.arange(64, dtype=np.float32) + np.float32(first)

    def halves(x):
        y = in_memory(jnp.square(x))
        return y[:32] - y[32:]

    compiled = jax.jit(halves).lower(x).compile()
    assert compiled.as_text().count(" while(") == 1
    np.testing.assert_array_equal(compiled(x), np.square(x)[:32] - np.square(x)[32:])
