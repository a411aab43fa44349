"""Thresholds, top-k and compaction against NumPy, over segments of odd sizes."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.sparse import Accumulated
from jaxcomm.kernels import platforms
from jaxcomm.kernels.noise import mix
from jaxcomm.kernels.vectors import Stored
from jaxcomm.layout import plan_layout
from jaxcomm.selectors import bracket, compact, select_threshold, select_topk, select_with_ties, topk
from jaxcomm.selectors.topk import dropped, n_kept
from tests.jaxcomm.numbers import numbers

SIZES = (1, 2049, 1024, 700)
seeds = st.integers(0, 2**20)
KINDS = ("normal", "ties", "zeros", "heavy", "infinite", "one")
kinds = st.sampled_from(KINDS)


def layout_of(capacity):
    tree = [jax.ShapeDtypeStruct((size,), np.float32) for size in SIZES]
    return plan_layout(tree, dense_below=0, capacity=capacity)


QUARTER = layout_of(lambda n: max(1, n // 4))


def segments(kind, seed, sizes=SIZES):
    rng = np.random.default_rng(seed)
    return [numbers(rng, kind, size) for size in sizes]


def vector_of(parts):
    return np.concatenate([np.pad(part, (0, -len(part) % 1024)) for part in parts])


def parts_of(vector, sizes=SIZES):
    starts = np.cumsum([0, *(-(-size // 1024) * 1024 for size in sizes)])
    return [np.asarray(vector)[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def masks_of(words, sizes=SIZES):
    mask = np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little").astype(bool)
    assert mask.sum() == sum(part.sum() for part in parts_of(mask, sizes)), "padding was selected"
    return parts_of(mask, sizes)


@functools.cache
def jitted(function, *static):
    return jax.jit(lambda *arrays, **options: function(*arrays, *static, **options))


def check_with_ties(parts, k, selected, threshold):
    """Compares with a sort: the k-th largest magnitudes, and the mask of what reaches them, without zeros."""
    tau = [np.sort(np.abs(x))[::-1][m - 1] if m <= x.size else np.float32(0) for x, m in zip(parts, k, strict=True)]
    np.testing.assert_array_equal(threshold, np.asarray(tau, np.float32))
    for x, t, mask in zip(parts, tau, masks_of(selected.words, [x.size for x in parts]), strict=True):
        np.testing.assert_array_equal(mask, (np.abs(x) >= t) & (x != 0))
    assert selected.ok == all(np.isfinite(x).all() for x in parts)


@pytest.mark.parametrize("fraction", [0, 0.3, 0.9, 1])
@hypothesis.given(kind=kinds, seed=seeds)
def test_ties(fraction, kind, seed):
    parts = segments(kind, seed)
    k = np.asarray([size - int(fraction * size) + 1 for size in SIZES], np.int32)
    check_with_ties(parts, k, *jitted(select_with_ties, QUARTER)(Stored(vector_of(parts)), k=k))


LARGE = (300_000, 70_000, 5_000, 1, 200_001)  # with brackets, except for the small ones


@functools.cache
def large(density):
    tree = [jax.ShapeDtypeStruct((size,), np.float32) for size in LARGE]
    return plan_layout(tree, dense_below=0, capacity=lambda n: n_kept(n, 1 - density))


def slots_of(layout):
    return np.asarray(layout.capacities, np.int32)


@pytest.mark.parametrize("density", [0.0005, 0.01, 0.1])
@hypothesis.given(kind=kinds, seed=seeds)
def test_ties_of_large_tensors(density, kind, seed):
    layout = large(density)
    assert not bracket._FEW * sum(bracket._rooms(layout)) > layout.n
    parts, k = segments(kind, seed, LARGE), slots_of(layout)
    check_with_ties(parts, k, *jitted(select_with_ties, layout)(Stored(vector_of(parts)), k=k))


def is_sampled(n):
    place = np.arange(n // 64, dtype=np.uint32)
    is_in = np.zeros(n, bool)
    is_in[place * 64 + np.asarray(mix(jnp.asarray(place))) % 64] = True
    return is_in


def unlike_the_sample(misses, layout):
    """Returns a vector whose largest numbers are all outside of the sample ("above"), or all in it."""
    x = np.random.default_rng(0).random(layout.n, np.float32)
    is_in = is_sampled(layout.n)
    largest = np.flatnonzero(~is_in if misses == "above" else is_in)[: 3 * layout.n // 200 :]
    x[largest] += 1
    return x


@pytest.mark.parametrize("misses", ["above", "below"])
def test_wrong_brackets(misses, monkeypatch):
    """If the largest are all outside the sample, or all in it, every coordinate is checked."""
    layout, searched = large(0.01), []
    parts = parts_of(unlike_the_sample(misses, layout), LARGE)
    for module in (bracket, topk):
        original = module.search_all

        def search(vector, *args, original=original):
            searched.append(vector.sum().size)
            return original(vector, *args)

        monkeypatch.setattr(module, "search_all", search)
    with jax.disable_jit():
        selection = select_with_ties(Stored(jnp.asarray(vector_of(parts))), layout, jnp.asarray(slots_of(layout)))
    assert len(searched) == 2
    assert searched[0] < searched[1] == layout.n
    check_with_ties(parts, slots_of(layout), *selection)


@pytest.mark.parametrize("sizes", [LARGE, (300_000,)], ids=["segments", "one segment"])
@pytest.mark.parametrize("kind", [*KINDS, "above", "below"])
def test_programs_for_gpus(kind, sizes, monkeypatch):
    """They find four bits of a threshold in a pass over candidates; here on a CPU."""
    monkeypatch.setattr(platforms, "_setting", lambda: "gpu")
    tree = [jax.ShapeDtypeStruct((size,), np.float32) for size in sizes]
    layout = plan_layout(tree, dense_below=0, capacity=lambda n: n_kept(n, 0.99))
    is_unlike = kind in ("above", "below")
    parts = parts_of(unlike_the_sample(kind, layout), sizes) if is_unlike else segments(kind, 5, sizes)

    @jax.jit
    def select(vector, k):
        return select_with_ties(vector, layout, k), select_topk(vector, layout)

    with_ties, exactly = select(Stored(vector_of(parts)), slots_of(layout))
    check_with_ties(parts, slots_of(layout), *with_ties)
    check_topk(parts, layout, exactly.words)


@pytest.mark.parametrize("chunk", [1024, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_by_a_kernel(kind, chunk, monkeypatch):
    """The kernel for GPUs, interpreted, marks what XLA's program marks, and finds what is broken."""
    sizes = (9_000, 4_096, 1, 12_289)
    tree = [jax.ShapeDtypeStruct((size,), np.float32) for size in sizes]
    layout = plan_layout(tree, dense_below=0, capacity=lambda n: n_kept(n, 0.98), chunk=chunk)
    gradient, residual = (vector_of(segments(kind, seed, sizes)) for seed in (1, 2))
    vector = Accumulated(jnp.asarray(gradient), jnp.asarray(residual)[None])
    expected = select_topk(vector, layout)
    monkeypatch.setattr(platforms, "_setting", lambda: "gpu")
    program = jax.make_jaxpr(lambda vector: select_topk(vector, layout))(vector)
    assert "largest_of_chunks" in str(program)
    selected = jax.jit(lambda vector: select_topk(vector, layout))(vector)
    np.testing.assert_array_equal(selected.words, expected.words)
    is_finite = np.isfinite([gradient, residual]).all()
    assert selected.ok == expected.ok == is_finite


def test_brackets_beside_the_kth_largest(monkeypatch):
    """The k-th is the last number above the bracket, the first or the last inside, and the first below."""
    layout = plan_layout([jax.ShapeDtypeStruct((200_000,), np.float32)], dense_below=0, capacity=lambda n: 2000)
    x = np.zeros(layout.n, np.float32)
    x[:200_000] = np.random.default_rng(0).permutation(200_000) + 1  # the j-th largest is 200,001 - j

    @jax.jit
    def largest(low, high):
        monkeypatch.setattr(bracket, "_brackets", lambda *given: (low, high))
        smallest, bracketed = bracket.find_largest(Stored(jnp.asarray(x)), layout, jnp.asarray([2000]))
        return smallest, bracketed.n_above, bracketed.holds

    def bits_of(rank):
        return np.asarray([200_001 - rank], np.float32).view(np.uint32)

    for n_above, holds in ((2000, False), (1999, True), (1500, True), (1499, False)):  # with 500 inside
        smallest, above, is_right = largest(bits_of(n_above + 500), bits_of(n_above))
        assert (above.tolist(), bool(is_right)) == ([n_above], holds)
        if holds:
            np.testing.assert_array_equal(smallest, bits_of(2000))


@pytest.mark.parametrize("select", ["topk", "with ties"])
def test_fewer_nonzeros_than_k(select):
    """The sample sees the 300 largest and then zeros; the 19,000 others are between its numbers."""
    layout = plan_layout([jax.ShapeDtypeStruct((2_000_000,), np.float32)], dense_below=0, capacity=lambda n: 20_000)
    assert bracket._rooms(layout)[0] < 19_000
    is_in, x = is_sampled(layout.n), np.zeros(layout.n, np.float32)
    x[np.flatnonzero(is_in)[:300]] = 2
    x[np.flatnonzero(~is_in)[: 60 * 19_000 : 60]] = 1
    parts = parts_of(x, (2_000_000,))
    if select == "topk":
        check_topk(parts, layout, jitted(select_topk, layout)(Stored(x)).words)
    else:
        check_with_ties(parts, slots_of(layout), *jitted(select_with_ties, layout)(Stored(x), k=slots_of(layout)))


def test_ties_on_a_mesh():
    """Each worker finds its own: by its bracket, or, if half of its numbers are equal, among all numbers."""
    layout = large(0.01)
    rows = np.stack([vector_of(segments(kind, 0, LARGE)) for kind in ("normal", "ties")])
    selection = jax.jit(
        jax.shard_map(
            lambda row: jax.tree.map(
                lambda x: x[None], select_with_ties(Stored(row[0]), layout, jnp.asarray(slots_of(layout)))
            ),
            mesh=jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2]),
            in_specs=P("data"),
            out_specs=P("data"),
        )
    )(rows)
    for at, row in enumerate(rows):
        check_with_ties(parts_of(row, LARGE), slots_of(layout), *jax.tree.map(lambda x, at=at: x[at], selection))


@hypothesis.given(kind=kinds, seed=seeds)
def test_thresholds(kind, seed):
    parts = segments(kind, seed)
    rng = np.random.default_rng(seed)
    tau = np.asarray([abs(rng.choice(part)) if rng.random() < 0.8 else 0 for part in parts], np.float32)
    selected = jitted(lambda vector, tau: select_threshold(vector, tau, QUARTER))(Stored(vector_of(parts)), tau)
    for x, t, mask in zip(parts, tau, masks_of(selected.words), strict=True):
        np.testing.assert_array_equal(mask, (np.abs(x) >= t) & (x != 0))
    assert selected.ok == all(np.isfinite(x).all() for x in parts)


def check_topk(parts, layout, words):
    for x, k, mask in zip(parts, layout.capacities, masks_of(words, [len(x) for x in parts]), strict=True):
        assert mask.sum() == min(k, np.count_nonzero(x))
        largest = np.argsort(-np.abs(x), kind="stable")[:k]
        np.testing.assert_array_equal(np.flatnonzero(mask), np.sort(largest[x[largest] != 0]))


@pytest.mark.parametrize("layout", [QUARTER, layout_of(lambda n: n), layout_of(lambda n: 1)], ids=["1/4", "all", "one"])
@hypothesis.given(kind=kinds, seed=seeds)
def test_topk(layout, kind, seed):
    parts = segments(kind, seed)
    selected = jitted(select_topk, layout)(Stored(vector_of(parts)))
    check_topk(parts, layout, selected.words)
    assert selected.ok == all(np.isfinite(x).all() for x in parts)


@pytest.mark.parametrize("density", [0.0005, 0.01, 0.1])
@hypothesis.given(kind=kinds, seed=seeds)
def test_topk_of_large_tensors(density, kind, seed):
    layout, parts = large(density), segments(kind, seed, LARGE)
    selected = jitted(select_topk, layout)(Stored(vector_of(parts)))
    check_topk(parts, layout, selected.words)
    assert selected.ok == all(np.isfinite(x).all() for x in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_topk_of_few_nonzeros(kind):
    """Counts of a warm-up, from 1 to the size, have no part in the planned room for candidates."""
    layout, parts = large(0.01), segments(kind, 3, LARGE)
    k = np.asarray([1, 20_000, 4_999, 1, 200_001], np.int32)
    selected = jitted(select_topk, layout)(Stored(vector_of(parts)), k=k)
    check_topk(parts, dataclasses.replace(layout, capacities=tuple(k.tolist())), selected.words)


@pytest.mark.parametrize("misses", ["above", "below"])
def test_topk_with_wrong_brackets(misses):
    layout = large(0.01)
    x = unlike_the_sample(misses, layout)
    parts = parts_of(x, LARGE)
    selected = jitted(select_topk, layout)(Stored(vector_of(parts)))
    check_topk(parts, layout, selected.words)


@pytest.mark.parametrize("select", ["topk", "threshold"])
def test_sums(select):
    layout = large(0.01)
    rng = np.random.default_rng(0)
    gradient, residual = (vector_of([rng.normal(size=n).astype(np.float32) for n in LARGE]) for _ in range(2))
    tau = np.full(len(LARGE), 3.0, np.float32)
    run = jax.jit(
        lambda g, r: (
            select_topk(Accumulated(g, r), layout)
            if select == "topk"
            else select_threshold(Accumulated(g, r), tau, layout)
        )
    )
    stored = (
        jitted(select_topk, layout)(Stored(gradient + residual))
        if select == "topk"
        else jitted(lambda vector: select_threshold(vector, tau, layout))(Stored(gradient + residual))
    )
    words, ok = run(gradient, residual[None])
    np.testing.assert_array_equal(words, stored.words)
    assert ok
    for value in (np.nan, np.inf, 2.0**100):
        variant = gradient.copy()
        variant[70_000] = value
        assert not run(variant, residual[None]).ok
        variant = residual.copy()
        variant[70_000] = value
        assert run(gradient, variant[None]).ok == np.isfinite(value)


@hypothesis.given(density=st.sampled_from([0, 0.01, 0.25, 0.3, 1]), seed=seeds)
def test_compact(density, seed):
    rng = np.random.default_rng(seed)
    masks = [rng.random(size) < density for size in SIZES]
    words = np.packbits(vector_of(masks), bitorder="little").view(np.uint32)
    selection = jitted(compact, QUARTER)(words)
    fit = [np.flatnonzero(mask)[:k] for mask, k in zip(masks, QUARTER.capacities, strict=True)]
    for mask, expected in zip(masks_of(selection.words), fit, strict=True):
        assert np.flatnonzero(mask).tolist() == expected.tolist()
    assert int(selection.overflow) == sum(mask.sum() - len(f) for mask, f in zip(masks, fit, strict=True))
    position, filled = (np.asarray(part) for part in selection.slots)
    assert np.all(np.diff(position) >= 0)
    assert position.min() >= 0
    assert position.max() < QUARTER.n
    starts = np.cumsum([0, *QUARTER.capacities])
    blocks = np.cumsum([0, *(-(-size // 1024) * 1024 for size in SIZES)])
    for i, expected in enumerate(fit):
        slots = slice(starts[i], starts[i + 1])
        assert (position[slots][filled[slots]] - blocks[i]).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("n", "sparsity", "expected"),
    [
        (1000, 0.99, 10),
        (100, 0.29, 71),
        (1, 0.99, 1),
        (50, 0.99, 1),
        (10, 0, 10),
        (10, 0.0, 10),
        (10**7, 1e-5, 9_999_900),
    ],
)
def test_decimal_counts(n, sparsity, expected):
    """100 * 0.29 is 28.999999999999996 in binary floating point."""
    assert n_kept(n, sparsity) == expected
    assert dropped(n, sparsity) == n - expected or expected == 1


@pytest.mark.parametrize("turn", [0.0, 0.3, 0.75, 0.9999999])
def test_turns_of_an_overfull_segment(turn):
    """From a start offset on, wrapping around, as many as there are slots; other segments are sent whole."""
    rng = np.random.default_rng(5)
    parts = [rng.random(size) < density for size, density in zip(SIZES, (1.0, 0.6, 0.05, 0.9), strict=True)]
    words = np.packbits(vector_of(parts), bitorder="little").view(np.uint32)
    selection = jax.jit(lambda words, turn: compact(words, QUARTER, turn))(words, np.float32(turn))
    overflow = 0
    for segment, part, capacity in zip(masks_of(selection.words), parts, QUARTER.capacities, strict=True):
        mask = np.flatnonzero(part)
        overfull = len(mask) > capacity
        first = min(int(np.float32(turn) * np.float32(len(mask))), len(mask) - 1) if overfull else 0
        np.testing.assert_array_equal(np.flatnonzero(segment), np.sort(np.roll(mask, -first)[:capacity]))
        overflow += max(0, len(mask) - capacity)
    assert selection.overflow == overflow > 0
    filled = np.asarray(selection.slots.position)[np.asarray(selection.slots.filled)]
    np.testing.assert_array_equal(filled, np.flatnonzero(vector_of(masks_of(selection.words))))


@pytest.mark.slow
def test_turns_reach_all():
    words = np.packbits(vector_of([np.ones(size, bool) for size in SIZES]), bitorder="little").view(np.uint32)
    union = [np.zeros(size, bool) for size in SIZES]
    for turn in np.arange(0, 1, 0.1, np.float32):
        union = [a | b for a, b in zip(union, masks_of(compact(words, QUARTER, turn).words), strict=True)]
    assert all(part.all() for part in union)
