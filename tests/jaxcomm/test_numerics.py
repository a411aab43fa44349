"""The digest of an array: every word counts, wherever the array lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.numerics import digest

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
    total = sum(int(word) * ((2 * place + 1) * 0x9E3779B1) for place, word in enumerate(words.ravel().tolist()))
    return total % 2**32


@pytest.mark.parametrize("name", ARRAYS)
def test_the_digest_is_the_sum_of_words_times_odd_numbers(name):
    assert int(jax.jit(digest)(ARRAYS[name])) == reference(ARRAYS[name])


def test_every_bit_changes_it():
    array = ARRAYS["float32"]
    before = int(digest(jnp.asarray(array)))
    for word in (0, 50, 104):
        for bit in range(32):
            changed = array.copy()
            changed.reshape(-1).view(np.uint32)[word] ^= np.uint32(1 << bit)
            assert reference(changed) != before


def test_a_sharded_array_stays_where_it_is():
    mesh = jc.make_mesh(data=4)
    array = np.random.default_rng(1).standard_normal((8, 1000)).astype(np.float32)
    for spec in (P("data"), P(None, "data")):
        compiled = jax.jit(digest).lower(jax.device_put(array, NamedSharding(mesh, spec))).compile()
        assert int(compiled(jax.device_put(array, NamedSharding(mesh, spec)))) == reference(array)
        assert "all-gather" not in compiled.as_text()
