from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models.functional import apply, split
from models.googlenet import STAGES, GoogLeNet, mean_loss, normalize_response
from tests.models.twins import count, crossing, make, make_batch

IMAGENET = ((224, 224, 3), 1000)


def test_parameters():
    # The paper's table 1: the kernels of every inception module, and the biases that it leaves out.
    total, inputs = (7 * 7 * 3 + 1) * 64 + (64 + 1) * 64 + (9 * 64 + 1) * 192, 192
    for widths in [module for stage in STAGES for module in stage]:
        one, before_three, three, before_five, five, pooling = widths
        total += (inputs + 1) * (one + before_three + before_five + pooling)
        total += (9 * before_three + 1) * three + (25 * before_five + 1) * five
        inputs = one + three + five + pooling
    total += (1024 + 1) * 1000
    head = (2048 + 1) * 1024 + (1024 + 1) * 1000
    heads = [(channels + 1) * 128 + head for channels in (512, 528)]
    assert count(partial(GoogLeNet, *IMAGENET, auxiliary=())) == total == 6_998_552
    assert count(partial(GoogLeNet, *IMAGENET)) == total + sum(heads) == 13_378_280


def test_what_crosses():
    shapes = crossing(partial(GoogLeNet, *IMAGENET), {"image": ((2, 224, 224, 3), np.float32)})
    channels = [192, 256, 480, 512, 512, 512, 528, 832, 832, 1024]  # of the paper's table 1
    sides = [28] * 3 + [14] * 5 + [7] * 2
    assert shapes == [(2, side, side, c) for side, c in zip(sides, channels, strict=True)] + [(2, 1000)]


def test_heads_in_training():
    graph, params, stats = split(make("googlenet"))
    batch = make_batch("googlenet")
    run = {
        training: jax.eval_shape(partial(apply, graph, training=training), params, stats, batch)[0]
        for training in (True, False)
    }
    assert [leaf.shape for leaf in run[True]] == [(4, 5)] * 3
    assert run[False].shape == (4, 5)
    with pytest.raises(ValueError, match=r"must name different modules, from 0 to 8; got \(2, 9\)"):
        GoogLeNet(*IMAGENET, auxiliary=(2, 9), rngs=nnx.Rngs(0))


def test_weights_of_heads():
    rng = np.random.default_rng(0)
    logits, labels = jnp.asarray(rng.normal(size=(3, 4, 5))), jnp.arange(4)
    losses = [optax.softmax_cross_entropy_with_integer_labels(x, labels).mean() for x in logits]
    np.testing.assert_allclose(mean_loss(tuple(logits), labels), losses[0] + 0.3 * (losses[1] + losses[2]), rtol=1e-6)
    np.testing.assert_allclose(mean_loss(logits[0], labels), losses[0], rtol=1e-6)


def test_response_normalisation():
    x = 30 * np.random.default_rng(0).normal(size=(2, 3, 3, 7)).astype(np.float32)
    expected = np.empty_like(x)
    for c in range(7):
        around = x[..., max(c - 2, 0) : c + 3]
        expected[..., c] = x[..., c] / (1 + 1e-4 / 5 * (around**2).sum(axis=-1)) ** 0.75
    np.testing.assert_allclose(normalize_response(jnp.asarray(x)), expected, rtol=1e-5)
