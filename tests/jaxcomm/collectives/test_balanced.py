"""The balanced all-reduce beyond the laws: its regions, and when it is chosen."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc
from jaxcomm import bits
from jaxcomm.codecs import value_codec
from jaxcomm.collectives.balanced import Regions
from jaxcomm.layout import plan_layout


def regions_of(sizes, slots, K, dtype="float32"):
    tree = [jax.ShapeDtypeStruct((n,), np.float32) for n in sizes]
    layout = plan_layout(tree, dense_below=0, capacity=lambda n: min(n, slots))
    return Regions(layout, K, value_codec(dtype), "auto")


@pytest.mark.parametrize(
    ("sizes", "slots", "K", "size", "capacity"),
    [
        ((5000,), 1000, 1, 5120, 1250),
        ((5000,), 1000, 2, 3072, 625),
        ((5000,), 1000, 8, 1024, 157),  # 156.25, rounded up
        ((5000,), 5000, 8, 1024, 782),
        ((1024, 10), 1000, 2, 1024, 632),
        ((4096,), 4096, 4, 1024, 1024),  # never more than there are
    ],
)
def test_regions_are_whole_blocks_with_a_quarter_of_room(sizes, slots, K, size, capacity):
    regions = regions_of(sizes, slots, K)
    assert regions.size == size
    assert regions.region.n_slots == capacity
    assert regions.region.n == size


def evaluated(out):
    """The results as arrays."""
    return out._replace(total=out.total(jnp.asarray(True)), residual=out.residual())


@functools.cache
def program(regions):
    def worker(vector, mask, flag):
        return evaluated(regions.exchange(vector, bits.pack(mask), jnp.float32(0), flag, "data"))

    workers = jax.vmap(worker, axis_name="data", axis_size=regions.workers)
    return jax.jit(workers)


def exchange(regions, vectors, masks, flags=None):
    flags = np.ones(len(vectors), bool) if flags is None else flags
    out = jax.tree.map(np.asarray, program(regions)(vectors, masks, flags))
    for array in (out.total, out.counts, out.ok):
        np.testing.assert_array_equal(array, np.broadcast_to(array[0], array.shape))
    return out


@pytest.mark.parametrize("K", [2, 8])
def test_nothing_is_lost_between_workers_and_owners(K):
    """Eight workers own five blocks, so that three own nothing."""
    regions = regions_of((5000,), 600, K, "bfloat16")
    rng = np.random.default_rng(K)
    vectors = np.pad(rng.normal(size=(K, 5000)), ((0, 0), (0, 120))).astype(np.float32)
    masks = np.abs(vectors) > 1.0
    out = exchange(regions, vectors, masks)
    sent = np.zeros((K, 5120))
    for w in range(K):
        np.add.at(sent[w], np.asarray(out.sent.position[w]), np.asarray(out.sent.values[w], np.float64))
        owned = slice(w * regions.size, (w + 1) * regions.size)
        outside = np.ones(5120, bool)
        outside[owned] = False
        assert not out.residual[w][outside].any()
    np.testing.assert_allclose(out.total[0] + out.residual.astype(np.float64).sum(0), sent.sum(0), atol=K * 1e-6)
    n_sent = np.asarray(out.sent.filled).sum()
    assert out.counts[0].tolist() == [n_sent, masks.sum() - n_sent]
    per_region = np.add.reduceat(np.asarray(out.total[0]) != 0, np.arange(0, 5120, regions.size))
    assert per_region.max() <= regions.region.n_slots


def test_an_owner_keeps_the_largest_sums_and_of_equal_ones_the_first():
    regions = regions_of((1024,), 4, 1)  # five slots
    vector = np.zeros((1, 1024), np.float32)
    vector[0, [3, 10, 20, 30, 40]] = [1, -5, 2, 2, 9]
    mask = vector != 0
    out = exchange(regions, vector, mask)
    np.testing.assert_array_equal(out.total, vector)
    vector[0, 50] = 2
    out = exchange(regions, vector, vector != 0)
    assert np.flatnonzero(out.total[0]).tolist() == [3, 10, 20, 30, 40]
    assert out.counts[0].tolist() == [5, 1]

    regions = regions_of((1024,), 4, 2)  # three slots, which two workers fill with different coordinates
    vectors = np.zeros((2, 1024), np.float32)
    vectors[0, [3, 10, 20]] = [1, -5, 2]
    vectors[1, [3, 30, 40]] = [1, 2, 2]
    out = exchange(regions, vectors, vectors != 0)
    assert np.flatnonzero(out.total[0]).tolist() == [3, 10, 20]
    assert out.total[0, [3, 10, 20]].tolist() == [2, -5, 2]
    assert np.flatnonzero(out.residual[0]).tolist() == [30, 40]


@pytest.mark.parametrize("bad", ["flag", "sum", "residual"])
def test_a_step_that_is_not_sound_is_told_to_everyone(bad):
    regions = regions_of((2048,), 4, 2)  # three slots
    vectors, flags = np.zeros((2, 2048), np.float32), np.ones(2, bool)
    vectors[:, 5] = 1
    masks = vectors != 0
    assert exchange(regions, vectors, masks, flags).ok.all()
    if bad == "flag":
        flags[1] = False
    elif bad == "sum":
        vectors[:, 5] = 3e38
    else:  # the owner has 3e38 of coordinate 7 left, which it did not select, and drops as much of the other's
        vectors[0, [7, 10, 11, 12]] = 3e38, 3.3e38, 3.3e38, 3.3e38
        vectors[1, [7, 8, 9]] = 3e38
        masks[:] = False
        masks[0, [10, 11, 12]] = masks[1, [7, 8, 9]] = True
    assert not exchange(regions, vectors, masks, flags).ok.any()


SHAPES = {"w": jax.ShapeDtypeStruct((100_000,), np.float32)}


@pytest.mark.parametrize(("factory", "sparsity"), [(jc.topk, 0.9), (jc.topk, 0.99), (jc.dgc, 0.999)])
@pytest.mark.parametrize("K", [2, 4, 16, 96])
def test_gather_is_chosen_up_to_a_quarter_of_the_dense_bytes(factory, sparsity, K):
    received = {
        collective: jc.wire_report(factory(sparsity, collective=collective), SHAPES, K).program.received
        for collective in ("gather", "balanced", "auto")
    }
    n = math.ceil(100_000 / 1024) * 1024
    if received["gather"] <= Fraction(8 * (K - 1) * n, 4 * K):
        assert received["auto"] == received["gather"]
    else:
        assert received["auto"] == min(received["gather"], received["balanced"])
