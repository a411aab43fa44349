"""The digest of an array, in which every word counts, whatever the sharding; and concatenation without XLA's loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.kernels.numerics import digest, largest_by

ARRAYS = {
    "float32": np.random.default_rng(0).standard_normal((7, 5, 3)).astype(np.float32),
    "int8": np.arange(-60, 60, dtype=np.int8),
    "float16": np.random.default_rng(0).standard_normal((9, 4)).astype(np.float16),
    "bool": np.random.default_rng(0).random((33, 2)) < 0.5,
    "a scalar": np.float32(2.5),
}


def reference(array):
    array = np.asarray(array)
    words = array.astype(np.uint8) if array.dtype == bool else array.view(f"u{array.itemsize}")
    return sum(lowbias32(word + place * 0x9E3779B1) for place, word in enumerate(words.ravel().tolist())) % 2**32


def lowbias32(x):
    """Wellons's hash, in Python integers."""
    x = (x ^ x % 2**32 >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("name", ARRAYS)
def test_digest(name):
    assert int(jax.jit(digest)(ARRAYS[name])) == reference(ARRAYS[name])


def max_or_nan(rows):
    return np.nan if np.isnan(rows).any() else rows.max()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int8", "uint32", "bool"])
@pytest.mark.parametrize(
    "numbers", [(1, 3, 2), (-1, -3, -2), (-0.0, 0), (0, -0.0), (1, -np.inf), (1, np.nan), (-np.nan, -1), (np.inf, 7)]
)
def test_largest(numbers, dtype):
    with jax.enable_x64(True):
        kinds = jnp.dtype(dtype)
        if not jnp.issubdtype(kinds, jnp.floating):
            numbers = [abs(number) for number in numbers if np.isfinite(number)]
        rows = np.array(numbers).astype(kinds)
        mesh = jc.make_mesh(data=len(rows))

        def pmax(row):
            return largest_by(lambda words: jax.lax.pmax(words, "data"), row)

        pmax = jax.shard_map(pmax, mesh=mesh, in_specs=P("data"), out_specs=P())
        for result in (jax.jit(pmax)(rows)[0], jax.jit(lambda rows: largest_by(jnp.max, rows))(rows)):
            assert result.dtype == kinds
            np.testing.assert_array_equal(np.asarray(result).astype(float), max_or_nan(rows.astype(float)))


def test_every_bit_counts():
    array = ARRAYS["float32"]
    before = int(digest(jnp.asarray(array)))
    for word in (0, 50, 104):
        for bit in range(32):
            variant = array.copy()
            variant.reshape(-1).view(np.uint32)[word] ^= np.uint32(1 << bit)
            assert reference(variant) != before


def test_swapped_words():
    """Also words that differ in only one bit, such as a number's sign, and at any distance."""
    words = np.random.default_rng(2).integers(2**32, size=4096, dtype=np.uint32)
    of_all = jax.jit(jax.vmap(digest))
    for distance in 2 ** np.arange(12):
        variant = np.tile(words, (32, 1))
        variant[:, distance] = words[0] ^ (1 << np.arange(32, dtype=np.uint32))
        swapped = variant.copy()
        swapped[:, [0, distance]] = variant[:, [distance, 0]]
        assert np.all(of_all(variant) != of_all(swapped))


def test_a_sharded_array_stays():
    mesh = jc.make_mesh(data=4)
    array = np.random.default_rng(1).standard_normal((8, 1000)).astype(np.float32)
    for spec in (P("data"), P(None, "data")):
        compiled = jax.jit(digest).lower(jax.device_put(array, NamedSharding(mesh, spec))).compile()
        assert int(compiled(jax.device_put(array, NamedSharding(mesh, spec)))) == reference(array)
        assert "all-gather" not in compiled.as_text()
