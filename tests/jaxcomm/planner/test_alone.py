"""What one worker computes without the others: the same program, without its collectives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomm as jc
from jaxcomm.accounting.jaxpr import jaxpr_communicates
from jaxcomm.planner.alone import without_wire
from tests.jaxcomm import trees
from tests.jaxcomm.cases import CASES

K = 3


@pytest.mark.parametrize("case", [case for case in CASES if not case.is_variant], ids=str)
def test_no_collective_is_left(case):
    tx, shapes = case.make(), trees.shapes_of("pair")
    gradients = jax.tree.map(lambda like: jnp.ones(like.shape, like.dtype), shapes)
    state = without_wire(tx.init, K)(gradients)
    program = jax.make_jaxpr(without_wire(tx.update, K))(gradients, state, gradients)
    assert not jaxpr_communicates(program)
    with_others = jax.make_jaxpr(tx.update, axis_env=[("data", K)])(gradients, state, gradients)
    assert jaxpr_communicates(with_others)
    assert program.out_avals == with_others.out_avals


def test_numbers_of_one_worker():
    """A gather returns K copies of the worker's own payload, as if all had the same."""
    tx = jc.topk(0.9, collective="gather")
    gradient = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((40, 60)).astype(np.float32))}

    def first(gradient):
        return tx.update(gradient, tx.init(gradient), gradient)[0]["w"]

    result = jax.jit(jax.vmap(first, axis_name="data", axis_size=K, in_axes=None))(gradient)
    single = jax.jit(without_wire(first, K))(gradient)
    assert 0 < np.count_nonzero(single) <= 260
    np.testing.assert_allclose(single, result[0], rtol=1e-6)


def test_loops_and_branches():
    def program(x):
        def body(carry, row):
            return carry + lax.psum(row, "data"), lax.all_gather(row, "data")

        total, gathered = lax.scan(body, jnp.zeros(2), x)
        choice = lax.cond(total.sum() > 0, lambda: lax.psum(total, "data"), lambda: -total)
        count = lax.while_loop(lambda c: c < 5, lambda c: c + lax.psum(1, "data") * 0 + 1 + lax.axis_index("data"), 0)
        permuted = lax.ppermute(x, "data", [(i, (i + 1) % K) for i in range(K)])
        parts = lax.all_to_all(jnp.arange(6.0).reshape(K, 2), "data", 0, 0)
        jitted = jax.jit(lambda y: lax.pmean(y, "data"))(x)
        return total, gathered, choice, count, permuted, parts, jitted

    x = jnp.arange(8.0).reshape(4, 2)
    total, gathered, choice, count, permuted, parts, jitted = jax.jit(without_wire(program, K))(x)
    np.testing.assert_array_equal(total, [12.0, 16.0])  # the rows of x, once
    np.testing.assert_array_equal(gathered, np.repeat(x[:, None], K, axis=1))
    np.testing.assert_array_equal(choice, total)
    assert count == 5
    np.testing.assert_array_equal(permuted, x)
    np.testing.assert_array_equal(parts, np.arange(6.0).reshape(K, 2))
    np.testing.assert_allclose(jitted, x / K)


def test_axes():
    with pytest.raises(ValueError, match="no axis 'workers'"):
        without_wire(jc.topk(0.9, axis_name="workers").update, K)(jnp.ones(600), jc.topk(0.9).init(jnp.ones(600)))
    size = without_wire(lambda x: x * lax.axis_size("data") * lax.axis_size("slice"), (2, 3), ("slice", "data"))(
        jnp.ones(())
    )
    assert size == 6


def test_no_loop_spans_a_collective():
    """In one loop, the work before and after a collective would take less time than with a transfer in between."""

    def fused(function):
        text = jax.jit(function).lower(jax.ShapeDtypeStruct((4096,), np.float32)).compile().as_text()
        ops = [re.findall(r"= f32\[4096\]\S* (multiply|add)\(", computation) for computation in text.split("\n}\n")]
        return ["add", "multiply"] in [sorted(pair) for pair in ops]

    assert fused(lambda x: 2 * x + 1)
    assert not fused(without_wire(lambda x: lax.psum(2 * x, "data") + 1, K))
