"""Patches of weights: the very bits, few bytes, and no other weights."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxcomm import patches
from jaxcomm.patches import apply_patch, pack_patch
from tests.jaxcomm.formulas import index_words

SHAPES = {"a": (3, 683), "b": (), "c": (0,), "d": (5000,)}
FIXED = 53  # bytes of a patch of one part, besides positions and values
TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def weights(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def changed(old, share, seed):
    rng = np.random.default_rng(seed)
    return {name: np.where(rng.random(w.shape) < share, w + rng.normal(size=w.shape), w) for name, w in old.items()}


def bits(array, name):
    return np.asarray(array).astype(TYPES[name]).reshape(-1).view(f"u{np.dtype(TYPES[name]).itemsize}")


def check(old, new, patch, name):
    result = apply_patch(old, patch)
    assert result.keys() == new.keys()
    for leaf in new:
        assert (result[leaf].dtype, result[leaf].shape) == (TYPES[name], np.shape(new[leaf]))
        np.testing.assert_array_equal(bits(result[leaf], name), bits(new[leaf], name))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 1.0])
def test_weights_return_to_the_bit(name, share):
    old = weights(0)
    new = changed(old, share, 1)
    check(old, new, pack_patch(old, new, jnp.dtype(name)), name)


def test_receiver_of_cast_weights():
    old = weights(0)
    new = changed(old, 0.1, 1)
    receiver = {name: jnp.asarray(w, jnp.bfloat16) for name, w in old.items()}
    check(receiver, new, pack_patch(old, new), "bfloat16")


def test_signs_of_zeros_and_bits_of_nans():
    old = np.array([0x0000, 0x8000, 0x7FC0, 0x7F81, 0x3F80, 0x7F80, 0xFFFF, 0x3F80], np.uint16)
    new = np.array([0x8000, 0x0000, 0xFF81, 0x7F81, 0x7FC1, 0xFF80, 0x0000, 0x3F80], np.uint16)
    patch = pack_patch(old.view(ml_dtypes.bfloat16), new.view(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(apply_patch(old.view(ml_dtypes.bfloat16), patch).view(np.uint16), new)


@pytest.mark.parametrize("places", [slice(0, 5000), slice(35_000, None), slice(0, None, 8)])
def test_clusters(places):
    old = np.random.default_rng(0).normal(size=40_000).astype(np.float32)
    new = old.copy()
    new[places] *= 2
    np.testing.assert_array_equal(apply_patch(old, pack_patch(old, new, np.float32)), new)


def test_weights_in_parts(monkeypatch):
    monkeypatch.setattr(patches, "_LENGTH", 2000)  # the third has no change
    old = weights(0)
    new = changed(old, 0.1, 1)
    new["d"][1000:4500] = old["d"][1000:4500]
    check(old, new, pack_patch(old, new), "bfloat16")


def test_bytes():
    n, count = 200_000, 2000
    old = np.random.default_rng(0).normal(size=n).astype(ml_dtypes.bfloat16)
    words = old.view(np.uint16).copy()
    rng = np.random.default_rng(1)
    words[rng.choice(n, count, replace=False)] += np.where(rng.random(count) < 0.5, 1, -1).astype(np.uint16)
    patch = pack_patch(old, words.view(ml_dtypes.bfloat16))
    values = len(patch) - FIXED - 4 * index_words("elias_fano", -(-n // 1024) * 1024, count)
    assert count / 8 <= values < 2 * count / 8
    assert len(pack_patch(old, old)) == FIXED


def test_damage():
    old = weights(0)
    patch = pack_patch(old, changed(old, 0.01, 1))
    for length in [0, 3, 10, FIXED - 9, FIXED, len(patch) - 1]:
        with pytest.raises(ValueError, match=rf"whole output of pack_patch, .* got {length} bytes"):
            apply_patch(old, patch[:length])
    with pytest.raises(ValueError, match="whole output"):
        apply_patch(old, patch + b"\0")
    for at in [0, 3, 5, 9, 20, 30, 40, 50, 60, len(patch) - 1]:
        with pytest.raises(ValueError, match="whole output"):
            apply_patch(old, patch[:at] + bytes([patch[at] ^ 4]) + patch[at + 1 :])


def test_other_weights():
    old = weights(0)
    new = changed(old, 0.01, 1)
    patch = pack_patch(old, new)
    with pytest.raises(ValueError, match=r"against; got others\. Apply patches in their order"):
        apply_patch(new, patch)
    for tree in ({**old, "a": old["a"].T}, {**old, "e": old["b"]}, {"x": old["a"]}):
        with pytest.raises(ValueError, match="tree and the shapes of the patch"):
            apply_patch(tree, patch)
        with pytest.raises(ValueError, match="same tree and shapes"):
            pack_patch(old, tree)


@pytest.mark.parametrize(
    ("tree", "dtype", "message"),
    [
        ({"w": np.ones(3)}, jnp.int16, "dtype must be a floating type of 16 or 32 bits; got 'int16'"),
        ({"w": np.ones(3)}, np.float64, "dtype must be a floating type of 16 or 32 bits; got 'float64'"),
        ({"w": np.ones(3), "i": np.ones(3, int)}, jnp.bfloat16, r"of real floating types; got \['int64'\]"),
        ({}, jnp.bfloat16, "at least one array; got {}"),
    ],
)
def test_bad_weights(tree, dtype, message):
    with pytest.raises(ValueError, match=message):
        pack_patch(tree, tree, dtype)
