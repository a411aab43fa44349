"""The one module that distinguishes a mesh axis from a simulated one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.collectives import axis

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def on_mesh(function, out_specs, check_vma=True, in_specs=None):
    mesh = jc.make_mesh(data=4)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs or P("data"), out_specs=out_specs, check_vma=check_vma)
    )


@pytest.mark.parametrize("way", ["mesh", "mesh without check_vma", "vmap"])
def test_tracking(way):
    types = {}

    def worker(x):
        types["tracked"] = axis.is_tracked("data")
        types["varies"] = axis.varies(x, "data")
        types["K"] = axis.axis_size("data")
        types["constant varies"] = axis.varies(jnp.zeros(3), "data")
        types["made to vary"] = axis.varies(axis.to_varying({"x": jnp.zeros(3)}, "data")["x"], "data")
        assert axis.to_varying(x, "data") is x
        return x

    if way == "vmap":
        jax.vmap(worker, axis_name="data")(X)
    else:
        on_mesh(worker, P("data"), check_vma=way == "mesh")(X)
    tracked = way == "mesh"
    assert types == {
        "tracked": tracked,
        "varies": tracked,
        "K": 4,
        "constant varies": False,
        "made to vary": tracked,
    }


def test_local_gradients():
    def worker(w, x):
        return jax.grad(lambda w: jnp.sum(w * x))(axis.to_varying(w, "data"))[None]

    grads = on_mesh(worker, P("data"), in_specs=(P(), P("data")))(np.ones((1, 3), np.float32), X)
    np.testing.assert_array_equal(grads.reshape(4, 3), X)


def test_reduced_gradients():
    def worker(x):
        axis.check_per_worker({"mine": x}, "data")
        axis.check_per_worker({"mine": x, "reduced": jax.lax.psum(x, "data")}, "data")
        return x

    with pytest.raises(ValueError, match=r"got one at .*'reduced'.* already reduced over axis 'data'"):
        on_mesh(worker, P("data"))(X)
    jax.vmap(worker, axis_name="data")(X)
    on_mesh(worker, P("data"), check_vma=False)(X)


def test_an_unknown_axis():
    with pytest.raises(ValueError, match=r"got no axis 'data'. Call it inside jax.shard_map .* axis_name='data'\)"):
        axis.axis_size("data")
    with pytest.raises(ValueError, match="got no axis 'data'"):
        jax.vmap(lambda x: x * axis.axis_size("data"), axis_name="workers")(X)
