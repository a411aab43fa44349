"""Values in 2 and 4 bits: the receiver decodes what the sender subtracts, empty slots are zeros, and words are few."""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxcomm.codecs import slot_codec
from jaxcomm.layout import plan_layout
from tests.reference.sparse_loco import quantized

CAPACITIES = (64, 1, 33, 7, 64)
TREE = [jax.ShapeDtypeStruct((1024 + capacity,), np.float32) for capacity in CAPACITIES]
LAYOUT = plan_layout(TREE, dense_below=0, capacity=lambda n: n - 1024)
CODECS = {bits: slot_codec(f"{bits}bit") for bits in (2, 4)}
WRITE = {bits: jax.jit(lambda v, f, codec=codec: codec.write(v, f, LAYOUT)) for bits, codec in CODECS.items()}
READ = {bits: jax.jit(lambda w, codec=codec: codec.read(w, LAYOUT)) for bits, codec in CODECS.items()}
KINDS = ("normal", "heavy", "ties", "huge", "zeros")


def slots(kind, seed):
    """Values in the filled slots, which come first in each segment, and zeros in the others."""
    rng, values, filled = np.random.default_rng(seed), [], []
    for capacity in CAPACITIES:
        x = rng.normal(size=capacity)
        if kind == "heavy":
            x *= 10.0 ** rng.integers(-30, 30, size=capacity)
        elif kind == "ties":
            x = rng.choice([-1.25, 1.25, 3.0], size=capacity)
        elif kind == "huge":
            x = np.copysign(3.0e38, x)
        elif kind == "zeros":
            x *= 0
        is_in = np.arange(capacity) < rng.integers(0, capacity + 1)
        values.append(np.where(is_in, x, 0))
        filled.append(is_in)
    return np.concatenate(values).astype(np.float32), np.concatenate(filled)


@pytest.mark.parametrize("bits", [2, 4])
@hypothesis.given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**20))
@hypothesis.example(kind="ties", seed=7923)  # where the computed mean of equal numbers is above them
def test_senders_and_receivers_agree(bits, kind, seed):
    values, filled = slots(kind, seed)
    words, read = WRITE[bits](values, filled)
    np.testing.assert_array_equal(READ[bits](words), read)
    assert np.isfinite(read).all()
    assert not np.asarray(read)[~filled].any()
    starts = np.cumsum((0, *CAPACITIES))
    if kind in ("normal", "ties"):
        for start, end in itertools.pairwise(starts):
            numbers = values[start:end][filled[start:end]]
            expected = quantized(numbers, bits, end - start)
            np.testing.assert_allclose(read[start:end][filled[start:end]], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 4])
def test_words_are_means_and_codes(bits):
    """A segment has 16 bits for its largest mean and 8 for each of the 2^(b-1) - 1 others."""
    words, _ = WRITE[bits](*slots("normal", 0))
    segments, n = len(CAPACITIES), sum(CAPACITIES)
    expected = -(-segments // 2) + 8 * -(-segments * (2 ** (bits - 1) - 1) // 32) + bits * -(-n // 32)
    assert words.shape == (expected,) == (CODECS[bits].n_words(LAYOUT),)
    assert words.dtype == jnp.uint32


def test_little_energy_is_lost():
    """For the largest 64 of 4096 normal numbers, whose magnitudes are at least 2.4."""
    x = np.sort(np.abs(np.random.default_rng(0).normal(size=4096)))[-64:].astype(np.float32)
    for bits, most in ((2, 0.02), (4, 0.001)):
        assert np.sum((quantized(x, bits, 64) - x) ** 2) / np.sum(x**2) < most


def test_other_names():
    with pytest.raises(ValueError, match="one of float32, bfloat16, 4bit, 2bit; got '8bit'"):
        slot_codec("8bit")
