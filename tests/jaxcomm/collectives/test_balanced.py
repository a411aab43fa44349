"""The balanced all-reduce beyond the laws: its regions, and when it is chosen."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc
from jaxcomm.codecs import value_codec
from jaxcomm.collectives.balanced import Regions
from jaxcomm.kernels import bits
from jaxcomm.layout import plan_layout
from tests.marks import slow_except


def regions_of(sizes, slots, K, dtype="float32"):
    tree = [jax.ShapeDtypeStruct((n,), np.float32) for n in sizes]
    layout = plan_layout(tree, dense_below=0, capacity=lambda n: min(n, slots))
    return Regions(layout, K, value_codec(dtype))


@pytest.mark.parametrize(
    ("sizes", "slots", "K", "size", "capacity"),
    [
        ((5000,), 1000, 1, 5120, 1000),  # never more than a payload has
        ((5000,), 1000, 2, 3072, 768),  # 5/4 of 1000 * 3072 / 5000, which is 614.4
        ((5000,), 1000, 8, 1024, 277),  # 204.8 and five standard deviations, 276.4, rounded up
        ((5000,), 5000, 8, 1024, 1024),  # never more than there are
        ((1024, 10), 1000, 2, 1024, 1010),  # the second region has ten alone
        ((4096, 1000), 500, 3, 2048, 625),  # of 250, 250 and 500
        ((4097,), 205, 4, 2048, 154),  # 102.5 and 50.6 in two regions each, one number in the third
    ],
)
def test_regions(sizes, slots, K, size, capacity):
    regions = regions_of(sizes, slots, K)
    assert regions.size == size
    assert regions.region.n_slots == capacity
    assert regions.region.n == size


def evaluated(out):
    """The results as arrays."""
    return out._replace(total=out.total(jnp.asarray(True)))


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


@pytest.mark.parametrize("K", slow_except([2, 8], 8))
def test_nothing_is_lost(K):
    """Eight workers own five blocks, so that three own nothing."""
    regions = regions_of((5000,), 600, K, "bfloat16")
    rng = np.random.default_rng(K)
    vectors = np.pad(rng.normal(size=(K, 5000)), ((0, 0), (0, 120))).astype(np.float32)
    masks = np.abs(vectors) > 1.0
    out = exchange(regions, vectors, masks)
    total, delivered, errors = out.total[0], np.zeros((K, 5120)), np.zeros((K, 5120))
    for w in range(K):
        np.add.at(delivered[w], out.sent.position[w], np.asarray(out.sent.values[w], np.float64))
        np.add.at(errors[w], out.errors[0][w], np.asarray(out.errors[1][w], np.float64))
        assert not errors[w, : w * regions.size].any()
        assert not errors[w, (w + 1) * regions.size :].any()
        # What an owner has no slot for stays with its senders.
        assert not delivered[w, total == 0].any()
        assert out.sent.filled[w].sum() == np.count_nonzero(delivered[w])
    np.testing.assert_allclose(total + errors.sum(0), delivered.sum(0), atol=K * 1e-6)
    room, starts = regions.region.n_slots, np.arange(0, 5120, regions.size)
    n_sent = np.minimum(np.add.reduceat(masks, starts, axis=1, dtype=int), room).sum()
    assert out.counts[0].tolist() == [n_sent, masks.sum() - n_sent]
    assert np.add.reduceat(total != 0, starts, dtype=int).max() <= room


@pytest.mark.slow
def test_owners_send_the_largest():
    regions = regions_of((1024,), 4, 1)
    vector = np.zeros((1, 1024), np.float32)
    vector[0, [3, 10, 20, 40]] = [1, -5, 2, 9]
    out = exchange(regions, vector, vector != 0)
    np.testing.assert_array_equal(out.total, vector)
    vector[0, 50] = 2
    out = exchange(regions, vector, vector != 0)
    assert np.flatnonzero(out.total[0]).tolist() == [3, 10, 20, 40]
    assert out.counts[0].tolist() == [4, 1]

    regions = regions_of((1024,), 4, 2)  # four slots, which two workers fill with different coordinates
    vectors = np.zeros((2, 1024), np.float32)
    vectors[0, [3, 10, 20]] = [1, -5, 2]
    vectors[1, [3, 30, 40, 50]] = [1, 2, 2, 2]
    out = exchange(regions, vectors, vectors != 0)
    assert np.flatnonzero(out.total[0]).tolist() == [3, 10, 20, 30]
    assert out.total[0, [3, 10, 20, 30]].tolist() == [2, -5, 2, 2]

    def taken(out):
        return [row[is_sent].tolist() for row, is_sent in zip(out.sent.position, out.sent.filled, strict=True)]

    assert taken(out) == [[3, 10, 20], [3, 30]]
    assert out.counts[0].tolist() == [7, 0]
    vectors[1, [10, 40, 50]] = 5, 0, 0  # a sum of 0 takes no slot
    assert taken(exchange(regions, vectors, vectors != 0)) == [[3, 10, 20], [3, 10, 30]]


@pytest.mark.parametrize(("bad", "owner"), [("flag", 0), ("sum", 0), ("residual", 0), ("residual", 1)])
def test_bad_steps(bad, owner):
    regions = regions_of((2048,), 4, 3, "bfloat16")
    vectors, flags = np.zeros((3, 2048), np.float32), np.ones(3, bool)
    place = owner * regions.size + 5
    vectors[:, place] = 1
    masks = vectors != 0
    assert exchange(regions, vectors, masks, flags).ok.all()
    if bad == "flag":
        flags[1] = False
    elif bad == "sum":
        vectors[:, place] = 3e38
    else:  # the owner has the largest float32 left, which it did not select, and rounds off some of the others' sum
        vectors[:, place] = np.roll([np.finfo(np.float32).max, 2.0**127, 2.0**118], owner)
        masks[owner] = False
    assert not exchange(regions, vectors, masks, flags).ok.any()


@pytest.mark.parametrize(
    ("tx", "n", "K", "steps"),
    [
        (jc.topk(0.8, collective="balanced"), 6000, 4, 1),  # six blocks, of which the first two workers own two
        (jc.topk(0.99, collective="balanced"), 4097, 4, 24),  # one number in the third region, none in the fourth
        (jc.topk(0.99, collective="balanced"), 32_768, 8, 24),
        (jc.pulse(0.0, collective="balanced"), 9000, 4, 1),  # everything fits
    ],
    ids=["6000", "4097", "32768", "pulse"],
)
def test_usual_gradients_fit(tx, n, K, steps):
    params, rng = {"w": jnp.zeros(n)}, np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (K, *leaf.shape)), tx.init(params))
    step = jax.jit(jax.vmap(lambda gradient, state: tx.update({"w": gradient}, state, params)[1], axis_name="data"))
    for _ in range(steps):
        state = step((rng.normal(size=n) + rng.normal(size=(K, n))).astype(np.float32), state)
        assert state.metrics.sent[0] > 0
        assert not state.metrics.overflow.any()


SHAPES = {"w": jax.ShapeDtypeStruct((100_000,), np.float32)}


@pytest.mark.parametrize(
    ("factory", "sparsity", "K"),
    slow_except(
        [(jc.dgc, 0.999, 16), (jc.topk, 0.9, 16), (jc.topk, 0.99, 96)], (jc.dgc, 0.999, 16), (jc.topk, 0.9, 16)
    ),
)
def test_choice_of_gather(factory, sparsity, K):
    received = {
        collective: jc.wire_report(factory(sparsity, collective=collective), SHAPES, K).program.received
        for collective in ("gather", "balanced", "auto")
    }
    n = math.ceil(100_000 / 1024) * 1024
    if received["gather"] <= Fraction(8 * (K - 1) * n, 4 * K):
        assert received["auto"] == received["gather"]
    else:
        assert received["auto"] == min(received["gather"], received["balanced"])
