import functools

import jax
import numpy as np
import pytest

from jaxcomm.collectives.masks import MaskUnion
from jaxcomm.layout import plan_layout
from tests.marks import slow_except

SIZES, DENSITY = (3000, 40, 1024), 0.05


def layout_of(density=DENSITY, sizes=SIZES):
    tree = [jax.ShapeDtypeStruct((n,), np.float32) for n in sizes]
    return plan_layout(tree, dense_below=0, capacity=lambda n: max(1, int(n * density)))


LAYOUT = layout_of()

TURN = 0.6


def random_masks(K, density, seed):
    """(K, n) bool, False in the padding."""
    rng = np.random.default_rng(seed)
    parts = [np.pad(rng.random((K, size)) < density, ((0, 0), (0, -size % 1024))) for size in SIZES]
    return np.concatenate(parts, axis=1)


@functools.cache
def program(r, codec):
    union = MaskUnion(LAYOUT, codec, r, "data")
    workers = jax.vmap(union, in_axes=(0, 0, None), axis_name="data", out_axes=None)
    return jax.jit(workers)


def united(masks, published, codec):
    """The (union, overflow) that the workers agree on."""
    words = np.packbits(masks, axis=1, bitorder="little").view(np.uint32)
    row = [[workers.index(w) if w in workers else -1 for workers in published] for w in range(len(masks))]  # (K, S)
    out, overflow, _ = program(len(published[0]), codec)(words, np.asarray(row, np.int32), np.float32(TURN))
    return np.unpackbits(np.asarray(out).view(np.uint8), bitorder="little").astype(bool), int(overflow)


@pytest.mark.parametrize("density", slow_except([0.02, 0.5], 0.5))
@pytest.mark.parametrize(
    ("K", "published"),
    [
        (1, [[0], [0], [0]]),
        pytest.param(3, [[2, 0], [1, 2], [0, 2]], marks=pytest.mark.slow),
        (4, [[3], [1], [3]]),
        (8, [[5, 1, 6], [2, 6, 5], [5, 6, 1]]),
    ],
)
def test_unions(K, published, density):
    """Each tensor has its own publishers. Bitmaps arrive whole, of positions those that fit; the rest is counted."""
    masks = random_masks(K, density, K)
    union, overflow = united(masks, published, "bitmap")
    ends = np.cumsum(LAYOUT.blocks) * 1024
    parts = [masks[workers, start:end].any(0) for workers, start, end in zip(published, [0, *ends], ends, strict=False)]
    np.testing.assert_array_equal(union, np.concatenate(parts))
    assert overflow == 0

    expected, omissions, start = np.zeros(LAYOUT.n, bool), 0, 0
    for workers, size, capacity, end in zip(published, SIZES, LAYOUT.capacities, ends, strict=True):
        for w in workers:
            set_bits = np.flatnonzero(masks[w, start : start + size])
            first = int(np.float32(TURN) * np.float32(len(set_bits))) if len(set_bits) > capacity else 0
            expected[start + np.roll(set_bits, -first)[:capacity]] = True
            omissions += max(0, len(set_bits) - capacity)
        start = end
    union, overflow = united(masks, published, "coded")
    np.testing.assert_array_equal(union, expected)
    assert overflow == omissions
    assert omissions > 0 or density < 0.5


@pytest.mark.parametrize("density", [0.001, 0.01, 0.03, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("K", "r"), [(1, 1), (2, 1), (2, 2), (4, 1), (8, 3), (8, 8), (96, 2)])
def test_choice_of_codec(K, r, density):
    layout = layout_of(density)
    row = MaskUnion(layout, "coded", r, "data").indices.n_words + len(SIZES) + 1
    coded = min(2 * (K - 1) / K * r * row, (K - 1) * row)  # all-reduce of r rows, or all-gather
    bitmap = 2 * (K - 1) * -(-layout.n_words // K)

    def is_coded(codec):
        union = MaskUnion(layout, codec, r, "data")
        answers = []
        jax.vmap(lambda x: answers.append(union.is_coded()) or x, axis_name="data", axis_size=K)(np.zeros(K))
        return answers[0]

    assert is_coded("coded")
    assert not is_coded("bitmap")
    if K > 1:
        assert is_coded("auto") == (coded < bitmap)
