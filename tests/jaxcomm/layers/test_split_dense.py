"""Dense layers over the devices of data-parallel convolutions: values, gradients, bytes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from jaxcomm.accounting.jaxpr import traced_program
from jaxcomm.layers.split_dense import (
    features_to_rows,
    rows_to_features,
    split_dense,
)
from tests.marks import slow_except

K, B, N, M = 4, 8, 12, 20
PLACES = {"rows": P("data"), "features": P(None, "data")}
SPLITS = {"outputs": P(None, "data"), "inputs": P("data")}


def numbers(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def on_mesh(function, in_specs, out_specs, workers=K):
    return jax.jit(jax.shard_map(function, mesh=jc.make_mesh(data=workers), in_specs=in_specs, out_specs=out_specs))


def cases():
    """All ways of one layer; the bias is sharded, or, for outputs in rows, also whole."""
    for by, inputs, outputs in itertools.product(SPLITS, PLACES, PLACES):
        for bias in ("slice", "whole") if outputs == "rows" else ("slice",):
            yield by, inputs, outputs, bias


@pytest.mark.parametrize(
    ("by", "inputs", "outputs", "bias"),
    slow_except(
        cases(),
        ("inputs", "features", "rows", "whole"),
        ("inputs", "features", "features", "slice"),
        ("inputs", "rows", "rows", "whole"),
        ("outputs", "rows", "features", "slice"),
        ("outputs", "rows", "rows", "whole"),
    ),
)
def test_a_layer_of_one_device(by, inputs, outputs, bias):
    """The value, the gradient of x, and those of the shards, which need no exchange."""
    x, kernel, b, weights = numbers(B, N), numbers(N, M), numbers(M), numbers(B, M)

    def loss(x, kernel, b, weights):
        y = split_dense(x, kernel, b, inputs=inputs, outputs=outputs)
        return jnp.sum(jnp.sin(y) * weights), y

    def worker(x, kernel, b, weights):
        if bias == "whole":
            b = jax.lax.pcast(b, "data", to="varying")
        grads, y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, kernel, b, weights)
        return y, *grads[:2], grads[2] if bias == "slice" else jax.lax.psum(grads[2], "data")

    spec_b = P("data") if bias == "slice" else P()
    specs = (PLACES[inputs], SPLITS[by], spec_b, PLACES[outputs])
    y, *grads = on_mesh(worker, specs, (PLACES[outputs], PLACES[inputs], SPLITS[by], spec_b))(x, kernel, b, weights)
    expected = jax.grad(lambda x, kernel, b: jnp.sum(jnp.sin(x @ kernel + b) * weights), argnums=(0, 1, 2))(
        x, kernel, b
    )
    np.testing.assert_allclose(y, x @ kernel + b, rtol=1e-5, atol=1e-5)
    for shard_gradient, whole in zip(grads, expected, strict=True):
        np.testing.assert_allclose(shard_gradient, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("by", "inputs", "outputs"), list(itertools.product(SPLITS, PLACES, PLACES)))
def test_bytes(by, inputs, outputs):
    """Predicted by the docstring's table, counted in the trace, and in the compiled text."""

    def worker(x, kernel):
        return jax.grad(lambda x: jnp.sum(jnp.sin(split_dense(x, kernel, inputs=inputs, outputs=outputs))))(x)

    elements = {
        "outputs": B * (N + (M / K if outputs == "rows" else 0)),
        "inputs": B * (M + (N / K if inputs == "rows" else 0)),
    }[by]
    function = on_mesh(worker, (PLACES[inputs], SPLITS[by]), PLACES[inputs])
    args = numbers(B, N), numbers(N, M)
    assert float(traced_program(function, *args).received) == 2 * 4 * elements * (K - 1) / K
    compiled = read_program(function.lower(*args).compile().as_text())
    assert float(compiled.received) == 2 * 4 * elements * (K - 1) / K


def test_rows_to_features_and_back():
    def worker(x):
        return rows_to_features(x), features_to_rows(rows_to_features(x))

    x = numbers(B, 3, N)
    features, rows = on_mesh(worker, P("data"), (P(None, None, "data"), P("data")))(x)
    np.testing.assert_array_equal(features, x)
    np.testing.assert_array_equal(rows, x)


@pytest.mark.parametrize(
    ("x", "kernel", "bias", "places", "message"),
    [
        ((2, 12), (12, 5), None, {"inputs": "columns"}, r"must be in 'rows' or in 'features'; got inputs='columns'"),
        ((12,), (12, 5), None, {}, r"must have rows of features and a matrix; got \(12,\) and a kernel \(12, 5\)"),
        (
            (2, 12),
            (6, 5),
            None,
            {},
            r"must have all 12 inputs or 1/4 of them; got \(6, 5\) for inputs \(2, 12\) in rows",
        ),
        ((2, 12), (12, 5), (7,), {}, r"a shard \(20/4,\), or, for outputs in rows, may be whole, \(20,\); got \(7,\)"),
        ((2, 12), (12, 5), (20,), {"outputs": "features"}, r"got \(20,\) for outputs in features"),
        ((2, 12), (3, 5), None, {"outputs": "features"}, r"must be a multiple of their number; got 5 outputs"),
        ((6, 3), (12, 5), None, {"inputs": "features"}, r"must be a multiple of their number; got 6 rows"),
    ],
)
def test_bad_shards(x, kernel, bias, places, message):
    def worker(x, kernel, bias):
        return split_dense(x, kernel, bias, **places)

    args = [None if shape is None else np.zeros(shape, np.float32) for shape in (x, kernel, bias)]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(on_mesh(worker, P(), P("data")), *args)
