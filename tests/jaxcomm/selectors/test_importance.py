"""Importance, its thresholds, and random coordinates against NumPy."""

import jax
import numpy as np
import pytest

from jaxcomm.kernels import noise
from jaxcomm.kernels.numerics import divide
from jaxcomm.layout import plan_layout
from jaxcomm.selectors.importance import importance, moments, segment_max, select_important, spread
from jaxcomm.selectors.strata import pick, select_strata

SIZES = (1, 2049, 1024, 700)
MAX = float(np.finfo(np.float32).max)


def layout_of(capacity, sizes=SIZES):
    tree = [jax.ShapeDtypeStruct((size,), np.float32) for size in sizes]
    return plan_layout(tree, dense_below=0, capacity=capacity)


LAYOUT = layout_of(lambda n: n)


def vector_of(parts):
    return np.concatenate([np.pad(part, (0, -len(part) % 1024)) for part in parts]).astype(np.float32)


def parts_of(vector, layout=LAYOUT):
    starts = np.cumsum([0, *layout.blocks]) * 1024
    return [np.asarray(vector)[start : start + size] for start, size in zip(starts, layout.sizes, strict=False)]


def test_importance():
    v, w = np.asarray([1, -3, 0, 0, 3e38, -2], np.float32), np.asarray([2, -0.5, 0, 5, 0, 0], np.float32)
    result = jax.jit(importance, static_argnums=2)(v, w, 0.5)
    np.testing.assert_allclose(result, [0.4, 3, 0, 0, MAX, 4], rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 3e37, 3.4e38])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_moments(scale, offset):
    """Squares of the large ones are infinite, and inverses of the largest are subnormal."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=size) + offset for size in SIZES]
    parts = [(part / np.abs(part).max() * scale).astype(np.float32) for part in parts]
    unit, mean, variance = (
        np.asarray(m, np.float64) for m in jax.jit(moments, static_argnums=1)(vector_of(parts), LAYOUT)
    )
    for i, part in enumerate(parts):
        part = part.astype(np.float64) / scale
        np.testing.assert_allclose(mean[i] * (unit[i] / scale), part.mean(), atol=1e-6)
        np.testing.assert_allclose(variance[i] * (unit[i] / scale) ** 2, part.var(), rtol=1e-4, atol=1e-10)
    values = [np.abs(part) for part in parts]
    q = np.asarray(jax.jit(spread, static_argnums=1)(vector_of(values), LAYOUT), np.float64)
    for i, value in enumerate(values):
        value = value.astype(np.float64) / scale
        np.testing.assert_allclose(q[i] / scale, value.var() / value.mean(), rtol=1e-4, atol=1e-10)


def test_zeros():
    assert not np.any(spread(np.zeros(LAYOUT.n, np.float32), LAYOUT))


def test_largest_of_segments():
    parts = [np.abs(np.random.default_rng(1).normal(size=size)) for size in SIZES]
    expected = [part.max() for part in parts]
    np.testing.assert_allclose(segment_max(vector_of(parts), LAYOUT), expected, rtol=1e-6)


@pytest.mark.parametrize("random", [False, True])
def test_thresholds(random):
    rng = np.random.default_rng(2)
    values = [np.where(rng.random(size) < 0.2, 0, np.abs(rng.normal(size=size))).astype(np.float32) for size in SIZES]
    u = rng.random(LAYOUT.n).astype(np.float32)
    u[:3] = 0  # with which everything but zeros enters
    threshold = np.asarray([0.5, values[1][7], 1e-30, 3.0], np.float32)  # one of them is not above itself
    words = select_important(vector_of(values), threshold, LAYOUT, u if random else None)
    mask = np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little").astype(bool)
    assert mask.sum() == sum(part.sum() for part in parts_of(mask))  # none in the padding
    for value, thr, uniform, part in zip(values, threshold, parts_of(u), parts_of(mask), strict=True):
        bound = thr * uniform if random else thr
        np.testing.assert_array_equal(part, (value > bound) & (value != 0))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 10), (10, 3), (2049, 205), (1000, 999), (2**30, 7)])
def test_strata(n, k):
    u = np.random.default_rng(n).random(k).astype(np.float32)
    u[[0, -1]] = 0, np.float32(1 - 2**-24)  # which times a large width is the width
    width, longer = divmod(n, k)
    widths = np.where(np.arange(k) < longer, width + 1, width)
    inside = np.minimum((u * widths.astype(np.float32)).astype(np.int64), widths - 1)
    for offset in {0, n // 3, n - 1}:
        result = np.asarray(pick(u, np.arange(k, dtype=np.int32), np.int32(n), k, np.int32(offset)))
        assert result.tolist() == ((np.cumsum(widths) - widths + inside + offset) % n).tolist()
        assert len(set(result.tolist())) == k


def test_slots_of_segments():
    layout = layout_of(lambda n: max(1, n // 3))
    slots = jax.jit(select_strata, static_argnums=1)(noise.make_key(5), layout)
    assert np.all(slots.filled)
    slot, start = 0, 0
    for size, k, blocks in zip(layout.sizes, layout.capacities, layout.blocks, strict=True):
        local_position = np.asarray(slots.position[slot : slot + k]) - start
        assert local_position.min() >= 0
        assert local_position.max() < size
        assert len(set(local_position.tolist())) == k
        slot, start = slot + k, start + blocks * 1024


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 8.6e37, 3.4e38])
def test_division_by_a_scale(scale):
    """Plain x / scale gives zeros above 8.5e37: XLA multiplies by the inverse, and flushes that to zero."""
    x = (np.linspace(-1, 1, 101) * scale).astype(np.float32)
    rows = np.stack([x, x / 2])
    quotient = jax.jit(lambda x, s: divide(x, s[:, None]))(rows, np.full(2, scale, np.float32))
    np.testing.assert_allclose(quotient, rows.astype(np.float64) / np.float32(scale), rtol=1e-6)
