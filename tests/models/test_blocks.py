import jax.numpy as jnp
import numpy as np
import pytest

from models.blocks import adaptive_average, pooled, take_rows


@pytest.mark.parametrize(("size", "grid"), [(6, 6), (14, 4), (7, 3), (2, 3), (5, 1)])
def test_adaptive_average(size, grid):
    x = np.random.default_rng(0).normal(size=(2, size, size + 1, 3)).astype(np.float32)
    expected = np.empty((2, grid, grid, 3), np.float32)
    for i in range(grid):
        for j in range(grid):
            rows = slice(int(np.floor(i * size / grid)), int(np.ceil((i + 1) * size / grid)))
            columns = slice(int(np.floor(j * (size + 1) / grid)), int(np.ceil((j + 1) * (size + 1) / grid)))
            expected[:, i, j] = x[:, rows, columns].mean(axis=(1, 2))
    np.testing.assert_allclose(adaptive_average(jnp.asarray(x), grid), expected, rtol=1e-5, atol=1e-6)


def test_ids_outside_a_table():
    table = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(
        take_rows(table, jnp.asarray([[2, -1], [3, 0]])), [[[4, 5], [np.nan] * 2], [[np.nan] * 2, [0, 1]]]
    )


def test_sides_of_images():
    assert [pooled(224, 11, 4, 2), pooled(55, 3), pooled(2, 2), pooled(3, 3)] == [55, 27, 1, 1]
    with pytest.raises(ValueError, match="got a side of 2 pixels with 0 of padding for one of 3"):
        pooled(2, 3)
