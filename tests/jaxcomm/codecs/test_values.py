import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxcomm.codecs import value_codec

BFLOAT16_MAX = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
CODECS = {name: value_codec(name) for name in ("float32", "bfloat16")}
ROUNDED = {name: jax.jit(codec.rounded) for name, codec in CODECS.items()}
THERE_AND_BACK = {
    name: jax.jit(lambda v, codec=codec: codec.decode(codec.encode(codec.rounded(v)), v.size))
    for name, codec in CODECS.items()
}


@pytest.mark.parametrize("name", CODECS)
@hypothesis.settings(max_examples=50)
@hypothesis.given(values=st.lists(floats, min_size=9, max_size=9))
def test_senders_and_receivers_agree(name, values):
    values = np.asarray(values, np.float32)
    expected = np.clip(values, -BFLOAT16_MAX, BFLOAT16_MAX).astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = values if name == "float32" else expected
    hypothesis.assume(np.all((expected == 0) | (np.abs(expected) >= np.finfo(np.float32).tiny)))
    np.testing.assert_array_equal(ROUNDED[name](values), expected)
    np.testing.assert_array_equal(THERE_AND_BACK[name](values), expected)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 1024])
def test_words(name, n):
    codec = CODECS[name]
    values = jnp.linspace(-1, 1, n, dtype=jnp.float32)
    words = codec.encode(codec.rounded(values))
    assert words.dtype == jnp.uint32
    assert words.shape == (-(-n * codec.bits // 32),)
    assert codec.bits == {"float32": 32, "bfloat16": 16}[name]


def test_finite_values_stay_finite():
    largest = np.asarray([3.4028235e38, -3.4028235e38, 3.395e38, 3.3e38], np.float32)
    assert np.all(np.isfinite(THERE_AND_BACK["bfloat16"](largest)))
    np.testing.assert_array_equal(THERE_AND_BACK["bfloat16"](largest)[:2], [BFLOAT16_MAX, -BFLOAT16_MAX])
    np.testing.assert_array_equal(THERE_AND_BACK["float32"](largest), largest)


def test_rounding_to_even():
    halfway = np.asarray([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    np.testing.assert_array_equal(ROUNDED["bfloat16"](halfway), [1, 1 + 2**-6, 1 + 2**-7])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CODECS)
def test_types_of_activations(name, dtype):
    """As they cross a boundary: no `rounded` before."""
    values = jnp.asarray(np.random.default_rng(0).normal(size=101), dtype)
    result = jax.jit(lambda x: CODECS[name].decode(CODECS[name].encode(x), x.size))(values)
    wire = ml_dtypes.bfloat16 if name == "bfloat16" else np.float32
    np.testing.assert_array_equal(result, np.asarray(values).astype(wire).astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_forms_of_a_dtype(dtype):
    assert value_codec(dtype) == CODECS["bfloat16"]


@pytest.mark.parametrize(("dtype", "name"), [("int8", "int8"), (np.float16, "float16"), ("bf16", "bf16")])
def test_other_dtypes(dtype, name):
    with pytest.raises(ValueError, match=f"one of float32, bfloat16; got {name!r}. Pass value_dtype='bfloat16'"):
        value_codec(dtype)
