import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxcomm.codecs.quantize import BlockSigns
from jaxcomm.kernels import noise
from jaxcomm.kernels.vectors import Stored
from jaxcomm.layout import BLOCK, plan_layout, stacked
from jaxcomm.selectors.importance import moments
from jaxcomm.selectors.strata import select_strata
from tests.marks import slow_except

SHAPES = {"a": (3, 700), "b": (5,), "c": (), "d": (1024,), "e": (0, 4), "f": (1025,)}


def tree(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dense_below", slow_except([0, 6, 1024, 10**6], 6, 1024))
def test_unflatten_inverts_flatten(dtype, dense_below):
    leaves = jax.tree.leaves(tree(dtype))
    layout = plan_layout(tree(dtype), dense_below=dense_below, capacity=lambda n: 1)
    inside, outside = layout.split(leaves)
    assert [leaf.size for leaf in inside] == [leaf.size for leaf in leaves if leaf.size >= max(dense_below, 1)]
    vector = layout.flatten(inside)
    assert vector.shape == (layout.n,)
    assert vector.dtype == jnp.float32
    assert layout.n % BLOCK == 0
    back = layout.join(layout.as_leaves(layout.unflatten(vector)), outside)
    assert len(back) == len(leaves)
    for array, leaf in zip(back, leaves, strict=True):
        assert (array.dtype, array.shape) == (leaf.dtype, leaf.shape)
        np.testing.assert_array_equal(array, leaf)
    assert np.count_nonzero(vector) == sum(np.count_nonzero(leaf) for leaf in inside)
    assert layout.n_dense == sum(leaf.size for leaf in outside)
    assert layout.n_slots == len(inside)


def test_segments_start_at_blocks():
    layout = plan_layout(tree(), dense_below=6, capacity=lambda n: n // 2)
    assert layout.sizes == (2100, 1024, 1025)
    assert layout.blocks == (3, 1, 2)
    assert layout.capacities == (1050, 512, 512)
    assert layout.segment_of_block().tolist() == [0, 0, 0, 1, 2, 2]
    assert layout.padding().tolist() == [3 * BLOCK - 2100, 0, BLOCK - 1]
    assert layout.n_words == layout.n // 32
    np.testing.assert_array_equal(layout.per_block(jnp.asarray([7, 8, 9])), [7, 7, 7, 8, 9, 9])
    np.testing.assert_array_equal(layout.per_segment(jnp.arange(6)), [0 + 1 + 2, 3, 4 + 5])


def planned(tree, sizes, axis_name, **options):
    with stacked(sizes, axis_name):
        return plan_layout(tree, dense_below=200, capacity=lambda n: n // 2, **options)


def test_segments_of_slots():
    """They are summed as the program runs: XLA would take minutes to sum ten million slots as it compiles."""
    shapes = [jax.ShapeDtypeStruct((size,), np.float32) for size in (9000, 4096, 1, 12_289)]
    layout = plan_layout(shapes, dense_below=0, capacity=lambda n: max(n // 50, 1), chunk=4096)
    compiled = jax.jit(layout.segment_of_slot).lower().compile()
    np.testing.assert_array_equal(compiled(), np.repeat(np.arange(len(layout.capacities)), layout.capacities))
    assert "scatter" in compiled.as_text()


def test_stages_count_their_elements():
    tree = [jax.ShapeDtypeStruct((n,), np.float32) for n in (2100, 600, 100)]
    sizes = {"[0]": (100, 2100, 0), "[1]": (600, 600, 600), "[2]": (100, 50, 0)}
    layout = planned(tree, sizes, "stage", chunk=1024)
    assert layout.capacities == (512, 512, 26, 300)

    def of_stage(_):
        elements = jnp.asarray(layout.elements())
        counts = jnp.asarray(layout.counts(lambda n: n + 1))
        return elements, jnp.asarray(layout.rooms()), counts, layout.padding(), layout.used(elements)

    elements, rooms, counts, padding, usage = jax.vmap(of_stage, axis_name="stage")(jnp.zeros(3))
    assert elements.tolist() == [[100, 0, 0, 600], [1024, 1024, 52, 600], [0, 0, 0, 600]]
    assert rooms.tolist() == [[100, 0, 0, 300], [512, 512, 26, 300], [0, 0, 0, 300]]  # 100 elements are sent whole
    assert counts.tolist() == [[1024, 1024, 52, 601], [1025, 1025, 53, 601], [1024, 1024, 52, 601]]
    assert padding.tolist() == [[924, 1024, 1024, 424], [0, 0, 972, 424], [1024, 1024, 1024, 424]]
    assert usage.tolist() == elements.tolist()  # a block each
    assert planned(tree, sizes, None, chunk=1024).rooms().tolist() == rooms[0].tolist()
    equal = {"[0]": (2100,) * 2, "[1]": (600,) * 2}
    assert planned(tree, equal, "stage") == planned(tree, {}, None)


def test_strata_of_a_stage():
    layout = planned([jax.ShapeDtypeStruct((3000,), np.float32)], {"[0]": (3000, 250)}, "stage")
    stages = jax.vmap(lambda _: select_strata(noise.make_key(5), layout), axis_name="stage")(jnp.zeros(2))
    for position, filled, n in zip(*stages, (3000, 250), strict=True):
        picks = np.asarray(position[filled])
        assert len(picks) == len(set(picks.tolist())) == n // 2
        assert 0 <= position.min() <= position.max() < 3000
        assert picks.max() < n


def test_means_of_a_stage():
    layout = planned([jax.ShapeDtypeStruct((3000,), np.float32)], {"[0]": (3000, 1250)}, "stage")
    values = np.zeros((2, layout.n), np.float32)
    for row, n in zip(values, (3000, 1250), strict=True):
        row[:n] = np.random.default_rng(n).normal(1, 2, size=n)

    def of_stage(row):
        return *moments(row, layout), BlockSigns(layout).codes(Stored(row), 0)[0][0]

    units, means, variances, scales = jax.vmap(of_stage, axis_name="stage")(values)
    for row, n, unit, mean, variance, scale in zip(values, (3000, 1250), units, means, variances, scales, strict=True):
        np.testing.assert_allclose(unit * mean, row[:n].mean(), rtol=1e-5)
        np.testing.assert_allclose(unit**2 * variance, row[:n].var(), rtol=1e-5)
        blocks = [row[start : min(start + BLOCK, n)] for start in range(0, layout.n, BLOCK)]
        expected = [np.abs(block).mean() if len(block) else 0 for block in blocks]
        np.testing.assert_allclose(scale, expected, rtol=1e-5)


def test_an_empty_tree():
    with pytest.raises(ValueError, match=r"at least one tensor; got an empty tree. Pass the parameters"):
        plan_layout({}, dense_below=0, capacity=lambda n: n)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool", "uint8"])
def test_leaves_that_are_not_real(dtype):
    leaves = {"fine": jnp.zeros(3), "odd": jax.ShapeDtypeStruct((3,), dtype)}
    with pytest.raises(ValueError, match=rf"real floating type; got {dtype} at .*'odd'.*nnx.Param"):
        plan_layout(leaves, dense_below=0, capacity=lambda n: n)


@pytest.mark.parametrize(
    ("size", "fits"), [(2**31 - 1024, True), (2**31 - 1023, False), (2**31, False), (2**33, False)]
)
def test_2_to_the_31_elements(size, fits):
    leaves = {"w": jax.ShapeDtypeStruct((size,), np.float32)}
    if fits:
        assert plan_layout(leaves, dense_below=0, capacity=lambda n: 1).n == size
        return
    blocks_size = -(-size // BLOCK) * BLOCK
    with pytest.raises(ValueError, match=rf"fewer than 2\^31 elements; got {blocks_size}. Shard the parameters"):
        plan_layout(leaves, dense_below=0, capacity=lambda n: 1)


def test_the_limit_counts_compressed_tensors():
    leaves = {"v": jax.ShapeDtypeStruct((2**30,), np.float32), "w": jax.ShapeDtypeStruct((2**30,), np.float32)}
    with pytest.raises(ValueError, match=rf"got {2**31}"):
        plan_layout(leaves, dense_below=0, capacity=lambda n: 1)
    assert plan_layout(leaves, dense_below=2**31, capacity=lambda n: 1).n == 0


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_segment_sums_under_vmap(blocks):
    """XLA for CPUs (JAX 0.10.2) mistakes the scatter-add of such integers for one that overwrites."""
    one = plan_layout([jax.ShapeDtypeStruct((1024 * blocks,), "float32")], dense_below=0, capacity=lambda n: n)
    rows = np.arange(1, 1 + 3 * blocks, dtype=np.int32).reshape(3, blocks)
    for K in (2, 3):
        sums = jax.jit(jax.vmap(one.per_segment))(rows[:K])
        np.testing.assert_array_equal(sums[:, 0], rows[:K].sum(1))
        assert sums.dtype == np.int32
