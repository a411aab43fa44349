"""What the factories refuse, when they are called or when they see a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc
from tests.jaxcomm.cases import CASES

SPARSE = [jc.topk, jc.dct_dp]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("factory", SPARSE)
@pytest.mark.parametrize("sparsity", [1.0, -0.1, NAN, 99, "0.9", None])
def test_sparsity_is_a_fraction_below_1(factory, sparsity):
    message = f"sparsity must be at least 0 and below 1 .*, got {sparsity!r}: use 0.99 to send 1%, or plump_dp"
    with pytest.raises(ValueError, match=message):
        factory(sparsity)


@pytest.mark.parametrize("factory", SPARSE)
@pytest.mark.parametrize("number", [np.float64(0.75), np.float32(0.75), 0])
def test_sparsity_may_be_any_number(factory, number):
    """As from np.linspace, in a sweep."""
    layout = jax.eval_shape(factory(number, dense_below=0).init, jnp.zeros(1000))
    assert layout.residual.rows.shape == (1, 1024)


def test_slack_may_be_any_number():
    jax.eval_shape(jc.dct_dp(0.75, slack=np.float32(1.5)).init, jnp.zeros(1000))


@pytest.mark.parametrize("life_span", [0, -1, 2.5, True, None])
def test_life_span_is_a_count(life_span):
    message = f"life_span must be an integer of at least 1, got {life_span!r}: 1 refreshes the thresholds in every step"
    with pytest.raises(ValueError, match=message):
        jc.dct_dp(life_span=life_span)


@pytest.mark.parametrize("slack", [0.5, INF, NAN, -1])
def test_slack_is_at_least_1(slack):
    with pytest.raises(ValueError, match=f"slack must be at least 1, got {slack!r}: 1.05 leaves 5% of room"):
        jc.dct_dp(slack=slack)


@pytest.mark.parametrize("drain_every", [0, -5, 0.5])
def test_drain_every_is_a_count_or_none(drain_every):
    message = f"drain_every must be an integer of at least 1, got {drain_every!r}: None never drains"
    with pytest.raises(ValueError, match=message):
        jc.dct_dp(drain_every=drain_every)


@pytest.mark.parametrize("factory", SPARSE)
@pytest.mark.parametrize("dense_below", [-1, 1.5])
def test_dense_below_is_a_count(factory, dense_below):
    message = f"dense_below must be an integer of at least 0, got {dense_below!r}: 0 compresses every tensor"
    with pytest.raises(ValueError, match=message):
        factory(dense_below=dense_below)


@pytest.mark.parametrize("factory", SPARSE)
def test_value_dtype_is_one_that_travels(factory):
    with pytest.raises(ValueError, match="one of float32, bfloat16, got 'int8': pass value_dtype='bfloat16'"):
        factory(value_dtype="int8").init(jnp.zeros(1000))


@pytest.mark.parametrize("factory", SPARSE)
def test_index_codec_is_one_of_four_or_auto(factory):
    with pytest.raises(ValueError, match="one of plain, bitmap, elias_fano, rice, got 'elias-fano': pass one of them"):
        factory(index_codec="elias-fano").init(jnp.zeros(1000))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "at least one tensor, got an empty tree: pass the parameters"),
        ({"w": np.zeros(600, np.int32)}, r"real floating type, got int32 at .*'w'.*optax.masked"),
        ({"w": np.zeros(600, np.complex64)}, r"real floating type, got complex64 at .*'w'"),
    ],
)
def test_trees_that_are_no_gradient_are_refused(case, tree, message):
    tx = case.make()
    with pytest.raises(ValueError, match=message):
        tx.init(tree)
    state = tx.init({"w": np.zeros(600, np.float32)})
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda g: tx.update(g, state), axis_name="data", axis_size=2)(
            jax.tree.map(lambda x: np.stack([x, x]), tree)
        )


@pytest.mark.parametrize("case", [case for case in CASES if case.is_sparse], ids=str)
def test_2_to_the_31_elements_are_refused(case):
    shapes = {"w": jax.ShapeDtypeStruct((2**31,), np.float32)}
    with pytest.raises(ValueError, match=r"fewer than 2\^31 elements, got 2147483648: shard the parameters"):
        jax.eval_shape(case.make().init, shapes)
