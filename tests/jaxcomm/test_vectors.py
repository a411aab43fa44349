import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.vectors import _in_rows, computed_end_to_end, end_to_end, largest_of_each


@pytest.mark.parametrize("join", [end_to_end, computed_end_to_end])
@pytest.mark.parametrize("count", [1, 2, 8, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_vectors_are_laid_end_to_end(join, count, dtype):
    rng = np.random.default_rng(count)
    parts = [rng.integers(0, 1000, size).astype(dtype) for size in rng.integers(1, 50, count)]
    parts.append(np.zeros(0, dtype))
    np.testing.assert_array_equal(jax.jit(join)(parts), np.concatenate(parts))
    rows = [np.stack([part, part + 1]) for part in parts]
    np.testing.assert_array_equal(jax.vmap(join)(rows), np.concatenate(rows, axis=1))


@pytest.mark.parametrize("join", [end_to_end, computed_end_to_end])
def test_vectors_on_a_mesh_keep_what_differs_between_workers(join):
    mesh = jc.make_mesh(data=2)
    own, same = np.arange(6.0, dtype=np.float32), np.full(3, -1.0, np.float32)
    run = jax.shard_map(
        lambda own, same: join([same, own, same]), mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    expected = np.concatenate([same, own[:3], same, same, own[3:], same])
    np.testing.assert_array_equal(jax.jit(run)(own, same), expected)


def test_no_few_vectors_are_concatenated_by_xla_for_a_cpu():
    """For up to 8 arrays, XLA makes a loop that reads beyond their ends."""
    matrices = [jax.ShapeDtypeStruct((32, 32), np.float32)] * 8

    def flat(matrices):
        return [matrix.reshape(-1) for matrix in matrices]

    by_xla = jax.jit(lambda matrices: jnp.concatenate(flat(matrices))).lower(matrices).compile().as_text()
    ours = jax.jit(lambda matrices: end_to_end(flat(matrices))).lower(matrices).compile().as_text()
    assert " concatenate(" in by_xla
    assert " concatenate(" not in ours


@pytest.mark.parametrize("size", [32, 96, 1024])
def test_the_largest_of_each(size):
    numbers = np.random.default_rng(size).integers(0, 2**32, 3 * size, dtype=np.uint32)
    expected = numbers.reshape(3, size).max(1)
    np.testing.assert_array_equal(jax.jit(largest_of_each, static_argnums=1)(numbers, size), expected)
    np.testing.assert_array_equal(_in_rows(jnp.asarray(numbers), size), expected)  # on other platforms
