from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.gpt import Gpt
from tests.models.twins import TWINS, count, crossing, make

PAPERS = partial(Gpt, 256, 256)
NEAR = partial(Gpt, 256, 8, layers=2, width=8, heads=2, near=True)


def test_parameters():
    attention, expand, contract, norms = 4 * (256 + 1) * 256, 257 * 1024, 1025 * 256, 4 * 256
    layer = attention + expand + contract + norms
    assert count(PAPERS) == 8 * layer + 2 * 256 * 256 + 2 * 256 + 256 * 256 == 6_515_200


def test_initial_values():
    """Radford et al. (2019) and their code: normal, 0.02; in residual sums by the root of their number, 2 * layers."""
    blocks = Gpt(256, 64, layers=3, width=64, heads=4, rngs=nnx.Rngs(0)).blocks
    params = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(blocks))}
    assert len(params) == 2 + 3 * (4 * 2 + 2 * 2 + 2 * 2) + 2 + 1
    for path, leaf in params.items():
        if "scale" in path or "bias" in path:
            assert np.ptp(leaf) == 0
        else:
            term = any(name in path for name in ("contract", "'out'"))
            expected = 0.02 / np.sqrt(6) if term else 0.02
            np.testing.assert_allclose(np.std(leaf), expected, rtol=0.05, err_msg=path)


def test_what_crosses():
    batch = {"text": ((3, 9), np.uint8)}
    assert crossing(partial(Gpt, 256, 8, layers=2, width=12, heads=2), batch) == [(3, 8, 12)] * 3 + [(3, 8, 256)]


@pytest.mark.parametrize("slopes", [None, (1, 1 / 256)])
def test_outputs(slopes):
    """GPT-2's layers in NumPy, one head and one row at a time; in place of places, slopes and the token before."""
    model = make("gpt") if slopes is None else NEAR(rngs=nnx.Rngs(0))
    for layer in () if slopes is None else model.blocks[1:-1]:
        layer.shift.own[...] = jnp.linspace(-2.0, 2.0, 8)
    text = TWINS["gpt"][1](2)["text"]
    outputs = np.asarray(model({"text": jnp.asarray(text)}))

    def norm(layer, x):
        deviation = x - x.mean(axis=-1, keepdims=True)
        return deviation / np.sqrt((deviation**2).mean(axis=-1, keepdims=True) + 1e-6) * layer.scale + layer.bias

    def dense(layer, x):
        return x @ np.asarray(layer.kernel[...]) + (0 if layer.bias is None else np.asarray(layer.bias[...]))

    embedding, *layers, last = model.blocks
    for row in range(2):
        x = np.asarray(embedding.table[...])[text[row, :-1]]
        x = x + np.asarray(embedding.places[...]) if slopes is None else x
        for layer in layers:
            y = norm(layer.norms[0], x)
            read = y
            if slopes is not None:
                own = 1 / (1 + np.exp(-np.linspace(-2.0, 2.0, 8)))
                read = own * y + (1 - own) * np.concatenate([np.zeros((1, 8)), y[:-1]])
            heads = []
            for head in range(2):
                q, k, v = (
                    dense(part, of)[:, 4 * head : 4 * head + 4]
                    for part, of in (
                        (layer.attention.query, y),
                        (layer.attention.key, read),
                        (layer.attention.value, read),
                    )
                )
                params = np.zeros_like(q)
                for place in range(len(q)):
                    weights = np.exp(k[: place + 1] @ q[place] / 2)  # the root of 4 features
                    if slopes is not None:
                        weights *= np.exp(-slopes[head] * np.arange(place, -1, -1))
                    params[place] = weights @ v[: place + 1] / weights.sum()
                heads.append(params)
            x = x + dense(layer.attention.out, np.concatenate(heads, axis=1))
            h = dense(layer.expand, norm(layer.norms[1], x))
            gelu = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
            x = x + dense(layer.contract, gelu)
        np.testing.assert_allclose(outputs[row], dense(last.dense, norm(last.norm, x)), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("near", [False, True])
def test_causality(near):
    model, text = NEAR(rngs=nnx.Rngs(0)) if near else make("gpt"), TWINS["gpt"][1](1)["text"]
    variant = text.copy()
    variant[0, 5] ^= 1
    one, two = (np.asarray(model({"text": jnp.asarray(row)})) for row in (text, variant))
    np.testing.assert_array_equal(one[0, :5], two[0, :5])
    assert (one[0, 5:] != two[0, 5:]).any(axis=1).all()


def test_long_texts():
    text = jnp.zeros((1, 12), jnp.uint8)
    with pytest.raises(ValueError, match=r"got 11 of them for 8 places. Make the model with more"):
        make("gpt")({"text": text})
    assert make("gpt")({"text": text[:, :6]}).shape == (1, 5, 256)
    assert NEAR(rngs=nnx.Rngs(0))({"text": text}).shape == (1, 11, 256)
