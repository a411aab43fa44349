"""The digest of an array, in which every word counts, whatever the sharding; and concatenation without XLA's loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.numerics import digest, end_to_end

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
def test_the_digest_is_the_sum_of_words_hashed_with_their_places(name):
    assert int(jax.jit(digest)(ARRAYS[name])) == reference(ARRAYS[name])


def test_every_bit_changes_it():
    array = ARRAYS["float32"]
    before = int(digest(jnp.asarray(array)))
    for word in (0, 50, 104):
        for bit in range(32):
            changed = array.copy()
            changed.reshape(-1).view(np.uint32)[word] ^= np.uint32(1 << bit)
            assert reference(changed) != before


def test_two_words_in_each_others_places_change_it():
    """Also words that differ in only one bit, such as a number's sign, and at any distance."""
    words = np.random.default_rng(2).integers(2**32, size=4096, dtype=np.uint32)
    of_all = jax.jit(jax.vmap(digest))
    for distance in 2 ** np.arange(12):
        changed = np.tile(words, (32, 1))
        changed[:, distance] = words[0] ^ (1 << np.arange(32, dtype=np.uint32))
        swapped = changed.copy()
        swapped[:, [0, distance]] = changed[:, [distance, 0]]
        assert np.all(of_all(changed) != of_all(swapped))


def test_a_sharded_array_stays_where_it_is():
    mesh = jc.make_mesh(data=4)
    array = np.random.default_rng(1).standard_normal((8, 1000)).astype(np.float32)
    for spec in (P("data"), P(None, "data")):
        compiled = jax.jit(digest).lower(jax.device_put(array, NamedSharding(mesh, spec))).compile()
        assert int(compiled(jax.device_put(array, NamedSharding(mesh, spec)))) == reference(array)
        assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("count", [1, 2, 8, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_vectors_are_laid_end_to_end(count, dtype):
    rng = np.random.default_rng(count)
    parts = [rng.integers(0, 1000, size).astype(dtype) for size in rng.integers(1, 50, count)]
    np.testing.assert_array_equal(jax.jit(end_to_end)(parts), np.concatenate(parts))
    rows = [np.stack([part, part + 1]) for part in parts]
    np.testing.assert_array_equal(jax.vmap(end_to_end)(rows), np.concatenate(rows, axis=1))


def test_vectors_on_a_mesh_keep_what_differs_between_workers():
    mesh = jc.make_mesh(data=2)
    own, same = np.arange(6.0, dtype=np.float32), np.full(3, -1.0, np.float32)
    run = jax.shard_map(
        lambda own, same: end_to_end([same, own, same]), mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
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
