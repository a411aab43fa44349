"""`shard_map` of many arrays: the program and the numbers of `jax.shard_map`, with few arguments."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.steps.shard_map import shard_map

COUNT = 20


def trees():
    """Returns arrays of several kinds, and their specs on a mesh of data=2, model=2."""
    draw = np.random.default_rng(3).normal
    arrays = {
        "matrices": [draw(size=(4 + i % 2, 6)).astype(np.float32) for i in range(COUNT)],
        "rows": [draw(size=(2, 1 + i % 3)).astype(np.float32) for i in range(COUNT)],
        "shards": [draw(size=(1 + i % 2, 4)).astype(np.float32) for i in range(COUNT)],
        "narrow": [jnp.asarray(draw(size=(3,)), jnp.bfloat16) for _ in range(COUNT)],
        "counts": [np.arange(i + 1, dtype=np.int32) for i in range(COUNT)],
        "scalars": [np.float32(i) for i in range(COUNT)],
        "keys": [jax.random.key(i) for i in range(COUNT)],
        "empty": np.zeros((0, 3), np.float32),
    }
    specs = dict.fromkeys(arrays, P()) | {"rows": P("data"), "shards": P(None, "model")}
    return arrays, specs


def on_device(tree):
    mean = lax.pmean(sum(row.sum() for row in tree["rows"]), "data")
    variant = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x * 2 + 1, tree)
    return variant, {"mean": mean, "shards": [shard + mean for shard in tree["shards"]]}


@pytest.fixture
def pair():
    """Returns arrays, and `on_device` by `shard_map` and by `jax.shard_map`."""
    arrays, specs = trees()
    options = {
        "mesh": jc.make_mesh(data=2, model=2),
        "in_specs": (specs,),
        "out_specs": (specs, {"mean": P(), "shards": P(None, "model")}),
    }
    return arrays, jax.jit(shard_map(on_device, **options)), jax.jit(jax.shard_map(on_device, **options))


def test_results(pair):
    arrays, few, many = pair
    out, expected = few(arrays), many(arrays)
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    for leaf, expected_leaf in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(leaf) == jax.typeof(expected_leaf)
        assert leaf.sharding == expected_leaf.sharding
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, expected_leaf = jax.random.key_data(leaf), jax.random.key_data(expected_leaf)
        np.testing.assert_array_equal(leaf, expected_leaf)


def opcodes(text):
    return sorted(re.findall(r"= \S+ ([a-z-]+)\(", text))


def count_arguments(text):
    """Counts the arguments of the map, without constants."""
    return len(re.findall(r"%(?:arg)?\d", re.search(r"manual_computation\((.*?)\)", text)[1]))


def test_compiled_program(pair):
    arrays, few, many = (pair[0], *(step.lower(pair[0]) for step in pair[1:]))
    arguments = [count_arguments(step.as_text()) for step in (few, many)]
    assert arguments == [5 + 2 * COUNT + 1, len(jax.tree.leaves(arrays))]  # scalars, keys and what is empty alone
    assert opcodes(few.compile().as_text()) == opcodes(many.compile().as_text())


def test_results_that_differ():
    def differing(matrices):
        return {f"matrix {i}": x + lax.axis_index("data") for i, x in enumerate(matrices)}

    mesh, arrays = jc.make_mesh(data=2), [np.ones((2, 3), np.float32)] * COUNT
    with pytest.raises(ValueError, match=r"out_specs\['matrix 7'\]"):
        jax.jit(shard_map(differing, mesh, (P(),), dict.fromkeys([f"matrix {i}" for i in range(COUNT)], P())))(arrays)


@pytest.mark.parametrize("exchange", ["plump_dp()", "topk(0.9)", "powersgd(2)", "local_sgd(2, exchange=jc.plump_dp())"])
def test_a_step_has_few_arguments(exchange):
    params = {f"layer {i}": np.eye(32, dtype=np.float32) for i in range(COUNT)}

    def loss_fn(params, batch):
        for matrix in params.values():
            batch = jnp.tanh(batch @ matrix)
        return jnp.mean(batch**2)

    method = eval(f"jc.{exchange}")
    links = (optax.adam(1e-3), method) if "local" in exchange else (method, optax.adam(1e-3))
    step = jc.make_train_step(loss_fn, jc.chain(*links), jc.make_mesh(data=2))
    state, batch = step.init(params), np.ones((4, 32), np.float32)
    assert count_arguments(step.lower(state, batch).as_text()) < COUNT
    step.verify(state, batch)
