"""JAX's settings of numbers: every method traces under jax_enable_x64, strict promotion, and without rank promotion."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from tests.jaxcomm.cases import CASES

K = 3
# Two compressed tensors of which most are small, one that is large, one without elements, and dense ones.
SHAPES = {"b": (7,), "e": (0, 5), "s": (), "v": (3000,), "w": (40, 50)}
LARGE = {"b": (7,), "w": (300, 700)}  # where brackets pay

SETTINGS = {
    **{f"{case}": case.make for case in CASES},
    "topk(0.9,balanced,4bit)": lambda: jc.topk(0.9, collective="balanced", value_dtype="4bit"),
    "topk(0)": lambda: jc.topk(0.0),
    "topk(checksum)": lambda: jc.topk(0.9, checksum=True),
    "topk(chunk)": lambda: jc.topk(0.9, chunk=1024),
    "topk(bfloat16 residual)": lambda: jc.topk(0.9, residual_dtype="bfloat16"),
    "topk(others)": lambda: jc.topk(0.9, where="w", others=jc.plump_dp()),
    "dct_dp(drains)": lambda: jc.dct_dp(0.9, drain_every=2),
    "dgc(clip)": lambda: jc.dgc(0.9, clip=1.0, warmup_steps=4),
    "ef21": lambda: jc.ef21(0.9),
    "hierarchical": lambda: jc.hierarchical(jc.topk(0.9, axis_name="slice")),
    "pulse(0)": lambda: jc.pulse(1e-12),
    "powersgd": jc.powersgd,
    "sign(checksum)": lambda: jc.sign(checksum=True),
    "slim_dp": jc.slim_dp,
    "local_sgd": lambda: jc.local_sgd(2, exchange=jc.plump_dp()),
    "local_sgd(topk)": lambda: jc.local_sgd(2, exchange=jc.topk(0.9)),
    "local_sgd(fragments)": lambda: jc.local_sgd(4, exchange=jc.quant_dp(4), fragments=2, overlap=1, mix=0.5),
    "plump_dp(p)": lambda: jc.plump_dp(p=2),
    "sparse_loco": lambda: jc.sparse_loco(2),
}


@contextlib.contextmanager
def strictly(x64):
    with (
        jax.enable_x64(x64),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        yield


def kinds(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def traced(tx, params):
    """The shapes and types of the updates and of the state, before and after: on a mesh without devices."""
    local = jc.exchange.is_local(tx)
    axes = {"slice": 2, "data": K} if isinstance(tx.method, jc.methods.Hierarchical) else {"data": K}
    spec, names = P(tuple(axes)), tuple(axes)
    mesh = AbstractMesh(tuple(axes.values()), names)
    found = {}

    def update(rows):
        own = jax.tree.map(lambda row: row[0], rows)
        given = own if local else params
        state = tx.init(params)
        updates, new = tx.update(own, state, given)
        found.update(updates=kinds(updates), states=(kinds(state), kinds(new)))
        return jax.tree.map(lambda update: jnp.sum(update)[None], updates)

    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((np.prod(list(axes.values())), *leaf.shape), leaf.dtype), params
    )
    jax.eval_shape(jax.shard_map(update, mesh=mesh, in_specs=(spec,), out_specs=spec), rows)
    return found


@pytest.mark.parametrize(("x64", "dtype"), [(True, np.float64), (True, np.float32), (False, np.float32)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_method_traces(setting, x64, dtype):
    with strictly(x64):
        tx = SETTINGS[setting]()
        params = {name: jnp.ones(shape, dtype) for name, shape in SHAPES.items()}
        found = traced(tx, params)
    assert {str(each.dtype) for each in jax.tree.leaves(found["updates"])} == {np.dtype(dtype).name}
    before, after = found["states"]
    assert before == after
