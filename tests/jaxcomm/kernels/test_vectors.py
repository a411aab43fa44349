import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.kernels.vectors import _in_rows, computed_end_to_end, end_to_end, largest_of_each, split_vector


@pytest.mark.parametrize("join", [end_to_end, computed_end_to_end])
@pytest.mark.parametrize("count", [1, 2, 8, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_end_to_end(join, count, dtype):
    rng = np.random.default_rng(count)
    parts = [rng.integers(0, 1000, size).astype(dtype) for size in rng.integers(1, 50, count)]
    parts.append(np.zeros(0, dtype))
    np.testing.assert_array_equal(jax.jit(join)(parts), np.concatenate(parts))
    rows = [np.stack([part, part + 1]) for part in parts]
    np.testing.assert_array_equal(jax.vmap(join)(rows), np.concatenate(rows, axis=1))


@pytest.mark.parametrize("join", [end_to_end, computed_end_to_end])
def test_end_to_end_on_a_mesh(join):
    mesh = jc.make_mesh(data=2)
    local, shared = np.arange(6.0, dtype=np.float32), np.full(3, -1.0, np.float32)
    run = jax.shard_map(
        lambda local, shared: join([shared, local, shared]), mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    expected = np.concatenate([shared, local[:3], shared, shared, local[3:], shared])
    np.testing.assert_array_equal(jax.jit(run)(local, shared), expected)


def test_xla_does_not_concatenate():
    """For up to 8 arrays, XLA makes a loop that reads beyond their ends."""
    matrices = [jax.ShapeDtypeStruct((32, 32), np.float32)] * 8

    def flat(matrices):
        return [matrix.reshape(-1) for matrix in matrices]

    by_xla = jax.jit(lambda matrices: jnp.concatenate(flat(matrices))).lower(matrices).compile().as_text()
    program = jax.jit(lambda matrices: end_to_end(flat(matrices))).lower(matrices).compile().as_text()
    assert " concatenate(" in by_xla
    assert " concatenate(" not in program


@pytest.mark.parametrize("size", [32, 96, 1024])
def test_largest_of_each(size):
    numbers = np.random.default_rng(size).integers(0, 2**32, 3 * size, dtype=np.uint32)
    expected = numbers.reshape(3, size).max(1)
    np.testing.assert_array_equal(jax.jit(largest_of_each, static_argnums=1)(numbers, size), expected)
    np.testing.assert_array_equal(_in_rows(jnp.asarray(numbers), size), expected)  # on other platforms


SHAPES = [(3, 4), (), (5,), (0, 2), (2, 2, 2), (1,)] * 4


@pytest.mark.parametrize("count", [0, 1, 8, 9, 24])
@pytest.mark.parametrize("gap", [0, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_splits(count, gap, dtype):
    shapes = SHAPES[:count]
    sizes = [math.prod(shape) + gap for shape in shapes]
    starts = [sum(sizes[:place]) for place in range(count)]
    vector = np.arange(sum(sizes)).astype(dtype)
    for _ in range(2):  # the second time, it begins with 1
        expected = [vector[a : a + math.prod(shape)].reshape(shape) for a, shape in zip(starts, shapes, strict=True)]
        result = jax.jit(lambda vector: split_vector(vector, shapes, starts))(vector)
        rows = jax.vmap(lambda vector: split_vector(vector, shapes, starts))(np.stack([vector, vector + 1]))
        for array, row, right in zip(result, rows, expected, strict=True):
            np.testing.assert_array_equal(array, right)
            np.testing.assert_array_equal(row, np.stack([right, right + 1]))
        vector = vector + np.asarray(1, dtype)


def test_splits_on_a_mesh():
    mesh, vector = jc.make_mesh(data=2), np.arange(40.0, dtype=np.float32)
    cut = functools.partial(split_vector, shapes=[(2,)] * 10, starts=range(0, 20, 2))
    for spec, length in ((P("data"), 20), (P(), 40)):
        run = jax.jit(jax.shard_map(cut, mesh=mesh, in_specs=spec, out_specs=spec))
        for place, result in enumerate(run(vector)):
            rows = [vector[start + 2 * place :][:2] for start in range(0, 40, length)]
            np.testing.assert_array_equal(result, np.concatenate(rows))


def test_two_loops_a_shape():
    """XLA for CPUs compiled a loop for each, and a step of 400 tensors took 16 times as long to compile."""

    def loops(count):
        vector = jax.ShapeDtypeStruct((count * 64,), np.float32)

        def run(vector):
            return [jnp.sin(x) for x in split_vector(vector, [(8, 8)] * count, range(0, count * 64, 64))]

        text = jax.jit(run).lower(vector).compile().as_text()
        bodies = re.findall(r"^%fused_computation[^{]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
        return len({re.sub(r"[._]?\d+|metadata=\{[^}]*\}", "", body) for body in bodies if "sine" in body})

    assert loops(20) == loops(40) == 2  # one for the array at 0, where every start begins
