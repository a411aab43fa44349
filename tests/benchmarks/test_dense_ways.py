"""The plan of how dense layers are split, and one worker that has them all: values, gradients, bytes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.dense_ways import on_one_worker, plan_split_dense, rows_of_one_worker
from jaxcomm.accounting.hlo import read_program
from jaxcomm.accounting.jaxpr import traced_program
from jaxcomm.layers import split_dense
from tests.jaxcomm.layers.test_split_dense import PLACES, SPLITS, B, K, M, N, numbers, on_mesh


def test_costs_of_the_plan():
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
def test_the_plan_is_cheapest(widths, workers):
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


def test_splits():
    plan = plan_split_dense((9216, 4096, 4096, 1000), 256, 8)
    assert [layer.by for layer in plan.layers] == ["inputs", "outputs", "inputs"]
    assert "9216 x 4096, split by inputs: rows to rows, 9,404,416 bytes" in str(plan)
    assert str(plan).startswith("3 dense layers: 18,536,448 bytes received per worker and step")


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


def test_others_send_rows():
    """Rows and labels go to worker 0, the rows' errors come back; products are in one branch of a conditional."""
    function, args, _ = one_worker_step(K)
    text = function.lower(*args).compile().as_text()
    rows, labels, loss = 4 * B // K * N, 4 * B // K, 4
    links = read_program(text).links()
    assert links == {(w, 0): rows + labels for w in range(1, K)} | {(0, w): rows for w in range(1, K)}
    collectives = [traffic for _, traffic in read_program(text).operations() if traffic.op != "permute"]
    assert [(traffic.op, traffic.operand_bytes) for traffic in collectives] == [("all_reduce", loss)]
    assert float(read_program(text).received) == float(traced_program(function, *args).received)
    jaxpr = str(function.trace(*args).jaxpr)
    outside = jaxpr.split("cond[")[0]
    assert "cond[" in jaxpr
    assert "dot_general" not in outside
    assert "conditional(" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((12,), 8, 4), r"got widths \(12,\), 8 rows and 4 workers. \(9216, 4096\) is one layer"),
        (((12, 0), 8, 4), "all numbers must be at least 1"),
        (((12, 8), 9, 4), "got 9 for 4. Use a batch size of 8"),
        (((13, 9), 8, 4), r"got widths \(13, 9\) for 4 workers. Pad them"),
    ],
)
def test_bad_plans(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_split_dense(*arguments)


def test_rows_of_one_worker():
    def worker(params, x):
        return on_one_worker(lambda params, x: jnp.sum(x @ params), params, x)

    with pytest.raises(ValueError, match=r"must have one row inside a worker; got \(12, 20\)"):
        jax.eval_shape(on_mesh(worker, (P(), P("data")), P()), numbers(N, M), numbers(B, N))
