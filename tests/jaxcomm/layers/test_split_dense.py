"""Dense layers over the devices of data-parallel convolutions: values, gradients, bytes, and the plan."""

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
    on_one_worker,
    plan_split_dense,
    rows_of_one_worker,
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
def test_a_layer_is_the_layer_of_one_device_and_its_gradients_are_whole(by, inputs, outputs, bias):
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
    for mine, whole in zip(grads, expected, strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("by", "inputs", "outputs"), list(itertools.product(SPLITS, PLACES, PLACES)))
def test_bytes_forward_and_backward_are_those_of_the_table(by, inputs, outputs):
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


def test_a_row_of_the_plan_costs_what_the_plan_says():
    """For a few layers with the plan's own specs, the traced bytes of the whole step are the plan's sum."""
    widths, batch = (24, 8, 16, 4), 8
    plan = plan_split_dense(widths, batch, K)

    def worker(x, *kernels):
        def loss(x):
            for layer, kernel in zip(plan.layers, kernels, strict=True):
                x = jnp.sin(split_dense(x, kernel, inputs=layer.inputs, outputs=layer.outputs))
            return jnp.sum(x)

        return jax.grad(loss)(x)

    kernels = [numbers(*pair) for pair in itertools.pairwise(widths)]
    specs = (P("data"), *(layer.kernel_spec() for layer in plan.layers))
    program = traced_program(on_mesh(worker, specs, P("data")), numbers(batch, widths[0]), *kernels)
    assert float(program.received) == plan.received == sum(float(layer.received) for layer in plan.layers)


@pytest.mark.parametrize(("widths", "workers"), [((24, 8, 16, 4), 4), ((9216, 4096, 4096, 1000), 8), ((8, 10), 4)])
def test_no_other_way_is_cheaper_than_the_plan(widths, workers):
    """All combinations of splits and places, counted independently."""
    batch = 16
    cheapest = np.inf
    layers = list(itertools.pairwise(widths))
    for ways in itertools.product(itertools.product(SPLITS, PLACES), repeat=len(layers)):
        place, elements = "rows", 0.0
        for (n, m), (by, outputs) in zip(layers, ways, strict=True):
            cut = [m] if by == "outputs" else [n]
            cut += [m] if outputs == "features" else []
            elements += np.inf if any(size % workers for size in cut) else 0.0
            if by == "outputs":
                elements += n + (m / workers if outputs == "rows" else 0)
            else:
                elements += m + (n / workers if place == "rows" else 0)
            place = outputs
        if place == "rows":
            cheapest = min(cheapest, 2 * 4 * batch * elements * (workers - 1) / workers)
    assert plan_split_dense(widths, batch, workers).received == pytest.approx(cheapest)


def test_a_plan_says_how_each_layer_is_split():
    plan = plan_split_dense((9216, 4096, 4096, 1000), 256, 8)
    assert [layer.by for layer in plan.layers] == ["inputs", "outputs", "inputs"]
    assert "9216 x 4096, split by inputs: rows to rows, 9,404,416 bytes" in str(plan)
    assert str(plan).startswith("3 dense layers: 18,536,448 bytes received per worker and step")


def test_rows_to_features_and_back():
    def worker(x):
        return rows_to_features(x), features_to_rows(rows_to_features(x))

    x = numbers(B, 3, N)
    features, rows = on_mesh(worker, P("data"), (P(None, None, "data"), P("data")))(x)
    np.testing.assert_array_equal(features, x)
    np.testing.assert_array_equal(rows, x)


def one_worker_step(workers):
    """The loss and the gradients of a dense layer on worker 0, with the rows and labels of all workers."""

    def mean_loss(params, inputs):
        y = jnp.sum(jnp.sin(inputs["x"] @ params["kernel"]), axis=-1) * inputs["label"]
        return jnp.mean(y)

    def worker(params, x, label):
        def loss(params, x):
            return on_one_worker(mean_loss, params, {"x": x, "label": label})

        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
        return value, *grads

    params, x, label = {"kernel": numbers(N, M)}, numbers(B, N), np.arange(B, dtype=np.int32)
    function = on_mesh(worker, (P("data"), P("data"), P("data")), (P(), P("data"), P("data")), workers)
    expected = jax.value_and_grad(mean_loss_of_one(mean_loss, label), argnums=(0, 1))(params, x)
    return function, (rows_of_one_worker(params, workers), x, label), expected


def mean_loss_of_one(mean_loss, label):
    return lambda params, x: mean_loss(params, {"x": x, "label": label})


@pytest.mark.parametrize("workers", [1, 4])
def test_one_worker_computes_for_all(workers):
    function, args, (loss, (kernel, errors)) = one_worker_step(workers)
    value, grads, x = function(*args)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    np.testing.assert_allclose(grads["kernel"][0], kernel["kernel"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(grads["kernel"][1:], 0)
    np.testing.assert_allclose(x, errors, rtol=1e-4, atol=1e-6)


def test_others_send_rows_get_errors_and_do_not_compute():
    """Rows and labels go to worker 0, the rows' errors come back; products are in one branch of a conditional."""
    function, args, _ = one_worker_step(K)
    text = function.lower(*args).compile().as_text()
    rows, labels, loss = 4 * B // K * N, 4 * B // K, 4
    moved = read_program(text).links()
    assert moved == {(w, 0): rows + labels for w in range(1, K)} | {(0, w): rows for w in range(1, K)}
    other = [traffic for _, traffic in read_program(text).operations() if traffic.op != "permute"]
    assert [(traffic.op, traffic.operand_bytes) for traffic in other] == [("all_reduce", loss)]
    assert float(read_program(text).received) == float(traced_program(function, *args).received)
    jaxpr = str(function.trace(*args).jaxpr)
    outside = jaxpr.split("cond[")[0]
    assert "cond[" in jaxpr
    assert "dot_general" not in outside
    assert "conditional(" in text


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
def test_shards_that_do_not_fit_are_refused(x, kernel, bias, places, message):
    def worker(x, kernel, bias):
        return split_dense(x, kernel, bias, **places)

    args = [None if shape is None else np.zeros(shape, np.float32) for shape in (x, kernel, bias)]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(on_mesh(worker, P(), P("data")), *args)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((12,), 8, 4), r"got widths \(12,\), 8 rows and 4 workers. \(9216, 4096\) is one layer"),
        (((12, 0), 8, 4), "all numbers must be at least 1"),
        (((12, 8), 9, 4), "got 9 for 4. Use a batch size of 8"),
        (((13, 9), 8, 4), r"got widths \(13, 9\) for 4 workers. Pad them"),
    ],
)
def test_plans_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_split_dense(*arguments)


def test_parameters_of_one_worker_have_a_row_for_each():
    def worker(params, x):
        return on_one_worker(lambda params, x: jnp.sum(x @ params), params, x)

    with pytest.raises(ValueError, match=r"must have one row inside a worker; got \(12, 20\)"):
        jax.eval_shape(on_mesh(worker, (P(), P("data")), P()), numbers(N, M), numbers(B, N))
