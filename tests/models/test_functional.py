"""Models as functions of their parameters: groups of rows, micro-batches, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from models.functional import apply, cut, merge, split
from models.resnet import ResNet
from tests.models.twins import CLASSES, IMAGE, close, filled, make, make_batch
from tests.refusals import refused

SMALLER = partial(ResNet, IMAGE, CLASSES, layers=(1,), width=2, stem="cifar")


def test_batch_statistics():
    graph, params, stats = split(filled(SMALLER))
    batch = make_batch("resnet", 16)
    call = jax.jit(lambda rows: apply(graph, params, stats, rows, training=True))
    outputs, new = jax.jit(lambda rows: apply(graph, params, stats, rows, training=True, rows_per_group=4))(batch)
    parts = [call(jax.tree.map(lambda a, i=i: a[4 * i : 4 * i + 4], batch)) for i in range(4)]
    close(outputs, jnp.concatenate([part[0] for part in parts]))
    close(new, jax.tree.map(lambda *leaves: sum(leaves) / 4, *(part[1] for part in parts)))
    logits, _ = call(batch)
    assert np.abs(outputs - logits).max() > 1e-2  # other statistics
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(*map(jax.tree.leaves, (new, stats)), strict=True))
    kernel, axes = params[0]["first"]["convolution"]["kernel"], ("NHWC", "HWIO", "NHWC")
    filtered = jax.lax.conv_general_dilated(batch["image"], kernel, (1, 1), "SAME", dimension_numbers=axes)
    first = call(batch)[1][0]["first"]["norm"]
    close(first["mean"], 0.1 * filtered.mean(axis=(0, 1, 2)))
    close(first["var"], 0.9 + 0.1 * filtered.var(axis=(0, 1, 2)))
    evaluate = jax.jit(lambda stats: apply(graph, params, stats, batch, training=False, rows_per_group=3)[0])
    assert np.abs(evaluate(new) - evaluate(stats)).max() > 1e-3


def test_groups_of_rows():
    graph, params, stats = split(filled(SMALLER))
    batch = make_batch("resnet", 16)

    def gradient(params, rows):
        def loss(params):
            outputs, new = apply(graph, params, stats, rows, training=True, rows_per_group=4)
            return jnp.mean(outputs**2), new

        return jax.grad(loss, has_aux=True)(params)

    def worker(params, rows):
        return jax.lax.pmean(gradient(jax.lax.pcast(params, "data", to="varying"), rows), "data")

    mesh = jc.make_mesh(data=2)
    spread = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    close(spread(params, batch), jax.jit(gradient)(params, batch))


def test_dropout_in_micro_batches():
    graph, params, stats = split(make("mlp"))
    batch = make_batch("mlp")
    call = jax.jit(lambda rows: apply(graph, params, stats, rows, training=True)[0])
    halves = [call(jax.tree.map(lambda a, i=i: a[2 * i : 2 * i + 2], batch)) for i in range(2)]
    close(call(batch), jnp.concatenate(halves))
    backwards = call(jax.tree.map(lambda a: a[::-1], batch))
    close(call(batch), backwards[::-1])


def test_refusals():
    model = make("mlp")
    for cuts in ((0,), (3,), (2, 2), (2, 1), (-1,)):
        with pytest.raises(ValueError, match=r"cuts must be rising indices of blocks, from 1 to 2 .*got"):
            cut(model, cuts)
    graph, params, stats = split(model)
    refused(
        lambda: apply(graph, params, stats, make_batch("mlp"), training=True, rows_per_group=3),
        "Rows",
        "got 4 rows for groups of 3",
    )
    refused(
        lambda: apply(graph, params, stats, make_batch("mlp"), training=True, rows_per_group=0),
        "Rows",
        "got 4 rows for groups of 0",
    )
    second = cut(model, (2,))[1]
    with pytest.raises(ValueError, match=r"must get the variables of its own blocks, 2 to 2; got some of 0, 1"):
        merge(second.graph, params, stats, training=True)
    del params[1]
    with pytest.raises(ValueError):  # noqa: PT011 (nnx's own)
        apply(graph, params, stats, make_batch("mlp"), training=False)


def test_merged_blocks():
    graph, params, stats = split(filled(SMALLER))
    before = jax.tree.map(np.array, (params, stats))
    blocks = merge(graph, params, stats, training=True)
    blocks[0](None, make_batch("resnet"))
    jax.tree.map(np.testing.assert_array_equal, before, (params, stats))
    assert not np.array_equal(blocks[0].first.norm.mean[...], stats[0]["first"]["norm"]["mean"])
