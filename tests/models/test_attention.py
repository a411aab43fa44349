import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.attention import Attention, distance_bias, positions


def test_attention():
    """A transcription in NumPy: every head attends by its own features."""
    rng = np.random.default_rng(0)
    attention = Attention(6, 2, dtype=jnp.float32, rngs=nnx.Rngs(0))
    for layer in (attention.query, attention.key, attention.value, attention.out):
        layer.kernel[...] = jnp.asarray(rng.normal(size=(6, 6)), jnp.float32)
        layer.bias[...] = jnp.asarray(rng.normal(size=6), jnp.float32)
    x, memory = (rng.normal(size=(3, length, 6)).astype(np.float32) for length in (4, 5))
    mask = rng.random((3, 1, 4, 5)) < 0.7
    mask[..., 0] = True

    def dense(layer, values):
        return values @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])

    q, k, v = dense(attention.query, x), dense(attention.key, memory), dense(attention.value, memory)
    heads = []
    for features in (slice(0, 3), slice(3, 6)):
        scores = q[..., features] @ k[..., features].swapaxes(1, 2) / np.sqrt(3)
        weights = np.exp(scores) * mask[:, 0]
        heads.append(weights / weights.sum(axis=-1, keepdims=True) @ v[..., features])
    expected = dense(attention.out, np.concatenate(heads, axis=-1))
    inputs = jnp.asarray(x), attention.keys_values(jnp.asarray(memory)), jnp.asarray(mask)
    result = attention(*inputs)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(attention(*inputs, np.full((4, 5), 3.0, np.float32)), result, rtol=1e-4, atol=1e-4)
    only = np.where(np.arange(5) == 0, 0, -1e9).astype(np.float32)  # the first place, which all may see
    values = attention.out(attention.value(jnp.asarray(memory))[:, :1])
    np.testing.assert_allclose(attention(*inputs, only), np.broadcast_to(values, x.shape), rtol=1e-4, atol=1e-4)


def test_biases_by_distance():
    """Slopes of three heads by hand: 1, 1/16 and 1/256."""
    bias = distance_bias(4, 3)
    assert (bias.shape, bias.dtype) == ((3, 4, 4), np.float32)
    np.testing.assert_allclose(bias[0, 3], [-3, -2, -1, 0])
    np.testing.assert_allclose(bias[:, 3, 0], [-3, -3 / 16, -3 / 256], rtol=1e-6)


def test_positions():
    table = positions(5, 4)
    angles = np.arange(5)[:, None] * np.array([1.0, 0.01])
    np.testing.assert_allclose(table, np.hstack([np.sin(angles), np.cos(angles)]), atol=1e-6)
    assert table.dtype == np.float32
